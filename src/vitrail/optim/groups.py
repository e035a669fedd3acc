"""Parameter groups: which parameters decay, at which rate each is updated, and which are frozen.

Layers are counted as in the paper's figures: everything before the encoder's blocks (patch embedding, a hybrid's
backbone, class token, registers, positions) is layer 0, block i is layer i + 1, and the last norm, pooling, the head
and whatever an objective adds around its network come last. In a ResNet the stages are the blocks, the root the
embedding.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from vitrail.core.errors import ConfigError
from vitrail.optim.config import Optim

KERNELS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAST = ("norm", "neck", "map_pool", "projection", "head")  # names of the modules after the blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters, by name, that share weight decay and rate. `rate` multiplies the learning rate, which is the
    encoder's or the head's."""

    params: dict[str, nn.Parameter]
    weight_decay: float
    rate: float
    is_encoder: bool = False


def freeze(module: nn.Module, optim: Optim) -> None:
    """Turns off the gradients of the modules that `optim.freeze` names. Call it before `group_parameters` and before
    sharding."""
    network = unwrap_network(module)
    for parameter in _frozen(network, optim.freeze):
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"optim.freeze={optim.freeze!r} leaves nothing to train: the network has no head")


def group_parameters(module: nn.Module, optim: Optim, *, has_encoder_rate: bool = False) -> list[ParameterGroup]:
    """The trainable parameters of a network, or of an objective around its `network`, by decay and rate. Only kernels
    decay: not biases, norms, tokens, position tables or relative offsets. With `has_encoder_rate`, those of the encoder
    are groups of their own: all of the network but its head."""
    layers = _layers(module)
    kernels = {part.weight for part in module.modules() if isinstance(part, KERNELS)}
    network = unwrap_network(module)
    last = len(list_blocks(network)) + 1
    encoder = set(network.parameters()) - _head(network) if has_encoder_rate else set[nn.Parameter]()
    found: dict[tuple[float, float, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = optim.weight_decay if parameter in kernels else 0.0
            rate = optim.layer_decay ** (last - layers.get(parameter, last))
            found.setdefault((decay, rate, parameter in encoder), {})[name] = parameter
    return [
        ParameterGroup(params=params, weight_decay=decay, rate=rate, is_encoder=is_encoder)
        for (decay, rate, is_encoder), params in found.items()
    ]


def unwrap_network(module: nn.Module) -> nn.Module:
    """An objective's network; a network itself."""
    inner = getattr(module, "network", None)
    return inner if isinstance(inner, nn.Module) else module


def list_blocks(network: nn.Module) -> list[nn.Module]:
    """The encoder's blocks or the ResNet's stages; empty if there are neither."""
    blocks = getattr(network, "blocks", None)
    return list(blocks) if isinstance(blocks, nn.ModuleList | nn.Sequential) else []


def _layers(module: nn.Module) -> dict[nn.Parameter, int]:
    """The layer of each parameter of the network, without those that an objective adds."""
    network = unwrap_network(module)
    blocks = list_blocks(network)
    layers = dict.fromkeys(network.parameters(), 0)
    for layer, block in enumerate(blocks, start=1):
        layers |= dict.fromkeys(block.parameters(), layer)
    for part in _parts(network, *LAST):
        layers |= dict.fromkeys(part.parameters(), len(blocks) + 1)
    return layers


def _frozen(network: nn.Module, what: str) -> set[nn.Parameter]:
    if not what:
        return set()
    if what == "all":
        return set(network.parameters()) - _head(network)
    depth = len(list_blocks(network))
    count = re.fullmatch(r"blocks:([0-9]+)", what)
    upto = 0 if what == "embedding" else int(count[1]) if count else -1
    if upto < 0 or upto > depth:
        known = f"'embedding', 'blocks:N' with N from 0 to {depth}, or 'all' for everything but the head"
        raise ConfigError(f"optim.freeze={what!r} must be empty, {known}")
    return {parameter for parameter, layer in _layers(network).items() if layer <= upto}


def _head(network: nn.Module) -> set[nn.Parameter]:
    return {parameter for head in _parts(network, "head") for parameter in head.parameters()}


def _parts(network: nn.Module, *names: str) -> Iterator[nn.Module]:
    for name in names:
        part = getattr(network, name, None)
        if isinstance(part, nn.Module):
            yield part

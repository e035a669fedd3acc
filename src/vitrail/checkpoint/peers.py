"""Other people's networks, built around what was just written: only where their library is installed.

Each is loaded with `strict=True`, so that a certificate also says that the other library takes the file.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoint.files.read import read_weights
from vitrail.checkpoint.files.refusal import told
from vitrail.checkpoint.formats.timm import architecture
from vitrail.core.errors import ConfigError, ExportRefused
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import vit_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A foreign network and where to look at it."""

    library: str
    network: nn.Module
    first: nn.Module
    blocks: list[nn.Module]
    logits: Callable[[Any], Tensor] | None = None


def peer(format_name: str, config: ModelConfig, target: Path) -> Peer | str:
    """The other library's network with the written weights, or the reason why there is none."""
    builders: dict[str, Callable[[ModelConfig, Path], Peer]] = {
        "timm": timm_peer,
        "huggingface": huggingface_peer,
        "torchvision": torchvision_peer,
    }
    library = {"huggingface": "transformers"}.get(format_name, format_name)
    if format_name not in builders:
        return "no other library to hold it against"
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    try:
        return builders[format_name](config, target)
    except (ConfigError, ExportRefused, RuntimeError, ValueError, AssertionError) as error:
        return f"{library} cannot build this network ({told(error)})"


def timm_peer(config: ModelConfig, target: Path) -> Peer:
    import timm

    file = target / "model.safetensors" if target.is_dir() else target
    network: Any
    with torch.device("meta"):  # its own weights would be drawn only to be overwritten
        network = timm_network(config)
    network.load_state_dict(_floats(file), strict=True, assign=True)
    version = f"timm {timm.__version__}"
    staged = hasattr(network, "stages")
    units = [block for stage in network.stages for block in stage.blocks] if staged else list(network.blocks)
    return Peer(library=version, network=network.eval(), first=units[0], blocks=units)


@singledispatch
def timm_network(config: ModelConfig) -> Any:
    import timm

    name, args = architecture(config)
    return timm.create_model(name, pretrained=False, **_tuples(args))


def timm_created(name: str, args: dict[str, Any], target: Path) -> nn.Module:
    """What timm's own loading makes of a file or of a folder: the call that people are told of."""
    import timm

    if target.is_dir():
        return timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    return timm.create_model(name, checkpoint_path=str(target), **args).eval()


@timm_network.register
def timm_bit(config: ResNetConfig) -> Any:
    """timm's BiT of any depth and width, also those it has no name for."""
    from timm.layers.std_conv import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    if config.factor % 1 or config.groups != 32 or config.unit != "preactivation":
        raise ExportRefused(f"factor={config.factor}, groups={config.groups}, unit={config.unit!r}")
    return ResNetV2(
        layers=list(config.blocks),
        width_factor=int(config.factor),
        num_classes=config.classes,
        in_chans=config.channels,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-8),
    )


def huggingface_peer(config: ModelConfig, target: Path) -> Peer:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name = "AutoModelForImageClassification" if config.classes else "AutoModel"
    # A pooler that is not in the folder would be drawn anew; without one there is nothing behind the last norm.
    without = {"add_pooling_layer": False} if getattr(config, "head", "") == "none" else {}
    network = getattr(transformers, name).from_pretrained(str(target), dtype=torch.float32, **without).eval()
    inner = getattr(network, "bit", None) or getattr(network, "vit", network)
    if hasattr(inner, "layers"):
        units = list(inner.layers)
    elif hasattr(inner.encoder, "stages"):
        units = [layer for stage in inner.encoder.stages for layer in stage.layers]
    else:
        units = list(inner.encoder.layer)

    def logits(out: Any) -> Tensor:
        if config.classes:
            return out.logits
        return out.last_hidden_state[:, 0] if without else out.pooler_output.flatten(1)

    return Peer(
        library=f"transformers {transformers.__version__}",
        network=network,
        first=units[0],
        blocks=units,
        logits=logits,
    )


def torchvision_peer(config: ModelConfig, target: Path) -> Peer:
    import torchvision
    from torchvision.models.vision_transformer import VisionTransformer

    config = vit_config(config, "torchvision's format")
    with torch.device("meta"):
        network = VisionTransformer(
            image_size=config.image[0],
            patch_size=config.patch[0],
            num_layers=config.depth,
            num_heads=config.heads,
            hidden_dim=config.width,
            mlp_dim=config.mlp_width,
            num_classes=config.classes or 1,
            representation_size=config.width if config.head == "tanh" else None,
        )
    if not config.classes:
        del network.heads.head
    network.load_state_dict(_floats(target), strict=True, assign=True)
    layers = list(network.encoder.layers.children())
    return Peer(
        library=f"torchvision {torchvision.__version__}", network=network.eval(), first=layers[0], blocks=layers
    )


def _floats(file: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in read_weights(file).tensors.items()}


def _tuples(args: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}

"""What every comparison with another library needs: weights that hide nothing, images, and the places to look at."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core.text import Pair
from vitrail.models.resnet import ResNet

TOLERANCE = 1e-5  # largest difference over largest value, in float32
Tensors = dict[str, Tensor]


@torch.no_grad()
def randomise(network: nn.Module, seed: int = 0) -> Any:
    """Weights from a seed in which nothing is 0, 1 or centred, so that no swapped, dropped or doubled tensor hides."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in network.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        match tensor.ndim:
            case 1:
                tensor.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.2 * noise)
            case 3:  # class token, registers, positions
                tensor.copy_(0.5 * noise)
            case _:
                shift = torch.randn(len(tensor), *[1] * (tensor.ndim - 1), generator=generator)
                tensor.copy_((noise + 0.3 * shift) * tensor[0].numel() ** -0.5)
    return network.eval()


def pictures(size: Pair, channels: int = 3, seed: int = 0) -> Tensor:
    """Two images with slopes, waves and grain, different in every channel and from side to side."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
    turn = torch.rand(2, channels, 3, 1, 1, generator=generator) * 6
    smooth = x * turn[:, :, 0].cos() + y * turn[:, :, 0].sin() + (9 * x * y + turn[:, :, 1]).sin()
    return smooth + 0.5 * torch.randn(2, channels, *size, generator=generator)


@torch.no_grad()
def seen(network: nn.Module, blocks: Sequence[nn.Module], images: Tensor) -> list[Tensor]:
    """Activations before the first block, behind every block, and what comes out at the end."""
    found: list[Tensor] = []

    def look(value: Any) -> None:
        found.append((value[0] if isinstance(value, tuple) else value).detach().clone())

    hooks = [blocks[0].register_forward_pre_hook(lambda _module, inputs: look(inputs))]
    hooks += [block.register_forward_hook(lambda _module, _inputs, output: look(output)) for block in blocks]
    out = network(images)
    for hook in hooks:
        hook.remove()
    for name in ("logits", "pooler_output"):
        out = getattr(out, name, out)
    return [*found, out.flatten(1)]


def our_blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, ResNet):
        return [unit for stage in model.trunk.stages for unit in stage]
    return list(model.blocks)


def differences(model: nn.Module, peer: nn.Module, blocks: Sequence[nn.Module], images: Tensor) -> list[float]:
    """How far we are from a peer: at the stem, behind every block, at the logits; relative to its largest value."""
    mine, theirs = seen(model, our_blocks(model), images), seen(peer, blocks, images)
    assert [a.shape for a in mine] == [b.shape for b in theirs]
    assert all(b.std() > 0 for b in theirs)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True)]


def assert_parity(model: nn.Module, peer: nn.Module, blocks: Sequence[nn.Module], images: Tensor) -> None:
    found = differences(model, peer, blocks, images)
    assert max(found) < TOLERANCE, [f"{value:.1e}" for value in found]


def assert_same(found: Tensors, wanted: Tensors) -> None:
    """The same names, and under each the same type, shape and bits."""
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

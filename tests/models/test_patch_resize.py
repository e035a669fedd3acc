"""Kernels for other patches and channels: against timm, and against what they are made for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.models._manipulate import adapt_input_conv
from torch import Tensor
from torch.nn import functional as F

from tests.lanes import rest_slow
from tests.models.tiny import HYBRID, RESNET, VIT, awake
from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair
from vitrail.models.build import build_from
from vitrail.models.resampling.patch_kernels import adapt_channels, resize_kernel
from vitrail.models.vit_config import Rotary, ViTConfig
from vitrail.models.zoo import adapt_config

# FlexiViT's patches at 240 px, from its stored kernel and to it; and some that are not square.
SIZES: list[tuple[Pair, Pair]] = [
    *(((32, 32), (patch, patch)) for patch in (8, 10, 12, 15, 16, 20, 24, 30, 40, 48)),
    ((16, 16), (14, 14)),
    ((14, 14), (16, 16)),
    ((4, 4), (2, 2)),
    ((1, 1), (3, 3)),
    ((16, 16), (12, 24)),
    ((14, 10), (7, 25)),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("old", "new"), rest_slow(SIZES, 0, 1, 2, 3))
def test_resized_kernels_are_timms(old: Pair, new: Pair) -> None:
    kernel = draw(5, 3, *old)
    found = resize_kernel(kernel, new)
    assert found.dtype == kernel.dtype
    assert apart(found, resample_patch_embed(kernel, list(new), interpolation="bilinear")) < 1e-5


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((4, 6), (7, 6)), ((8, 8), (30, 12))])
def test_a_larger_kernel_sees_in_larger_patches_what_the_old_one_saw(old: Pair, new: Pair) -> None:
    kernel, patches = draw(5, 3, *old, dtype=torch.float64), draw(9, 3, *old, dtype=torch.float64)
    larger = F.interpolate(patches, new, mode="bilinear")
    found, wanted = F.conv2d(larger, resize_kernel(kernel, new)), F.conv2d(patches, kernel)
    assert apart(found, wanted) < 1e-12


def test_a_smaller_kernel_is_the_closest_that_there_is() -> None:
    """Of all kernels, for patches whose pixels are independent."""
    kernel, patches = draw(1, 1, 8, 8, dtype=torch.float64), torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    smaller = F.interpolate(patches, (4, 4), mode="bilinear", antialias=True).flatten(1)
    best = torch.linalg.lstsq(smaller, F.conv2d(patches, kernel).flatten(1)).solution.view(1, 1, 4, 4)
    assert apart(resize_kernel(kernel, (4, 4)), best) < 1e-10


def test_its_own_size_is_the_kernel_itself() -> None:
    kernel = draw(2, 3, 4, 6)
    assert resize_kernel(kernel, (4, 6)) is kernel
    assert adapt_channels(kernel, 3) is kernel


def test_a_chain_of_resizes_is_another_kernel() -> None:
    """So weights are resized from the file every time."""
    kernel = draw(5, 3, 8, 8)
    for between in (4, 24):
        chain = resize_kernel(resize_kernel(kernel, (between, between)), (6, 6))
        assert apart(chain, resize_kernel(kernel, (6, 6))) > 0.1


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 8, 13])
def test_channels_are_timms(channels: int) -> None:
    kernel = draw(5, 3, 4, 4)
    torch.testing.assert_close(adapt_channels(kernel, channels), adapt_input_conv(channels, kernel.clone()))


def test_grey_seen_through_one_channel_is_grey_seen_through_three() -> None:
    kernel, grey = draw(5, 3, 4, 4, dtype=torch.float64), draw(7, 1, 8, 8, dtype=torch.float64)
    wanted = F.conv2d(grey.expand(-1, 3, -1, -1), kernel)
    assert apart(F.conv2d(grey, adapt_channels(kernel, 1)), wanted) < 1e-12
    assert apart(F.conv2d(grey.expand(-1, 6, -1, -1), adapt_channels(kernel, 6)), wanted) < 1e-12


SQUARE = ViTConfig(width=16, depth=2, mlp_width=24, heads=2, image=(24, 24), patch=(6, 6), classes=5)
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "two tables": {"position": "learned2d"},
    "sines": {"position": "sincos2d"},
    "every layer": {"placement": "every"},
    "rotary": {"position": "none", "rotary": Rotary(coordinates="unit")},
    "bias table": {"position": "none", "position_bias": "table"},
    "table of its own grid": {"position_grid": (8, 8), "position_resample": "bilinear-antialias"},
    "patch head": {"head": "patches"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("patch", [(3, 3), (8, 8), (12, 4)])
def test_a_network_at_another_patch_is_the_one_that_was_resized(kind: str, patch: Pair) -> None:
    """What training runs on the fly is what `load` builds, and the network itself is not changed."""
    config = replace(SQUARE, **KINDS[kind])
    network, images = awake(config, torch.float64), draw(2, 3, 24, 24, dtype=torch.float64)
    own, before = network(images), {name: tensor.clone() for name, tensor in network.state_dict().items()}
    other = adapt_config(config, patch=patch)
    resized = build_from(other, type(network).resize_tensors(network.state_dict(), config, other))
    close: Any = {"rtol": 1e-7, "atol": 1e-7 if kind == "sines" else 1e-10}  # sines are float32
    network.set_patch(patch)
    torch.testing.assert_close(network(images), resized(images), **close)
    torch.testing.assert_close(network.patch_map(images), resized.patch_map(images), **close)
    wide, images = adapt_config(other, image=(24, 48)), draw(2, 3, 24, 48, dtype=torch.float64)
    resized = build_from(wide, type(network).resize_tensors(network.state_dict(), config, wide))
    torch.testing.assert_close(network.features(images), resized.features(images), **close)
    network.set_patch(None)
    images = draw(2, 3, 24, 24, dtype=torch.float64)
    assert torch.equal(network(images), own)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert list(before) == list(network.state_dict())


def test_gradients_flow_to_the_stored_kernel_and_table() -> None:
    network: Any = awake(SQUARE, torch.float64)
    weight = network.embedding.projection.weight

    def loss(kernel: Tensor) -> Tensor:
        tensors = {**dict(network.named_parameters()), "embedding.projection.weight": kernel}
        return torch.func.functional_call(network, tensors, draw(2, 3, 24, 24, dtype=torch.float64)).square().sum()

    network.set_patch(3)
    (found,) = torch.autograd.grad(loss(weight), weight)
    way = draw(*weight.shape, dtype=torch.float64)
    slope = (loss(weight + 1e-6 * way) - loss(weight - 1e-6 * way)) / 2e-6
    assert slope.item() == pytest.approx(float((found * way).sum()), rel=1e-6)
    loss(weight).backward()
    table = next(tensor for name, tensor in network.named_parameters() if name.startswith("position."))
    assert table.grad is not None
    assert float(table.grad.abs().min()) > 0


@pytest.mark.parametrize(
    ("config", "patch", "error", "text"),
    [
        (SQUARE, 5, ImageSizeError, "leaves 4 pixels over"),
        (replace(SQUARE, position="relative"), 4, ConfigError, "tied to one size"),
        (HYBRID, 2, ConfigError, "feature map|pixels over"),
        (RESNET, 4, ConfigError, "no patches"),
    ],
)
def test_patches_that_cannot_be(config: Any, patch: int, error: type[Exception], text: str) -> None:
    network = awake(config, torch.float32)
    with pytest.raises(error, match=text):
        network.set_patch(patch)


@pytest.mark.parametrize("config", [VIT, RESNET, HYBRID], ids=["vit", "resnet", "hybrid"])
@pytest.mark.parametrize("channels", [1, 6])
def test_every_family_takes_other_channels(config: Any, channels: int) -> None:
    network, new = awake(config, torch.float64), adapt_config(config, channels=channels)
    adapted = build_from(new, type(network).resize_tensors(network.state_dict(), config, new)).eval()
    assert adapted.kernel.shape[1] == channels
    grey = draw(2, 1, *config.image, dtype=torch.float64)
    found, wanted = (one(grey.expand(-1, count, -1, -1)) for one, count in ((adapted, channels), (network.eval(), 3)))
    assert found.shape == wanted.shape
    if config is VIT:  # kernels that are standardised each have a scale of their own
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)

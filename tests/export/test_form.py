"""What is shipped computes what the network computes, before any exporter has seen it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.tiny import RESNET, SOME, VARIANTS, VIT, awake, images
from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.weights import build_network, to_bundle
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.export.exportable import BorderedPool, make_references, to_exportable
from vitrail.models import layers as convolution
from vitrail.models.build import Model
from vitrail.models.positions.embeddings import SineTable, sine_positions
from vitrail.models.resampling.interpolation import resample_grid, resize_grid
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import adapt_config


def off(mine: Tensor, theirs: Tensor) -> float:
    assert mine.shape == theirs.shape
    return float((mine - theirs).abs().max() / mine.abs().max())


def carded(model: Model) -> Bundle:
    model.card = Card(preprocessing=Preprocessing(image=model.config.image))
    return to_bundle(model)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_every_network_at_its_own_size_and_at_others(name: str) -> None:
    torch.manual_seed(0)
    config = VARIANTS[name]
    model = awake(config, torch.float32)
    shown = images(config, 3, torch.float32)
    assert off(model(shown), to_exportable(model)(shown)) < 5e-6
    possible = config.open_sizes
    assert bool(possible.why) == (possible.step is None)
    if possible.step is None:
        return
    form = to_exportable(model, dynamic=True)
    for size, reference in make_references(carded(model), possible).items():
        shown = torch.randn(2, config.channels, *size)
        assert off(reference(shown), form(shown)) < 5e-6


def test_which_sizes_one_file_takes() -> None:
    fixed = {name for name, config in VARIANTS.items() if config.open_sizes.step is None}
    assert {name for name in fixed if isinstance(VARIANTS[name], ResNetConfig)} == {
        "axial resnet",
        "axial resnet, odd grid",
        "bit, same padding",  # its 20x28 px leave pixels over at a stride of 8
        "post-activation",
    }
    assert {"relative, stem", "axial", "hybrid", "hybrid, axial", "hybrid, relative"} <= fixed
    assert "learned, every" not in fixed
    assert VIT.open_sizes.step == (2, 3)
    assert RESNET.open_sizes.any
    same = replace(RESNET, padding="same", image=(24, 32))
    assert (same.open_sizes.step, same.open_sizes.any) == ((8, 8), False)
    hybrid = VARIANTS["hybrid, patch 2x1"]
    assert adapt_config(hybrid, image_size=(32, 32)).open_sizes.step == (16, 8)


@pytest.mark.parametrize("size", [(8, 8), (9, 12), (12, 9), (7, 7)])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_the_pool_is_that_of_the_network(size: tuple[int, int], zero: bool, same: bool) -> None:
    config = replace(RESNET, padding="same" if same else "symmetric", pool_padding="zero" if zero else "infinity")
    x = torch.randn(2, 8, *size) - 1  # mostly below zero, so that the border shows
    expected = convolution.RootPool(config)(x)
    pool = convolution.RootPool(config)
    assert torch.equal(BorderedPool(pool, dynamic=False)(x), expected)
    if size == (8, 8):
        assert torch.equal(BorderedPool(pool, dynamic=True)(x), expected)


@pytest.mark.parametrize("grid", [(3, 5), (7, 2), (1, 1), (1, 9), (4, 4)])
def test_positions_are_resampled_as_the_reference_does(grid: tuple[int, int]) -> None:
    table = torch.randn(4, 4, 6)
    assert torch.allclose(resample_grid(table, grid), resize_grid(table, grid), atol=1e-6)
    if grid == (4, 4):
        assert torch.equal(resample_grid(table, grid), table)


def test_fixed_positions_are_those_of_the_grid() -> None:
    config = replace(VIT, position="sincos2d", image=(10, 21))
    assert torch.allclose(
        sine_positions(config.grid, 16, torch.float32).flatten(0, 1), SineTable(config)()[0, 1:], atol=1e-6
    )


@torch.no_grad()
def test_bytes_are_normalised_as_pictures_are() -> None:
    preprocessing = Preprocessing(image=VIT.image, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    model = awake(VIT, torch.float32)
    pixels = torch.randint(256, (2, 3, *VIT.image), dtype=torch.uint8)
    form = to_exportable(model, preprocessing=preprocessing)
    assert off(model(preprocessing.normalise(pixels)), form(pixels)) < 1e-6


@torch.no_grad()
def test_the_network_stays_as_it_was() -> None:
    model = awake(VARIANTS["hybrid"], torch.float32).train()
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()}
    form = to_exportable(model)
    assert model.training
    assert not form.training
    after = model.state_dict(keep_vars=True)
    assert all(torch.equal(after[name], value) for name, (value, _) in before.items())
    assert [after[name].requires_grad for name in before] == [wants for _, wants in before.values()]
    assert build_network(carded(model)) is not model

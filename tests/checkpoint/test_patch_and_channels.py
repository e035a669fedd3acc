"""Weights at another patch size and for other channels: what `load` gives, what a file keeps, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from tests.models.tiny import RESNET, awake
from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.hub_repository import from_pretrained
from vitrail.checkpoint.weights import create_model, load, save, to_bundle, write_bundle
from vitrail.core.errors import ConfigError, ImageSizeError, MismatchedWeights
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.positions.embeddings import resize_position
from vitrail.models.resampling.patch_kernels import adapt_channels, resize_kernel
from vitrail.models.vit_config import ViTConfig
from vitrail.predict.predictor import Predictor

SHAPE = ViTConfig(width=16, depth=2, mlp_width=24, heads=2, image=(24, 24), patch=(6, 6), classes=5)
KERNEL, TABLE = "embedding.projection.weight", "position.tables.0.table"
COLOURS = Preprocessing(image=(24, 24), mean=IMAGENET_MEAN, std=IMAGENET_STD)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    save(awake(SHAPE, torch.float32), path, preprocessing=COLOURS)
    return path


def tensors(network: Any) -> dict[str, Tensor]:
    return network.state_dict()


@pytest.mark.parametrize("patch", [4, 8, (12, 3)])
def test_another_patch_resizes_kernel_and_positions_alone(file: Path, patch: Any) -> None:
    own, found = tensors(load(file)), load(file, patch=patch)
    size = patch if isinstance(patch, tuple) else (patch, patch)
    grid = (24 // size[0], 24 // size[1])
    assert (found.config.patch, found.config.grid, found.config.image) == (size, grid, (24, 24))  # type: ignore[union-attr]
    for name, tensor in tensors(found).items():
        wanted = own[name]
        if name == KERNEL:
            wanted = resize_kernel(wanted, size)
        elif name == TABLE:
            wanted = resize_position(wanted, (4, 4), grid)
        assert torch.equal(tensor, wanted), name
    assert found(torch.zeros(1, 3, 24, 24)).shape == (1, 5)
    assert torch.equal(tensors(from_pretrained(file, patch=patch))[KERNEL], tensors(found)[KERNEL])


def test_a_saved_network_knows_its_patch(file: Path, tmp_path: Path) -> None:
    found = load(file, patch=8)
    save(found, tmp_path / "eight.safetensors")
    again = load(tmp_path / "eight.safetensors")
    assert again.config == found.config
    assert all(torch.equal(tensor, tensors(found)[name]) for name, tensor in tensors(again).items())


def test_the_image_size_stays_so_the_patch_has_to_divide_it(file: Path) -> None:
    with pytest.raises(ImageSizeError, match="leaves 4 pixels over at patch 5x5; use 20 or 25"):
        load(file, patch=5)
    found = load(file, patch=5, image_size=25)
    assert (found.config.image, found.config.grid) == ((25, 25), (5, 5))
    assert get_card(found).preprocessing.image == (25, 25)
    with pytest.raises(ConfigError, match="both at least 1"):
        load(file, patch=0)


def test_half_precision_is_resized_in_float32(file: Path, tmp_path: Path) -> None:
    bundle = read_bundle(file)
    half = {name: tensor.half() for name, tensor in bundle.tensors.items()}
    write_bundle(replace(bundle, tensors=half), tmp_path / "half.safetensors")
    found = tensors(load(tmp_path / "half.safetensors", patch=4))[KERNEL]
    torch.testing.assert_close(found, resize_kernel(half[KERNEL].float(), (4, 4)), rtol=1e-6, atol=1e-6)


def test_networks_without_patches_have_none_to_resize(tmp_path: Path) -> None:
    save(awake(RESNET, torch.float32), tmp_path / "resnet.safetensors")
    with pytest.raises(ConfigError, match=r"patch=4: .* has no patches"):
        load(tmp_path / "resnet.safetensors", patch=4)
    assert load(tmp_path / "resnet.safetensors", channels=1).config.channels == 1


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_other_channels_and_their_preprocessing(file: Path, tmp_path: Path, channels: int) -> None:
    own, found = tensors(load(file)), load(file, channels=channels)
    save(found, tmp_path / "other.safetensors")
    for network in (found, load(tmp_path / "other.safetensors")):
        assert network.config.channels == channels
        assert torch.equal(tensors(network)[KERNEL], adapt_channels(own[KERNEL], channels))
        prepared = get_card(network).preprocessing
        assert prepared.channels == channels
        mean = sum(IMAGENET_MEAN) / 3
        assert prepared.mean == ((mean,) if channels == 1 else (IMAGENET_MEAN * 3)[:channels])
        assert prepared.normalise(torch.zeros(2, channels, 24, 24, dtype=torch.uint8)).shape == (2, channels, 24, 24)
        assert network(torch.zeros(2, channels, 24, 24)).shape == (2, 5)


def test_a_grey_network_reads_images_of_any_kind(file: Path) -> None:
    """Those in colour by their luma; a grey one as the network of three channels read it, where all its channels had
    one mean."""
    levels = np.random.default_rng(0).integers(0, 256, (24, 24), dtype=np.uint8)
    grey, colour = Image.fromarray(levels), Image.fromarray(np.stack([levels, levels // 2, levels], axis=2))
    even = Preprocessing(image=(24, 24))
    three, one = (Predictor(load(file, channels=count), preprocessing=even, device="cpu") for count in (3, 1))
    wanted, found = (asker.logits(asker.prepare(grey)[None]) for asker in (three, one))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert one(colour).top
    seen = one.normalise(one.prepare(colour)[None])
    luma = torch.from_numpy(np.asarray(colour.convert("L"), np.float32))
    assert float((seen[0, 0] * 127.5 + 127.5 - luma).abs().max()) <= 0.501  # Pillow rounds to levels


def test_preprocessing_of_channels_that_the_network_has_not_is_refused(file: Path) -> None:
    bundle = to_bundle(load(file))
    two = replace(bundle.card, preprocessing=replace(COLOURS, mean=(0.5, 0.5), std=(0.5, 0.5)))
    with pytest.raises(ConfigError, match="2 channels for a network of 3"):
        replace(bundle, card=two)
    with pytest.raises(ConfigError, match="mean has 1 channels and std 3"):
        replace(COLOURS, mean=(0.5,))


def test_fresh_networks_and_bare_ones_have_the_card_of_their_channels() -> None:
    assert get_card(create_model(SHAPE, channels=1)).preprocessing.mean == (0.5,)
    assert get_card(vitrail.create_model("ViT-Nano/4", channels=2)).preprocessing.std == (0.5, 0.5)


def test_what_a_file_does_not_say_is_still_told_by_other_words(file: Path) -> None:
    with pytest.raises(MismatchedWeights):
        load(file, width=32)

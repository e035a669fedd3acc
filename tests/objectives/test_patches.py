"""Cutting images into patches and putting them together, and what is refused."""

import pytest
import torch

from tests.models.tiny import HYBRID, RESNET
from tests.objectives.masked import PLAIN, VIT, WORLD, model, network, noise
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.objectives import patch_ops as patches
from vitrail.objectives.mae import MAE
from vitrail.objectives.objective import ObjectiveContext


def test_patches_are_cut_in_raster_order_and_joined_again() -> None:
    pixels = noise(3)
    found = patches.cut_patches(pixels, VIT.patch)
    (rows, columns), (tall, wide) = VIT.grid, VIT.patch
    assert found.shape == (3, rows * columns, tall * wide * 3)
    for picture in range(3):
        for patch in range(rows * columns):
            top, left = patch // columns * tall, patch % columns * wide
            slow = [
                int(pixels[picture, channel, top + y, left + x])
                for y in range(tall)
                for x in range(wide)
                for channel in range(3)
            ]
            assert found[picture, patch].tolist() == slow
    assert torch.equal(patches.join_patches(found, VIT.patch, VIT.grid), pixels)


def test_picking_and_putting_are_by_sample() -> None:
    tokens = torch.arange(24.0).view(2, 4, 3)
    places = torch.tensor([[3, 0], [1, 2]])
    found = patches.gather_tokens(tokens, places)
    assert torch.equal(found, torch.stack([tokens[0, [3, 0]], tokens[1, [1, 2]]]))
    changed = patches.scatter_patches(tokens, places, -found)
    assert torch.equal(changed[0], torch.stack([-tokens[0, 0], tokens[0, 1], tokens[0, 2], -tokens[0, 3]]))
    assert torch.equal(changed[1], torch.stack([tokens[1, 0], -tokens[1, 1], -tokens[1, 2], tokens[1, 3]]))


def test_networks_without_patches_or_with_a_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a ViT"):
        patches.check_patch_model(RESNET, "x")
    with pytest.raises(ConfigError, match="hybrid's tokens come from its feature map; use a ViT without a backbone"):
        patches.check_patch_model(HYBRID, "x")
    with pytest.raises(ConfigError, match="3 channels; the model takes 1"):
        patches.check_patch_model(model(channels=1), "x")
    context = ObjectiveContext(0, PLAIN, Mix(), 10, WORLD)
    with pytest.raises(ConfigError, match="objective MAE trains a ViT, not a ResNet; use a ViT"):
        MAE().build(network(RESNET), context)
    with pytest.raises(ConfigError, match="head='linear' untrained; use head='none', classes=0"):
        MAE().build(network(model(head="linear", classes=3)), context)

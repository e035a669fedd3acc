"""Attention distance and entropy: the paper's check values, by hand, and over batches."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.inspection.test_tokens import ATTENTIVE
from tests.models.tiny import RESNET, VIT, awake, images
from vitrail.core.errors import ConfigError, DataError
from vitrail.inspection.layer_taps import iterate_layers
from vitrail.inspection.measures import attention_distance, attention_entropy, distance_matrix
from vitrail.models import attention
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


def with_weights(config: ViTConfig, monkeypatch: pytest.MonkeyPatch, made: Callable[[int], Tensor]) -> ViT:
    """A network whose heads all have the given weights [T, T]."""

    def weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
        return made(q.shape[2]).expand(*q.shape[:2], -1, -1)

    monkeypatch.setattr(attention, "attention_weights", weights)
    return build(config)


@pytest.mark.parametrize(
    ("grid", "patch", "pixels"), [(14, 16, 116.49), (7, 32, 115.50), (16, 14, 116.57), (8, 4, 16.55)]
)
def test_uniform_attention_has_the_distance_of_the_grid(
    monkeypatch: pytest.MonkeyPatch, grid: int, patch: int, pixels: float
) -> None:
    side = grid * patch
    config = replace(VIT, image=(side, side), patch=(patch, patch), depth=1, pool="mean", class_token=False)
    alike = with_weights(config, monkeypatch, lambda count: torch.full((count, count), 1 / count))
    found = attention_distance(alike, [torch.zeros(1, 3, side, side)])
    assert found.tolist() == [[pytest.approx(pixels, abs=0.005)] * 2]
    # With a class token the patches have N of N + 1 parts of the weight, and are not given the rest.
    token = with_weights(
        replace(config, pool="token", class_token=True),
        monkeypatch,
        lambda count: torch.full((count, count), 1 / count),
    )
    count = grid * grid
    found = attention_distance(token, [torch.zeros(1, 3, side, side)])
    assert found[0, 0].item() == pytest.approx(pixels * count / (count + 1), abs=0.005)


def test_identity_attention_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_weights(VIT, monkeypatch, torch.eye)
    assert not attention_distance(model, [torch.zeros(2, 3, 6, 12)]).any()
    assert not attention_entropy(model, [torch.zeros(2, 3, 6, 12)]).any()


def test_a_hand_made_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows and three columns of patches of 2x3 px behind a class token and a register. Every patch gives a half to
    the class token, a quarter to the first patch and a quarter to the last."""
    config = replace(VIT, image=(4, 9), registers=1)

    def made(count: int) -> Tensor:
        weights = torch.zeros(count, count)
        weights[:, 0], weights[:, 2], weights[:, -1] = 0.5, 0.25, 0.25
        return weights

    model = with_weights(config, monkeypatch, made)
    places = [(row * 2, column * 3) for row in range(2) for column in range(3)]
    by_hand = sum(0.25 * math.dist(place, (0, 0)) + 0.25 * math.dist(place, (2, 6)) for place in places) / 6
    found = attention_distance(model, [torch.zeros(3, 3, 4, 9)])
    assert found.shape == (2, 2)
    assert found.flatten().tolist() == pytest.approx([by_hand] * 4)
    assert attention_entropy(model, [torch.zeros(3, 3, 4, 9)]).flatten().tolist() == pytest.approx([1.5] * 4)


def test_uniform_attention_has_log2_of_the_tokens_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_weights(VIT, monkeypatch, lambda count: torch.full((count, count), 1 / count))
    found = attention_entropy(model, [torch.zeros(1, 3, 6, 12)])
    assert found.flatten().tolist() == pytest.approx([math.log2(13)] * 4)


def test_distances_on_a_grid_that_is_not_square() -> None:
    far = distance_matrix((2, 3), (10, 4))
    assert far.shape == (6, 6)
    assert torch.equal(far, far.T)
    assert far[0].tolist() == pytest.approx([0, 4, 8, 10, math.hypot(4, 10), math.hypot(8, 10)])


@pytest.mark.parametrize("name", ["registers", "mean, no class token", "hybrid", "axial", "relative, every"])
def test_pictures_count_alike_however_they_are_batched(name: str) -> None:
    config = ATTENTIVE[name]
    model, pictures = awake(config), images(config, batch=5)
    whole = attention_distance(model, [pictures])
    torch.testing.assert_close(attention_distance(model, [pictures[:4], pictures[4:]]), whole)
    far = distance_matrix(config.grid, (2, 3) if config.backbone is None else (8, 8)).double()
    for view in iterate_layers(model, pictures):
        between = view.attention[..., config.prefix :, config.prefix :]
        wanted = (between * far).sum(-1).mean(-1).mean(0)
        torch.testing.assert_close(whole[view.layer], wanted.float())


def test_no_pictures_and_no_attention_are_refused() -> None:
    with pytest.raises(DataError):
        attention_distance(awake(VIT), [])
    with pytest.raises(ConfigError):
        attention_distance(build(RESNET), [torch.zeros(1, 3, 20, 28)])

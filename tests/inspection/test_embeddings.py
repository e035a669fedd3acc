"""Filters and positions: planted components, known tables, and the two numbers on rows, columns and nearness."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from tests.models.tiny import HYBRID, POSITIONS, RESNET, VIT, awake
from vitrail.core.errors import ConfigError
from vitrail.inspection.measures import distance_matrix
from vitrail.inspection.weights_and_features import (
    distance_correlation,
    filter_components,
    position_similarity,
    row_column_score,
)
from vitrail.models.build import build


def test_planted_components_come_out_in_order() -> None:
    """Filters that are mixtures of two patterns, one of them stronger, on a common offset."""
    model = build(replace(VIT, width=64, image=(8, 8), patch=(4, 4)))
    strong, weak, common = torch.linalg.qr(torch.randn(48, 3)).Q.T.view(3, 3, 4, 4)
    amount = torch.linalg.qr(torch.randn(64, 3) - torch.randn(64, 3).mean(0)).Q
    amount -= amount.mean(0)
    with torch.no_grad():
        mixed = 3 * amount[:, :1] * strong.flatten() + amount[:, 1:2] * weak.flatten() + 50 * common.flatten()
        model.embedding.projection.weight.copy_(mixed.view(64, 3, 4, 4))
    tiles = filter_components(model, 2)
    assert tiles.shape == (2, 4, 4, 3)
    for tile, pattern in zip(tiles, (strong, weak), strict=True):
        both = torch.stack([tile.flatten(), pattern.permute(1, 2, 0).flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) > 0.99


@pytest.mark.parametrize("config", [VIT, replace(VIT, channels=1), HYBRID, RESNET])
def test_tiles_are_pictures(config: object) -> None:
    model = awake(config, torch.float32)  # type: ignore[arg-type]
    tiles = filter_components(model)
    patch = (2, 3) if getattr(config, "backbone", RESNET) is None else (7, 7)
    assert tiles.shape[1:] == (*patch, 3)
    assert 1 <= len(tiles) <= 28
    assert tiles.flatten(1).amin(1).tolist() == [0.0] * len(tiles)
    assert tiles.flatten(1).amax(1).tolist() == pytest.approx([1.0] * len(tiles))
    assert torch.equal(tiles, filter_components(model))


def test_there_are_no_more_components_than_filters_or_pixels_allow() -> None:
    assert len(filter_components(awake(VIT))) == 15  # 16 filters around their mean
    assert len(filter_components(awake(replace(VIT, channels=1, width=32)))) == 6  # pixels
    assert len(filter_components(awake(VIT), 3)) == 3
    with pytest.raises(ConfigError, match="count=0"):
        filter_components(awake(VIT), 0)
    with pytest.raises(ConfigError):
        filter_components(awake(replace(VIT, channels=4)))


@pytest.mark.parametrize("changes", POSITIONS)
def test_every_kind_of_position_is_shown_or_refused(changes: dict[str, str]) -> None:
    model = awake(replace(VIT, **changes, registers=1))
    if changes["position"] in ("none", "relative"):
        with pytest.raises(ConfigError, match=changes["position"]):
            position_similarity(model)
        return
    similarity = position_similarity(model)
    assert similarity.shape == (3, 4, 3, 4)
    flat = similarity.reshape(12, 12)
    torch.testing.assert_close(flat, flat.T)
    torch.testing.assert_close(flat.diagonal(), torch.ones(12))


def test_tiles_are_cosines_of_the_patches_rows() -> None:
    model = build(VIT)
    table = model.position.tables[0].table
    similarity = position_similarity(model)
    row = table[0, 1 + 1 * 4 + 2]  # behind the class token: second row, third column
    for r in range(3):
        for c in range(4):
            wanted = torch.cosine_similarity(row, table[0, 1 + r * 4 + c], dim=0)
            assert similarity[1, 2, r, c].item() == pytest.approx(wanted.item(), abs=1e-6)


def alike(rows: int, columns: int, of: str) -> Tensor:
    """Similarities that are made: by distance alone, by rows and columns, or by chance."""
    far = distance_matrix((rows, columns), (1, 1))
    if of == "distance":
        return (-far.square() / 18).exp().view(rows, columns, rows, columns)
    if of == "chance":
        rows_ = torch.nn.functional.normalize(torch.randn(rows * columns, 512), dim=1)
        return (rows_ @ rows_.T).view(rows, columns, rows, columns)
    same = torch.eye(rows)[:, None, :, None] + torch.eye(columns)[None, :, None, :]
    return same / 2


def test_rows_and_columns_count_beyond_distance() -> None:
    assert row_column_score(alike(14, 14, "axes")) == pytest.approx(0.5)
    assert row_column_score(alike(6, 9, "axes")) == pytest.approx(0.5)
    assert abs(row_column_score(alike(14, 14, "distance"))) < 0.01
    assert abs(row_column_score(alike(14, 14, "chance"))) < 0.02
    assert row_column_score(alike(2, 9, "axes")) == 0.0
    orthogonal = replace(VIT, position="learned2d", width=256, image=(16, 24))
    assert row_column_score(position_similarity(build(orthogonal))) == pytest.approx(0.5, abs=0.1)


def test_nearness_is_a_rank_correlation() -> None:
    assert distance_correlation(alike(5, 8, "distance")) == pytest.approx(-1)
    assert abs(distance_correlation(alike(14, 14, "chance"))) < 0.05
    similarity = alike(4, 3, "axes") + 0.1 * alike(4, 3, "chance").round(decimals=1)  # with ties on both sides
    first, second = torch.triu_indices(12, 12, offset=1)
    far = distance_matrix((4, 3), (1, 1))
    wanted = spearmanr(similarity.reshape(12, 12)[first, second], far[first, second]).statistic
    assert distance_correlation(similarity) == pytest.approx(float(wanted), abs=1e-6)
    with pytest.raises(ConfigError):
        distance_correlation(torch.zeros(4, 4))

"""Boundary IoU against repeated erosion by loops, as in the original."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.evaluation.segments.boundary_iou import band_width, boundary_ious, count_boundaries, find_bands

Mask = NDArray[np.bool_]


def slow_erosion(mask: Mask) -> Mask:
    """By 3x3 ones; zeros lie outside."""
    height, width = mask.shape
    out = mask.copy()
    for row in range(height):
        for column in range(width):
            for down in (-1, 0, 1):
                for across in (-1, 0, 1):
                    inside = 0 <= row + down < height and 0 <= column + across < width
                    out[row, column] &= inside and bool(mask[row + down, column + across])
    return out


def slow_band(mask: Mask, ratio: float) -> Mask:
    eroded = mask
    for _ in range(max(round(ratio * math.sqrt(mask.shape[0] ** 2 + mask.shape[1] ** 2)), 1)):
        eroded = slow_erosion(eroded)
    return mask & ~eroded


def draw_masks(count: int, size: tuple[int, int], seed: int) -> Mask:
    """Rectangles with bites, one of them empty, one full."""
    draw, out = np.random.default_rng(seed), np.zeros((count, *size), np.bool_)
    for mask in out[1:]:
        top, left = draw.integers(0, size[0] // 2), draw.integers(0, size[1] // 2)
        mask[top : top + draw.integers(3, size[0]), left : left + draw.integers(3, size[1])] = True
        mask[draw.random(size) < 0.01] = False
    out[-1] = True
    return out


@pytest.mark.parametrize(("size", "ratio"), [((12, 15), 0.02), ((21, 17), 0.1), ((9, 30), 0.14)])
def test_bands_and_ious_are_those_of_repeated_erosion(size: tuple[int, int], ratio: float) -> None:
    masks, others = draw_masks(6, size, 0), draw_masks(6, size, 1)
    bands = [np.stack([slow_band(mask, ratio) for mask in one]) for one in (masks, others)]
    found = find_bands(torch.from_numpy(masks), ratio).numpy()
    assert np.array_equal(found, bands[0])
    assert 0 < found[-1].sum() < found[-1].size  # of the whole image, a frame
    ious = boundary_ious(torch.from_numpy(masks), torch.from_numpy(others), ratio).numpy()
    for iou, one, other in zip(ious[1:], bands[0][1:], bands[1][1:], strict=True):
        assert iou == pytest.approx((one & other).sum() / (one | other).sum())
    assert np.isnan(ious[0])


def test_bands_are_2_percent_of_the_diagonal_and_a_pixel_at_least() -> None:
    assert [band_width(*size) for size in ((8, 8), (300, 400), (640, 640))] == [1, 10, 18]


def test_maps_of_classes_are_counted_as_one_mask_per_class() -> None:
    draw, classes, ratio = np.random.default_rng(3), 4, 0.1
    truth = np.repeat(np.repeat(draw.integers(0, classes, (3, 4, 5)), 5, 1), 5, 2).astype(np.uint8)
    predicted = np.roll(truth, 1, 2).astype(np.int64)
    truth[0, 3:9, 4:11] = 255
    truth[2] = 255
    both, either = count_boundaries(torch.from_numpy(predicted), torch.from_numpy(truth), classes, ratio)
    for at in range(3):
        for label in range(classes):
            seen = truth[at] != 255
            own = slow_band(truth[at] == label, ratio)
            said = slow_band((predicted[at] == label) & seen, ratio)
            assert int(both[at, label]) == (own & said).sum()
            assert int(either[at, label]) == (own | said).sum()
    assert int(either[2].sum()) == 0 < int(both[:2].min(1).values.max())

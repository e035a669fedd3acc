"""Run-length codes, polygons and overlaps, against pycocotools: the same runs, the same numbers."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.data.annotations import rle
from vitrail.data.annotations.polygons import fill, fill_polygons, upsample
from vitrail.data.annotations.rle import Rle, decode, encode, encode_values, find_box, merge, overlap


def random_polygon(rng: np.random.Generator) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """Points inside, on pixels, far outside, on tenths, or some of them twice."""
    height, width = (int(side) for side in rng.integers(1, 80, 2))
    scale, points = np.array([width, height]), rng.random((int(rng.integers(3, 12)), 2))
    match int(rng.integers(5)):
        case 0:
            points = points * scale
        case 1:
            points = points * scale * 3 - scale
        case 2:
            points = np.round(points * scale)
        case 3:
            points = np.round(points * scale * 2 - scale / 2, 1)
        case _:
            points = np.repeat(np.round(points * 20 + scale / 2 - 10, 2), rng.integers(1, 3, len(points)), 0)
    return points, (height, width)


def compare_polygons(judge: Any, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        points, size = random_polygon(rng)
        theirs = judge.frPyObjects([points.ravel().tolist()], *size)[0]
        ours = fill(upsample(points), size)
        assert rle.write_counts(ours).encode() == theirs["counts"], (points, size)
        assert np.array_equal(rle.read_counts(size, theirs["counts"]).counts, ours.counts)


def test_some_polygons() -> None:
    compare_polygons(pytest.importorskip("pycocotools.mask"), 80, seed=1)


@pytest.mark.slow
def test_thousands_of_polygons() -> None:
    compare_polygons(pytest.importorskip("pycocotools.mask"), 10_000, seed=2)


def random_masks(rng: np.random.Generator, count: int) -> list[NDArray[np.bool_]]:
    height, width = (int(side) for side in rng.integers(1, 40, 2))
    blocks = rng.random((count, height // 8 + 1, width // 8 + 1)) < rng.random((count, 1, 1))
    return [np.kron(one, np.ones((8, 8)))[:height, :width] > rng.random((height, width)) * 0.9 for one in blocks]


def compare_masks(judge: Any, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        masks = random_masks(rng, 6)
        ours = [encode(mask) for mask in masks]
        theirs = [judge.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in masks]
        for one, other, mask in zip(ours, theirs, masks, strict=True):
            left, top, right, bottom = find_box(one)
            assert rle.write_counts(one).encode() == other["counts"]
            assert judge.toBbox(other).tolist() == [left, top, right - left, bottom - top]
            assert int(judge.area(other)) == one.area
            assert np.array_equal(decode(one), mask)
        assert rle.write_counts(merge(ours)).encode() == judge.merge(theirs)["counts"]
        crowd = rng.random(3) < 0.4
        expected = judge.iou(theirs[:3], theirs[3:], crowd.astype(np.uint8).tolist())
        assert np.array_equal(overlap(ours[:3], ours[3:], crowd), expected)


def test_some_masks() -> None:
    compare_masks(pytest.importorskip("pycocotools.mask"), 20, seed=3)


@pytest.mark.slow
def test_thousands_of_masks() -> None:
    compare_masks(pytest.importorskip("pycocotools.mask"), 2_000, seed=4)


def test_large_runs_in_text() -> None:
    """Runs of up to 28 bits, and differences of both signs."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        runs = np.sort(rng.integers(0, 12_000 * 12_000, int(rng.integers(1, 20))))
        ours = rle.from_toggles((12_000, 12_000), runs)
        assert np.array_equal(rle.read_counts(ours.size, rle.write_counts(ours)).counts, ours.counts)


def test_values_of_a_map() -> None:
    values = np.random.default_rng(6).integers(-1, 4, (9, 7))
    found = encode_values(values, 5)
    assert [decode(one).tolist() for one in found] == [(values == kind).tolist() for kind in range(5)]


def test_runs_of_nothing_are_taken_out() -> None:
    found = rle.make_rle((2, 4), [0, 0, 2, 1, 0, 3, 2, 0])
    assert found.counts.tolist() == [2, 4, 2]
    assert rle.make_rle((2, 4), [0, 8]).counts.tolist() == [0, 8]
    assert rle.make_rle((2, 4), [8]).counts.tolist() == [8]


def test_polygons_of_several_parts_are_merged() -> None:
    squares = [np.array([[0, 0], [4, 0], [4, 4], [0, 4]], float) + shift for shift in (0, 2, 6)]
    found = decode(fill_polygons([upsample(one) for one in squares], (12, 12)))
    expected = np.zeros((12, 12), np.bool_)
    for shift in (0, 2, 6):
        expected[shift : shift + 4, shift : shift + 4] = True
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "counts",
    [
        [],
        [3],
        [5, -1],
        [2**62, 2**62, 2**62, 2**62],
        [1.0, 3.0],
        ["1", 3],
        [[4]],
        None,
        {},
        4,
        "",
        "0",
        "ü",
        "\n",
        b"\xff",
        "P" * 9,
    ],
)
def test_runs_that_cannot_be_used(counts: Any) -> None:
    with pytest.raises(BadImage):
        rle.read_counts((2, 2), counts)


@pytest.mark.parametrize("size", [(0, 4), (-1, -4), (10**6, 10**6)])
def test_sizes_that_cannot_be_used(size: tuple[int, int]) -> None:
    with pytest.raises(BadImage):
        rle.make_rle(size, [size[0] * size[1]])


@pytest.mark.parametrize(
    "points", [[[0, 0], [1, 1]], [[0, 0], [np.nan, 1], [2, 2]], [[0, 0], [1e9, 1], [2, 2]], [[1, 2, 3]]]
)
def test_polygons_that_cannot_be_used(points: list[list[float]]) -> None:
    with pytest.raises(BadImage):
        upsample(np.array(points, float))


def test_polygons_without_end() -> None:
    points = np.tile([[-1e7, 0], [1e7, 5]], (200, 1))
    with pytest.raises(BadImage):
        fill(upsample(points), (8, 8))
    long = fill(upsample(np.array([[-2e4, 0], [2e4, 0], [2e4, 4], [-2e4, 4]], float)), (8, 8))
    assert np.array_equal(decode(long), np.arange(8)[:, None] < np.full(8, 4))


def test_masks_of_two_sizes() -> None:
    one, other = encode(np.ones((2, 3))), encode(np.ones((3, 2)))
    with pytest.raises(BadImage):
        merge([one, other])
    with pytest.raises(BadImage):
        overlap([one], [other])
    assert overlap([], [one]).shape == (0, 1)
    assert isinstance(merge([one]), Rle)

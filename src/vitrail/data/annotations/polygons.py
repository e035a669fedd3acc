"""Rasterises polygons to masks, exactly as pycocotools does.

The outline is traced in steps of a fifth of a pixel. A pixel is inside if the outline crosses the centre line of its
column an odd number of times above it. Two polygons that are joined by a line there and back, as in YOLO's files, are
filled as two.

Points are rounded to fifths of a pixel, the precision that filling uses: `upsample` once, `fill` as often as needed.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair
from vitrail.data.annotations.rle import Rle, from_toggles, merge

SCALE: Final = 5
FURTHEST: Final = 1e8  # largest coordinate of a point, in pixels
LONGEST: Final = 50_000_000  # most steps around a polygon
PIECE: Final = 1 << 20  # steps that are processed at a time


def upsample(points: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
    """Rounds points [n, 2] (x, y) from pixels to fifths of a pixel. BadImage for fewer than three points, or for a
    coordinate that is not finite or beyond FURTHEST."""
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3:
        raise BadImage(f"a polygon has {len(points)} points; at least 3 are needed")
    values = points.astype(np.float64)
    if not bool((np.abs(values) <= FURTHEST).all()):
        wrong = values[~(np.abs(values) <= FURTHEST)][0]
        raise BadImage(f"a polygon has the coordinate {wrong:g}; coordinates are pixels of the image")
    return (SCALE * values + 0.5).astype(np.int32)


def fill(points: NDArray[np.int32], size: Pair) -> Rle:
    """Rasterises one polygon [n, 2], in fifths of a pixel. Parts outside the image are cut off."""
    x, y = points[:, 0].astype(np.int64), points[:, 1].astype(np.int64)
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    steps = np.maximum(np.abs(next_x - x), np.abs(next_y - y)) + 1
    if (length := int(steps.sum())) > LONGEST:
        raise BadImage(f"a polygon has an outline of {length // SCALE:,} pixels; the limit is {LONGEST // SCALE:,}")
    bounds = np.cumsum(steps)
    places: list[NDArray[np.int64]] = []
    first = 0
    while first < len(x):
        last = int(np.searchsorted(bounds, (bounds[first - 1] if first else 0) + PIECE, side="right"))
        some = slice(first, max(last, first + 1))
        places.append(cross_columns(x[some], y[some], next_x[some], next_y[some], size))
        first = some.stop
    return from_toggles(size, np.concatenate(places))


def fill_polygons(polygons: Sequence[NDArray[np.int32]], size: Pair) -> Rle:
    """Rasterises an object of one or more polygons: the union of their masks."""
    return merge([fill(points, size) for points in polygons])


def cross_columns(
    x: NDArray[np.int64], y: NDArray[np.int64], next_x: NDArray[np.int64], next_y: NDArray[np.int64], size: Pair
) -> NDArray[np.int64]:
    """Finds where edges cross the centre lines of columns: the column-major index of the first pixel at or below each
    crossing."""
    across, down = np.abs(next_x - x), np.abs(next_y - y)
    flat = across >= down
    steps = np.where(flat, across, down)
    # An edge is traced in the same direction whichever end comes first, so an edge there and back cancels out.
    flip = np.where(flat, x > next_x, y > next_y)
    start_x, start_y = np.where(flip, next_x, x), np.where(flip, next_y, y)
    rise = np.where(flat, next_y - y, next_x - x) * np.where(flip, -1, 1)
    slope = rise / np.maximum(steps, 1)
    edge = np.repeat(np.arange(len(x)), steps + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - steps - 1, steps + 1)
    step = np.where(flip[edge], steps[edge] - step, step)
    flat_edge, long_x, long_y, slopes = flat[edge], start_x[edge], start_y[edge], slope[edge]
    slanted = (np.where(flat_edge, long_y, long_x) + slopes * step + 0.5).astype(np.int64)  # rounds towards 0, like C
    u, v = np.where(flat_edge, step + long_x, slanted), np.where(flat_edge, slanted, step + long_y)
    changed = np.flatnonzero(u[1:] != u[:-1]) + 1
    before, after = u[changed - 1], u[changed]
    left = np.where(after < before, after, after - 1)
    column = (left - SCALE // 2) // SCALE
    height, width = size
    crossing = (left % SCALE == SCALE // 2) & (column >= 0) & (column < width)
    top = np.minimum(v[changed - 1], v[changed])[crossing]
    row = np.ceil(np.clip((top + 0.5) / SCALE - 0.5, 0, height)).astype(np.int64)
    return column[crossing] * height + row

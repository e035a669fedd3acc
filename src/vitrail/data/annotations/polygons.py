"""Polygons to masks, exactly as COCO's own tools paint them: the outline is walked in steps of a fifth of a pixel, and
a pixel belongs to the mask where its column's centre is crossed above it an odd number of times. Two polygons that are
joined by a line there and back, as YOLO's files have them, are painted as two.

Points are kept in fifths of a pixel, which is all that painting looks at: `upsample` once, `fill` as often as needed.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair
from vitrail.data.annotations.rle import Rle, from_toggles, merge

SCALE: Final = 5
FURTHEST: Final = 1e8  # pixels from the corner of an image that a point may be
LONGEST: Final = 50_000_000  # steps around a polygon
PIECE: Final = 1 << 20  # of them at a time


def upsample(points: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
    """x, y [n, 2] in pixels to whole fifths of them. BadImage for fewer than three, or any not finite."""
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3:
        raise BadImage(f"a polygon of {len(points)} points; it has at least 3")
    values = points.astype(np.float64)
    if not bool((np.abs(values) <= FURTHEST).all()):
        wrong = values[~(np.abs(values) <= FURTHEST)][0]
        raise BadImage(f"a polygon with the coordinate {wrong:g}; they are pixels of the image")
    return (SCALE * values + 0.5).astype(np.int32)


def fill(points: NDArray[np.int32], size: Pair) -> Rle:
    """The mask of one polygon [n, 2] in fifths of pixels. What lies outside of the image is cut off."""
    x, y = points[:, 0].astype(np.int64), points[:, 1].astype(np.int64)
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    steps = np.maximum(np.abs(next_x - x), np.abs(next_y - y)) + 1
    if (length := int(steps.sum())) > LONGEST:
        raise BadImage(f"a polygon of {length // SCALE:,} pixels around; the limit is {LONGEST // SCALE:,}")
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
    """The mask of an object of one or more polygons: what any of them covers."""
    return merge([fill(points, size) for points in polygons])


def cross_columns(
    x: NDArray[np.int64], y: NDArray[np.int64], next_x: NDArray[np.int64], next_y: NDArray[np.int64], size: Pair
) -> NDArray[np.int64]:
    """Where edges cross the centres of columns: the place of the first pixel at or below each crossing."""
    across, down = np.abs(next_x - x), np.abs(next_y - y)
    flat = across >= down
    steps = np.where(flat, across, down)
    # An edge is walked the same way whichever end comes first, so that one there and back leaves nothing.
    flip = np.where(flat, x > next_x, y > next_y)
    start_x, start_y = np.where(flip, next_x, x), np.where(flip, next_y, y)
    rise = np.where(flat, next_y - y, next_x - x) * np.where(flip, -1, 1)
    slope = rise / np.maximum(steps, 1)
    edge = np.repeat(np.arange(len(x)), steps + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - steps - 1, steps + 1)
    step = np.where(flip[edge], steps[edge] - step, step)
    flat_edge, long_x, long_y, slopes = flat[edge], start_x[edge], start_y[edge], slope[edge]
    slanted = (np.where(flat_edge, long_y, long_x) + slopes * step + 0.5).astype(np.int64)  # towards 0, as C does
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

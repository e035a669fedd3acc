"""Decides whether two thumbnails show the same image: one is shifted and stretched onto the other, then correlated.

The perceptual hash proposes pairs, and this module decides. Both thumbnails are band-passed first, because smooth
gradients are similar in most images and detail finer than two pixels is noise. A few Gauss-Newton steps then find the
window of one that the other shows. Each pair is computed independently, so the result does not depend on the batch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SIDE: Final = 32  # of a thumbnail
FIRST_STEPS, STEPS = 2, 6  # Gauss-Newton steps: for a first look, and for promising pairs
PROMISING: Final = 0.6  # distance after the first look up to which a pair is pursued
STUCK = 0.04, 0.4  # distances between which the search is repeated from other windows
RESTARTS: Final = tuple((y, 0.95, x, 0.95) for y in (0.0, 0.025, 0.05) for x in (0.0, 0.025, 0.05))
SMALLEST, LARGEST, BEYOND = 0.8, 1.05, 0.03  # sizes of a window relative to the side, and how far it may stick out
GAIN: Final = 1.5  # factor by which the contrast of a copy may differ
BRIGHTNESS: Final = 24.0  # levels of 255 by which its mean may differ
COLOUR: Final = 12.0  # levels by which its chroma may differ, on average
COLOURLESS: Final = 4.0  # chroma below which an image counts as grey; a grey copy of a coloured image is a copy
BATCH: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Thumbnails:
    """Thumbnails of N images: grey [N, 32, 32] and, coarser, chroma [N, 8, 8, 2]."""

    grey: NDArray[np.uint8]
    chroma: NDArray[np.uint8]

    def __getitem__(self, at: "slice | NDArray[np.int64]") -> "Thumbnails":
        return Thumbnails(grey=self.grey[at], chroma=self.chroma[at])

    @property
    def mirrored(self) -> "Thumbnails":
        return Thumbnails(grey=self.grey[:, :, ::-1], chroma=self.chroma[:, :, ::-1])


@lru_cache(maxsize=1)
def blur_matrices() -> tuple[Floats, Floats]:
    """Returns a narrow and a wide blur, as matrices [32, 32] that act on rows."""
    fine, wide = np.zeros((SIDE, SIDE)), np.zeros((SIDE, SIDE))
    for i in range(SIDE):
        for shift, weight in ((-1, 0.25), (0, 0.5), (1, 0.25)):
            fine[i, min(max(i + shift, 0), SIDE - 1)] += weight
        near = slice(max(0, i - 4), i + 5)
        wide[i, near] = 1 / len(range(*near.indices(SIDE)))
    return fine, wide


def band_pass(pixels: Floats) -> Floats:
    """Removes frequencies too low or too high to compare from thumbnails [N, 32, 32]."""
    fine, wide = blur_matrices()
    blurred = fine @ pixels @ fine.T
    return blurred - wide @ blurred @ wide.T


def measure_contrast(thumbs: NDArray[np.uint8]) -> Floats:
    """The root mean square of the pass band in levels of 255 [N]: near 0 for a blank image."""
    return np.sqrt((band_pass(thumbs.astype(np.float64)) ** 2).mean((1, 2)))


def cubic_weights(start: Floats, size: Floats, side: int) -> Floats:
    """Computes the Catmull-Rom weights [N, side, side] that resample the interval of length `size` from `start`."""
    at = (start[:, None] + (np.arange(side) + 0.5) / side * size[:, None]) * side - 0.5
    base = np.floor(at).astype(np.int64)
    far = at - base
    weights = np.zeros((len(start), side, side))
    rows, columns = np.arange(len(start))[:, None], np.arange(side)[None]
    for shift in (-1, 0, 1, 2):
        t = np.abs(far - shift)
        near, tail = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
        np.add.at(weights, (rows, columns, np.clip(base + shift, 0, side - 1)), np.where(t <= 1, near, tail))
    return weights


def warp(pixels: Floats, window: Floats) -> Floats:
    """Resamples a window (top, height, left, width: fractions, [N, 4]) of each image [N, S, S] to the image's size."""
    side = pixels.shape[1]
    rows, columns = (cubic_weights(window[:, at], window[:, at + 1], side) for at in (0, 2))
    return rows @ pixels @ columns.transpose(0, 2, 1)


def sum_squares(pixels: Floats) -> Floats:
    return (pixels.reshape(len(pixels), -1) ** 2).sum(1) + 1e-9


def refine_window(moved: Floats, goal: Floats, window: Floats) -> Floats:
    """Takes one Gauss-Newton step towards the window that matches the goal best."""
    place = (np.arange(SIDE) + 0.5) / SIDE
    down, across = np.gradient(moved, axis=1) * SIDE, np.gradient(moved, axis=2) * SIDE
    slopes = np.stack([down, down * place[None, :, None], across, across * place[None, None, :]], axis=-1)
    slopes = slopes.reshape(len(moved), -1, 4)
    gain = np.minimum(np.sqrt(sum_squares(goal) / sum_squares(moved)), 2)[:, None, None]
    rest = (goal - moved * gain).reshape(len(moved), -1, 1)
    turned = slopes.transpose(0, 2, 1)
    normal = turned @ slopes
    damping = 1e-3 * np.trace(normal, axis1=1, axis2=2) + 1e-6
    step = np.linalg.solve(normal + damping[:, None, None] * np.eye(4), turned @ rest)[:, :, 0].clip(-0.05, 0.05)
    top, height, left, width = window.T
    height_, width_ = (side.clip(SMALLEST, LARGEST) for side in (height * (1 + step[:, 1]), width * (1 + step[:, 3])))
    top_ = np.clip(top + height * step[:, 0], -BEYOND, 1 + BEYOND - height_)
    left_ = np.clip(left + width * step[:, 2], -BEYOND, 1 + BEYOND - width_)
    return np.stack([top_, height_, left_, width_], axis=1)


def align(whole: Floats, part: Floats, window: Floats, steps: int) -> tuple[Floats, Floats]:
    """Finds the window [N, 4] of `whole` that `part` matches best, starting the search at `window`. Returns the
    distance [N], which is 1 - correlation, and the window."""
    goal = band_pass(part)
    best, kept = np.full(len(part), -1.0), window
    for step in range(steps + 1):
        moved = band_pass(warp(whole, window))
        product = (moved * goal).reshape(len(moved), -1).sum(1)
        reached = product / np.sqrt(sum_squares(moved) * sum_squares(goal))
        better = reached > best
        best, kept = np.where(better, reached, best), np.where(better[:, None], window, kept)
        if step < steps:
            window = refine_window(moved, goal, window)
    return 1 - best, kept


def measure_distances(whole: Thumbnails, part: Thumbnails, window: Floats) -> Floats:
    """Computes 1 - correlation of each pair [N] after the best shift and stretch, starting at `window` [N, 4]. The
    distance is infinite where contrast, brightness or colour rule out a copy."""
    cuts = [slice(i, i + BATCH) for i in range(0, len(window), BATCH)]
    return np.concatenate([np.zeros(0), *(measure_batch(whole[cut], part[cut], window[cut]) for cut in cuts)])


def measure_batch(whole: Thumbnails, part: Thumbnails, window: Floats) -> Floats:
    ours, theirs = whole.grey.astype(np.float64), part.grey.astype(np.float64)
    distance, window = align(ours, theirs, window, FIRST_STEPS)
    out = np.full(len(window), np.inf)
    at = np.flatnonzero(distance < PROMISING)
    if not at.size:
        return out
    distance, window = align(ours[at], theirs[at], window[at], STEPS)
    for restart in RESTARTS:
        stuck = np.flatnonzero((distance > STUCK[0]) & (distance < STUCK[1]))
        if stuck.size:
            start = np.broadcast_to(np.array(restart), (len(stuck), 4))
            other, place = align(ours[at[stuck]], theirs[at[stuck]], start, STEPS)
            better = other < distance[stuck]
            distance[stuck[better]], window[stuck[better]] = other[better], place[better]
    fair = is_plausible(whole[at], part[at], window)
    out[at[fair]] = distance[fair]
    return out


def is_plausible(whole: Thumbnails, part: Thumbnails, window: Floats) -> NDArray[np.bool_]:
    """Whether contrast, brightness and colour are close enough for a copy [N], once the images are aligned."""
    moved, theirs = warp(whole.grey.astype(np.float64), window), part.grey.astype(np.float64)
    gain = np.sqrt(sum_squares(band_pass(theirs)) / sum_squares(band_pass(moved)))
    fair = (gain < GAIN) & (gain > 1 / GAIN)
    fair &= np.abs(moved.mean((1, 2)) - theirs.mean((1, 2))) < BRIGHTNESS
    hue, goal = whole.chroma.astype(np.float64) - 128, part.chroma.astype(np.float64) - 128
    grey = np.minimum(np.abs(hue).mean((1, 2, 3)), np.abs(goal).mean((1, 2, 3))) < COLOURLESS
    apart = [np.abs(warp(hue[..., c], window) - goal[..., c]).mean((1, 2)) for c in (0, 1)]
    return fair & (grey | ((apart[0] + apart[1]) / 2 < COLOUR))

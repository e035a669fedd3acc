"""Run-length encoded masks in COCO's format: alternating runs of zeros and ones in column-major order, zeros first.

    rle = read_counts((480, 640), annotation["counts"])  # compressed text, or a list of runs
    decode(rle), rle.area, find_box(rle), write_counts(rle)
    merge([one, other]), overlap(found, truth, crowd)

Masks from files pass through `make_rle`, which refuses runs that do not add up to the size of the mask. Runs of length
0 are removed, except for the first, so every mask has exactly one encoding.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair, format_size

MOST_PIXELS: Final = 178_956_970  # in a mask; the limit for images is the same
LONGEST: Final = 7  # most characters of a number in compressed text: 35 bits
LOWEST, HIGHEST = 48, 111  # range of character codes in compressed text
BITS, SIGN, MORE = 5, 0x10, 0x20  # of a character: value bits, sign bit (of the last one), and continuation bit


class Rle(NamedTuple):
    """A mask [H, W] as run lengths in column-major order, which add up to H * W. The first run is of zeros; its length
    may be 0."""

    size: Pair
    counts: NDArray[np.int64]

    @property
    def area(self) -> int:
        """The number of pixels in the mask."""
        return int(self.counts[1::2].sum())


def encode(mask: NDArray[Any]) -> Rle:
    """Encodes a mask [H, W] of booleans, or of numbers where anything but 0 is inside."""
    flat = np.asarray(mask, np.bool_).ravel(order="F")
    if not flat.size:
        return Rle((mask.shape[0], mask.shape[1]), np.zeros(0, np.int64))
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    bounds = np.concatenate([[0], *([[0]] if flat[0] else []), ends, [flat.size]])
    return Rle((mask.shape[0], mask.shape[1]), np.diff(bounds).astype(np.int64))


def decode(rle: Rle) -> NDArray[np.bool_]:
    """Decodes to a mask [H, W]."""
    values = np.arange(len(rle.counts)) % 2 == 1
    return np.repeat(values, rle.counts).reshape(rle.size, order="F")


def encode_values(values: NDArray[np.integer], kinds: int) -> list[Rle]:
    """Encodes a mask for each value from 0 to `kinds` - 1 in a map [H, W], in one pass. Other values are skipped."""
    return encode_runs(find_runs(values), kinds)


class Runs(NamedTuple):
    """Runs of equal values in a map [H, W], as column-major indices from `starts` up to but not including `ends`."""

    size: Pair
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    values: NDArray[np.integer]


def find_runs(values: NDArray[np.integer]) -> Runs:
    """Finds the runs of equal values in a map [H, W]."""
    size, flat = (values.shape[0], values.shape[1]), values.ravel(order="F")
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    return Runs(size, starts, np.append(starts[1:], flat.size), flat[starts])


def encode_runs(runs: Runs, kinds: int) -> list[Rle]:
    """Does what `encode_values` does, given the runs of a map."""
    order = np.argsort(runs.values, kind="stable")
    bounds = np.searchsorted(runs.values[order], np.arange(kinds + 1))
    some = (order[first:last] for first, last in pairwise(bounds.tolist()))
    return [from_toggles(runs.size, np.stack([runs.starts[run], runs.ends[run]], 1).ravel()) for run in some]


def from_toggles(size: Pair, places: NDArray[np.integer]) -> Rle:
    """Encodes the mask that starts with zeros and toggles at each of the column-major indices in `places`. Toggles at
    the same index cancel in pairs."""
    total = size[0] * size[1]
    values, times = np.unique(places, return_counts=True)
    changes = values[(times % 2 == 1) & (values < total)]
    return Rle(size, np.diff(np.concatenate([[0], changes, [total]])).astype(np.int64))


def toggles(rle: Rle) -> NDArray[np.int64]:
    """The column-major indices at which a mask toggles."""
    return np.cumsum(rle.counts[:-1])


def make_rle(size: Pair, counts: Any) -> Rle:
    """Builds a mask from runs that a file gives. BadImage unless they are whole numbers from 0 that add up to H * W."""
    total = size[0] * size[1]
    if not (min(size) >= 1 and total <= MOST_PIXELS):
        raise BadImage(f"a mask of {format_size(size)} pixels; it has 1 to {MOST_PIXELS:,}")
    try:
        runs = np.asarray(counts)
    except (ValueError, OverflowError):
        runs = np.empty((0, 0))
    if runs.ndim != 1 or runs.dtype.kind not in "iu" or not runs.size:
        raise BadImage("the runs of a mask are not a list of whole numbers")
    if int(runs.min()) < 0:
        raise BadImage(f"a run of {int(runs.min())} pixels in a mask; runs have 0 or more")
    # The longest run is checked before the runs are added, so the sum cannot overflow.
    longest = int(runs.max())
    covered = longest if longest > total else int(runs.astype(np.int64).sum())
    if covered != total:
        raise BadImage(f"runs of {covered:,} pixels in a mask of {format_size(size)}, which has {total:,}")
    return from_toggles(size, np.cumsum(runs.astype(np.int64)[:-1]))


def read_counts(size: Pair, counts: Any) -> Rle:
    """Builds a mask from COCO's `counts`: a list of runs, or its compressed text. BadImage if it is neither."""
    if not isinstance(counts, str | bytes):
        return make_rle(size, counts)
    try:
        letters = np.frombuffer(counts.encode("ascii") if isinstance(counts, str) else counts, np.uint8)
    except UnicodeEncodeError:
        letters = np.zeros(1, np.uint8)
    if not letters.size or int(letters.min()) < LOWEST or int(letters.max()) > HIGHEST:
        raise BadImage("the runs of a mask are not a text in COCO's code")
    parts = letters.astype(np.int64) - LOWEST
    ends = np.flatnonzero((parts & MORE) == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if not ends.size or ends[-1] != len(parts) - 1:
        raise BadImage("the runs of a mask end within a number; the text is cut")
    if int(lengths.max()) > LONGEST:
        raise BadImage("a run of a mask beyond 35 bits; the text is damaged")
    places = np.arange(len(parts)) - np.repeat(starts, lengths)
    values = np.add.reduceat((parts & (MORE - 1)) << (BITS * places), starts)
    values -= np.where(parts[ends] & SIGN, np.int64(1) << (BITS * lengths), 0)
    values[1::2] = np.cumsum(values[1::2])  # from the fourth on: differences from the run two before
    values[2::2] = np.cumsum(values[2::2])
    return make_rle(size, values)


def write_counts(rle: Rle) -> str:
    """Compresses the runs of a mask to COCO's text."""
    left = rle.counts.copy()
    left[3:] -= rle.counts[1:-2]
    letters = np.zeros((len(left), LONGEST), np.int64)
    used, more = np.zeros(len(left), np.int64), np.ones(len(left), np.bool_)
    for place in range(LONGEST):
        part = left & (MORE - 1)
        left >>= BITS
        used += more
        letters[:, place] = part
        done = np.where(part & SIGN, left == -1, left == 0)
        letters[more & ~done, place] |= MORE
        more &= ~done
    kept = np.arange(LONGEST) < used[:, None]
    return (letters[kept] + LOWEST).astype(np.uint8).tobytes().decode("ascii")


def merge(masks: Sequence[Rle]) -> Rle:
    """The union of one or more masks of the same size."""
    if len(masks) == 1:
        return masks[0]
    size = masks[0].size
    if any(mask.size != size for mask in masks):
        raise BadImage(f"masks of {format_size(size)} and of other sizes cannot be merged; all need the same size")
    places = np.concatenate([toggles(mask) for mask in masks])
    steps = np.concatenate([1 - 2 * (np.arange(len(mask.counts) - 1) % 2) for mask in masks])
    order = np.argsort(places, kind="stable")
    places, depth = places[order], np.cumsum(steps[order])
    last = np.append(places[1:] != places[:-1], True)[: len(places)]  # the last of several toggles at one index
    places, covered = places[last], depth[last] > 0
    return from_toggles(size, places[covered != np.concatenate([[False], covered[:-1]])[: len(covered)]])


def find_box(rle: Rle) -> tuple[float, float, float, float]:
    """The bounding box of a mask: left, top, right, bottom; all 0 if the mask is empty."""
    bounds = np.cumsum(rle.counts)
    starts, ends = bounds[0:-1:2], bounds[1::2]
    starts, ends = starts[: len(ends)], ends - 1  # the first and the last pixel of each run
    if not len(ends):
        return (0.0, 0.0, 0.0, 0.0)
    height = rle.size[0]
    if bool((starts // height != ends // height).any()):  # a run continues in the next column
        top, bottom = 0, height - 1
    else:
        top, bottom = int((starts % height).min()), int((ends % height).max())
    return (float(starts[0] // height), float(top), float(ends[-1] // height + 1), float(bottom + 1))


def overlap(found: Sequence[Rle], truth: Sequence[Rle], crowd: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """IoU [M, N] of M predicted masks with N ground-truth masks. For a crowd the intersection is divided by the area of
    the prediction, as in COCO's evaluation."""
    out = np.zeros((len(found), len(truth)))
    if not out.size:
        return out
    sizes = {mask.size for mask in (*found, *truth)}
    if len(sizes) > 1:
        one, other = sorted(sizes)[:2]
        raise BadImage(f"masks of {format_size(one)} and {format_size(other)} cannot be compared; all need one size")
    bounds = [pad_pairs(toggles(mask), mask.size[0] * mask.size[1]) for mask in found]
    places, starts = np.concatenate(bounds), np.cumsum([0, *map(len, bounds)])
    signs = 2 * (np.arange(len(places)) % 2) - 1
    areas = np.array([mask.area for mask in found], np.int64)
    for column, mask in enumerate(truth):
        ends = np.cumsum(mask.counts)
        ones = np.cumsum(np.where(np.arange(len(mask.counts)) % 2, mask.counts, 0))
        at = np.searchsorted(ends, places, side="left").clip(0, len(ends) - 1)
        # Pixels of the mask before each index: those of all runs up to its own, less the rest of that run.
        before = ones[at] - np.where(at % 2, ends[at] - places, 0)
        sums = np.concatenate([[0], np.cumsum(before * signs)])
        common = sums[starts[1:]] - sums[starts[:-1]]
        union = areas if crowd is not None and crowd[column] else areas + mask.area - common
        np.divide(common, union, out=out[:, column], where=common > 0)
    return out


def pad_pairs(places: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Toggles as alternating starts and ends of the runs of ones; `end` closes the last run."""
    return np.append(places, end) if len(places) % 2 else places

"""Run-length encoded masks, as COCO defines them: runs of zeros and ones in turn, down the columns, zeros first.

    rle = read_counts((480, 640), annotation["counts"])  # text or a list, as COCO's files have them
    decode(rle), rle.area, find_box(rle), write_counts(rle)
    merge([one, other]), overlap(found, truth, crowd)

Masks from files come from `make_rle`, which refuses runs that do not add up; the others have sound ones. Runs of length
0 other than the first are taken out, so that a mask has one encoding.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair, format_size

MOST_PIXELS: Final = 178_956_970  # of a mask, as of an image
LONGEST: Final = 7  # letters of one number in text: 35 bits
LOWEST, HIGHEST = 48, 111  # letters that occur in such a text
BITS, SIGN, MORE = 5, 0x10, 0x20  # of a letter: its value, the sign in the last letter, and whether another one follows


class Rle(NamedTuple):
    """A mask [H, W]: lengths of runs, column by column, which add up to H * W. The first is of zeros and may be 0."""

    size: Pair
    counts: NDArray[np.int64]

    @property
    def area(self) -> int:
        """The number of pixels in the mask."""
        return int(self.counts[1::2].sum())


def encode(mask: NDArray[Any]) -> Rle:
    """A mask [H, W] of booleans, or of numbers of which any but 0 counts."""
    flat = np.asarray(mask, np.bool_).ravel(order="F")
    if not flat.size:
        return Rle((mask.shape[0], mask.shape[1]), np.zeros(0, np.int64))
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    bounds = np.concatenate([[0], *([[0]] if flat[0] else []), ends, [flat.size]])
    return Rle((mask.shape[0], mask.shape[1]), np.diff(bounds).astype(np.int64))


def decode(rle: Rle) -> NDArray[np.bool_]:
    """The mask [H, W]."""
    values = np.arange(len(rle.counts)) % 2 == 1
    return np.repeat(values, rle.counts).reshape(rle.size, order="F")


def encode_values(values: NDArray[np.integer], kinds: int) -> list[Rle]:
    """The masks of the values 0 to `kinds` - 1 in a map [H, W], in one pass; other values belong to none."""
    return encode_runs(find_runs(values), kinds)


class Runs(NamedTuple):
    """Runs of equal values in a map [H, W], down its columns: those places from `starts` to before `ends`."""

    size: Pair
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    values: NDArray[np.integer]


def find_runs(values: NDArray[np.integer]) -> Runs:
    size, flat = (values.shape[0], values.shape[1]), values.ravel(order="F")
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    return Runs(size, starts, np.append(starts[1:], flat.size), flat[starts])


def encode_runs(runs: Runs, kinds: int) -> list[Rle]:
    """As `encode_values`, of runs."""
    order = np.argsort(runs.values, kind="stable")
    bounds = np.searchsorted(runs.values[order], np.arange(kinds + 1))
    some = (order[first:last] for first, last in pairwise(bounds.tolist()))
    return [from_toggles(runs.size, np.stack([runs.starts[run], runs.ends[run]], 1).ravel()) for run in some]


def from_toggles(size: Pair, places: NDArray[np.integer]) -> Rle:
    """The mask that starts with zeros and changes at each of the places, in order; a change at a place an even number
    of times is none."""
    total = size[0] * size[1]
    values, times = np.unique(places, return_counts=True)
    changes = values[(times % 2 == 1) & (values < total)]
    return Rle(size, np.diff(np.concatenate([[0], changes, [total]])).astype(np.int64))


def toggles(rle: Rle) -> NDArray[np.int64]:
    """The places at which a mask changes."""
    return np.cumsum(rle.counts[:-1])


def make_rle(size: Pair, counts: Any) -> Rle:
    """A mask of runs from a file. BadImage where they are no whole numbers from 0, or do not add up to H * W."""
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
    # Each is bounded before they are added, so that the sum cannot wrap around.
    longest = int(runs.max())
    covered = longest if longest > total else int(runs.astype(np.int64).sum())
    if covered != total:
        raise BadImage(f"runs of {covered:,} pixels in a mask of {format_size(size)}, which has {total:,}")
    return from_toggles(size, np.cumsum(runs.astype(np.int64)[:-1]))


def read_counts(size: Pair, counts: Any) -> Rle:
    """A mask from what COCO calls counts: a list of runs, or the text that packs one. BadImage where it is not one."""
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
    values[1::2] = np.cumsum(values[1::2])  # from the fourth on they are differences to the last but one
    values[2::2] = np.cumsum(values[2::2])
    return make_rle(size, values)


def write_counts(rle: Rle) -> str:
    """The text that packs the runs of a mask."""
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
    """The pixels that are in any of the masks, one or more of one size."""
    if len(masks) == 1:
        return masks[0]
    size = masks[0].size
    if any(mask.size != size for mask in masks):
        raise BadImage(f"masks of {format_size(size)} and of other sizes cannot be merged")
    places = np.concatenate([toggles(mask) for mask in masks])
    steps = np.concatenate([1 - 2 * (np.arange(len(mask.counts) - 1) % 2) for mask in masks])
    order = np.argsort(places, kind="stable")
    places, depth = places[order], np.cumsum(steps[order])
    last = np.append(places[1:] != places[:-1], True)[: len(places)]  # of several changes at one place
    places, covered = places[last], depth[last] > 0
    return from_toggles(size, places[covered != np.concatenate([[False], covered[:-1]])[: len(covered)]])


def find_box(rle: Rle) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the pixels of a mask; all 0 where it has none."""
    bounds = np.cumsum(rle.counts)
    starts, ends = bounds[0:-1:2], bounds[1::2]
    starts, ends = starts[: len(ends)], ends - 1  # the first and the last pixel of each run
    if not len(ends):
        return (0.0, 0.0, 0.0, 0.0)
    height = rle.size[0]
    if bool((starts // height != ends // height).any()):  # a run that goes on in the next column
        top, bottom = 0, height - 1
    else:
        top, bottom = int((starts % height).min()), int((ends % height).max())
    return (float(starts[0] // height), float(top), float(ends[-1] // height + 1), float(bottom + 1))


def overlap(found: Sequence[Rle], truth: Sequence[Rle], crowd: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Intersection over union of M masks with N others [M, N]; of those that are a crowd, over the area of the found
    one, as in COCO's evaluation. 0 where nothing is in common."""
    out = np.zeros((len(found), len(truth)))
    if not out.size:
        return out
    sizes = {mask.size for mask in (*found, *truth)}
    if len(sizes) > 1:
        one, other = sorted(sizes)[:2]
        raise BadImage(f"masks of {format_size(one)} and of {format_size(other)} cannot be compared")
    bounds = [pad_pairs(toggles(mask), mask.size[0] * mask.size[1]) for mask in found]
    places, starts = np.concatenate(bounds), np.cumsum([0, *map(len, bounds)])
    signs = 2 * (np.arange(len(places)) % 2) - 1
    areas = np.array([mask.area for mask in found], np.int64)
    for column, mask in enumerate(truth):
        ends = np.cumsum(mask.counts)
        ones = np.cumsum(np.where(np.arange(len(mask.counts)) % 2, mask.counts, 0))
        at = np.searchsorted(ends, places, side="left").clip(0, len(ends) - 1)
        # Pixels of the mask before each place: all of the runs up to its own, less what of that one lies behind.
        before = ones[at] - np.where(at % 2, ends[at] - places, 0)
        sums = np.concatenate([[0], np.cumsum(before * signs)])
        common = sums[starts[1:]] - sums[starts[:-1]]
        union = areas if crowd is not None and crowd[column] else areas + mask.area - common
        np.divide(common, union, out=out[:, column], where=common > 0)
    return out


def pad_pairs(places: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Changes of a mask as starts and ends of its runs of ones in turn."""
    return np.append(places, end) if len(places) % 2 else places

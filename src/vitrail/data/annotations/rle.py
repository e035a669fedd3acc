"""Run-length encoded masks, as COCO defines them: runs of zeros and ones in turn, down the columns, zeros first."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.text import Pair


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

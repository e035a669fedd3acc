"""A programme run on a whole batch: sorted by operation on the host, so that each is done once a step, to neighbours.

The pictures lie in the order of the operation that comes next: one gather a step, and one that brings them back. All
numbers that the operations need are computed here, without torch, and can be computed in another thread.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.shapes import Pair
from vitrail.data.transforms.batched_operations import (
    SMOOTH,
    Blends,
    Moves,
    autocontrast,
    bells,
    blend,
    blur,
    centred,
    equalise,
    grey,
    matrices,
    posterise,
    solarise,
    warp,
)
from vitrail.data.transforms.programme import NAMES, NUMBER, Programme

Stage: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]


class Work(NamedTuple):
    """Something to do to a batch: the arrays that are sent for it, and what takes the pixels and the arrays there."""

    arrays: tuple[NDArray[Any], ...]
    stage: Stage


# The order in which a batch is sorted: those that are done together are neighbours. What stays comes last.
SORTED: Final = (
    *Moves._fields,
    *Blends._fields,
    *("posterise", "solarise", "autocontrast", "equalise", "grey", "blur", "identity"),
)
SUPPORTED: Final = frozenset(NUMBER[name] for name in SORTED)
MOVED, BLENDED = len(Moves._fields), len(Moves._fields) + len(Blends._fields)  # where these end in it
BLURRED = SORTED.index("blur")
# The place of each operation in that order, as small numbers, which sort quickest.
PLACES: Final = np.full(len(NAMES), len(SORTED), np.uint8)
PLACES[[NUMBER[name] for name in SORTED]] = np.arange(len(SORTED))
LEVELS: Final = np.arange(256)


class Step(NamedTuple):
    """One operation for each picture of a sorted batch: how many go through which, in the order of the batch."""

    moves: Moves
    blends: Blends
    rest: list[int]  # from posterise on

    def counts(self) -> list[int]:
        return [sum(self.moves), sum(self.blends), *self.rest]


def programmed(programme: Programme, size: Pair) -> Work:
    """What it takes to run a programme on a batch of pictures of this size."""
    places, exact = PLACES[programme.which.T], programme.level.T  # [S, B]
    order = places.argsort(axis=1, kind="stable")
    level = np.empty(exact.shape, np.float32)
    gathers, back = np.empty((len(order) + 1, order.shape[1]), np.int64), np.arange(order.shape[1])
    steps: list[Step] = []
    matrix: list[NDArray[np.float32]] = []
    rests: list[NDArray[np.float32]] = []
    masks: list[NDArray[np.uint8]] = []
    sigmas: list[NDArray[np.float64]] = []
    for row, sorting in enumerate(order):
        by = exact[row][sorting]
        level[row] = by
        counts = np.bincount(places[row], minlength=len(SORTED)).tolist()
        ends = [0, *itertools.accumulate(counts)]
        sigmas.append(by[ends[BLURRED] : ends[BLURRED + 1]])
        moves, blends = Moves(*counts[:MOVED]), Blends(*counts[MOVED:BLENDED])
        steps.append(Step(moves, blends, counts[BLENDED:]))
        matrix.append(matrices(moves, by[: ends[MOVED]], size))
        rests.append(1 - level[row, ends[MOVED] : ends[BLENDED]])
        bits = level[row, ends[BLENDED] : ends[BLENDED + 1]].astype(np.int64)
        masks.append((255 << (8 - bits)).astype(np.uint8))
        gathers[row], back = back[sorting], np.empty_like(back)
        back[sorting] = np.arange(len(back))
    gathers[-1] = back
    arrays = (gathers, column(level), column(np.concatenate(rests)), column(np.concatenate(masks)))
    shares = column(bells(np.concatenate(sigmas), size))
    return Work((*arrays, np.concatenate(matrix), shares, SMOOTH, LEVELS, *centred(size)), partial(done, steps))


def column(numbers: NDArray[Any]) -> NDArray[Any]:
    """One number for each picture [..., 1, 1, 1]."""
    return numbers[..., None, None, None]


def done(steps: list[Step], pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """The steps of a programme, on a copy of the batch."""
    gathers, level, rest, kept, matrix, shares, kernel, levels, x, y = arrays
    rests = rest.split([sum(step.blends) for step in steps])
    masks = kept.split([step.rest[0] for step in steps])
    moves = matrix.split([sum(step.moves) for step in steps])
    bell = shares.split([step.rest[BLURRED - BLENDED] for step in steps], 2)
    for row, step in enumerate(steps):
        pixels, counts = pixels.index_select(0, gathers[row]), step.counts()
        turned, blended, posterised, solarised, spread, equal, grey_ones, blurred, _ = pixels.split(counts)
        _, amounts, _, thresholds, *_ = level[row].split(counts)
        if len(turned):
            warp(turned, moves[row], x, y)
        if len(blended):
            blend(blended, amounts, rests[row], step.blends, kernel)
        if len(posterised):
            posterise(posterised, masks[row])
        if len(solarised):
            solarise(solarised, thresholds)
        if len(spread):
            autocontrast(spread)
        if len(equal):
            equalise(equal, levels)
        if len(grey_ones):
            grey(grey_ones)
        if len(blurred):
            blur(blurred, bell[row].unbind(0))
    return pixels.index_select(0, gathers[-1])

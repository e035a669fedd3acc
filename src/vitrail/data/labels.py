"""What the samples of a source are: one class each, several, or none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels

NONE = -1  # stands where a sample has no label, and fills up rows of several
SPARSE: Final = 1000  # up to so many classes, numbers may have gaps of any width
SPREAD: Final = 10  # beyond that, there may be so many class numbers for each one that occurs
PIECE: Final = 1 << 20  # labels that are compared at a time


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Class numbers: `values` [N], one a sample; or, with `starts` [N + 1], several a sample laid end to end."""

    values: NDArray[np.integer]
    starts: NDArray[np.integer] | None = None

    @classmethod
    def none(cls, count: int) -> "Labels":
        """No sample has a label. Costs no memory."""
        return cls(np.broadcast_to(np.int64(NONE), count))

    @classmethod
    def several(cls, rows: Iterable[Iterable[int]]) -> "Labels":
        lists = [list(row) for row in rows]
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(row) for row in lists], out=starts[1:])
        return cls(np.array([value for row in lists for value in row], np.int64), starts)

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        """The classes of one sample, most often one; an unlabelled sample has none."""
        if self.starts is None:
            value = int(self.values[index])
            return () if value == NONE else (value,)
        return tuple(int(v) for v in self.values[self.starts[index] : self.starts[index + 1]])

    @property
    def multiple(self) -> bool:
        """Whether a sample may have several."""
        return self.starts is not None

    @property
    def multi_label(self) -> bool:
        """Whether some sample has several, or none of them where it may: each class is then a question of its own."""
        return self.starts is not None and bool((np.diff(self.starts) != 1).any())

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """What a batch carries: [B], or [B, most] filled up with -1 where samples may have several."""
        if self.starts is None:
            return self.values[indices].astype(np.int64)
        lists = [self[int(i)] for i in indices]
        out = np.full((len(lists), max((len(row) for row in lists), default=0) or 1), NONE, np.int64)
        for line, row in zip(out, lists, strict=True):
            line[: len(row)] = row
        return out

    def take(self, indices: NDArray[np.int64]) -> "Labels":
        """Those of some samples, in the given order."""
        if self.starts is None:
            return Labels(self.values[indices])
        return Labels.several(self[int(i)] for i in indices)

    def counts(self, classes: int) -> NDArray[np.int64]:
        """How many samples have each class [K]."""
        return np.bincount(self.values[self.values >= 0], minlength=classes)

    def check(self, classes: int, where: str) -> None:
        """Refuses a label outside the range before anything starts."""
        wrong = np.flatnonzero((self.values < NONE) | (self.values >= classes))
        if wrong.size:
            at = int(wrong[0])
            sample = at if self.starts is None else int(np.searchsorted(self.starts, at, side="right")) - 1
            raise BadLabels(
                f"{where}: sample {sample} has label {int(self.values[at])}, but there are {classes} classes, "
                f"0 to {classes - 1} ({wrong.size} such labels)"
            )


def number_classes(where: str, parts: Sequence[NDArray[np.integer]], remedy: str) -> tuple[str, ...]:
    """The names "0" to "K - 1" of classes that the labels of all parts give as numbers. BadLabels where a number is far
    beyond what the others make likely, before memory is taken for the names of so many classes."""
    highest = max((int(part.max(initial=NONE)) for part in parts), default=NONE)
    if highest >= SPARSE:
        refuse_sparse(where, highest, count_distinct(parts, -(-(highest + 1) // SPREAD)), remedy)
    return tuple(str(number) for number in range(highest + 1))


def refuse_sparse(where: str, highest: int, distinct: int, remedy: str) -> None:
    """The rule for class numbers, whatever they are read from. `remedy` says how labels become names instead."""
    if highest >= max(SPARSE, SPREAD * distinct):
        shown = f"{highest:,}" if highest < 10**18 else "beyond 10^18"
        raise BadLabels(
            f"{where}: the highest label is {shown}, but only {distinct:,} different labels occur; are these codes "
            f"rather than class numbers from 0? {remedy}"
        )


def count_distinct(parts: Sequence[NDArray[np.integer]], enough: int) -> int:
    """How many different labels occur; counting stops at `enough`."""
    seen = np.empty(0, np.int64)
    for part in parts:
        for start in range(0, len(part), PIECE):
            piece = part[start : start + PIECE]
            seen = np.union1d(seen, piece[piece != NONE])
            if len(seen) >= enough:
                return len(seen)
    return len(seen)


def refuse_negative(where: str, values: NDArray[np.integer]) -> None:
    """Refuses labels below 0. A split whose labels are all -1 has none, as in Hugging Face's test splits."""
    wrong = np.flatnonzero(values < 0)
    if wrong.size and not (values == NONE).all():
        raise BadLabels(
            f"{where}: label {int(values[wrong[0]])} of sample {int(wrong[0])} is below 0; classes count from 0, and "
            "images without a label belong into a split of their own"
        )

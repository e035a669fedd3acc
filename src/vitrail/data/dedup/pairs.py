"""Pairs of pictures that are the same, as one array; and the groups that they make."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

KINDS: Final = ("exact", "near", "flipped", "embedding")  # the surest first
EXACT, NEAR, FLIPPED, EMBEDDING = range(4)
WITHIN: Final = -1  # stands for the set where both pictures are of TRAIN
PAIR: Final = np.dtype([("set", "<i4"), ("train", "<i8"), ("test", "<i8"), ("kind", "u1"), ("distance", "<f4")])

Pairs: TypeAlias = NDArray[np.void]  # [M] of PAIR; `set` counts the test sets


def pairs(
    where: int, train: NDArray[np.int64], test: NDArray[np.int64], kind: "int | NDArray[np.int64]", distance: object
) -> Pairs:
    """One array from its columns."""
    made = np.zeros(len(train), PAIR)
    made["set"], made["train"], made["test"], made["kind"], made["distance"] = where, train, test, kind, distance
    return made


def joined(parts: Sequence[Pairs]) -> Pairs:
    """All of them in one order, each pair once: the surest kind, then the smallest distance."""
    everything = np.concatenate([np.zeros(0, PAIR), *parts])
    order = ("distance", "kind", "test", "train", "set")  # the last is the first that counts
    everything = everything[np.lexsort([everything[name] for name in order])]
    first = np.ones(len(everything), bool)
    for name in ("set", "train", "test"):
        column = everything[name]
        if name == "set":
            first[1:] = column[1:] != column[:-1]
        else:
            first[1:] |= column[1:] != column[:-1]
    return everything[first]


def groups(length: int, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of `length` things the lowest number in its group, where each (one, other) is in one group [N]."""
    root = np.arange(length)

    def top(at: int) -> int:
        while root[at] != at:
            root[at] = root[root[at]]
            at = int(root[at])
        return at

    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        low, high = sorted((top(a), top(b)))
        root[high] = low
    for at in np.unique(np.concatenate([one, other])).tolist():
        root[at] = top(at)
    return root

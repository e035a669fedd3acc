"""Pairs of images that are the same, as one array; and the groups that they make.

Work cut into blocks, and what comes of each block in a file of its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import replacing
from vitrail.core.errors import DataError, reason_of

KINDS: Final = ("exact", "near", "flipped", "embedding")  # the surest first
EXACT, NEAR, FLIPPED, EMBEDDING = range(4)
WITHIN: Final = -1  # stands for the set where both images are of TRAIN
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


PATIENCE: Final = 1800.0  # seconds in which another rank should write something


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The block files of one source, in one folder: block b holds the images from b * size on."""

    folder: Path
    length: int
    size: int

    def __len__(self) -> int:
        return -(-self.length // self.size)

    def path(self, block: int) -> Path:
        return self.folder / f"{block:06d}.npz"

    def span(self, block: int) -> tuple[int, int]:
        return block * self.size, min(self.length, (block + 1) * self.size)

    def missing(self) -> list[int]:
        return [block for block in range(len(self)) if not self.path(block).is_file()]


def sweep(block: int, blocks: Sequence[Blocks], within: bool, compare: Callable[[int, int, int], Pairs]) -> Pairs:
    """One block of TRAIN, which is source 0, against all blocks of the other sources and, with `within`, the earlier
    ones and itself. `compare` is told the source, the block and what to call the set."""
    others = [(s, b, s - 1) for s in range(1, len(blocks)) for b in range(len(blocks[s]))]
    if within:
        others += [(0, b, WITHIN) for b in range(block + 1)]
    return joined([placed(compare(s, b, where), block, b, blocks[0].size) for s, b, where in others])


def placed(pairs: Pairs, train: int, test: int, size: int) -> Pairs:
    """With numbers that count from the beginning of the sets. Within one set the later image is the train image."""
    pairs["train"] += train * size
    pairs["test"] += test * size
    inner = pairs["set"] == WITHIN
    later, earlier = np.maximum(pairs["train"], pairs["test"]), np.minimum(pairs["train"], pairs["test"])
    pairs["train"], pairs["test"] = np.where(inner, later, pairs["train"]), np.where(inner, earlier, pairs["test"])
    return pairs[~inner | (pairs["train"] != pairs["test"])]


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """An .npz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with open(path, "rb") as content, np.load(content, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({reason_of(error)}); remove it") from None


def waited_for(
    paths: Iterable[Path], patience: float = PATIENCE, pause: Callable[[float], None] = time.sleep
) -> Iterator[Path]:
    """The paths in order, each once its file is there: another rank may still be writing it. Patience is for the next
    file of the folder, whichever it is."""
    for path in paths:
        waited, seen = 0.0, -1
        while not path.is_file():
            there = sum(1 for _ in path.parent.glob("*")) if path.parent.is_dir() else 0
            waited, seen = (0.0, there) if there != seen else (waited, seen)
            if waited >= patience:
                raise DataError(f"{path} was not written within {patience:.0f} s: has another rank stopped?")
            pause(0.5)
            waited += 0.5
        yield path

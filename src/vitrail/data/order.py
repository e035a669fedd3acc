"""The order of an epoch: a pseudo-random permutation that is computed where it is asked for, never stored.

A Feistel network over the smallest rectangle that holds the set, with cycle-walking past its end: each round adds to
one coordinate a keyed hash of the other, so every round, and the whole, is a bijection. The key is (seed, epoch). Three
hundred million samples cost no more memory than three.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.data.draws import GOLDEN, Keys, keyed, mix, number

ROUNDS: Final = 16  # with 8, sets of five or six still show a preference among their permutations
ORDER: Final = number("order")
ONE: Final = np.uint64(1)  # 63 bits and a coordinate never wrap


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of `length` things for every (seed, epoch)."""

    length: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.length <= 2**62:
            raise ConfigError(f"length={self.length}: an order needs at least one sample and at most 2**62")

    def __call__(self, epoch: "int | NDArray[np.int64]", position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these positions of an epoch; `epoch` is one number or one a position."""
        rows = isqrt(self.length - 1) + 1
        columns = -(-self.length // rows)
        key = np.broadcast_to(keyed(ORDER, self.seed, epoch), position.shape)
        if position.size and not (int(position.min()) >= 0 and int(position.max()) < self.length):
            raise ConfigError(
                f"positions {position.min()} to {position.max()} are not all in an epoch of {self.length}"
            )
        sample = feistel(position.astype(np.uint64), rows, columns, key)
        while (out := np.flatnonzero(sample >= np.uint64(self.length))).size:  # walk on until it is inside
            sample[out] = feistel(sample[out], rows, columns, key[out])
        return sample.astype(np.int64)

    def stream(self, position: NDArray[np.int64], repeats: int = 1) -> "Positions":
        """Places in the endless stream of one epoch after another, each sample `repeats` times in a row."""
        draw, view = np.divmod(position, repeats)
        epoch, within = np.divmod(draw, self.length)
        return Positions(epoch=epoch, sample=self(epoch, within), repeat=view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What stands at some places of the stream: epoch, sample and which repeat of it, each [B]."""

    epoch: NDArray[np.int64]
    sample: NDArray[np.int64]
    repeat: NDArray[np.int64]


def feistel(x: Keys, rows: int, columns: int, key: Keys) -> Keys:
    """x is row * columns + column; the two coordinates take turns in moving the other."""
    tall, wide = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(x, wide)
    key = key.copy()
    for _ in range(ROUNDS // 2):
        row = moved(row, column + key, tall)
        key += GOLDEN
        column = moved(column, row + key, wide)
        key += GOLDEN
    return row * wide + column


def moved(one: Keys, by: Keys, below: "np.uint64") -> Keys:
    """One coordinate plus a hash, around the rectangle's edge."""
    out = mix(by)
    out >>= ONE
    out += one
    out -= out // below * below  # the remainder; numpy has a quick division by one number, but no quick %
    return out

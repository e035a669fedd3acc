"""Stateless random numbers, a pure function of (seed, epoch, sample, view) and a purpose; and the order of an epoch.

Without state, a run can resume anywhere, with any number of processes, and draw the same numbers. A sample in a loader
process and a batch on the accelerator get the same numbers, because both derive them from the same keys.

`EpochOrder` is a pseudo-random permutation that is computed on demand and never stored: a Feistel network over the
smallest rectangle that holds the dataset, with cycle-walking past its end. Each round adds to one coordinate a keyed
hash of the other, so every round is a bijection. The key is (seed, epoch). Memory does not grow with the dataset.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Keys: TypeAlias = NDArray[np.uint64]
Whole: TypeAlias = int | NDArray[np.int64]  # one number for all B samples, or one each

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
UNUSED = np.uint64(11)  # bits that a float64 has no room for
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def splitmix64(x: Keys) -> Keys:
    """Applies the finaliser of splitmix64, a bijection of 64 bits. Takes only arrays, which wrap without warnings."""
    x = x ^ (x >> SHIFTS[0])  # a new array; the rest is done in place
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x


def splitmix64_tensor(bits: "Tensor") -> "Tensor":
    """Applies `splitmix64` to an int64 tensor. Signed numbers wrap like unsigned ones; only shifts differ."""
    bits = bits ^ shift_right(bits, 30)  # a new tensor; the rest is done in place
    bits.mul_(as_int64(0xBF58476D1CE4E5B9))
    bits.bitwise_xor_(shift_right(bits, 27))
    bits.mul_(as_int64(0x94D049BB133111EB))
    return bits.bitwise_xor_(shift_right(bits, 31))


def shift_right(bits: "Tensor", by: int) -> "Tensor":
    """Shifts an int64 tensor logically: zeros come in from the left."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


def as_int64(value: int) -> int:
    """Reinterprets an unsigned 64-bit number as signed."""
    return value - 2**64 if value >= 2**63 else value


def hash_keys(*parts: "int | NDArray[np.integer[Any]]") -> Keys:
    """Hashes integers or integer arrays, in order, to one key [B]. Scalars are broadcast, and taken modulo 2**64."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        more = part.astype(np.uint64) if isinstance(part, np.ndarray) else np.array([part % 2**64], np.uint64)
        key = splitmix64((key + GOLDEN) ^ splitmix64(more + GOLDEN))
    return key


@lru_cache(maxsize=256)
def hash_word(text: str) -> int:
    """Hashes a word to a number that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=256)
def purpose_keys(purpose: str, count: int) -> Keys:
    """Returns the keys [1, count] that make a purpose's numbers different from those of others. They are cached,
    because computing them would take longer than the rest of a draw."""
    return hash_keys(hash_word(purpose), np.arange(count, dtype=np.uint64))[None, :]


class CounterRng:
    """The random numbers of B samples, by purpose. The numbers of a purpose do not depend on what else is drawn."""

    __slots__ = ("keys", "mixed")

    def __init__(self, keys: Keys, mixed: Keys | None = None) -> None:
        self.keys = keys
        # [B, 1]: the keys that all purposes start from
        self.mixed = splitmix64(keys[:, None] + GOLDEN) if mixed is None else mixed

    @classmethod
    def for_samples(cls, *, seed: int, epoch: Whole, sample: Whole, view: Whole = 0) -> "CounterRng":
        """The numbers of one sample, or of a batch if `sample` (and perhaps `epoch`) is an array [B]."""
        return cls(hash_keys(seed, epoch, sample, view))

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, index: int) -> "CounterRng":
        """The numbers of one sample of a batch."""
        return self.rows(slice(index, index + 1))

    def rows(self, some: "slice | NDArray[np.int64]") -> "CounterRng":
        """The numbers of some samples of a batch."""
        return CounterRng(self.keys[some], self.mixed[some])

    def bits(self, purpose: str, count: int = 1) -> Keys:
        """Draws 64-bit integers [B, count]."""
        return splitmix64(self.mixed ^ purpose_keys(purpose, count))

    def uniform(self, purpose: str, count: int = 1) -> NDArray[np.float64]:
        """Draws numbers in [0, 1) as [B, count], from the upper 53 bits."""
        return (self.bits(purpose, count) >> UNUSED).astype(np.float64) * 2.0**-53

    def integers(self, purpose: str, below: int, count: int = 1) -> NDArray[np.int64]:
        """Draws integers in [0, below) as [B, count]. `below` stays under 2**32, so that the bias is below 2**-32."""
        return (self.bits(purpose, count) % np.uint64(below)).view(np.int64)

    def generator(self, purpose: str, row: int = 0) -> np.random.Generator:
        """Returns a numpy generator for one sample, for draws of many numbers or from other distributions."""
        return np.random.Generator(np.random.Philox(int(self.bits(purpose)[row, 0])))


ROUNDS: Final = 16  # with 8, the permutations of five or six samples are still measurably non-uniform
ORDER: Final = hash_word("order")
ONE: Final = np.uint64(1)  # shift that leaves 63 bits, so that adding a coordinate never wraps


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """A permutation of `length` samples for every (seed, epoch). Its stream repeats each sample `repeats` times."""

    length: int
    seed: int
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1")
        if not 0 < self.length <= 2**62:
            raise ConfigError(f"length={self.length}: an order needs at least one sample and at most 2**62")

    def __call__(self, epoch: Whole, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the samples at these positions of an epoch; `epoch` is one number, or one per position."""
        rows = isqrt(self.length - 1) + 1
        columns = -(-self.length // rows)
        key = np.broadcast_to(hash_keys(ORDER, self.seed, epoch), position.shape)
        if position.size and not (int(position.min()) >= 0 and int(position.max()) < self.length):
            span = f"{position.min()} to {position.max()}"
            raise ConfigError(f"positions {span} are not all in an epoch of {self.length}")
        sample = feistel(position.astype(np.uint64), rows, columns, key)
        while (out := np.flatnonzero(sample >= np.uint64(self.length))).size:  # walk on until it is inside
            sample[out] = feistel(sample[out], rows, columns, key[out])
        return sample.astype(np.int64)

    def locate(self, position: NDArray[np.int64]) -> "StreamPositions":
        """Returns the epoch, sample and repeat at these positions of the endless stream of epochs."""
        draw, view = np.divmod(position, self.repeats)
        epoch, within = np.divmod(draw, self.length)
        return StreamPositions(epoch=epoch, sample=self(epoch, within), repeat=view)


class StreamPositions(NamedTuple):
    """The contents of B positions of the stream: epoch, sample and number of the repeat, each [B]."""

    epoch: NDArray[np.int64]
    sample: NDArray[np.int64]
    repeat: NDArray[np.int64]

    def draws(self, seed: int, views: int) -> list[CounterRng]:
        """Returns the random numbers of each sample for each of `views` views."""
        numbers = (self.repeat * views + number for number in range(views))
        return [CounterRng(hash_keys(seed, self.epoch, self.sample, number)) for number in numbers]


def feistel(x: Keys, rows: int, columns: int, key: Keys) -> Keys:
    """Permutes x = row * columns + column: the two coordinates take turns, each moving the other."""
    tall, wide = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(x, wide)
    key = key.copy()
    for _ in range(ROUNDS // 2):
        row = add_hash(row, column + key, tall)
        key += GOLDEN
        column = add_hash(column, row + key, wide)
        key += GOLDEN
    return row * wide + column


def add_hash(one: Keys, by: Keys, below: "np.uint64") -> Keys:
    """Adds a hash of `by` to one coordinate, modulo `below`."""
    out = splitmix64(by)
    out >>= ONE
    out += one
    out -= out // below * below  # the remainder; numpy's division by a scalar is fast, its % is not
    return out

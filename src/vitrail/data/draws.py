"""Random numbers that are computed, not kept: a pure function of (seed, epoch, sample, view) and of what they are for.

Nothing here has a state, so a run can stop and go on anywhere, with any number of processes, and draw the same. One
sample in a loader process and a batch on the accelerator get the same numbers, because both come from the same keys.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]

STEP, BELOW = 0x9E3779B97F4A7C15, 2**64 - 1
GOLDEN = np.uint64(STEP)
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
UNUSED = np.uint64(11)  # bits that a float64 has no room for
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(x: Keys) -> Keys:
    """The finaliser of splitmix64: a bijection of 64 bits that leaves no pattern. Arrays only: they wrap in silence."""
    x = x ^ (x >> SHIFTS[0])  # a new array; the rest is done in it
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x


def mixed(x: int) -> int:
    """`mix` of a single number below 2**64: as an array of one it would take thirty times as long."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & BELOW
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & BELOW
    return x ^ x >> 31


def keyed(*parts: "int | NDArray[np.integer[Any]]") -> Keys:
    """One key [B] from several integers or integer arrays, in order; scalars are broadcast, and count modulo 2**64."""
    one, rest = 0, iter(parts)  # of the scalars in front
    for part in rest:
        if isinstance(part, np.ndarray):
            break
        one = mixed((one + STEP & BELOW) ^ mixed(part + STEP & BELOW))
    else:
        return np.array([one], np.uint64)
    key = mix(np.uint64(one + STEP & BELOW) ^ mix(part.astype(np.uint64) + GOLDEN))
    for part in rest:
        more = part.astype(np.uint64) if isinstance(part, np.ndarray) else np.array([part & BELOW], np.uint64)
        key = mix((key + GOLDEN) ^ mix(more + GOLDEN))
    return key


@lru_cache(maxsize=256)
def number(text: str) -> int:
    """A word as a number that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=256)
def streams(purpose: str, count: int) -> Keys:
    """What sets a purpose's numbers apart [1, count]. Kept, for it would take longer than all else that a draw does."""
    return keyed(number(purpose), np.arange(count, dtype=np.uint64))[None, :]


class Draws:
    """The random numbers of B samples, by purpose. Another purpose, or one more, never shifts the rest."""

    __slots__ = ("keys", "mixed")

    def __init__(self, keys: Keys, mixed: Keys | None = None) -> None:
        self.keys = keys
        self.mixed = mix(keys[:, None] + GOLDEN) if mixed is None else mixed  # [B, 1], what all purposes start from

    @classmethod
    def of(
        cls,
        *,
        seed: int,
        epoch: "int | NDArray[np.int64]",
        sample: "int | NDArray[np.int64]",
        view: "int | NDArray[np.int64]" = 0,
    ) -> "Draws":
        """Those of one sample, or of a batch where `sample` (and perhaps `epoch`) is an array [B]."""
        return cls(keyed(seed, epoch, sample, view))

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, index: int) -> "Draws":
        """Those of one sample of a batch."""
        return self.rows(slice(index, index + 1))

    def rows(self, some: "slice | NDArray[np.int64]") -> "Draws":
        """Those of some samples of a batch."""
        return Draws(self.keys[some], self.mixed[some])

    def bits(self, purpose: str, count: int = 1) -> Keys:
        """Whole 64-bit numbers [B, count]."""
        return mix(self.mixed ^ streams(purpose, count))

    def uniform(self, purpose: str, count: int = 1) -> NDArray[np.float64]:
        """Numbers in [0, 1) as [B, count]: the upper 53 bits."""
        bits = self.bits(purpose, count)
        bits >>= UNUSED
        numbers = bits.astype(np.float64)
        numbers *= 2.0**-53
        return numbers

    def integers(self, purpose: str, below: int, count: int = 1) -> NDArray[np.int64]:
        """Whole numbers in [0, below) as [B, count]; `below` stays under 2**32, so that the bias is below 2**-32."""
        bits = self.bits(purpose, count)
        bits %= np.uint64(below)
        return bits.view(np.int64)

    def generator(self, purpose: str, row: int = 0) -> np.random.Generator:
        """A numpy generator of one sample's own, for what needs many numbers or a shaped distribution."""
        return np.random.Generator(np.random.Philox(int(self.bits(purpose)[row, 0])))

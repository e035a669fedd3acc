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

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Keys) -> Keys:
    """The finaliser of splitmix64: a bijection of 64 bits that leaves no pattern. Arrays only: they wrap in silence."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed(*parts: "int | NDArray[np.integer[Any]]") -> Keys:
    """One key [B] from several integers or integer arrays, in order; scalars are broadcast, and count modulo 2**64."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        array = part if isinstance(part, np.ndarray) else np.array([part & (2**64 - 1)], np.uint64)
        key = mix((key + GOLDEN) ^ mix(array.astype(np.uint64) + GOLDEN))
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

    __slots__ = ("keys",)

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

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
        return Draws(self.keys[index : index + 1])

    def bits(self, purpose: str, count: int = 1) -> Keys:
        """Whole 64-bit numbers [B, count]."""
        return mix(mix(self.keys[:, None] + GOLDEN) ^ streams(purpose, count))

    def uniform(self, purpose: str, count: int = 1) -> NDArray[np.float64]:
        """Numbers in [0, 1) as [B, count]: the upper 53 bits."""
        return (self.bits(purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, purpose: str, below: int, count: int = 1) -> NDArray[np.int64]:
        """Whole numbers in [0, below) as [B, count]; `below` stays under 2**32, so that the bias is below 2**-32."""
        return (self.bits(purpose, count) % np.uint64(below)).astype(np.int64)

    def generator(self, purpose: str, row: int = 0) -> np.random.Generator:
        """A numpy generator of one sample's own, for what needs many numbers or a shaped distribution."""
        return np.random.Generator(np.random.Philox(int(self.bits(purpose)[row, 0])))

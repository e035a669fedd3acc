"""Millions of names in two arrays.

A Python list of strings is copied page by page into every loader process, because reading a string counts a reference.
Arrays are not, and they pickle as one piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from os import fsdecode, fsencode

import numpy as np
from numpy.typing import NDArray


class Strings(Sequence[str]):
    """An immutable list of strings; names that are not UTF-8 survive, as file systems hand them out."""

    __slots__ = ("bytes", "starts")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        encoded = [fsencode(string) for string in strings]
        self.starts: NDArray[np.int64] = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(piece) for piece in encoded], out=self.starts[1:])
        self.bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)

    @classmethod
    def over(cls, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> "Strings":
        """The strings that lie in arrays already, memory-mapped ones say."""
        made = cls.__new__(cls)
        made.bytes, made.starts = data, starts
        return made

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return fsdecode(self.bytes[self.starts[index] : self.starts[index + 1]].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

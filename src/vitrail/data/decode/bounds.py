"""How many pieces (segments, chunks, blocks, comments) a file may be made of.

A honest file has few, or large ones. A hostile one has millions that hold nothing, and each costs a step in Python.
"""

from typing import Final

from vitrail.core.errors import BadImage

FREE: Final = 10_000  # pieces that any file may have, whatever its size


class Walk:
    """Counts the pieces of one file. BadImage where they are more than FREE and hold fewer than `average` bytes."""

    __slots__ = ("kind", "most", "pieces")

    def __init__(self, kind: str, data: bytes, average: int = 1024) -> None:
        self.kind, self.pieces, self.most = kind, 0, FREE + len(data) // average

    def step(self, count: int = 1) -> None:
        self.pieces += count
        if self.pieces > self.most:
            raise BadImage(f"{self.kind} of more than {self.most:,} pieces, made to take long; save it again")

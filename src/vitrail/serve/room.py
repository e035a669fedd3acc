"""Memory for decoding, shared by all threads that decode: each reserves what its picture will take before it begins."""

import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType

from vitrail.serve.refusal import unavailable


class Room:
    """At most `most` bytes reserved at a time; a request that finds no room waits for it, up to `wait_s`."""

    def __init__(self, most: int, wait_s: float) -> None:
        self.most, self.wait_s = most, wait_s
        self.held = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until there is room; 503 where there is none in time."""
        until = time.monotonic() + self.wait_s
        with self._changed:
            if not self._changed.wait_for(lambda: self.held + size <= self.most, max(until - time.monotonic(), 0)):
                raise unavailable("no memory to decode", "other pictures take all that is set aside; try again")
            self.held += size

    def give(self, size: int) -> None:
        with self._changed:
            self.held -= size
            self._changed.notify_all()


class Reservation(AbstractContextManager["Reservation"]):
    """What one picture holds of a room, until it is prepared. A picture larger than all of the room has it alone."""

    def __init__(self, room: Room) -> None:
        self.room, self.size = room, 0

    def take(self, size: int) -> None:
        size = min(size, self.room.most)
        self.room.take(size)
        self.size += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.room.give(self.size)
        self.size = 0

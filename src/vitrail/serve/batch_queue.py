"""Images on their way to the network: a bounded line between many requests and one worker.

An image has a place in the line from when it is let in until the worker takes it, so that what is being decoded counts
too. Requests join and leave on the event loop, decoding threads bring images, the worker takes them: one lock.

Memory for decoding, shared by all threads that decode: each reserves what its image will take before it begins.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal

from torch import Tensor

from vitrail.serve.http_errors import busy, unavailable

Kind = Literal["predict", "embed", "attention"]
ALONE: Final = ("attention",)  # is not batched: every image has its own memory for the weights of a layer


@dataclass(slots=True, eq=False)
class Ticket:
    """One image of a request. `answer` is the event loop's; the rest belongs to whoever has the image."""

    kind: Kind
    answer: "asyncio.Future[Any]"
    layer: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # how its outputs become a prediction
    show: bool = False  # whether the prediction itself is wanted, to be drawn
    pixels: Tensor | None = None  # uint8 [3, H, W], once it is prepared
    facts: Any = None  # what its preparation found out about it
    state: Literal["coming", "waiting", "taken", "gone"] = "coming"


class Line:
    """At most `room` images that wait or are prepared."""

    def __init__(self, *, room: int, batch: int, wait_s: float) -> None:
        self.room, self.batch, self.wait_s = room, batch, wait_s
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._placed = 0
        self.closed = False

    def __len__(self) -> int:
        """Images that have a place."""
        return self._placed

    # For the event loop.

    def check(self) -> None:
        """Refuses where an image would find no place, before its body is read."""
        if self._placed >= self.room:
            raise self._full()

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Places for all of them, or for none."""
        with self._changed:
            if self._placed + len(tickets) > self.room:
                raise self._full()
            self._placed += len(tickets)

    def leave(self, tickets: Sequence[Ticket]) -> None:
        """Gives up the places of those that nobody waits for any more; what the worker has it keeps."""
        with self._changed:
            for ticket in tickets:
                if ticket.state in ("coming", "waiting"):
                    if ticket.state == "waiting":
                        self._waiting.remove(ticket)
                    self._placed -= 1
                    ticket.state = "gone"
                    ticket.pixels = None
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets a worker that waits find out that it was replaced."""
        with self._changed:
            self._changed.notify_all()

    # For threads.

    def put(self, ticket: Ticket, pixels: Tensor, facts: Any) -> None:
        """An image is prepared; thrown away where its request has left."""
        with self._changed:
            if ticket.state == "coming":
                ticket.pixels, ticket.facts, ticket.state = pixels, facts, "waiting"
                self._waiting.append(ticket)
                self._changed.notify_all()

    def take(self, current: Callable[[], bool]) -> list[Ticket]:
        """The next batch, of one kind, the longest waiting first. Waits a little for images that are being prepared,
        never for ones that nobody has sent. Empty when the line is closed or the worker is not `current` any more."""
        with self._changed:
            while not self._waiting:
                if self.closed or not current():
                    return []
                self._changed.wait()
            until = time.monotonic() + self.wait_s
            while self._waiting and self._placed > len(self._waiting) and len(self._waiting) < self.batch:
                left = until - time.monotonic()
                if left <= 0 or self.closed:
                    break
                self._changed.wait(left)
            return self._picked() if current() and not self.closed else []

    def _picked(self) -> list[Ticket]:
        if not self._waiting:
            return []
        kind = self._waiting[0].kind
        most = 1 if kind in ALONE else self.batch
        picked = [ticket for ticket in self._waiting if ticket.kind == kind][:most]
        for ticket in picked:
            self._waiting.remove(ticket)
            ticket.state = "taken"
        self._placed -= len(picked)
        return picked

    def _full(self) -> Exception:
        return busy(f"{self._placed} of {self.room} places are taken by images that wait; try again in a moment")


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
                raise unavailable("no memory to decode", "other images take all that is set aside; try again")
            self.held += size

    def give(self, size: int) -> None:
        with self._changed:
            self.held -= size
            self._changed.notify_all()


class Reservation(AbstractContextManager["Reservation"]):
    """What one image holds of a room, until it is prepared. An image larger than all of the room has it alone."""

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

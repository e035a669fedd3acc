"""Queues images for the model: bounded memory, a bounded queue, and the one thread that runs the model.

An image holds a place in the queue from its admission until the model thread takes it, so images that are still being
decoded count too. Requests join and leave on the event loop, decoding threads add images, the model thread takes them;
one lock guards all of it.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from torch import Tensor

from vitrail.serve.http_errors import RequestError, too_many_requests, unavailable

logger = logging.getLogger("vitrail.serve")

Kind = Literal["predict", "embed", "attention"]
UNBATCHED: Final = ("attention",)  # the attention weights of a layer take memory for every image


class MemoryBudget:
    """At most `limit` bytes reserved at a time. A reservation that does not fit waits up to `wait_s`, then raises."""

    def __init__(self, limit: int, full: Callable[[], RequestError], wait_s: float = 0.0) -> None:
        self.limit, self.full, self.wait_s = limit, full, wait_s
        self.held = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self) -> Generator[Callable[[int], None]]:
        """Opens a reservation for one request or image, and yields a function that adds bytes to it. A reservation that
        exceeds the whole budget takes all of it, alone."""
        mine = 0

        def grow(size: int) -> None:
            nonlocal mine
            size = min(size, self.limit)
            with self._changed:
                if not self._changed.wait_for(lambda: self.held + size <= self.limit, self.wait_s):
                    raise self.full()
                self.held += size
            mine += size

        try:
            yield grow
        finally:
            with self._changed:
                self.held -= mine
                self._changed.notify_all()


@dataclass(slots=True, eq=False)
class QueuedImage:
    """One image of a request. `answer` belongs to the event loop, the rest to the thread that holds the image."""

    kind: Kind
    answer: "asyncio.Future[Any]"
    layer: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # options for turning outputs into a prediction
    show: bool = False  # whether the prediction itself is needed, to draw it
    pixels: Tensor | None = None  # uint8 [3, H, W], once prepared
    facts: Any = None  # what preparation learned about the image
    state: Literal["preparing", "waiting", "taken", "gone"] = "preparing"


class BatchQueue:
    """At most `capacity` images that wait or are being prepared."""

    def __init__(self, *, capacity: int, batch: int, wait_s: float) -> None:
        self.capacity, self.batch, self.wait_s = capacity, batch, wait_s
        self._waiting: deque[QueuedImage] = deque()
        self._changed = threading.Condition()
        self._places = 0
        self.closed = False

    def __len__(self) -> int:
        """The number of places in use."""
        return self._places

    # Called on the event loop.

    def check_space(self, count: int = 1) -> None:
        """Raises if `count` more images do not fit. Called with 1 before a request's body is read."""
        if self._places + count > self.capacity:
            raise too_many_requests(f"{self._places} of {self.capacity} places in the queue are taken; try again soon")

    def admit(self, images: Sequence[QueuedImage]) -> None:
        """Reserves places for all images, or raises and reserves none."""
        with self._changed:
            self.check_space(len(images))
            self._places += len(images)

    def leave(self, images: Sequence[QueuedImage]) -> None:
        """Frees the places of images that nobody waits for any more; the model thread keeps what it has taken."""
        with self._changed:
            for image in images:
                if image.state == "waiting":
                    self._waiting.remove(image)
                if image.state in ("preparing", "waiting"):
                    self._places -= 1
                    image.state, image.pixels = "gone", None
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the queue; no batch is taken after this."""
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Lets a waiting model thread notice that it was replaced."""
        with self._changed:
            self._changed.notify_all()

    # Called in threads.

    def put(self, image: QueuedImage, pixels: Tensor, facts: Any) -> None:
        """Adds a prepared image, or drops it if its request has left."""
        with self._changed:
            if image.state == "preparing":
                image.pixels, image.facts, image.state = pixels, facts, "waiting"
                self._waiting.append(image)
                self._changed.notify_all()

    def take(self, is_current: Callable[[], bool]) -> list[QueuedImage]:
        """Takes the next batch, of one kind, oldest first. Waits up to `wait_s` for images that are being prepared, but
        never for requests that have not arrived. Empty if the queue is closed or the thread is no longer current."""
        changed, waiting = self._changed, self._waiting
        with changed:
            changed.wait_for(lambda: waiting or self.closed or not is_current())
            changed.wait_for(
                lambda: len(waiting) >= min(self._places, self.batch) or self.closed or not waiting, self.wait_s
            )
            if self.closed or not is_current() or not waiting:
                return []
            kind = waiting[0].kind
            batch = [image for image in waiting if image.kind == kind][: 1 if kind in UNBATCHED else self.batch]
            for image in batch:
                waiting.remove(image)
                image.state = "taken"
            self._places -= len(batch)
            return batch


Compute = Callable[[Sequence[QueuedImage]], Sequence[Any]]  # images of one kind -> one answer each
Deliver = Callable[[Sequence[QueuedImage], Sequence[Any], float], None]  # answers or exceptions, and the seconds taken


class ModelThread:
    """A thread that takes batches from a queue until it is replaced. A batch that fails is retried in halves, so that
    an image which cannot be computed fails alone."""

    def __init__(
        self, name: str, queue: BatchQueue, warm: Callable[[], object], compute: Compute, deliver: Deliver
    ) -> None:
        self.queue, self.warm, self.compute, self.deliver = queue, warm, compute, deliver
        self.warmed = self.retired = False
        self.held: Sequence[QueuedImage] = ()
        self.since = time.monotonic()  # start of the work at hand
        self.thread = threading.Thread(target=self._run, name=f"{name}-model", daemon=True)

    def find_trouble(self, stuck_s: float) -> str:
        """Why the thread should be replaced; empty if it is healthy."""
        if not self.thread.is_alive():
            return "died"
        working = bool(self.held) or not self.warmed
        return f"hung for {stuck_s:g} s" if working and time.monotonic() - self.since > stuck_s else ""

    def _run(self) -> None:
        self.warm()
        self.warmed = True
        while not (self.retired or self.queue.closed):
            batch = self.queue.take(lambda: not self.retired)
            if not batch:  # all of its images left while it waited
                continue
            self.since, self.held = time.monotonic(), batch
            answers = self._compute(batch)
            took, self.held = time.monotonic() - self.since, ()
            if not self.retired:
                self.deliver(batch, answers, took)
            del batch, answers  # so that no memory is held while waiting

    def _compute(self, batch: Sequence[QueuedImage]) -> Sequence[Any]:
        try:
            return self.compute(batch)
        except Exception as error:
            if len(batch) > 1:
                half = len(batch) // 2
                return [*self._compute(batch[:half]), *self._compute(batch[half:])]
            logger.exception("the model failed on an image")
            reason = f"{type(error).__name__} on this image; the server keeps running"
            return [RequestError(500, "the model failed", reason)]


class ThreadSupervisor:
    """Owns the current model thread. `check`, called regularly on the event loop, replaces one that died or hangs: its
    images get 503, waiting ones are served by the next thread."""

    def __init__(self, make: Callable[[], ModelThread], stuck_s: float) -> None:
        self.make, self.stuck_s = make, stuck_s
        self.worker = make()
        self.restarts = 0

    @property
    def ready(self) -> bool:
        return self.worker.warmed and not self.worker.find_trouble(self.stuck_s)

    def check(self) -> None:
        reason = self.worker.find_trouble(self.stuck_s)
        if not reason:
            return
        logger.error("the model thread %s; starting another", reason)
        held, self.worker.retired = self.worker.held, True
        self.worker.queue.wake()
        for image in held:
            if not image.answer.done():
                image.answer.set_exception(unavailable("model thread lost", f"it {reason}; try again"))
        self.worker = self.make()
        self.restarts += 1
        self.worker.thread.start()

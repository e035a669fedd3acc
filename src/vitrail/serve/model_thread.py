"""The one thread that runs the network, and whoever watches over it.

A batch that fails is tried again in halves, so that an image which cannot be computed fails alone. A thread that died,
or that does not come back, is replaced: what it held is answered with 503, what waits is served by the next one.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vitrail.serve.batch_queue import Line, Ticket
from vitrail.serve.http_errors import Refused, unavailable

logger = logging.getLogger("vitrail.serve")

Compute = Callable[[Sequence[Ticket]], Sequence[Any]]  # tickets of one kind to as many answers
Deliver = Callable[[Sequence[Ticket], Sequence[Any], float], None]  # answers or exceptions, and how long they took


class Worker:
    """A thread that takes batches from a line until it is replaced."""

    def __init__(
        self, name: str, line: Line, *, warm: Callable[[], object], compute: Compute, deliver: Deliver
    ) -> None:
        self.line, self.warm, self.compute, self.deliver = line, warm, compute, deliver
        self.warmed = self.retired = False
        self.held: Sequence[Ticket] = ()
        self.since = time.monotonic()  # when it last began something
        self.thread = threading.Thread(target=self._run, name=f"{name}-worker", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def retire(self) -> None:
        """Takes nothing more; what it still computes nobody gets."""
        self.retired = True
        self.line.wake()

    def trouble(self, stuck_s: float) -> str:
        """Why it should be replaced; empty where it should not."""
        if not self.thread.is_alive():
            return "died"
        working = bool(self.held) or not self.warmed
        if working and time.monotonic() - self.since > stuck_s:
            return f"did not come back for {stuck_s:g} s"
        return ""

    def _run(self) -> None:
        self.warm()
        self.warmed = True
        while True:
            # An empty batch is one whose images all left while it waited.
            batch = self.line.take(lambda: not self.retired)
            if not batch:
                if self.retired or self.line.closed:
                    return
                continue
            self.since, self.held = time.monotonic(), batch
            answers = self._computed(batch)
            took, self.held = time.monotonic() - self.since, ()
            if not self.retired:
                self.deliver(batch, answers, took)
            del batch, answers  # nothing is kept while it waits

    def _computed(self, batch: Sequence[Ticket]) -> Sequence[Any]:
        try:
            return self.compute(batch)
        except Exception as error:
            if len(batch) > 1:
                half = len(batch) // 2
                return [*self._computed(batch[:half]), *self._computed(batch[half:])]
            logger.exception("the network failed on an image")
            return [
                Refused(500, "the network failed", f"on this image, with {type(error).__name__}; the server goes on")
            ]


class Watch:
    """The current worker. `tick` is called again and again, on the event loop."""

    def __init__(self, make: Callable[[], Worker], stuck_s: float) -> None:
        self.make, self.stuck_s = make, stuck_s
        self.worker = make()
        self.restarts = 0

    def start(self) -> None:
        self.worker.start()

    @property
    def ready(self) -> bool:
        return self.worker.warmed and not self.worker.trouble(self.stuck_s)

    def tick(self) -> None:
        why = self.worker.trouble(self.stuck_s)
        if not why:
            return
        logger.error("the thread that runs the network %s; another one takes over", why)
        lost, held = self.worker, self.worker.held
        lost.retire()
        for ticket in held:
            if not ticket.answer.done():
                ticket.answer.set_exception(unavailable("the network was lost", f"its thread {why}; try again"))
        self.worker = self.make()
        self.restarts += 1
        self.worker.start()

"""A server's moving parts: the line, the worker, the threads that decode, and a request's way through them."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from starlette.requests import Request

from vitrail.core.errors import BadImage, ConfigError
from vitrail.serve.batch_queue import Kind, Line, Ticket
from vitrail.serve.http_errors import Gone, Refused, unavailable
from vitrail.serve.metrics import Metrics
from vitrail.serve.model_thread import Watch, Worker
from vitrail.serve.requests import Budget, Claim, Receive, Upload, read_body, uploads
from vitrail.serve.served_model import Served
from vitrail.serve.settings import Settings

TICK_S: Final = 0.25
LARGE: Final = 256 * 1024  # bytes of a body that is not taken apart on the event loop
THREADS: Final = "vitrail-"
PATIENCE_S: Final = 3.0  # for threads at the end
Made = TypeVar("Made")


class Service:
    """One model behind one line. Used on one event loop, between the two ends of `running`."""

    def __init__(self, served: Served, settings: Settings) -> None:
        self.served, self.settings = served, settings
        self.metrics = Metrics()
        self.budget = Budget(settings.memory)
        self.line = Line(room=settings.queue, batch=settings.batch, wait_s=settings.wait_ms / 1e3)
        self.threads = f"{THREADS}{id(self):x}"  # how the names of its own begin
        self.watch = Watch(self._worker, settings.stuck_s)
        self.pool = ThreadPoolExecutor(settings.decoders, thread_name_prefix=self.threads)
        self.drawers = ThreadPoolExecutor(1, thread_name_prefix=self.threads)
        self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def _worker(self) -> Worker:
        served = self.served
        return Worker(self.threads, self.line, warm=served.warm, compute=served.compute, deliver=self._deliver)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the service is not running"
        return self._loop

    @property
    def why_not_ready(self) -> str:
        if self.draining:
            return "the server is stopping"
        return "" if self.watch.ready else "the network is being loaded, or loaded again"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["Service"]:
        """Starts the worker and waits until it is warm; stops all threads at the end."""
        self._loop = asyncio.get_running_loop()
        self.watch.start()
        while not self.watch.worker.warmed and self.watch.worker.thread.is_alive():
            await asyncio.sleep(0.005)
        if not self.watch.worker.warmed:
            raise ConfigError(f"{self.served.name}: the network failed on its first image; it cannot be served")
        ticking = asyncio.create_task(self._tick())
        try:
            yield self
        finally:
            ticking.cancel()
            self.draining = True
            self.line.close()
            for pool in (self.pool, self.drawers):
                pool.shutdown(wait=False, cancel_futures=True)
            until = time.monotonic() + PATIENCE_S
            while threads(self.threads) and time.monotonic() < until:
                await asyncio.sleep(0.01)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.watch.tick()

    # The way of a request.

    async def put_through(
        self,
        request: Request,
        kind: Kind,
        *,
        most: int | None = None,
        layer: int | None = None,
        options: Mapping[str, Any] | None = None,
        show: bool = False,
    ) -> tuple[list[Upload], list[Ticket], list[Any]]:
        """The images of a request, and what the network says of each. Refused or Gone where it comes to nothing."""
        if self.draining:
            raise unavailable("stopping", "the server takes no more work; ask another one, or later", after=5)
        arrived = self.loop.time()
        self.line.check()
        with Claim(self.budget) as claim:
            body = await read_body(request.headers, request.receive, self.settings, claim)
            found = await self._pictures(
                request.headers.get("content-type", ""), body, most or self.settings.most_images
            )
            del body
            tickets = [Ticket(kind, self.loop.create_future(), layer, options or {}, show) for _ in found]
            self.line.admit(tickets)
            try:
                for ticket, upload in zip(tickets, found, strict=True):
                    self.pool.submit(self._prepare, ticket, upload)
                answers = await self._answers(tickets, request.receive, arrived + self.settings.timeout_s)
            finally:
                self.line.leave(tickets)
        return found, tickets, answers

    async def draw(self, make: Callable[[], Made]) -> Made:
        """What takes a while is not made on the event loop, nor behind images that wait to be decoded."""
        return await self.loop.run_in_executor(self.drawers, make)

    async def _pictures(self, content_type: str, body: bytes, most: int) -> list[Upload]:
        if len(body) < LARGE:
            return uploads(content_type, body, most)
        return await self.loop.run_in_executor(self.pool, uploads, content_type, body, most)

    def _prepare(self, ticket: Ticket, upload: Upload) -> None:
        """In a thread: decodes one image and puts it into the line."""
        if ticket.state == "gone":
            return
        try:
            self.line.put(ticket, *self.served.prepare(upload.data))
        except BadImage as error:
            self._fail(ticket, Refused(415, "not an image that is read", f"{upload.name}: {error}"))
        except Exception as error:
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(settle, ticket, error)

    def _deliver(self, tickets: Sequence[Ticket], answers: Sequence[Any], took: float) -> None:
        """In the worker's thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._delivered, tickets, answers, took)

    def _delivered(self, tickets: Sequence[Ticket], answers: Sequence[Any], took: float) -> None:
        self.metrics.computed(tickets[0].kind, len(tickets), took)
        for ticket, answer in zip(tickets, answers, strict=True):
            settle(ticket, answer)

    async def _answers(self, tickets: Sequence[Ticket], receive: Receive, until: float) -> list[Any]:
        """Waits for all images, the deadline, or the client to leave: whichever comes first."""
        gone = asyncio.create_task(left(receive))
        pending: set[asyncio.Future[Any]] = {ticket.answer for ticket in tickets}
        try:
            while pending:
                waited = until - self.loop.time()
                done, _ = await asyncio.wait(
                    (*pending, gone), timeout=max(waited, 0), return_when=asyncio.FIRST_COMPLETED
                )
                pending -= done
                for answer in done - {gone}:
                    answer.result()  # the first that failed fails them all
                if pending and gone in done:
                    raise Gone
                if not done:
                    took = f"no answer within {self.settings.timeout_s:g} s"
                    raise unavailable("took too long", f"{took}; the server has more to do than it can")
            return [ticket.answer.result() for ticket in tickets]
        finally:
            gone.cancel()
            for ticket in tickets:
                if not ticket.answer.cancel() and not ticket.answer.cancelled():
                    ticket.answer.exception()  # seen, so that asyncio does not complain of a second bad image


def settle(ticket: Ticket, answer: Any) -> None:
    if ticket.answer.done():
        return
    if isinstance(answer, Exception):
        ticket.answer.set_exception(answer)
    else:
        ticket.answer.set_result(answer)


async def left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def threads(start: str = THREADS) -> list[threading.Thread]:
    """Threads of a service, or of any, that still work."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(start) and thread.is_alive()]

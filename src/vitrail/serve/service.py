"""Connects the parts of a server: queue, model thread and decoding threads, and the path of a request through them."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Receive

from vitrail.core.errors import BadImage, ConfigError
from vitrail.serve.batch_queue import BatchQueue, MemoryBudget, ModelThread, QueuedImage, ThreadSupervisor
from vitrail.serve.http_errors import ClientDisconnected, RequestError, stopping, too_many_requests, unavailable
from vitrail.serve.metrics import Metrics
from vitrail.serve.requests import Upload, read_body, read_uploads
from vitrail.serve.served_model import ServedModel
from vitrail.serve.settings import ServeSettings

TICK_S: Final = 0.25
LARGE: Final = 256 * 1024  # bytes of a body that is not parsed on the event loop
THREADS: Final = "vitrail-"
THREADS_END_S: Final = 3.0  # how long shutdown waits for threads


class Service:
    """One model behind one queue. Runs on one event loop, inside `running`."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, served: ServedModel, settings: ServeSettings) -> None:
        self.served, self.settings = served, settings
        self.metrics = Metrics()
        # Counts the bytes received, not those announced, since announcing them costs nothing.
        full = partial(too_many_requests, "other requests fill the memory for request bodies; try again in a moment")
        self.budget = MemoryBudget(max(4 * settings.max_bytes, 64 * 2**20), full)
        self.queue = BatchQueue(capacity=settings.queue, batch=settings.batch, wait_s=settings.wait_ms / 1e3)
        self.thread_prefix = prefix = f"{THREADS}{id(self):x}"
        self.supervisor = ThreadSupervisor(
            lambda: ModelThread(prefix, self.queue, served.warm, served.compute, self._settle), settings.stuck_s
        )
        self.decoders = ThreadPoolExecutor(settings.decoders, thread_name_prefix=prefix)
        # Threads for slow work outside the event loop, which must not wait behind images to decode.
        self.drawers = ThreadPoolExecutor(1, thread_name_prefix=prefix)
        self.draining = False

    @property
    def why_not_ready(self) -> str:
        if self.draining:
            return "the server is stopping"
        return "" if self.supervisor.ready else "the model is loading or restarting"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["Service"]:
        """Starts the model thread and waits until it is warm; stops all threads at the end."""
        self.loop = asyncio.get_running_loop()
        worker = self.supervisor.worker
        worker.thread.start()
        while not worker.warmed and worker.thread.is_alive():
            await asyncio.sleep(0.005)
        if not worker.warmed:
            raise ConfigError(f"{self.served.name}: the model failed on its first image; it cannot be served")

        async def supervise() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                self.supervisor.check()

        checking = asyncio.create_task(supervise())
        try:
            yield self
        finally:
            checking.cancel()
            self.draining = True
            self.queue.close()
            for pool in (self.decoders, self.drawers):
                pool.shutdown(wait=False, cancel_futures=True)
            until = time.monotonic() + THREADS_END_S
            while service_threads(self.thread_prefix) and time.monotonic() < until:
                await asyncio.sleep(0.01)

    # The path of a request.

    async def handle(
        self, request: Request, make: Callable[["asyncio.Future[Any]"], QueuedImage], max_images: int | None = None
    ) -> tuple[list[Upload], list[QueuedImage], list[Any]]:
        """Reads the images of a request, and returns them with the model's answers. `make` makes the queued image for
        an answer."""
        if self.draining:
            raise stopping()
        arrived = self.loop.time()
        self.queue.check_space()
        with self.budget.reserve() as grow:
            body = await read_body(request.headers, request.receive, self.settings, grow)
            arguments = request.headers.get("content-type", ""), body, max_images or self.settings.most_images
            if len(body) < LARGE:
                uploads = read_uploads(*arguments)
            else:
                uploads = await self.loop.run_in_executor(self.decoders, read_uploads, *arguments)
            del body, arguments
            images = [make(self.loop.create_future()) for _ in uploads]
            self.queue.admit(images)
            try:
                for image, upload in zip(images, uploads, strict=True):
                    self.decoders.submit(self._prepare, image, upload)
                answers = await self._collect(images, request.receive, arrived + self.settings.timeout_s)
            finally:
                self.queue.leave(images)
        return uploads, images, answers

    def _prepare(self, image: QueuedImage, upload: Upload) -> None:
        """In a thread: decodes one image and queues it."""
        if image.state == "gone":
            return
        try:
            self.queue.put(image, *self.served.prepare(upload.data))
        except BadImage as error:
            self._settle([image], [RequestError(415, "unreadable image", f"{upload.name}: {error}")])
        except Exception as error:
            self._settle([image], [error])

    def _settle(self, images: Sequence[QueuedImage], answers: Sequence[Any], took: float | None = None) -> None:
        """In a thread: has the event loop hand each request its answers; `took` are the seconds of the model."""

        def settle() -> None:
            if took is not None:
                self.metrics.count_batch(images[0].kind, len(images), took)
            for image, answer in zip(images, answers, strict=True):
                if image.answer.done():
                    continue
                if isinstance(answer, Exception):
                    image.answer.set_exception(answer)
                else:
                    image.answer.set_result(answer)

        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the answers
            self.loop.call_soon_threadsafe(settle)

    async def _collect(self, images: Sequence[QueuedImage], receive: Receive, until: float) -> list[Any]:
        """Waits for all answers, the deadline, or the client to leave, whichever comes first."""

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(wait_for_disconnect())
        pending: set[asyncio.Future[Any]] = {image.answer for image in images}
        try:
            while pending:
                left = max(until - self.loop.time(), 0)
                done, _ = await asyncio.wait((*pending, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for answer in done - {gone}:
                    answer.result()  # the first failure fails the request
                if pending and gone in done:
                    raise ClientDisconnected
                if not done:
                    limit = f"no answer within {self.settings.timeout_s:g} s"
                    raise unavailable("timeout", f"{limit}; the server is overloaded")
            return [image.answer.result() for image in images]
        finally:
            gone.cancel()
            for image in images:
                if not image.answer.cancel() and not image.answer.cancelled():
                    image.answer.exception()  # retrieved, so that asyncio does not warn about a second bad image


def service_threads(prefix: str = THREADS) -> list[threading.Thread]:
    """Threads of one service, or of all, that are still alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix) and thread.is_alive()]

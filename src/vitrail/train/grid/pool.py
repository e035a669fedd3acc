"""Processes that take one cell after another. One that dies has failed its cell, and another takes its place."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Final, cast

from vitrail.train.grid.worker import SIGNALS, Ended, Moved, Place, Task, serve

POLL_S: Final = 1.0  # a process that is killed is missed after this, even where its children hold its pipe open
LEAVE_S: Final = 30.0  # a process that has nothing to do may take to leave


class Worker:
    """A process, the pipe to it, and the cell that it is busy with."""

    def __init__(self, place: Place) -> None:
        self.place, self.cell = place, ""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = cast("tuple[Connection[Any, Any], Connection[Any, Any]]", context.Pipe())
        self.process: SpawnProcess = context.Process(target=serve, args=(theirs, place), name="vitrail-grid")
        with held_back():
            self.process.start()
        theirs.close()

    def how_it_ended(self) -> str:
        """In words."""
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with status {code}; what it said is above"
        name = signal.Signals(-code).name
        spare = "; out of memory? try fewer --jobs" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{spare}"


class Pool:
    """As many processes as there are places, started when there is something for them to do."""

    def __init__(self, places: Sequence[Place], *, most: int) -> None:
        self.free: list[Place] = list(places[: max(most, 0)])
        self.workers: list[Worker] = []
        self.stopping = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without an error every process is idle, and leaves when its pipe is closed; else it is ended."""
        for worker in self.workers:
            worker.pipe.close()
            if kind is not None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.join(LEAVE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    @property
    def busy(self) -> bool:
        return any(worker.cell for worker in self.workers)

    @property
    def idle(self) -> bool:
        """Whether somebody could take a task."""
        return bool(self.free) or any(not worker.cell for worker in self.workers)

    def give(self, task: Task) -> None:
        """To one that is idle, or to a new one."""
        worker = next((worker for worker in self.workers if not worker.cell and worker.process.is_alive()), None)
        if worker is None:
            for dead in [worker for worker in self.workers if not worker.cell]:
                self.bury(dead)
            worker = Worker(self.free.pop(0))
            self.workers.append(worker)
        worker.cell = task.cell.name
        with contextlib.suppress(BrokenPipeError):  # it died; `messages` tells
            worker.pipe.send(task)

    def messages(self) -> Iterator[Moved | Ended]:
        """What the processes say, or what became of them; nothing where nobody had to say something for a while."""
        wait([worker.pipe for worker in self.workers], POLL_S)
        for worker in list(self.workers):
            yield from self.heard_from(worker)

    def heard_from(self, worker: Worker) -> Iterator[Moved | Ended]:
        alive = worker.process.is_alive()  # asked first: what it said before it died is in the pipe then
        try:
            while worker.pipe.poll():
                message: Moved | Ended = worker.pipe.recv()
                if isinstance(message, Ended):
                    worker.cell = ""
                yield message
        except (EOFError, ConnectionResetError):
            alive = False
        if alive:
            return
        fault = self.bury(worker)
        if worker.cell:
            yield Ended(cell=worker.cell, state="stopped" if self.stopping else "failed", fault=fault)

    def bury(self, worker: Worker) -> str:
        """Gives the place of a process that died to another, and says how it ended."""
        self.workers.remove(worker)
        worker.pipe.close()
        self.free.append(worker.place)
        return worker.how_it_ended()

    def stop(self) -> None:
        """Once: every process ends its cell behind its step, and saves it."""
        if self.stopping:
            return
        self.stopping = True
        for worker in self.workers:
            if worker.process.pid is not None and worker.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGTERM)


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Signals wait while a process is started. It inherits that, and listens once it can answer them. Windows has no
    such thing."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would let them through when it is started on the way
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

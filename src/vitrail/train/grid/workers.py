"""Trains the cells of a grid, in this process or in a pool of processes that take one cell after another.

A process that lives on between cells pays once for torch and for the device. Nothing of a cell may reach the next:
compiled code is dropped (after a few networks torch would silently stop compiling), and the memory of the device is
released. A process that dies fails its cell, and another one replaces it.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, cast

import torch

from vitrail.core.errors import Diverged, VitrailError
from vitrail.distributed.process_group import World
from vitrail.train.config import Run
from vitrail.train.grid.plan import CellTask, PreparedCell, Unavailable, keep_outcome
from vitrail.train.loop import train
from vitrail.train.observer import STEP, NullObserver, Observer, listen_for_signals

FAULT: Final = "fault.txt"  # of a cell that failed by no mistake that we know: where in the code
TELL_S: Final = 0.5  # between two signs of progress
SMALL_STEP: Final = 1e10  # FLOPs
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

EndState: TypeAlias = Literal["done", "failed", "missing", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellProgress:
    """How far a cell is, a share of its steps."""

    cell: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CellEnd:
    """How a cell ended, with its values where it is done, and why where it failed or was skipped."""

    cell: str
    state: EndState
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
    diverged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSlot:
    """Where a process works: its device, and how many share the device and the machine."""

    device: str
    on_device: int = 1
    on_machine: int = 1


def run_cell(task: CellTask, world: World, observer: Observer | None = None) -> CellEnd:
    """Trains a cell to its end, or resumes it. An error is described and does not affect other cells. In a
    world of several processes this holds for what all of them meet alike; any other error ends the grid."""
    name = task.cell.name
    prepared = prepare(task, world)
    if isinstance(prepared, CellEnd):
        return prepared
    run = prepared.run
    try:
        with few_threads(run, world.device) if task.few_threads else contextlib.nullcontext():
            result = train(
                run,
                out=task.folder,
                world=world,
                command=dict(prepared.command),
                force=task.force,
                observer=observer or NullObserver(),
                splits=prepared.splits,
            )
        if result.state != "done":
            return CellEnd(cell=name, state="stopped")
        values = (
            keep_outcome(task.cell, task.folder, task.job, checkpoints=task.keep_checkpoints) if world.is_main else None
        )
        return CellEnd(cell=name, state="done", values=world.broadcast_from_main(values))
    except Exception as error:
        diverged = isinstance(error, Diverged)
        if world.size > 1 and not diverged:
            raise  # the others wait in this cell, and would never meet this process in the next
        return end_failed(task, error, world, diverged=diverged)


def prepare(task: CellTask, world: World) -> PreparedCell | CellEnd:
    """The cell ready to be trained, or how it ended before that, in all processes alike."""
    prepared, ended = None, None
    try:
        prepared = task.job.prepare(task.cell)
    except Unavailable as error:
        ended = CellEnd(cell=task.cell.name, state="missing", fault=str(error))
    except Exception as error:
        ended = end_failed(task, error, world)
    ended = next(filter(None, world.gather(ended)), None)
    if ended is not None:
        return ended
    assert prepared is not None
    return prepared


def end_failed(task: CellTask, error: Exception, world: World, *, diverged: bool = False) -> CellEnd:
    """An error that is not the user's mistake leaves its traceback in the cell's folder."""
    if not isinstance(error, VitrailError) and world.is_main:
        leave_trace(task.folder)
    fault = describe_error(error, shared=world.local_size > 1)
    return CellEnd(cell=task.cell.name, state="failed", fault=fault, diverged=diverged)


@contextlib.contextmanager
def few_threads(run: Run, device: torch.device) -> Generator[None]:
    """On a CPU a small step is quickest with one thread: several wait for each other longer than they compute."""
    before = torch.get_num_threads()
    if device.type == "cpu" and 6 * run.objective.macs_per_image(run.model) * run.batch < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_error(error: BaseException, *, shared: bool) -> str:
    """What went wrong, in a line; `shared` says that other cells have a part of the same memory."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {text.partition('. ')[0]}{'; try fewer --jobs' if shared else ''}"
    return text if isinstance(error, VitrailError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def leave_trace(folder: Path) -> None:
    """Writes the traceback into the cell's folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAULT).write_text(traceback.format_exc(), "utf-8")
    except OSError:  # the fault itself is reported anyway
        pass


def release_memory(device: torch.device) -> None:
    """Leaves nothing of the last cell to the next."""
    if "torch._dynamo" in sys.modules:  # where nothing was compiled there is nothing to forget, and much to import
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class PipeObserver:
    """Reports the progress of a cell through a pipe."""

    def __init__(self, cell: str, pipe: "Connection[Any, Any]") -> None:
        self.cell, self.pipe, self.last = cell, pipe, 0.0

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...

    def advance(self, what: str, done: int, total: int | None) -> None:
        if what == STEP and total and time.monotonic() - self.last > TELL_S:
            self.last = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # the parent is gone: the cell ends after its step
                self.pipe.send(CellProgress(cell=self.cell, share=done / total))


def run_tasks(pipe: "Connection[Any, Any]", place: DeviceSlot) -> None:
    """The life of a process: takes tasks until there is none, or until a signal comes. It is started with signals held
    back, so that one which comes too early waits for this."""
    try:
        with listen_for_signals() as stop:
            if hasattr(signal, "pthread_sigmask"):  # not on Windows
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            threading.Thread(target=stop_with_parent, daemon=True).start()
            world = make_world(place)
            while not stop:
                task: CellTask = pipe.recv()
                pipe.send(run_cell(task, world, PipeObserver(task.cell.name, pipe)))
                release_memory(world.device)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nothing left to do, or nobody who asks
        return
    except KeyboardInterrupt:
        os._exit(130)  # at once, without waiting for a checkpoint that is being written: it is whole or not there


def stop_with_parent() -> None:
    """Where the grid is killed and its processes are not, they save and end, too: the next start needs their cells."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def make_world(place: DeviceSlot) -> World:
    """A world of one, which knows that others share the machine with it."""
    device = torch.device(place.device)
    torch.set_num_threads(max(min(cores() // place.on_machine, torch.get_num_threads()), 1))  # OMP_NUM_THREADS holds
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A process that takes more than its share runs out of memory itself, and takes smaller micro-batches.
        torch.cuda.set_per_process_memory_fraction(1 / place.on_device, device)
    return World(device=device, local_size=place.on_machine)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


POLL_S: Final = 1.0  # a process that is killed is missed after this, even where its children hold its pipe open
LEAVE_S: Final = 30.0  # a process that has nothing to do may take to leave


class GridWorker:
    """A process, the pipe to it, and the cell that it is busy with."""

    def __init__(self, place: DeviceSlot) -> None:
        self.place, self.cell = place, ""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = cast("tuple[Connection[Any, Any], Connection[Any, Any]]", context.Pipe())
        self.process: SpawnProcess = context.Process(target=run_tasks, args=(theirs, place), name="vitrail-grid")
        with block_signals():
            self.process.start()
        theirs.close()

    def describe_exit(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with status {code}; what it said is above"
        name = signal.Signals(-code).name
        spare = "; out of memory? try fewer --jobs" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{spare}"


class WorkerPool:
    """As many processes as there are places, started when there is something for them to do."""

    def __init__(self, places: Sequence[DeviceSlot], *, most: int) -> None:
        self.free: list[DeviceSlot] = list(places[: max(most, 0)])
        self.workers: list[GridWorker] = []
        self.stopping = False

    def __enter__(self) -> "WorkerPool":
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

    def give(self, task: CellTask) -> None:
        """To one that is idle, or to a new one."""
        worker = next((worker for worker in self.workers if not worker.cell and worker.process.is_alive()), None)
        if worker is None:
            for dead in [worker for worker in self.workers if not worker.cell]:
                self.remove_dead_worker(dead)
            worker = GridWorker(self.free.pop(0))
            self.workers.append(worker)
        worker.cell = task.cell.name
        with contextlib.suppress(BrokenPipeError):  # it died; `messages` tells
            worker.pipe.send(task)

    def messages(self) -> Iterator[CellProgress | CellEnd]:
        """The messages of the processes, or how they ended; empty after POLL_S without messages."""
        wait([worker.pipe for worker in self.workers], POLL_S)
        for worker in list(self.workers):
            yield from self.read_messages(worker)

    def read_messages(self, worker: GridWorker) -> Iterator[CellProgress | CellEnd]:
        alive = worker.process.is_alive()  # asked first: what it said before it died is in the pipe then
        try:
            while worker.pipe.poll():
                message: CellProgress | CellEnd = worker.pipe.recv()
                if isinstance(message, CellEnd):
                    worker.cell = ""
                yield message
        except (EOFError, ConnectionResetError):
            alive = False
        if alive:
            return
        fault = self.remove_dead_worker(worker)
        if worker.cell:
            yield CellEnd(cell=worker.cell, state="stopped" if self.stopping else "failed", fault=fault)

    def remove_dead_worker(self, worker: GridWorker) -> str:
        """Gives the place of a process that died to another, and says how it ended."""
        self.workers.remove(worker)
        worker.pipe.close()
        self.free.append(worker.place)
        return worker.describe_exit()

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
def block_signals() -> Generator[None]:
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

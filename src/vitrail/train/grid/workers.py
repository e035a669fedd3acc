"""Trains the cells of a grid, in this process or in a pool of processes that take one cell after another.

A process that is reused for several cells loads torch and sets up the device only once. No state may leak from one cell
into the next: compiled code is dropped (after a few networks, torch would silently stop compiling), and device memory
is released. If a process dies, its cell fails, and another process replaces it.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch

from vitrail.core.errors import Diverged, VitrailError
from vitrail.core.processes import available_cores
from vitrail.distributed.process_group import World
from vitrail.evaluation.speed import training_flops
from vitrail.train.grid.plan import Cell, CellJob, CellOutcome, Unavailable, keep_outcome
from vitrail.train.loop import train
from vitrail.train.observer import STEP, NullObserver, Observer, get_advance, listen_for_signals

FAULT: Final = "fault.txt"  # traceback of a cell that failed with an unexpected error
TELL_S: Final = 0.5  # between two progress messages
SMALL_STEP: Final = 1e10  # FLOPs
POLL_S: Final = 1.0  # a killed process is noticed after this, even if its children hold its pipe open
LEAVE_S: Final = 30.0  # that an idle process may take to exit
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
CAN_BLOCK: Final = hasattr(signal, "pthread_sigmask")  # not on Windows

Message: TypeAlias = tuple[str, float] | CellOutcome  # a cell and the share of its steps that are done, or its outcome


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """Where a process runs: its device, and how many processes share the device and the machine."""

    device: str
    on_device: int = 1
    on_machine: int = 1


class CellObserver:
    """Reports the progress of a cell, as a share of its steps, and passes everything on to another observer."""

    def __init__(self, cell: str, report: Callable[[str, float], None], observer: Observer) -> None:
        self.cell, self.report = cell, report
        self.log, self.progress, self.pass_on = observer.log, observer.progress, get_advance(observer)

    def advance(self, what: str, done: int, total: int | None) -> None:
        self.pass_on(what, done, total)
        if what == STEP and total:
            self.report(self.cell, done / total)


def run_cell(cell: Cell, folder: Path, job: CellJob, world: World, observer: Observer) -> CellOutcome:
    """Trains a cell to its end, or resumes it, and leaves no state behind for the next. An error is described in the
    outcome and does not affect other cells. In a world of several processes this holds for errors that all of them
    raise; any other error ends the grid."""
    prepared, failed, threads = None, None, torch.get_num_threads()
    try:
        prepared = job.prepare(cell)
    except Exception as error:
        failed = describe_failure(cell, folder, error, world)
    if failed := next(filter(None, world.gather(failed)), None):
        return failed
    assert prepared is not None
    run, splits, command = prepared.run, prepared.splits, dict(prepared.command)
    is_small = training_flops(run.macs_per_image, run.batch) < SMALL_STEP
    try:
        if job.few_threads and is_small and world.device.type == "cpu":
            torch.set_num_threads(1)  # for a small step, threads cost more in synchronisation than they save
        result = train(run, out=folder, world=world, command=command, force=job.force, observer=observer, splits=splits)
        if result.state != "done":
            return CellOutcome(cell=cell.name, at=cell.at, stopped=True)
        values = world.broadcast_from_main(keep_outcome(cell, folder, job) if world.is_main else None)
        return CellOutcome(cell=cell.name, at=cell.at, values=values)
    except Exception as error:
        if world.size > 1 and not isinstance(error, Diverged):
            raise  # the other processes wait in this cell and would never reach the next one
        return describe_failure(cell, folder, error, world)
    finally:
        torch.set_num_threads(threads)
        release_memory(world.device)


def describe_failure(cell: Cell, folder: Path, error: Exception, world: World) -> CellOutcome:
    """Describes an error. If it is not the user's mistake, its traceback is written to the cell's folder."""
    if isinstance(error, Unavailable):
        return CellOutcome(cell=cell.name, at=cell.at, fault=str(error), missing=True)
    if not isinstance(error, VitrailError) and world.is_main:
        with contextlib.suppress(OSError):  # the fault itself is reported anyway
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FAULT).write_text(traceback.format_exc(), "utf-8")
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        text = f"out of memory: {text.partition('. ')[0]}{'; try fewer --jobs' if world.local_size > 1 else ''}"
    elif not isinstance(error, VitrailError) or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return CellOutcome(cell=cell.name, at=cell.at, fault=text, diverged=isinstance(error, Diverged))


def release_memory(device: torch.device) -> None:
    if "torch._dynamo" in sys.modules:  # if nothing was compiled, nothing needs resetting, and the import is slow
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def run_tasks(pipe: "Connection[Any, Any]", place: DeviceSlot) -> None:
    """The main function of a process: runs cells until there are none left, or until a signal arrives. The process is
    started with signals blocked, so that one that arrives too early waits for the handler."""
    last = 0.0

    def report(cell: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # the parent is gone: the cell stops after its step
                pipe.send((cell, share))

    try:
        with listen_for_signals() as stop:
            if CAN_BLOCK:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            threading.Thread(target=stop_with_parent, daemon=True).start()
            device = torch.device(place.device)
            cores = available_cores() // place.on_machine
            torch.set_num_threads(max(min(cores, torch.get_num_threads()), 1))  # OMP_NUM_THREADS is respected
            if device.type == "cuda":
                torch.cuda.set_device(device)
                # A process that exceeds its share runs out of memory itself, and retries with smaller micro-batches.
                torch.cuda.set_per_process_memory_fraction(1 / place.on_device, device)
            world = World(device=device, local_size=place.on_machine)
            while not stop:
                cell, folder, job = pipe.recv()
                pipe.send(run_cell(cell, folder, job, world, CellObserver(cell.name, report, NullObserver())))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nothing left to do, or the parent is gone
        return
    except KeyboardInterrupt:
        os._exit(130)  # at once, without waiting for a checkpoint in progress: it will be complete or absent


def stop_with_parent() -> None:
    """If the grid is killed and its processes are not, they save and exit too: the next start needs their cells."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class GridWorker:
    """A process, the pipe to it, and the cell that it is running. Signals are blocked while the process starts: it
    inherits the mask, and unblocks them once it can handle them."""

    def __init__(self, place: DeviceSlot) -> None:
        self.place = place
        self.cell: Cell | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = cast("tuple[Connection[Any, Any], Connection[Any, Any]]", context.Pipe())
        self.process: SpawnProcess = context.Process(target=run_tasks, args=(theirs, place), name="vitrail-grid")
        if CAN_BLOCK:
            resource_tracker.ensure_running()  # starting it later would unblock them
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process.start()
        finally:
            if CAN_BLOCK:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()


class WorkerPool:
    """A pool of one process per slot, each started when there is a cell for it."""

    def __init__(self, places: Sequence[DeviceSlot]) -> None:
        self.free: list[DeviceSlot] = list(places)
        self.workers: list[GridWorker] = []
        self.stopping = False

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the pipes. Without an error, every process is idle and exits by itself; otherwise it is terminated."""
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
        """Whether a process is free to run a cell."""
        return bool(self.free) or any(not worker.cell for worker in self.workers)

    def give(self, cell: Cell, folder: Path, job: CellJob) -> None:
        """Gives a cell to an idle process, or to a new one."""
        idle = [worker for worker in self.workers if not worker.cell]
        worker = next((worker for worker in idle if worker.process.is_alive()), None)
        if worker is None:
            for dead in idle:
                self.remove_dead_worker(dead)
            worker = GridWorker(self.free.pop(0))
            self.workers.append(worker)
        worker.cell = cell
        with contextlib.suppress(BrokenPipeError):  # it died, which `messages` reports
            worker.pipe.send((cell, folder, job))

    def messages(self) -> Iterator[Message]:
        """The messages of the processes, or how they ended; empty after POLL_S without messages."""
        wait([worker.pipe for worker in self.workers], POLL_S)
        for worker in list(self.workers):
            alive = worker.process.is_alive()  # checked first: its last messages are in the pipe by then
            try:
                while worker.pipe.poll():
                    message: Message = worker.pipe.recv()
                    if isinstance(message, CellOutcome):
                        worker.cell = None
                    yield message
            except (EOFError, ConnectionResetError):
                alive = False
            if alive:
                continue
            fault = self.remove_dead_worker(worker)
            if (cell := worker.cell) is not None:
                yield CellOutcome(cell=cell.name, at=cell.at, fault=fault, stopped=self.stopping)

    def remove_dead_worker(self, worker: GridWorker) -> str:
        """Removes a process that died, which frees its slot, and says how it ended."""
        self.workers.remove(worker)
        worker.pipe.close()
        self.free.append(worker.place)
        worker.process.join()
        code = worker.process.exitcode or 0
        if code >= 0:
            return f"its process ended with status {code}; its output is above"
        name = signal.Signals(-code).name
        return f"its process was ended by {name}{'; out of memory? try fewer --jobs' if name == 'SIGKILL' else ''}"

    def stop(self) -> None:
        """Makes every process save its cell after the current step and stop. Only the first call has an effect."""
        for worker in () if self.stopping else self.workers:
            if worker.process.pid is not None and worker.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGTERM)
        self.stopping = True

"""One cell after another in one process: trained, or resumed, to its end, and its outcome kept.

A process that lives on between cells pays once for torch and for the device. What one cell leaves behind must not
reach the next: compiled code is forgotten (after a few networks torch would stop compiling, without a word), and the
memory of the device is given back.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from vitrail.core.errors import Diverged, VitrailError
from vitrail.distributed.process_group import World
from vitrail.train.config import Run
from vitrail.train.grid.cell import Cell, Job, Prepared, Unavailable, keep
from vitrail.train.loop import train
from vitrail.train.runtime.observer import STEP, Observer, Silent, heard

FAULT: Final = "fault.txt"  # of a cell that failed by no mistake that we know: where in the code
TELL_S: Final = 0.5  # between two signs of progress
SMALL_STEP: Final = 1e10  # FLOPs
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

State: TypeAlias = Literal["done", "failed", "missing", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A cell to train, the folder of its run, and what the grid does with its cells. `few_threads` trains a small step
    with one thread on a CPU; `keep_checkpoints` keeps those of a finished cell."""

    cell: Cell
    folder: Path
    job: Job
    force: bool = False
    few_threads: bool = False
    keep_checkpoints: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """How far a cell is, a share of its steps."""

    cell: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a cell ended, with its values where it is done, and why where it failed or was skipped."""

    cell: str
    state: State
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
    diverged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process works: its device, and how many share the device and the machine."""

    device: str
    on_device: int = 1
    on_machine: int = 1


def run_cell(task: Task, world: World, observer: Observer | None = None) -> Ended:
    """Trains a cell to its end, or resumes it. What goes wrong is told in words, and no other cell is affected. In a
    world of several processes this holds for what all of them meet alike; any other error ends the grid."""
    name = task.cell.name
    prepared = prepare(task, world)
    if isinstance(prepared, Ended):
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
                observer=observer or Silent(),
                pictures=prepared.pictures,
            )
        if result.state != "done":
            return Ended(cell=name, state="stopped")
        values = keep(task.cell, task.folder, task.job, checkpoints=task.keep_checkpoints) if world.is_main else None
        return Ended(cell=name, state="done", values=world.broadcast(values))
    except Exception as error:
        diverged = isinstance(error, Diverged)
        if world.size > 1 and not diverged:
            raise  # the others wait in this cell, and would never meet this process in the next
        return failed(task, error, world, diverged=diverged)


def prepare(task: Task, world: World) -> Prepared | Ended:
    """The cell ready to be trained, or how it ended before that, in all processes alike."""
    prepared, ended = None, None
    try:
        prepared = task.job.prepare(task.cell)
    except Unavailable as error:
        ended = Ended(cell=task.cell.name, state="missing", fault=str(error))
    except Exception as error:
        ended = failed(task, error, world)
    ended = next(filter(None, world.gather(ended)), None)
    if ended is not None:
        return ended
    assert prepared is not None
    return prepared


def failed(task: Task, error: Exception, world: World, *, diverged: bool = False) -> Ended:
    """An error that is not the user's mistake leaves its traceback in the cell's folder."""
    if not isinstance(error, VitrailError) and world.is_main:
        leave_trace(task.folder)
    fault = words(error, shared=world.local_size > 1)
    return Ended(cell=task.cell.name, state="failed", fault=fault, diverged=diverged)


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


def words(error: BaseException, *, shared: bool) -> str:
    """What went wrong, in a line; `shared` says that other cells have a part of the same memory."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {text.partition('. ')[0]}{'; try fewer --jobs' if shared else ''}"
    return text if isinstance(error, VitrailError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def leave_trace(folder: Path) -> None:
    """For whoever looks for the cause."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAULT).write_text(traceback.format_exc(), "utf-8")
    except OSError:  # the fault itself is told all the same
        pass


def tidy(device: torch.device) -> None:
    """Leaves nothing of the last cell to the next."""
    if "torch._dynamo" in sys.modules:  # where nothing was compiled there is nothing to forget, and much to import
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Teller:
    """Tells through a pipe how far a cell is."""

    def __init__(self, cell: str, pipe: "Connection[Any, Any]") -> None:
        self.cell, self.pipe, self.last = cell, pipe, 0.0

    def told(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...

    def advance(self, what: str, done: int, total: int | None) -> None:
        if what == STEP and total and time.monotonic() - self.last > TELL_S:
            self.last = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # whoever asked is gone: the cell ends behind its step
                self.pipe.send(Moved(cell=self.cell, share=done / total))


def serve(pipe: "Connection[Any, Any]", place: Place) -> None:
    """The life of a process: takes tasks until there is none, or until a signal comes. It is started with signals held
    back, so that one which comes too early waits for this."""
    try:
        with heard() as stop:
            if hasattr(signal, "pthread_sigmask"):  # not on Windows
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            threading.Thread(target=follow, daemon=True).start()
            world = world_at(place)
            while not stop:
                task: Task = pipe.recv()
                pipe.send(run_cell(task, world, Teller(task.cell.name, pipe)))
                tidy(world.device)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nothing left to do, or nobody who asks
        return
    except KeyboardInterrupt:
        os._exit(130)  # at once, without waiting for a checkpoint that is being written: it is whole or not there


def follow() -> None:
    """Where the grid is killed and its processes are not, they save and end, too: the next start needs their cells."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def world_at(place: Place) -> World:
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

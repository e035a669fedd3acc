"""Runs a grid: every cell to its end, in this process or in several, even if some of them fail.

    plan = GridPlan(cells=cells, out=out, cells_in=out / "cells", record=out / "study.json", job=job)
    report = run_grid(plan, World(device=torch.device("cpu")), watcher=QuietWatcher())

The same call again resumes: finished cells stay, interrupted ones resume from their checkpoints, failed ones are tried
again. A failure is reported and the other cells finish; only the cells that start from its weights are not run. What a
grid is for (a sweep's last run, VTAB's mean, a study's table) is up to its caller.
"""

import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch

from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import World, find_device
from vitrail.train.grid.plan import (
    Cell,
    CellOutcome,
    CellState,
    GridPlan,
    GridReport,
    Present,
    Watcher,
    finished_outcome,
    present_nothing,
    read_seconds,
    write_record,
)
from vitrail.train.grid.workers import CellEnd, CellProgress, DeviceSlot, WorkerPool, cores, release_memory, run_cell
from vitrail.train.observer import STEP, Observer, Stop, get_advance, listen_for_signals
from vitrail.train.run_folder.files import RunLock


class GridState:
    """The state of all cells. Every process has one, and they agree; only the main one writes and presents."""

    def __init__(self, plan: GridPlan, world: World, watcher: Watcher, present: Present) -> None:
        self.plan, self.world, self.watcher, self.present = plan, world, watcher, present
        self.cells = {cell.name: cell for cell in plan.cells}
        found, seconds = world.broadcast_from_main(
            (self.finished(), read_seconds(plan.record)) if world.is_main else None
        )
        self.outcomes: dict[str, CellOutcome] = found
        self.seconds = {name: seconds[name] for name in self.outcomes if name in seconds}
        self.states: dict[str, CellState] = {
            name: "done" if name in self.outcomes else "waiting" for name in self.cells
        }
        self.shares: dict[str, float] = {}
        self.since: dict[str, float] = {}
        self.start = self.presented = time.monotonic()
        self.total = sum(self.work(name) for name in self.cells if self.states[name] == "waiting")
        self.unwritten = False
        self.note("running")

    def finished(self) -> dict[str, CellOutcome]:
        """The outcomes of the cells that need no more work."""
        found = {
            name: finished_outcome(cell, self.plan.folder(name), self.plan.job) for name, cell in self.cells.items()
        }
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def work(self, name: str) -> float:
        return self.plan.work.get(name, 1.0)

    @property
    def left(self) -> int:
        return sum(state == "waiting" for state in self.states.values())

    def next(self) -> Cell | None:
        """The most expensive cell that can start now, of the first seed that has one: the whole grid exists early, and
        further seeds refine it. None if all others are started or waiting for another cell."""
        ready = [
            name
            for name, state in self.states.items()
            if state == "waiting" and self.states.get(self.cells[name].after, "done") == "done"
        ]
        return self.cells[max(ready, key=self.urgency)] if ready else None

    def urgency(self, name: str) -> tuple[float, float]:
        return -float(self.cells[name].at.get("seed", 0)), self.work(name)

    def begun(self, cell: Cell) -> None:
        self.states[cell.name] = "running"
        self.since[cell.name] = time.monotonic()
        self.watcher.started(cell)
        self.note("running")

    def listener(self, cell: Cell) -> "CellObserver":
        return CellObserver(self, cell.name, self.watcher.listen(cell))

    def moved(self, message: CellProgress) -> None:
        self.shares[message.cell] = message.share
        self.progress()

    def ended(self, message: CellEnd) -> None:
        name, cell = message.cell, self.cells[message.cell]
        self.seconds[name] = time.monotonic() - self.since[name]
        self.states[name] = message.state
        if message.state == "done":
            self.over(CellOutcome(cell=name, at=cell.at, values=message.values))
        elif message.state != "stopped":
            missing = message.state == "missing"
            self.fail(
                CellOutcome(cell=name, at=cell.at, fault=message.fault, diverged=message.diverged, missing=missing)
            )
        self.note("running")
        if message.state != "stopped" and time.monotonic() - self.presented > self.plan.present_s:
            self.show_so_far()

    def over(self, outcome: CellOutcome) -> None:
        """Records the outcome of a cell that is over for this start."""
        self.outcomes[outcome.cell], self.shares[outcome.cell] = outcome, 1.0
        self.progress()
        self.watcher.ended(self.cells[outcome.cell], outcome, self.seconds.get(outcome.cell, 0.0))

    def fail(self, outcome: CellOutcome) -> None:
        """Ends a cell that failed or is missing, and those that would have started from its weights."""
        self.over(outcome)
        for other in self.cells.values():
            if other.after == outcome.cell and self.states[other.name] == "waiting":
                self.states[other.name] = "left out"
                fault = f"not run: {outcome.cell}, from whose weights it starts, failed"
                self.fail(CellOutcome(cell=other.name, at=other.at, fault=fault))

    def progress(self) -> None:
        """Reports the share of this start's work that is done, and the seconds left at this rate."""
        done = sum(self.work(name) * share for name, share in self.shares.items())
        share = done / self.total if self.total else 1.0
        spent = time.monotonic() - self.start
        self.watcher.progress(share, spent * (1 - share) / share if share else float("nan"))

    def show_so_far(self) -> None:
        """Presents the results so far. A failure is reported and stops nothing; at the end it will be raised."""
        self.presented = time.monotonic()
        if not self.world.is_main:
            return
        try:
            self.present(self.report())
        except Exception as error:
            self.watcher.log(
                f"the results so far could not be presented ({error}); the other {self.plan.unit} still run"
            )

    def list_outcomes(self) -> tuple[CellOutcome, ...]:
        return tuple(self.outcomes[name] for name in self.cells if name in self.outcomes)

    def report(self, *, stopped: bool = False) -> GridReport:
        return GridReport(states=dict(self.states), outcomes=self.list_outcomes(), stopped=stopped)

    def close(self, *, stopped: bool) -> GridReport:
        """Writes the record and presents the results."""
        unfinished = any(state in ("waiting", "running", "stopped") for state in self.states.values())
        failed = any(state in ("failed", "left out") for state in self.states.values())
        self.note("stopped" if stopped and unfinished else "failed" if failed else "done")
        report = self.report(stopped=stopped and unfinished)
        if self.outcomes and self.world.is_main:
            self.present(report)
        return report

    def note(self, state: str) -> None:
        """Writes the record. A full disk does not end the grid: every cell's own folder has its state."""
        if not self.world.is_main:
            return
        cells: dict[str, dict[str, Any]] = {}
        for name, cell in self.cells.items():
            outcome = self.outcomes.get(name)
            cells[name] = {
                "state": self.states[name],
                "at": dict(cell.at),
                **({"fault": outcome.fault} if outcome and outcome.fault else {}),
                **({"values": dict(outcome.values)} if outcome and outcome.values else {}),
                **({"seconds": round(self.seconds[name], 1)} if name in self.seconds else {}),
            }
        content = {**self.plan.facts(self.list_outcomes()), "state": state, "go_on": self.plan.go_on, "cells": cells}
        try:
            write_record(self.plan.record, content)
        except OSError as error:
            if not self.unwritten:
                reason = error.strerror or error
                self.watcher.log(f"{self.plan.record} could not be written ({reason}); the {self.plan.unit} still run")
            self.unwritten = True
        else:
            self.unwritten = False


class CellObserver:
    """Observes a run in this process, and passes everything on to the watcher's own observer."""

    def __init__(self, board: GridState, cell: str, observer: Observer) -> None:
        self.board, self.cell, self.observer = board, cell, observer
        self.pass_on = get_advance(observer)

    def log(self, text: str) -> None:
        self.observer.log(text)

    def progress(self, row: dict[str, Any]) -> None:
        self.observer.progress(row)

    def advance(self, what: str, done: int, total: int | None) -> None:
        self.pass_on(what, done, total)
        if what == STEP and total:
            self.board.moved(CellProgress(cell=self.cell, share=done / total))


ON_A_GPU: Final = 4  # processes: a small network does not fill the card


def device_slots(device: str, jobs: int = 0) -> tuple[DeviceSlot, ...]:
    """Where the processes work, one entry each: `jobs` of them, or as many as make sense."""
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} must be at least 1, or 0 for as many as make sense")
    found = find_device(device)
    if found.type == "mps":  # one process uses all of it
        count = jobs or 1
        return (DeviceSlot(device=str(found), on_device=count, on_machine=count),) * count
    if found.type != "cuda":
        count = jobs or max(cores() // 2, 1)
        return (DeviceSlot(device=str(found), on_device=count, on_machine=count),) * count
    cards = [str(found)] if ":" in device else [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    count = jobs or ON_A_GPU * len(cards)
    return tuple(
        DeviceSlot(device=cards[at % len(cards)], on_device=-(-count // len(cards)), on_machine=count)
        for at in range(count)
    )


def run_grid(
    plan: GridPlan, where: World | Sequence[DeviceSlot], *, watcher: Watcher, present: Present = present_nothing
) -> GridReport:
    """Runs what is left of a grid: in a world, cell after cell, or in a process for each place. `present` is called now
    and then and at the end, with what there is."""
    world = where if isinstance(where, World) else World(device=torch.device("cpu"))
    with hold_folder(plan, world, watcher):
        board = GridState(plan, world, watcher, present)
        if board.outcomes:
            watcher.log(f"{len(board.outcomes)} of {len(plan.cells)} {plan.unit} are finished already")
        with listen_for_signals() as stop:
            stopped = run_inline(board, where, stop) if isinstance(where, World) else run_in_pool(board, where, stop)
        return board.close(stopped=stopped)


@contextlib.contextmanager
def hold_folder(plan: GridPlan, world: World, watcher: Watcher) -> Generator[None]:
    """Locks the grid's folder. An error of the main process is raised in all of them."""
    lock, refused = None, ""
    try:
        if world.is_main:
            try:
                plan.out.mkdir(parents=True, exist_ok=True)
                lock = RunLock(plan.out, watcher.log)
                plan.open(watcher.log)
            except ConfigError as error:
                refused = str(error)
            except OSError as error:
                refused = f"{plan.out} cannot be written ({error.strerror or error}); give another --out"
        if refused := world.broadcast(refused):
            raise ConfigError(refused)
        yield
    finally:
        if lock is not None:
            lock.release()


def run_inline(board: GridState, world: World, stop: Stop) -> bool:
    """Runs one cell after another in this process; returns whether a signal ended it."""
    while not any(world.gather(bool(stop))):
        cell = board.next()
        if cell is None:
            return False
        board.begun(cell)
        board.ended(run_cell(board.plan.task(cell), world, board.listener(cell)))
        release_memory(world.device)
    return True


def run_in_pool(board: GridState, places: Sequence[DeviceSlot], stop: Stop) -> bool:
    """Runs cells in a pool of processes; returns whether a signal ended it."""
    with WorkerPool(places, most=board.left) as pool:
        while True:
            if stop:
                pool.stop()
            while not stop and pool.idle and (cell := board.next()) is not None:
                board.begun(cell)
                pool.give(board.plan.task(cell))
            if not pool.busy:
                return bool(stop)
            for message in pool.messages():
                if isinstance(message, CellProgress):
                    board.moved(message)
                else:
                    board.ended(message)

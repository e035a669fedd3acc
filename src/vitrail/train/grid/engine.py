"""Runs every cell of a grid, in this process or in a pool of processes, even if some cells fail.

    plan = GridPlan(cells=cells, out=out, cells_in=out / "cells", record=out / "study.json", job=job)
    report = run_grid(plan, World(device=torch.device("cpu")), watcher=Watcher())

The same call again resumes: finished cells are kept, interrupted cells resume from their checkpoints, and failed cells
are tried again. A failure is reported and the other cells still run, except those that start from the failed cell's
weights. What follows from a grid (a sweep's final run, VTAB's mean, a study's table) is up to its caller.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

from vitrail.core.errors import ConfigError
from vitrail.core.processes import available_cores
from vitrail.distributed.process_group import World, find_device
from vitrail.train.grid.plan import Cell, CellOutcome, CellState, GridPlan, GridReport, Present, Watcher, read_finished
from vitrail.train.grid.workers import CellObserver, DeviceSlot, WorkerPool, run_cell
from vitrail.train.observer import Stop, listen_for_signals
from vitrail.train.resume import raise_everywhere
from vitrail.train.run_folder.files import FailureNotes, RunLock, now, read_json, write_json

ON_A_GPU: Final = 4  # processes: a small network does not fill the card


class GridState:
    """The state of all cells. Every process holds the same one; only the main process writes and presents it."""

    def __init__(self, plan: GridPlan, world: World, watcher: Watcher, present: Present) -> None:
        self.plan, self.world, self.watcher, self.present = plan, world, watcher, present
        self.cells = {cell.name: cell for cell in plan.cells}
        self.outcomes, seconds = world.broadcast_from_main(self.read_earlier() if world.is_main else None)
        self.seconds = {name: seconds[name] for name in self.outcomes if name in seconds}
        self.states: dict[str, CellState] = dict.fromkeys(self.cells, "waiting")
        self.states |= dict.fromkeys(self.outcomes, "done")
        self.shares: dict[str, float] = {}
        self.since: dict[str, float] = {}
        self.start = self.presented = time.monotonic()
        self.total = sum(self.work_of(name) for name, state in self.states.items() if state == "waiting")
        self.failures = FailureNotes(watcher.log)
        self.write_record("running")

    def folder(self, cell: Cell) -> Path:
        return self.plan.cells_in / cell.name

    def read_earlier(self) -> tuple[dict[str, CellOutcome], dict[str, float]]:
        """The outcomes of the finished cells, and the seconds that the record gives for its cells."""
        found = {cell.name: read_finished(cell, self.folder(cell), self.plan.job) for cell in self.plan.cells}
        cells = read_json(self.plan.record).get("cells") if self.plan.record.exists() else None
        known = cast(dict[str, Any], cells) if isinstance(cells, Mapping) else {}
        seconds = {name: cell.get("seconds") for name, cell in known.items() if isinstance(cell, Mapping)}
        outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
        return outcomes, {name: float(value) for name, value in seconds.items() if isinstance(value, int | float)}

    def work_of(self, name: str) -> float:
        return self.plan.work.get(name, 1.0)

    def next(self) -> Cell | None:
        """The most expensive cell that can start now, of the first seed that has one: that way the whole grid is
        complete early, and further seeds refine it. None if all other cells have started or wait for another one."""
        waiting = [self.cells[name] for name, state in self.states.items() if state == "waiting"]
        ready = [cell for cell in waiting if self.states.get(cell.after, "done") == "done"]
        return max(ready, key=lambda cell: (-float(cell.at.get("seed", 0)), self.work_of(cell.name)), default=None)

    def begin(self, cell: Cell) -> None:
        self.states[cell.name] = "running"
        self.since[cell.name] = time.monotonic()
        self.watcher.started(cell)
        self.write_record("running")

    def advance(self, cell: str, share: float) -> None:
        """Reports the share of this start's work that is done, and the seconds left at this rate."""
        self.shares[cell] = share
        done = sum(self.work_of(name) * share for name, share in self.shares.items())
        whole = done / self.total if self.total else 1.0
        spent = time.monotonic() - self.start
        self.watcher.progress(whole, spent * (1 - whole) / whole if whole else float("nan"))

    def end(self, outcome: CellOutcome) -> None:
        self.seconds[outcome.cell] = time.monotonic() - self.since[outcome.cell]
        self.states[outcome.cell] = outcome.state
        if not outcome.stopped:
            self.record(outcome)
        self.write_record("running")
        if not outcome.stopped and time.monotonic() - self.presented > self.plan.present_s:
            self.present_so_far()

    def record(self, outcome: CellOutcome) -> None:
        """Records the outcome of a cell. If it failed or is missing, the cells that start from its weights are left
        out."""
        self.outcomes[outcome.cell] = outcome
        self.advance(outcome.cell, 1.0)
        self.watcher.ended(self.cells[outcome.cell], outcome, self.seconds.get(outcome.cell, 0.0))
        for other in self.cells.values() if outcome.fault else ():
            if other.after == outcome.cell and self.states[other.name] == "waiting":
                self.states[other.name] = "left out"
                fault = f"not run: {outcome.cell}, from whose weights it starts, failed"
                self.record(CellOutcome(cell=other.name, at=other.at, fault=fault))

    def present_so_far(self) -> None:
        """Presents the results so far. A failure is reported and does not stop the grid; it is raised at the end."""
        self.presented = time.monotonic()
        try:
            if self.world.is_main:
                self.present(self.report())
        except Exception as error:
            self.watcher.log(f"the results could not be presented ({error}); the other {self.plan.unit} still run")

    def list_outcomes(self) -> tuple[CellOutcome, ...]:
        return tuple(self.outcomes[name] for name in self.cells if name in self.outcomes)

    def report(self, *, stopped: bool = False) -> GridReport:
        return GridReport(states=dict(self.states), outcomes=self.list_outcomes(), stopped=stopped)

    def close(self, *, stopped: bool) -> GridReport:
        """Writes the record and presents the results."""
        states = set(self.states.values())
        stopped = stopped and not states.isdisjoint(("waiting", "running", "stopped"))
        self.write_record("stopped" if stopped else "done" if states.isdisjoint(("failed", "left out")) else "failed")
        report = self.report(stopped=stopped)
        if self.outcomes and self.world.is_main:
            self.present(report)
        return report

    def write_record(self, state: str) -> None:
        """Writes the record. A full disk does not end the grid: every cell's own folder has its state."""
        if not self.world.is_main:
            return
        cells: dict[str, dict[str, Any]] = {}
        for name, cell in self.cells.items():
            cells[name] = {"state": self.states[name], "at": dict(cell.at)}
            if (outcome := self.outcomes.get(name)) is not None:
                known = {"fault": outcome.fault, "values": dict(outcome.values)}
                cells[name] |= {key: value for key, value in known.items() if value}
            if name in self.seconds:
                cells[name]["seconds"] = round(self.seconds[name], 1)
        content = {**self.plan.facts(self.list_outcomes()), "state": state, "go_on": self.plan.go_on, "cells": cells}
        with self.failures.note_once(f"{self.plan.record} could not be written", f"the {self.plan.unit} still run"):
            write_json(self.plan.record, {**content, "updated": now()})


def device_slots(device: str, jobs: int = 0) -> tuple[DeviceSlot, ...]:
    """A slot for each process: `jobs` of them, or as many as the devices can use."""
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} must be at least 1, or 0 to choose automatically")
    found, cards = find_device(device), [str(find_device(device))]
    if found.type == "cuda" and ":" not in device:
        cards = [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    usual = {"mps": 1, "cuda": ON_A_GPU * len(cards)}  # one process uses all of an MPS device
    count = jobs or usual.get(found.type, max(available_cores() // 2, 1))
    each = -(-count // len(cards))
    return tuple(DeviceSlot(cards[at % len(cards)], on_device=each, on_machine=count) for at in range(count))


def run_grid(
    plan: GridPlan, where: World | Sequence[DeviceSlot], *, watcher: Watcher, present: Present = lambda report: None
) -> GridReport:
    """Runs what is left of a grid: one cell after another in a world, or in a pool with one process per slot. `present`
    is called from time to time and at the end, with the results so far."""
    world = where if isinstance(where, World) else World(device=torch.device("cpu"))
    with contextlib.ExitStack() as held:
        with raise_everywhere(world):
            if world.is_main:
                try:
                    plan.out.mkdir(parents=True, exist_ok=True)
                    held.callback(RunLock(plan.out, watcher.log).release)
                    plan.open(watcher.log)
                except OSError as error:
                    reason = error.strerror or error
                    raise ConfigError(f"{plan.out} cannot be written ({reason}); give another --out") from error
        board = GridState(plan, world, watcher, present)
        if board.outcomes:
            watcher.log(f"{len(board.outcomes)} of {len(plan.cells)} {plan.unit} are already finished")
        with listen_for_signals() as stop:
            stopped = run_inline(board, where, stop) if isinstance(where, World) else run_in_pool(board, where, stop)
        return board.close(stopped=stopped)


def run_inline(board: GridState, world: World, stop: Stop) -> bool:
    """Runs one cell after another in this process; returns whether a signal ended it."""
    while not any(world.gather(bool(stop))):
        cell = board.next()
        if cell is None:
            return False
        board.begin(cell)
        observer = CellObserver(cell.name, board.advance, board.watcher.listen(cell))
        board.end(run_cell(cell, board.folder(cell), board.plan.job, world, observer))
    return True


def run_in_pool(board: GridState, places: Sequence[DeviceSlot], stop: Stop) -> bool:
    """Runs cells in a pool of processes; returns whether a signal ended it."""
    waiting = sum(state == "waiting" for state in board.states.values())
    with WorkerPool(places[:waiting]) as pool:
        while True:
            if stop:
                pool.stop()
            while not stop and pool.idle and (cell := board.next()) is not None:
                board.begin(cell)
                pool.give(cell, board.folder(cell), board.plan.job)
            if not pool.busy:
                return bool(stop)
            for message in pool.messages():
                if isinstance(message, CellOutcome):
                    board.end(message)
                else:
                    board.advance(*message)

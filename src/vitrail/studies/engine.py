"""Runs a study: every cell of a grid to its end, spread over processes and devices, whatever happens to one of them.

    plan = Plan(study=study("positions"), scale="tiny", cells=grid(study("positions"), "tiny"), out=Path("runs/mine"))
    report = go(plan, places=places_for("auto", jobs=0), watcher=Nobody(), present=write)

The same call again goes on: a finished cell stays, one that was interrupted resumes from its checkpoint, one that
failed is tried again. A cell that fails is told of and the others finish; only what starts from its weights is not run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import torch

from vitrail.core.errors import ConfigError
from vitrail.distributed.device import find_device
from vitrail.distributed.world import World
from vitrail.studies import outcomes as kept
from vitrail.studies.cell import Cell, Outcome, Scale
from vitrail.studies.pool import Pool
from vitrail.studies.study import Study
from vitrail.studies.worker import Ended, Moved, Place, Task, cores, run_cell, tidy
from vitrail.train.folder.lock import Lock
from vitrail.train.observer import STEP
from vitrail.train.signals import Stop, heard

ON_A_GPU: Final = 4  # processes: a small network does not fill the card
PRESENT_S: Final = 60.0  # between two presentations while the study runs

State: TypeAlias = Literal["waiting", "running", "done", "failed", "left out", "stopped"]
Present: TypeAlias = Callable[[Sequence[Outcome]], None]


class Watcher(Protocol):
    """Who is told how a study goes: a terminal, or nobody."""

    def told(self, text: str) -> None: ...
    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: Outcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...


class Nobody:
    def told(self, text: str) -> None: ...
    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: Outcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run and where. `work` is what each cell costs, in any unit: long ones come first, seed by seed. `go_on`
    is the command that goes on with the study."""

    study: Study
    scale: Scale
    cells: tuple[Cell, ...]
    out: Path
    data: str = ""
    work: dict[str, float] = field(default_factory=dict[str, float])
    go_on: str = ""
    force: bool = False

    def task(self, cell: Cell) -> Task:
        return Task(cell=cell, out=self.out, study=self.study.name, go_on=self.go_on, force=self.force)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How every cell stands, and what came of those that are not waiting any more, in the order of the grid."""

    states: dict[str, State]
    outcomes: tuple[Outcome, ...]
    stopped: bool  # by a signal, and to be gone on with

    def of(self, *states: State) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


def places_for(device: str, jobs: int = 0) -> tuple[Place, ...]:
    """Where the processes work, one entry each: `jobs` of them, or as many as make sense. One place on a CPU is this
    very process's."""
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} must be at least 1, or 0 for as many as make sense")
    found = find_device(device)
    if found.type == "mps":  # one process uses all of it
        count = jobs or 1
        return (Place(device=str(found), on_device=count, on_machine=count),) * count
    if found.type != "cuda":
        count = jobs or max(cores() // 2, 1)
        return (Place(device=str(found), on_device=count, on_machine=count),) * count
    cards = [str(found)] if ":" in device else [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    count = jobs or ON_A_GPU * len(cards)
    return tuple(
        Place(device=cards[at % len(cards)], on_device=-(-count // len(cards)), on_machine=count) for at in range(count)
    )


def go(plan: Plan, *, places: Sequence[Place], watcher: Watcher, present: Present) -> Report:
    """Runs what is left of a study. `present` is called with the outcomes that there are, now and then and at the
    end."""
    plan.out.mkdir(parents=True, exist_ok=True)
    lock = Lock(plan.out, watcher.told)
    try:
        for name in kept.take_up(plan.out, plan.study.name, plan.scale, plan.cells, force=plan.force):
            watcher.told(f"{name} is trained anew: its run has changed")
        board = Board(plan, watcher, present)
        if board.outcomes:
            watcher.told(f"{len(board.outcomes)} of {len(plan.cells)} cells are finished already")
        with heard() as stop:
            if len(places) == 1 and not places[0].device.startswith("cuda"):
                here(board, places[0], stop)
            else:
                spread(board, places, stop)
        return board.close(stopped=bool(stop))
    finally:
        lock.release()


def here(board: "Board", place: Place, stop: Stop) -> None:
    """One cell after another in this process, with as many threads as it has."""
    world = World(device=torch.device(place.device))
    while not stop and (cell := board.next()) is not None:
        board.begun(cell)
        board.ended(run_cell(board.plan.task(cell), world, board.listener(cell)))
        tidy(world.device)


def spread(board: "Board", places: Sequence[Place], stop: Stop) -> None:
    """Over processes, each of which takes the next cell when it is done with one."""
    with Pool(places, most=board.left) as pool:
        while True:
            if stop:
                pool.stop()
            while not stop and pool.idle and (cell := board.next()) is not None:
                board.begun(cell)
                pool.give(board.plan.task(cell))
            if not pool.busy:
                return
            for message in pool.messages():
                if isinstance(message, Moved):
                    board.moved(message)
                else:
                    board.ended(message)


class Board:
    """How the cells of a study stand: in memory, in OUT/study.json, and to whoever watches."""

    def __init__(self, plan: Plan, watcher: Watcher, present: Present) -> None:
        self.plan, self.watcher, self.present = plan, watcher, present
        self.cells = {cell.name: cell for cell in plan.cells}
        self.outcomes = kept.finished(plan.out, plan.cells)
        self.states: dict[str, State] = {name: "done" if name in self.outcomes else "waiting" for name in self.cells}
        self.shares: dict[str, float] = {}
        self.since: dict[str, float] = {}
        before = kept.seconds_in(plan.out)
        self.seconds = {name: before[name] for name in self.outcomes if name in before}
        self.start = self.presented = time.monotonic()
        self.total = sum(self.work(name) for name in self.cells if self.states[name] == "waiting")
        self.note("running")

    def work(self, name: str) -> float:
        return self.plan.work.get(name, 1.0)

    @property
    def left(self) -> int:
        return sum(state == "waiting" for state in self.states.values())

    def next(self) -> Cell | None:
        """The longest cell that can start now, of the first seed that has one: the whole grid stands there early, and
        other seeds narrow it down. None where all wait for others, or are begun."""
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

    def listener(self, cell: Cell) -> "Listener":
        return Listener(self, cell.name)

    def moved(self, message: Moved) -> None:
        self.shares[message.cell] = message.share
        self.progress()

    def ended(self, message: Ended) -> None:
        name, cell = message.cell, self.cells[message.cell]
        self.seconds[name] = time.monotonic() - self.since[name]
        self.states[name] = message.state
        if message.state == "done":
            found = kept.outcome_in(self.plan.out, cell)
            assert found is not None, f"{name} is done and has no outcome"
            self.over(found)
        elif message.state == "failed":
            self.fail(name, message.fault)
        self.note("running")
        if message.state == "done" and time.monotonic() - self.presented > PRESENT_S:
            self.show_so_far()

    def over(self, outcome: Outcome) -> None:
        """Nothing more will come of a cell in this start."""
        self.outcomes[outcome.cell], self.shares[outcome.cell] = outcome, 1.0
        self.progress()
        self.watcher.ended(self.cells[outcome.cell], outcome, self.seconds.get(outcome.cell, 0.0))

    def fail(self, name: str, fault: str) -> None:
        """A cell that failed, and those that would have started from its weights."""
        self.over(Outcome(cell=name, at=self.cells[name].at, fault=fault))
        for other in self.cells.values():
            if other.after == name and self.states[other.name] == "waiting":
                self.states[other.name] = "left out"
                self.fail(other.name, f"not run: {name}, from whose weights it starts, failed")

    def progress(self) -> None:
        """Told as the share of the work of this start, and the seconds that the rest will take at this rate."""
        done = sum(self.work(name) * share for name, share in self.shares.items())
        share = done / self.total if self.total else 1.0
        spent = time.monotonic() - self.start
        self.watcher.progress(share, spent * (1 - share) / share if share else float("nan"))

    def show_so_far(self) -> None:
        """On the way a presentation that fails is told of, and stops nothing; the one of the end will fail as well."""
        self.presented = time.monotonic()
        try:
            self.present(self.told())
        except Exception as error:
            self.watcher.told(f"what there is could not be presented ({error}); the study goes on")

    def told(self) -> tuple[Outcome, ...]:
        return tuple(self.outcomes[name] for name in self.cells if name in self.outcomes)

    def close(self, *, stopped: bool) -> Report:
        """The last word, and the presentation of what there is."""
        unfinished = any(state in ("waiting", "running", "stopped") for state in self.states.values())
        failed = any(state in ("failed", "left out") for state in self.states.values())
        self.note("stopped" if stopped and unfinished else "failed" if failed else "done")
        if self.told():
            self.present(self.told())
        return Report(states=self.states, outcomes=self.told(), stopped=stopped and unfinished)

    def note(self, state: str) -> None:
        plan = self.plan
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
        facts = {"study": plan.study.name, "scale": plan.scale, "data": plan.data, "state": state}
        kept.note(plan.out, {**facts, "go_on": plan.go_on, "cells": cells})


class Listener:
    """Hears a run in this very process."""

    def __init__(self, board: Board, cell: str) -> None:
        self.board, self.cell = board, cell

    def told(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...

    def advance(self, what: str, done: int, total: int | None) -> None:
        if what == STEP and total:
            self.board.moved(Moved(cell=self.cell, share=done / total))

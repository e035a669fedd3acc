"""How the cells of a grid stand: in memory, in its record, and to those that watch."""

import time
from typing import Any

from vitrail.distributed.process_group import World
from vitrail.train.grid.cell import Cell, Outcome, finished_outcome, read_seconds, write_record
from vitrail.train.grid.plan import Plan, Present, Report, State, Watcher
from vitrail.train.grid.worker import Ended, Moved
from vitrail.train.runtime.observer import STEP, Observer, advance_of


class Board:
    """Of several processes each has one, and they agree; the first one alone writes and presents."""

    def __init__(self, plan: Plan, world: World, watcher: Watcher, present: Present) -> None:
        self.plan, self.world, self.watcher, self.present = plan, world, watcher, present
        self.cells = {cell.name: cell for cell in plan.cells}
        found, seconds = world.broadcast((self.finished(), read_seconds(plan.record)) if world.is_main else None)
        self.outcomes: dict[str, Outcome] = found
        self.seconds = {name: seconds[name] for name in self.outcomes if name in seconds}
        self.states: dict[str, State] = {name: "done" if name in self.outcomes else "waiting" for name in self.cells}
        self.shares: dict[str, float] = {}
        self.since: dict[str, float] = {}
        self.start = self.presented = time.monotonic()
        self.total = sum(self.work(name) for name in self.cells if self.states[name] == "waiting")
        self.unwritten = False
        self.note("running")

    def finished(self) -> dict[str, Outcome]:
        """The cells that need no more work."""
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
        return Listener(self, cell.name, self.watcher.listen(cell))

    def moved(self, message: Moved) -> None:
        self.shares[message.cell] = message.share
        self.progress()

    def ended(self, message: Ended) -> None:
        name, cell = message.cell, self.cells[message.cell]
        self.seconds[name] = time.monotonic() - self.since[name]
        self.states[name] = message.state
        if message.state == "done":
            self.over(Outcome(cell=name, at=cell.at, values=message.values))
        elif message.state != "stopped":
            missing = message.state == "missing"
            self.fail(Outcome(cell=name, at=cell.at, fault=message.fault, diverged=message.diverged, missing=missing))
        self.note("running")
        if message.state != "stopped" and time.monotonic() - self.presented > self.plan.present_s:
            self.show_so_far()

    def over(self, outcome: Outcome) -> None:
        """Nothing more will come of a cell in this start."""
        self.outcomes[outcome.cell], self.shares[outcome.cell] = outcome, 1.0
        self.progress()
        self.watcher.ended(self.cells[outcome.cell], outcome, self.seconds.get(outcome.cell, 0.0))

    def fail(self, outcome: Outcome) -> None:
        """A cell that failed or is missing, and those that would have started from its weights."""
        self.over(outcome)
        for other in self.cells.values():
            if other.after == outcome.cell and self.states[other.name] == "waiting":
                self.states[other.name] = "left out"
                fault = f"not run: {outcome.cell}, from whose weights it starts, failed"
                self.fail(Outcome(cell=other.name, at=other.at, fault=fault))

    def progress(self) -> None:
        """Told as the share of the work of this start, and the seconds that the rest will take at this rate."""
        done = sum(self.work(name) * share for name, share in self.shares.items())
        share = done / self.total if self.total else 1.0
        spent = time.monotonic() - self.start
        self.watcher.progress(share, spent * (1 - share) / share if share else float("nan"))

    def show_so_far(self) -> None:
        """On the way a presentation that fails is reported, and stops nothing; the one of the end will fail as well."""
        self.presented = time.monotonic()
        if not self.world.is_main:
            return
        try:
            self.present(self.report())
        except Exception as error:
            self.watcher.told(f"what there is could not be presented ({error}); the other {self.plan.unit} still run")

    def told(self) -> tuple[Outcome, ...]:
        return tuple(self.outcomes[name] for name in self.cells if name in self.outcomes)

    def report(self, *, stopped: bool = False) -> Report:
        return Report(states=dict(self.states), outcomes=self.told(), stopped=stopped)

    def close(self, *, stopped: bool) -> Report:
        """The last word, and the presentation of what there is."""
        unfinished = any(state in ("waiting", "running", "stopped") for state in self.states.values())
        failed = any(state in ("failed", "left out") for state in self.states.values())
        self.note("stopped" if stopped and unfinished else "failed" if failed else "done")
        report = self.report(stopped=stopped and unfinished)
        if self.outcomes and self.world.is_main:
            self.present(report)
        return report

    def note(self, state: str) -> None:
        """Writes the record. A full disk does not end the grid: every cell's own folder says how it stands."""
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
        content = {**self.plan.facts(self.told()), "state": state, "go_on": self.plan.go_on, "cells": cells}
        try:
            write_record(self.plan.record, content)
        except OSError as error:
            if not self.unwritten:
                reason = error.strerror or error
                self.watcher.told(f"{self.plan.record} could not be written ({reason}); the {self.plan.unit} still run")
            self.unwritten = True
        else:
            self.unwritten = False


class Listener:
    """Hears a run in this very process, and passes on what the watcher's own observer wants to hear."""

    def __init__(self, board: Board, cell: str, observer: Observer) -> None:
        self.board, self.cell, self.observer = board, cell, observer
        self.pass_on = advance_of(observer)

    def told(self, text: str) -> None:
        self.observer.told(text)

    def progress(self, row: dict[str, Any]) -> None:
        self.observer.progress(row)

    def advance(self, what: str, done: int, total: int | None) -> None:
        self.pass_on(what, done, total)
        if what == STEP and total:
            self.board.moved(Moved(cell=self.cell, share=done / total))

"""What a grid runs and where, who hears of it, and how it stands in the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from vitrail.train.grid.cell import Cell, Job, Outcome
from vitrail.train.grid.worker import Task
from vitrail.train.runtime.observer import Observer, Silent

State: TypeAlias = Literal["waiting", "running", "done", "failed", "left out", "missing", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How every cell stands, and what came of those that are not waiting any more, in the order of the grid."""

    states: dict[str, State]
    outcomes: tuple[Outcome, ...]
    stopped: bool = False  # by a signal, and to be resumed

    def of(self, *states: State) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


Present: TypeAlias = Callable[[Report], None]


def present_nothing(report: Report) -> None: ...


def open_nothing(tell: Callable[[str], None]) -> None: ...


def no_facts(outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A grid. `out` is the folder that one job at a time holds, `cells_in` has a run folder for each cell, `record` is
    the file that says how every cell stands, together with the `facts` of this kind of grid. `open` looks at what lies
    in `out` before anything runs, and refuses (ConfigError) what does not belong to this grid. `work` is what each cell
    costs, in any unit: long ones come first, seed by seed. `go_on` is the command that resumes the grid."""

    cells: tuple[Cell, ...]
    out: Path
    cells_in: Path
    record: Path
    job: Job
    open: Callable[[Callable[[str], None]], None] = open_nothing
    facts: Callable[[Sequence[Outcome]], Mapping[str, Any]] = no_facts
    unit: str = "cells"
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    go_on: str = ""
    force: bool = False
    few_threads: bool = False
    keep_checkpoints: bool = False
    present_s: float = 60.0  # between two presentations while the grid runs

    def folder(self, name: str) -> Path:
        return self.cells_in / name

    def task(self, cell: Cell) -> Task:
        return Task(
            cell=cell,
            folder=self.folder(cell.name),
            job=self.job,
            force=self.force,
            few_threads=self.few_threads,
            keep_checkpoints=self.keep_checkpoints,
        )


class Watcher(Protocol):
    """Who is told how a grid goes: a terminal, or nobody. `listen` gives the observer of a cell that is trained in this
    process; those in other processes only tell how far they are."""

    def told(self, text: str) -> None: ...
    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: Outcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...
    def listen(self, cell: Cell) -> Observer: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class QuietWatcher:
    """Lets an observer hear what is said and how the cells of this process go, and adds nothing of its own."""

    observer: Observer = field(default_factory=Silent)

    def told(self, text: str) -> None:
        self.observer.told(text)

    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: Outcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...

    def listen(self, cell: Cell) -> Observer:
        return self.observer

"""The definition of a grid: its cells, the job that runs on each, the watcher, and the outcomes on disk.

CELL/outcome.json exists if and only if the cell is finished.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError, VitrailError
from vitrail.train.config import Run, RunRequest
from vitrail.train.data import DataSplits
from vitrail.train.observer import NullObserver, Observer
from vitrail.train.run_folder.files import is_done, read_json

Coordinate: TypeAlias = str | int | float
CellState: TypeAlias = Literal["waiting", "running", "done", "failed", "left out", "missing", "stopped"]
OUTCOME: Final = "outcome.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of the grid. `at` gives its coordinates: {"positions": "learned", "placed": "stem", "seed": 0}. With
    `after`, it starts from the last weights of the cell of that name, which is run first (3.2), and may take its
    network from them."""

    name: str  # of its folder, too
    at: Mapping[str, Coordinate]
    run: RunRequest
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOutcome:
    """How a cell ended. `values`, by name, are what the grid's job reads from the finished run. A cell that failed has
    no values and a `fault` that says why. `diverged` means that its numbers were no longer finite, `missing` that its
    images are not available, `stopped` that a signal ended it and it can be resumed."""

    cell: str
    at: Mapping[str, Coordinate]
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
    diverged: bool = False
    missing: bool = False
    stopped: bool = False

    @property
    def state(self) -> CellState:
        return "stopped" if self.stopped else "missing" if self.missing else "failed" if self.fault else "done"


class Unavailable(VitrailError):
    """The images of a cell are not available, so the cell is skipped rather than failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCell:
    """A cell ready to be trained: its complete run, its images, and the command that its folder records. Without
    images, those of the run are opened."""

    run: Run
    splits: DataSplits | None = None
    command: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class CellJob:
    """What a grid does with each of its cells. It is sent to other processes, so it must be plain data that can be
    pickled. `force` continues a run of another config; `few_threads` uses a single thread for small steps on a CPU;
    `keep_checkpoints` keeps the checkpoints of finished cells."""

    force: bool = False
    few_threads: bool = False
    keep_checkpoints: bool = False

    def prepare(self, cell: Cell) -> PreparedCell:
        """Prepares a cell for training. Unavailable if it should be skipped."""
        raise NotImplementedError

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        """Reads the values of a cell whose run is done from its folder."""
        raise NotImplementedError


def read_outcome(cell: Cell, folder: Path) -> CellOutcome | None:
    """Reads the outcome of a cell; None if it is not finished."""
    path = folder / OUTCOME
    if not path.exists():
        return None
    values = read_json(path).get("values")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is damaged (no values); remove it and start the grid again")
    return CellOutcome(cell=cell.name, at=cell.at, values={str(name): float(value) for name, value in values.items()})


def read_finished(cell: Cell, folder: Path, job: CellJob) -> CellOutcome | None:
    """Reads the outcome of a cell; None if it needs more work. A run that is done and has no checkpoints left counts as
    finished too: version 0.1.0 left VTAB's tasks in this state. A run that still has checkpoints is finished from them.
    """
    found = read_outcome(cell, folder)
    if found is None and is_done(folder) and not list_checkpoints(folder / FOLDER):
        values = job.read(cell, folder)
        return CellOutcome(cell=cell.name, at=cell.at, values=values) if values else None
    return found


def keep_outcome(cell: Cell, folder: Path, job: CellJob) -> Mapping[str, float]:
    """Writes the outcome of a cell whose run is done, and removes its checkpoints: they are of no further use, and
    those of a whole grid would fill a disk."""
    values = job.read(cell, folder)
    content = {"cell": cell.name, "at": dict(cell.at), "values": dict(values)}
    write_file(folder / OUTCOME, json.dumps(content, indent=1).encode() + b"\n")
    if not job.keep_checkpoints:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class GridReport:
    """The state of every cell, and the outcomes of those that have ended, in the order of the grid."""

    states: dict[str, CellState]
    outcomes: tuple[CellOutcome, ...]
    stopped: bool = False  # by a signal; can be resumed

    def in_state(self, *states: CellState) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


Present: TypeAlias = Callable[[GridReport], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlan:
    """A grid. `out` is the folder, held by one job at a time; `cells_in` has a run folder for each cell; `record` is
    the file with the state of every cell and the `facts` about this kind of grid. `open` checks the contents of `out`
    before anything runs, and raises ConfigError if they do not belong to this grid. `work` is the cost of each cell, in
    any unit: within a seed, the most expensive cells run first. `go_on` is the command that resumes the grid."""

    cells: tuple[Cell, ...]
    out: Path
    cells_in: Path
    record: Path
    job: CellJob
    open: Callable[[Callable[[str], None]], None] = lambda tell: None
    facts: Callable[[Sequence[CellOutcome]], Mapping[str, Any]] = lambda outcomes: {}
    unit: str = "cells"
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    go_on: str = ""
    present_s: float = 60.0  # between two presentations while the grid runs


@dataclass(kw_only=True)
class Watcher:
    """Watches a grid: passes messages, and the progress of the cells in this process, on to an observer, and adds
    nothing of its own. `listen` returns the observer of a cell that is trained in this process; cells in other
    processes report only their progress."""

    observer: Observer = field(default_factory=NullObserver)

    def log(self, text: str) -> None:
        self.observer.log(text)

    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...

    def listen(self, cell: Cell) -> Observer:
        return self.observer

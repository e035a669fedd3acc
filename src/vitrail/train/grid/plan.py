"""The definition of a grid: its cells, what is done with each, who watches, and the outcomes on disk.

CELL/outcome.json exists once the cell is finished, and not before.
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
    """A cell of the grid. `at` is where it stands: {"positions": "learned", "placed": "stem", "seed": 0}. With `after`
    it starts from the last weights of the cell of that name, which then comes first (3.2), and may leave its network to
    them."""

    name: str  # of its folder, too
    at: Mapping[str, Coordinate]
    run: RunRequest
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOutcome:
    """How a cell ended. Values are by name, whatever the grid's job reads from the finished run. A cell that failed has
    none, and a `fault` that says why; `diverged` says that its numbers were no longer finite, `missing` that its images
    are not there, `stopped` that a signal ended it and it can be resumed."""

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
    """The images of a cell are not there: it is skipped, not failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCell:
    """A cell ready to be trained: its run with everything in place, its images, and what its folder keeps of how it was
    asked for. Without images the run's own are opened."""

    run: Run
    splits: DataSplits | None = None
    command: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class CellJob:
    """What a grid does with each of its cells. It travels to other processes: plain data that can be pickled. `force`
    takes up a run of another config; `few_threads` trains a small step with one thread on a CPU; `keep_checkpoints`
    keeps those of a finished cell."""

    force: bool = False
    few_threads: bool = False
    keep_checkpoints: bool = False

    def prepare(self, cell: Cell) -> PreparedCell:
        """Raises Unavailable where the cell is to be skipped."""
        raise NotImplementedError

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        """The values of a cell whose run is done, from its folder."""
        raise NotImplementedError


def read_outcome(cell: Cell, folder: Path) -> CellOutcome | None:
    """What came of a cell; none where it is not finished."""
    path = folder / OUTCOME
    if not path.exists():
        return None
    values = read_json(path).get("values")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is damaged (no values); remove it, and the cell is finished again")
    return CellOutcome(cell=cell.name, at=cell.at, values={str(name): float(value) for name, value in values.items()})


def read_finished(cell: Cell, folder: Path, job: CellJob) -> CellOutcome | None:
    """What came of a cell; none where it needs more work. A run that is done and whose checkpoints are gone is finished
    too: version 0.1.0 left the tasks of VTAB like that. One whose checkpoints are there is finished from them."""
    found = read_outcome(cell, folder)
    if found is None and is_done(folder) and not list_checkpoints(folder / FOLDER):
        values = job.read(cell, folder)
        return CellOutcome(cell=cell.name, at=cell.at, values=values) if values else None
    return found


def keep_outcome(cell: Cell, folder: Path, job: CellJob) -> Mapping[str, float]:
    """Writes what came of a cell whose run is done. Its checkpoints are of no more use then, and a grid of them would
    fill a disk."""
    values = job.read(cell, folder)
    content = {"cell": cell.name, "at": dict(cell.at), "values": dict(values)}
    write_file(folder / OUTCOME, json.dumps(content, indent=1).encode() + b"\n")
    if not job.keep_checkpoints:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class GridReport:
    """How every cell stands, and what came of those that are not waiting any more, in the order of the grid."""

    states: dict[str, CellState]
    outcomes: tuple[CellOutcome, ...]
    stopped: bool = False  # by a signal; can be resumed

    def in_state(self, *states: CellState) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


Present: TypeAlias = Callable[[GridReport], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlan:
    """A grid. `out` is the folder that one job at a time holds, `cells_in` has a run folder for each cell, `record` is
    the file that says how every cell stands, together with the `facts` of this kind of grid. `open` looks at what lies
    in `out` before anything runs, and refuses (ConfigError) what does not belong to this grid. `work` is what each cell
    costs, in any unit: long ones come first, seed by seed. `go_on` is the command that resumes the grid."""

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
    """Watches a grid: passes on to an observer what is said and how the cells of this process go, and adds nothing of
    its own. `listen` gives the observer of a cell that is trained in this process; those in other processes only report
    how far they are."""

    observer: Observer = field(default_factory=NullObserver)

    def log(self, text: str) -> None:
        self.observer.log(text)

    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None: ...
    def progress(self, share: float, left_s: float) -> None: ...

    def listen(self, cell: Cell) -> Observer:
        return self.observer

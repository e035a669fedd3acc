"""One run of a grid: where it stands, what is trained, and what came of it.

What came of the cells of a grid, on disk: CELL/outcome.json, there once the cell is finished and not before.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import places
from vitrail.core.atomic_files import replacing, write_file
from vitrail.core.errors import ConfigError, VitrailError
from vitrail.train.config import Run, RunRequest
from vitrail.train.data_splits import Pictures
from vitrail.train.run_folder.files import is_done, read_json

Place: TypeAlias = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of the grid. `at` is where it stands: {"positions": "learned", "placed": "stem", "seed": 0}. With `after`
    it starts from the last weights of the cell of that name, which then comes first (3.2), and may leave its network to
    them."""

    name: str  # of its folder, too
    at: Mapping[str, Place]
    run: RunRequest
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A cell that needs no more work. Values are by name, whatever the grid's job reads from the finished run. A cell
    that failed has none, and a `fault` in words; `diverged` says that its numbers were no longer finite, `missing` that
    its images are not there."""

    cell: str
    at: Mapping[str, Place]
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
    diverged: bool = False
    missing: bool = False


class Unavailable(VitrailError):
    """The images of a cell are not there: it is skipped, not failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A cell ready to be trained: its run with everything in place, its images, and what its folder keeps of how it was
    asked for. Without images the run's own are opened."""

    run: Run
    pictures: Pictures | None = None
    command: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Job(Protocol):
    """What a grid does with each of its cells. It travels to other processes: plain data that can be pickled."""

    def prepare(self, cell: Cell) -> Prepared:
        """Raises Unavailable where the cell is to be skipped."""
        ...

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        """The values of a cell whose run is done, from its folder."""
        ...


OUTCOME: Final = "outcome.json"


def write_outcome(cell: Cell, folder: Path, values: Mapping[str, float]) -> None:
    content = {"cell": cell.name, "at": dict(cell.at), "values": dict(values)}
    write_file(folder / OUTCOME, json.dumps(content, indent=1).encode() + b"\n")


def read_outcome(cell: Cell, folder: Path) -> Outcome | None:
    """What came of a cell; none where it is not finished."""
    path = folder / OUTCOME
    if not path.exists():
        return None
    values = read_json(path).get("values")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is damaged (no values); remove it, and the cell is finished again")
    return Outcome(cell=cell.name, at=cell.at, values={str(name): float(value) for name, value in values.items()})


def finished_outcome(cell: Cell, folder: Path, job: Job) -> Outcome | None:
    """What came of a cell; none where it needs more work. A run that is done and whose checkpoints are gone is finished
    too: version 0.1.0 left the tasks of VTAB like that. One whose checkpoints are there is finished from them."""
    found = read_outcome(cell, folder)
    if found is None and is_done(folder) and not places(folder / CHECKPOINTS):
        values = job.read(cell, folder)
        return Outcome(cell=cell.name, at=cell.at, values=values) if values else None
    return found


def keep(cell: Cell, folder: Path, job: Job, *, checkpoints: bool) -> Mapping[str, float]:
    """Writes what came of a cell whose run is done. Its checkpoints are of no more use then, and a grid of them would
    fill a disk."""
    values = job.read(cell, folder)
    write_outcome(cell, folder, values)
    if not checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return values


def read_seconds(record: Path) -> dict[str, float]:
    """How long cells took, of those that the record of a grid knows it of."""
    cells = read_json(record).get("cells") if record.exists() else None
    told = {str(name): cell for name, cell in cells.items()} if isinstance(cells, Mapping) else {}
    known = {name: cell.get("seconds") for name, cell in told.items() if isinstance(cell, Mapping)}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


def write_record(record: Path, content: Mapping[str, Any]) -> None:
    """The record of a grid: which one it is, and how every cell stands."""
    told = {**content, "updated": datetime.now().astimezone().isoformat(timespec="seconds")}
    record.parent.mkdir(parents=True, exist_ok=True)
    with replacing(record) as file:
        file.write(json.dumps(told, indent=1).encode() + b"\n")

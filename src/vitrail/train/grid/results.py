"""What came of the cells of a grid, on disk: CELL/outcome.json, there once the cell is finished and not before."""

import json
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import places
from vitrail.core.errors import ConfigError
from vitrail.core.storage import replacing, write_file
from vitrail.train.folder.layout import is_done, read_json
from vitrail.train.grid.cell import Cell, Job, Outcome

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

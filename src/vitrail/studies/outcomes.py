"""What a study keeps, and what its folder says to whoever starts it again.

OUT/
    study.json              which study, and how every cell stands
    cells/NAME/             the run folder of a cell
    cells/NAME/outcome.json what came of it; there once it is finished, and not before
    table.md  table.csv  figure.png  figure.svg  report.html
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import places
from vitrail.core.errors import ConfigError
from vitrail.core.settings import differences, plain, restored
from vitrail.core.storage import write_file
from vitrail.studies.cell import Cell, Outcome
from vitrail.train.config import Run
from vitrail.train.folder.layout import BEST, COMMAND, CONFIG, METRICS, read_json
from vitrail.train.report import read_metrics

STUDY: Final = "study.json"
CELLS: Final = "cells"
OUTCOME: Final = "outcome.json"
ASKED: Final = "run"  # in a cell's command.json: its run as the grid has it
COSTS: Final = ("exaflops", "device_hours", "images")
NAMED: Final = 12  # differing fields that a refusal lists

# What may change between two starts without changing what comes out: less than for a run, since its scores come out.
FREE: Final = frozenset(
    {"name", "micro", "log", "keep", "bad_steps", "compile", "sharding", "recompute", "baseline"}
    | {"data.workers", "data.strict", "data.resident"}
)


def folder_of(out: Path, cell: str) -> Path:
    return out / CELLS / cell


def values_in(folder: Path) -> dict[str, float]:
    """What a finished run recorded of the values of `Outcome`. Where the run chose weights by its watched split, their
    watched score counts, and their few-shot accuracy."""
    rows = read_metrics(folder / METRICS)[0]
    found: dict[str, float] = {}
    looks = [row for row in rows if row["kind"] == "watch" and row.get("accuracy") is not None]
    watched = [row["accuracy"] for row in looks]
    tested = [row["accuracy"] for row in rows if row["kind"] == "test" and row.get("accuracy") is not None]
    chose = (folder / BEST).exists()
    if watched:
        found["watch"] = max(watched) if chose else watched[-1]
    if tested or watched:
        found["accuracy"] = tested[-1] if tested else found["watch"]
    best = max(looks, key=lambda row: (row["accuracy"], -row.get("loss", 0.0))) if looks else {}
    for row in rows:
        if row["kind"] == "fewshot" and (not chose or row["step"] == best.get("step", row["step"])):
            found[f"fewshot-{row['shots']}"] = row["accuracy"]
    trained = [row for row in rows if row["kind"] == "train"]
    if trained:
        found |= {name: trained[-1][name] for name in COSTS if name in trained[-1]}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def keep(cell: Cell, folder: Path) -> None:
    """Writes what came of a cell whose run is done. Checkpoints are of no more use then: a grid of them would fill a
    disk."""
    content = {"cell": cell.name, "at": dict(cell.at), "values": values_in(folder)}
    write_file(folder / OUTCOME, json.dumps(content, indent=1).encode() + b"\n")
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def outcome_in(out: Path, cell: Cell) -> Outcome | None:
    """What came of a cell; none where it is not finished."""
    path = folder_of(out, cell.name) / OUTCOME
    if not path.exists():
        return None
    values = read_json(path).get("values")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is damaged (no values); remove it, and the cell is finished again")
    return Outcome(cell=cell.name, at=cell.at, values={str(name): float(value) for name, value in values.items()})


def finished(out: Path, cells: Sequence[Cell]) -> dict[str, Outcome]:
    """The cells that need no more work, with what came of them."""
    found = {cell.name: outcome_in(out, cell) for cell in cells}
    return {name: outcome for name, outcome in found.items() if outcome is not None}


def changed(out: Path, cell: Cell) -> list[str]:
    """Where the run of a cell is another than the one that was trained in its folder: "optim.lr: 0.001 -> 0.003"."""
    folder = folder_of(out, cell.name)
    if not (folder / COMMAND).exists() or not ((folder / OUTCOME).exists() or places(folder / CHECKPOINTS)):
        return []
    command = read_json(folder / COMMAND)
    before, now = command.get(ASKED), as_read(plain(cell.run))
    if not isinstance(before, Mapping):
        return [f"it holds a run of its own, and no cell of a study ({COMMAND})"]
    lines = differences(with_defaults(before), now)
    if command.get("after", "") != cell.after:
        lines.append(f"after: {command.get('after') or 'nothing'} -> {cell.after or 'nothing'}")
    return [line for line in lines if not is_free(line.partition(":")[0])]


def as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data as it comes back from a file."""
    return json.loads(json.dumps(values))


def with_defaults(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run as it was written, with fields that there were not yet; as it is where it cannot be read any more."""
    try:
        return as_read(plain(restored(Run, before)))
    except ConfigError:
        return before


def is_free(field: str) -> bool:
    return any(field == other or field.startswith(f"{other}.") for other in FREE)


def take_up(out: Path, study: str, scale: str, cells: Sequence[Cell], *, force: bool) -> list[str]:
    """Refuses a folder that holds something else, and cells whose run has changed. With `force` those are removed, with
    what was trained from their weights, to be trained anew; their names are returned."""
    if (out / CONFIG).exists():
        raise ConfigError(f"{out} holds a run, not a study; give another --out")
    if (out / STUDY).exists():
        before = read_json(out / STUDY)
        held = (before.get("study"), before.get("scale"))
        if held != (study, scale):
            raise ConfigError(f"{out} holds the study {held[0]} at scale {held[1]}; give another --out")
    found = {cell.name: lines for cell in cells if (lines := changed(out, cell))}
    if found and not force:
        name, lines = next(iter(found.items()))
        more = [f"and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
        others = f", and {len(found) - 1} other cells have changed as well" if len(found) > 1 else ""
        raise ConfigError(
            f"{folder_of(out, name)} holds a cell with another config ({'; '.join([*lines[:NAMED], *more])}){others}; "
            "add --force to train those anew, or give another --out"
        )
    anew = set(found)
    for _ in cells:  # whatever order they stand in
        anew |= {cell.name for cell in cells if cell.after in anew}
    there = [cell.name for cell in cells if cell.name in anew and folder_of(out, cell.name).exists()]
    for name in there:
        shutil.rmtree(folder_of(out, name))
    return there


def seconds_in(out: Path) -> dict[str, float]:
    """How long cells took, of those that OUT/study.json knows it of."""
    cells = read_json(out / STUDY).get("cells") if (out / STUDY).exists() else None
    told = {str(name): cell for name, cell in cells.items()} if isinstance(cells, Mapping) else {}
    known = {name: cell.get("seconds") for name, cell in told.items() if isinstance(cell, Mapping)}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


def note(out: Path, content: Mapping[str, Any]) -> None:
    """OUT/study.json: which study it is, and how it stands."""
    told = {**content, "updated": datetime.now().astimezone().isoformat(timespec="seconds")}
    write_file(out / STUDY, json.dumps(told, indent=1).encode() + b"\n")

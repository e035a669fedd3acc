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
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import places
from vitrail.core.errors import ConfigError
from vitrail.core.settings import differences, plain, restored, without_fields
from vitrail.train.config import RunRequest
from vitrail.train.folder.layout import BEST, COMMAND, CONFIG, METRICS, is_done, read_json
from vitrail.train.grid.cell import Cell, Outcome
from vitrail.train.grid.results import OUTCOME, read_outcome
from vitrail.train.report import read_metrics
from vitrail.train.rows import best_of, headline, scores

STUDY: Final = "study.json"
CELLS: Final = "cells"
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
    """What a finished run recorded of "accuracy" (of the split for the end, or else of the watched one, a share; of
    another task its own first number),
    "watch" (of the watched split, to choose by), "fewshot-5" (a share), "exaflops", "device_hours" and "images". Where
    the run chose weights by its watched split, their watched score counts, and their few-shot accuracy."""
    rows = read_metrics(folder / METRICS)[0]
    found: dict[str, float] = {}
    watched, tested = scores(rows, "watch"), scores(rows, "test")
    chose = (folder / BEST).exists()
    best = best_of(watched) if watched else {}
    if watched and (first := headline(best if chose else watched[-1])) is not None:
        found["watch"] = found[first.criterion.name] = first.value
    if tested and (first := headline(tested[-1])) is not None:
        found[first.criterion.name] = first.value
    for row in rows:
        if row["kind"] == "fewshot" and (not chose or row["step"] == best.get("step", row["step"])):
            found[f"fewshot-{row['shots']}"] = row["accuracy"]
    trained = [row for row in rows if row["kind"] == "train"]
    if trained:
        found |= {name: trained[-1][name] for name in COSTS if name in trained[-1]}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def finished(out: Path, cells: Sequence[Cell]) -> dict[str, Outcome]:
    """The cells that need no more work, with what came of them."""
    found = {cell.name: read_outcome(cell, folder_of(out, cell.name)) for cell in cells}
    return {name: outcome for name, outcome in found.items() if outcome is not None}


def changed(out: Path, cell: Cell) -> list[str]:
    """Where the run of a cell is another than the one that was trained in its folder: "optim.lr: 0.001 -> 0.003"."""
    folder = folder_of(out, cell.name)
    trained = (folder / OUTCOME).exists() or is_done(folder) or places(folder / CHECKPOINTS)
    if not trained or not (folder / COMMAND).exists():
        return []
    command = read_json(folder / COMMAND)
    before, now = command.get(ASKED), as_read(plain(cell.run))
    if not isinstance(before, Mapping):
        return [f"it holds a run of its own, and no cell of a study ({COMMAND})"]
    lines = differences(with_defaults(before), now)
    if command.get("after", "") != cell.after:
        lines.append(f"after: {command.get('after') or 'nothing'} -> {cell.after or 'nothing'}")
    return without_fields(lines, FREE)


def as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data as it comes back from a file."""
    return json.loads(json.dumps(values))


def with_defaults(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run as it was written, with fields that there were not yet; as it is where it cannot be read any more."""
    try:
        return as_read(plain(restored(RunRequest, before)))
    except ConfigError:
        return before


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

"""Runs a study: its cells as a grid of runs, with a report from time to time and at the end.

    study = find_study("positions")
    plan = StudyPlan(study=study, scale="tiny", cells=study.grid("tiny"), out=Path("runs/mine"))
    report = run_study(plan, places=device_slots("auto", jobs=0), watcher=Watcher(), present=write)

    OUT/study.json               which study, and the state of every cell
    OUT/cells/NAME/              the run folder of a cell
    OUT/cells/NAME/outcome.json  its outcome, written when it has finished
    OUT/table.md  table.csv  figure.png  figure.svg  report.html

The same call again resumes: finished cells are kept, interrupted cells resume from their checkpoints, and failed cells
are tried again (vitrail.train.grid).
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import torch

from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import list_checkpoints
from vitrail.core.config_overrides import diff_plain, drop_fields, from_plain, to_plain
from vitrail.core.errors import ConfigError
from vitrail.core.text import join_words
from vitrail.data.collection import open_collection
from vitrail.distributed.process_group import World
from vitrail.recipes.run_overrides import start_from
from vitrail.studies.definition import Scale, Study
from vitrail.tasks.registry import task_of
from vitrail.train.config import RunRequest, configure
from vitrail.train.data import split_collection
from vitrail.train.grid import plan as grid
from vitrail.train.grid.engine import run_grid
from vitrail.train.grid.plan import OUTCOME, Cell, CellJob, CellOutcome, PreparedCell, read_outcome
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.run_folder.files import BEST, COMMAND, CONFIG, LAST, METRICS, is_done, read_json
from vitrail.train.run_folder.metric_rows import best_of, headline, read_metrics, scores

STUDY: Final = "study.json"
CELLS: Final = "cells"
REQUESTED: Final = "run"  # in a cell's command.json: its run as the grid has it
COSTS: Final = ("exaflops", "device_hours", "images")
LISTED: Final = 12  # differing fields in an error
# Fields that may change between two starts without changing the outcome: fewer than for a run, since scores count.
FREE: Final = frozenset(
    {"name", "micro", "log", "keep", "bad_steps", "compile", "sharding", "recompute", "baseline"}
    | {"data.workers", "data.strict", "data.resident"}
)
Present: TypeAlias = Callable[[Sequence[CellOutcome]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """What to run and where. `work` is the cost of each cell, in any unit: within a seed, the most expensive cells run
    first. `go_on` is the command that resumes the study."""

    study: Study
    scale: Scale
    cells: tuple[Cell, ...]
    out: Path
    data: str = ""
    work: dict[str, float] = field(default_factory=dict[str, float])
    go_on: str = ""
    force: bool = False

    def as_grid(self) -> grid.GridPlan:
        return grid.GridPlan(
            cells=self.cells,
            out=self.out,
            cells_in=self.out / CELLS,
            record=self.out / STUDY,
            job=StudyJob(out=self.out, study=self.study.name, go_on=self.go_on, force=self.force, few_threads=True),
            open=self.check_folder,
            facts=lambda outcomes: {"study": self.study.name, "scale": self.scale, "data": self.data},
            work=self.work,
            go_on=self.go_on,
        )

    def check_folder(self, tell: Callable[[str], None]) -> None:
        """Raises ConfigError if the folder holds something else, or cells whose run has changed. With `force`, such
        cells and those that started from their weights are removed and trained again."""
        out = self.out
        if (out / CONFIG).exists():
            raise ConfigError(f"{out} holds a run, not a study; give another --out")
        if (out / STUDY).exists():
            before = read_json(out / STUDY)
            study, scale = before.get("study"), before.get("scale")
            if (study, scale) != (self.study.name, self.scale):
                raise ConfigError(f"{out} holds the study {study} at scale {scale}; give another --out")
        changed = {cell.name: lines for cell in self.cells if (lines := find_changes(out, cell))}
        if changed and not self.force:
            name, lines = next(iter(changed.items()))
            others = f", and {len(changed) - 1} other cells have changed as well" if len(changed) > 1 else ""
            fault = f"{cell_folder(out, name)} holds a cell with another config ({join_words(lines, limit=LISTED)})"
            raise ConfigError(f"{fault}{others}; add --force to train those again, or give another --out")
        again = set(changed)
        for _ in self.cells:  # in any order
            again |= {cell.name for cell in self.cells if cell.after in again}
        for cell in self.cells:
            if cell.name in again and (folder := cell_folder(out, cell.name)).exists():
                shutil.rmtree(folder)
                tell(f"{cell.name} is trained again: its run has changed")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyJob(CellJob):
    """Trains a cell of the study in `out`, from the weights of another cell if it comes after one."""

    out: Path
    study: str
    go_on: str = ""

    def prepare(self, cell: Cell) -> PreparedCell:
        """If the grid names no network, it is that of the weights (3.2)."""
        if cell.after:
            weights = str(cell_folder(self.out, cell.after) / LAST)
            bundle = find_weights(weights)
            run = start_from(cell.run, weights, bundle.config, bundle.card.preprocessing)
            run = replace(run, model=cell.run.model or run.model)
        else:
            run = configure(cell.run)
        splits = None
        if run.data.source:
            splits = split_collection(open_cached(run.data.source), run.data, task_of(run.objective))
        command = {"study": self.study, "cell": cell.name, "after": cell.after, "go_on": self.go_on}
        return PreparedCell(run=run, splits=splits, command={**command, REQUESTED: to_plain(cell.run)})

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        return read_values(folder)


open_cached = lru_cache(maxsize=2)(open_collection)  # most cells share their source, and reading it takes seconds


def run_study(
    plan: StudyPlan, *, places: Sequence[DeviceSlot], watcher: grid.Watcher, present: Present
) -> grid.GridReport:
    """Runs the cells that have not finished. `present` is called with the outcomes so far, from time to time and at the
    end. With a single slot on a CPU, cells run in this process."""
    alone = len(places) == 1 and not places[0].device.startswith("cuda")
    where = World(device=torch.device(places[0].device)) if alone else places
    return run_grid(plan.as_grid(), where, watcher=watcher, present=lambda report: present(report.outcomes))


def cell_folder(out: Path, cell: str) -> Path:
    return out / CELLS / cell


def read_finished(out: Path, cells: Sequence[Cell]) -> dict[str, CellOutcome]:
    """The outcomes of the cells that have finished."""
    found = {cell.name: read_outcome(cell, cell_folder(out, cell.name)) for cell in cells}
    return {name: outcome for name, outcome in found.items() if outcome is not None}


def read_values(folder: Path) -> dict[str, float]:
    """Reads what a finished run recorded: "accuracy" (on the test split if there is one, otherwise on the watched
    split; for another task its own main score), "watch" (on the watched split), "fewshot-5", "exaflops",
    "device_hours", "images". If the run selected weights by the watched split, the watched score and few-shot accuracy
    are those of these weights."""
    rows = read_metrics(folder / METRICS)[0]
    found: dict[str, float] = {}
    watched, tested = scores(rows, "watch"), scores(rows, "test")
    selected = (folder / BEST).exists()
    best = best_of(watched) if watched else {}
    if watched and (first := headline(best if selected else watched[-1])) is not None:
        found["watch"] = found[first.criterion.name] = first.value
    if tested and (first := headline(tested[-1])) is not None:
        found[first.criterion.name] = first.value
    for row in rows:
        if row["kind"] == "fewshot" and (not selected or row["step"] == best.get("step", row["step"])):
            found[f"fewshot-{row['shots']}"] = row["accuracy"]
    if trained := [row for row in rows if row["kind"] == "train"]:
        found |= {name: trained[-1][name] for name in COSTS if name in trained[-1]}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def find_changes(out: Path, cell: Cell) -> list[str]:
    """How the run of a cell differs from the one trained in its folder: "optim.lr: 0.001 -> 0.003"."""
    folder = cell_folder(out, cell.name)
    trained = (folder / OUTCOME).exists() or is_done(folder) or list_checkpoints(folder / CHECKPOINTS)
    if not trained or not (folder / COMMAND).exists():
        return []
    command = read_json(folder / COMMAND)
    before = command.get(REQUESTED)
    if not isinstance(before, Mapping):
        return [f"it holds a run of its own, not a cell of a study ({COMMAND})"]
    with contextlib.suppress(ConfigError):  # fields may have been added since it was written
        before = to_plain(from_plain(RunRequest, before))
    lines = diff_plain(*(json.loads(json.dumps(values)) for values in (before, to_plain(cell.run))))
    if command.get("after", "") != cell.after:
        lines.append(f"after: {command.get('after') or 'nothing'} -> {cell.after or 'nothing'}")
    return drop_fields(lines, FREE)

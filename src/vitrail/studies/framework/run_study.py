"""Runs a study: its cells as a grid of runs, presented now and then and at the end.

    plan = Plan(study=study("positions"), scale="tiny", cells=grid(study("positions"), "tiny"), out=Path("runs/mine"))
    report = go(plan, places=places_for("auto", jobs=0), watcher=QuietWatcher(), present=write)

The same call again resumes: a finished cell stays, one that was interrupted resumes from its checkpoint, one that
failed is tried again (vitrail.train.grid).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vitrail.checkpoint.find_weights import find_weights
from vitrail.core.config_overrides import to_plain
from vitrail.data.collection import Collection, open_collection
from vitrail.distributed.process_group import World
from vitrail.recipes.run_overrides import started_from
from vitrail.studies.framework.definition import Scale, Study
from vitrail.studies.framework.results import ASKED, CELLS, STUDY, folder_of, take_up, values_in
from vitrail.tasks.registry import task_of
from vitrail.train.config import Run, configure
from vitrail.train.data import DataSplits, split_collection
from vitrail.train.grid import plan as grid
from vitrail.train.grid.engine import run_grid
from vitrail.train.grid.plan import Cell, CellOutcome, PreparedCell
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.run_folder.files import LAST

Present: TypeAlias = Callable[[Sequence[CellOutcome]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run and where. `work` is what each cell costs, in any unit: long ones come first, seed by seed. `go_on`
    is the command that resumes the study."""

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
            job=StudyJob(out=self.out, study=self.study.name, go_on=self.go_on),
            open=self.open,
            facts=self.facts,
            work=self.work,
            go_on=self.go_on,
            force=self.force,
            few_threads=True,
        )

    def open(self, tell: Callable[[str], None]) -> None:
        for name in take_up(self.out, self.study.name, self.scale, self.cells, force=self.force):
            tell(f"{name} is trained again: its run has changed")

    def facts(self, outcomes: Sequence[CellOutcome]) -> Mapping[str, Any]:
        return {"study": self.study.name, "scale": self.scale, "data": self.data}


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyJob:
    """Trains a cell of the study in `out`, from the weights of another where it comes after one."""

    out: Path
    study: str
    go_on: str = ""

    def prepare(self, cell: Cell) -> PreparedCell:
        run = self.starting(cell)
        command = {
            "study": self.study,
            "cell": cell.name,
            "after": cell.after,
            ASKED: to_plain(cell.run),
            "go_on": self.go_on,
        }
        return PreparedCell(run=run, splits=pictures_of(run), command=command)

    def starting(self, cell: Cell) -> Run:
        """The run with the weights that it starts from. A network that the grid leaves open is theirs (3.2)."""
        if not cell.after:
            return configure(cell.run)
        weights = str(folder_of(self.out, cell.after) / LAST)
        bundle = find_weights(weights)
        started = started_from(cell.run, weights, bundle.config, bundle.card.preprocessing)
        return started if cell.run.model is None else replace(started, model=cell.run.model)

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        return values_in(folder)


def pictures_of(run: Run) -> DataSplits | None:
    """None where the run does not say which, for `train` to complain of."""
    return split_collection(opened(run.data.source), run.data, task_of(run.objective)) if run.data.source else None


@lru_cache(maxsize=2)
def opened(source: str) -> Collection:
    """The cells of a grid mostly share their source; reading it takes seconds."""
    return open_collection(source)


def go(plan: Plan, *, places: Sequence[DeviceSlot], watcher: grid.Watcher, present: Present) -> grid.GridReport:
    """Runs what is left of a study. `present` is called with the outcomes that there are, now and then and at the end.
    One place on a CPU is this very process's."""
    alone = len(places) == 1 and not places[0].device.startswith("cuda")
    where = World(device=torch.device(places[0].device)) if alone else places
    return run_grid(plan.as_grid(), where, watcher=watcher, present=lambda report: present(report.outcomes))

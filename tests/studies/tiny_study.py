"""A study whose cells take a second each: two learning rates, and one that starts from the weights of the first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.train.tiny import tiny_run
from vitrail.distributed.process_group import World
from vitrail.studies.definition import Findings, ResultTable, Scale, Study
from vitrail.studies.run_study import StudyPlan, run_study
from vitrail.train.config import Data, Keep, Run, RunRequest, to_stage
from vitrail.train.grid.engine import GridState, device_slots
from vitrail.train.grid.plan import Cell, CellOutcome, GridReport
from vitrail.train.observer import NullObserver, Observer

STEPS = 4
DIGITS = Data(source="digits", dev=0.02, watch="dev", test="test", workers=0)


def quick(steps: int = STEPS, lr: float = 3e-3, seed: int = 0) -> Run:
    run = tiny_run(steps=steps, data=DIGITS, keep=Keep(steps=10), seed=seed, average=0.0, log=2)
    return replace(run, optim=replace(run.optim, lr=lr), schedule=replace(run.schedule, warmup=1))


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    """first, second, and third after first."""
    first = Cell(name="first-0", at={"lr": 3e-3, "seed": 0}, run=quick())
    second = Cell(name="second-0", at={"lr": 1e-3, "seed": 0}, run=quick(lr=1e-3))
    tuning = to_stage(RunRequest, quick(), model=None)
    third = Cell(name="third-0", at={"lr": 3e-3, "stage": 2, "seed": 0}, run=tuning, after="first-0")
    return first, second, third


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    rows = tuple((one.cell, one.fault or f"{one.values['accuracy']:.4f}") for one in outcomes)
    return Findings(
        table=ResultTable(columns=("cell", "accuracy"), rows=rows),
        panels=(),
        summary=f"{len(rows)} cells have ended.",
        paper="The paper has no such study.",
        claims=(),
    )


TINY = Study(name="tiny", title="A study of nothing", anchor="D.0", cells=cells, analyse=analyse)


@dataclass(slots=True)
class Recorder:
    """Who started and who ended, in order."""

    lines: list[str] = field(default_factory=list[str])

    def log(self, text: str) -> None:
        self.lines.append(f"told {text}")

    def started(self, cell: Cell) -> None:
        self.lines.append(f"start {cell.name}")

    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        self.lines.append(f"{'fail' if outcome.fault else 'end'} {cell.name}")

    def progress(self, share: float, left_s: float) -> None:
        assert 0 <= share <= 1 + 1e-9

    def listen(self, cell: Cell) -> Observer:
        return NullObserver()


def plan_of(out: Path, changed: Sequence[Cell] = (), *, force: bool = False) -> StudyPlan:
    known = {cell.name: cell for cell in (*TINY.grid("tiny"), *changed)}
    return StudyPlan(study=TINY, scale="tiny", cells=tuple(known.values()), out=out, go_on="again", force=force)


def board_of(plan: StudyPlan, recorder: Recorder | None = None) -> GridState:
    return GridState(plan.as_grid(), World(device=torch.device("cpu")), recorder or Recorder(), lambda report: None)


def play(plan: StudyPlan, jobs: int = 1, recorder: Recorder | None = None) -> tuple[GridReport, Recorder]:
    recorder = recorder or Recorder()
    return run_study(plan, places=device_slots("cpu", jobs), watcher=recorder, present=lambda outcomes: None), recorder

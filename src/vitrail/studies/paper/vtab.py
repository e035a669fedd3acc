"""VTAB-1k (4.1, Table 9): weights fine-tuned on each of 19 tasks, a thousand images each, after one fixed recipe.

    study = Study(base=base_run("vit.safetensors"), out=Path("runs/vtab"))
    outcome = go(study, world=world)

One run folder a task, below `out`: the tasks are a grid of runs (vitrail.train.grid). The same call again resumes: a
task that is done stays, one that was interrupted resumes from its checkpoint. A task whose images are not there is
passed over, and what it lacks is kept.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from vitrail.checkpoint.find_weights import find_weights
from vitrail.core.config_overrides import diff_plain, drop_fields, to_plain
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import open_collection
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS, VtabTask
from vitrail.distributed.process_group import World
from vitrail.recipes.registry import recipe
from vitrail.recipes.run_overrides import on_data, resized, started_from, with_changes
from vitrail.recipes.run_request import Asked
from vitrail.train.config import Run, configure
from vitrail.train.data import DataSplits, split_collection
from vitrail.train.grid.engine import run_grid
from vitrail.train.grid.plan import Cell, GridPlan, GridReport, PreparedCell, QuietWatcher, Unavailable
from vitrail.train.grid.plan import CellOutcome as GridOutcome
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.observer import NullObserver, Observer
from vitrail.train.report.page import read_metrics
from vitrail.train.resolve import resolve
from vitrail.train.resume import FREE
from vitrail.train.run_folder.files import CONFIG, METRICS, is_done, read_json

RECIPE: Final = "finetune-vtab"
STUDY: Final = "study.json"

State: TypeAlias = Literal["done", "stopped", "waiting", "missing", "failed"]
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What to do and where. `base` is the run of any task but for its images; `root` holds a folder for each data
    set, and is $VITRAIL_DATA where there is none; `weights_hash` tells the weights from others under the same name."""

    base: Run
    out: Path
    tasks: tuple[str, ...] = tuple(VTAB_TASKS)
    root: Path | None = None
    weights_hash: str = ""
    image_size: int = 0  # as it was typed, for the command that goes on with one task
    settings: tuple[str, ...] = ()
    go_on: str = ""  # the command that goes on with all

    def folder(self, task: str) -> Path:
        return self.out / task


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What became of a task on its whole test split."""

    task: VtabTask
    accuracy: float
    count: int
    loss: float
    step: int
    fingerprint: str  # of the test split

    @property
    def right(self) -> int:
        return round(self.accuracy * self.count)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How every task stands, the scores of those that are done, and why others are not."""

    states: dict[str, State]
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def stopped(self) -> bool:
        return "stopped" in self.states.values()

    def of(self, *states: State) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


def base_run(weights: str, *, image_size: int = 0, seed: int | None = None, settings: tuple[str, ...] = ()) -> Run:
    """The paper's recipe on the given weights: 2,500 steps of 512 at 0.01, 384 px, and what is changed of it."""
    run, bundle = recipe(RECIPE), find_weights(weights)
    if image_size:
        run = resized(run, image_size)
    run = started_from(run, weights, bundle.config, bundle.card.preprocessing)
    if seed is not None:
        run = replace(run, seed=seed)
    return with_changes(run, settings)


def changed(study: Study) -> list[str]:
    """Where a study is not the paper's recipe: "steps: 2500 -> 100"."""
    free = (*FREE, "seed", "model", "weights", "preprocessing")
    found = drop_fields(diff_plain(to_plain(recipe(RECIPE)), to_plain(study.base)), free)
    return found + [text for text in study.settings if text.startswith("model.")]


def place(task: VtabTask, root: Path | None) -> str:
    """Where a task's images are: SOURCE as every command takes it. Below a root they lie in a folder of the set's
    name, or as torchvision keeps them."""
    if root is None:
        return f"vtab/{task.name}"
    entry, home = SETS[task.source], root / SETS[task.source].folder
    beside = not home.is_dir() and any((root / folder).is_dir() for folder in entry.folders)
    return f"vtab/{task.name}:{root if beside else home}"


def task_run(study: Study, task: VtabTask) -> Run:
    """The run of one task: without the crop or the flip that would change its answer."""
    return replace(on_data(study.base, place(task, study.root)), name=f"vtab-{task.name}")


def pictures_of(
    study: Study, task: VtabTask, *, download: bool = False, progress: Progress | None = None
) -> DataSplits | str:
    """The images of a task; why there are none, with what to put where, if so."""
    try:
        return split_collection(
            open_collection(place(task, study.root), download=download, progress=progress), study.base.data
        )
    except DataError as error:
        return str(error)


def facts_of(study: Study) -> dict[str, Any]:
    """What must not change between two starts, as it comes back from study.json."""
    return json.loads(json.dumps({"weights": study.weights_hash, "run": to_plain(study.base)}))


def check_folder(study: Study) -> None:
    """Refuses a folder that holds something else. Other weights or settings are another study, other tasks are not."""
    path, now = study.out / STUDY, facts_of(study)
    if path.exists():
        before = read_json(path)
        before = {name: before[name] for name in now if name in before}
        found = drop_fields(diff_plain(before, now), (*(f"run.{name}" for name in FREE), "run.weights"))
        if found:
            raise ConfigError(
                f"{study.out} holds a study with another config ({'; '.join(found[:12])}); give another --out"
            )
    elif (study.out / CONFIG).exists():
        raise ConfigError(f"{study.out} holds a run, not a study of VTAB; give another --out")


def check_run(study: Study, world: World) -> None:
    """Refuses a recipe that cannot work, by the first task whose images are there, before anything is written."""
    for name in study.tasks:
        if is_done(study.folder(name)):
            continue
        pictures = pictures_of(study, VTAB_TASKS[name])
        if not isinstance(pictures, str):
            resolve(task_run(study, VTAB_TASKS[name]), pictures, world)
            return


def score_in(folder: Path, task: VtabTask) -> Score | None:
    """What a finished run says of its test split; none where the task is not done."""
    if not is_done(folder):
        return None
    rows = [row for row in read_metrics(folder / METRICS)[0] if row["kind"] == "test"]
    if not rows:
        return None
    prints = read_json(folder / CONFIG)["data"]["fingerprint"]
    last = rows[-1]
    return Score(
        task=task,
        accuracy=float(last["accuracy"]),
        count=int(last["count"]),
        loss=float(last["loss"]),
        step=int(last["step"]),
        fingerprint=str(prints.get("test", "")),
    )


def so_far(study: Study) -> Outcome:
    """What lies in the folder: all tasks that are done, whichever were asked for this time."""
    found = {
        name: score for name in VTAB_TASKS if (score := score_in(study.folder(name), VTAB_TASKS[name])) is not None
    }
    states: dict[str, State] = {**dict.fromkeys(study.tasks, "waiting"), **dict.fromkeys(found, "done")}
    return Outcome(states=states, scores=found)


def go(
    study: Study,
    *,
    world: World,
    observer: Observer | None = None,
    noted: Callable[[Outcome], None] = lambda outcome: None,
    places: Sequence[DeviceSlot] = (),
) -> Outcome:
    """Every task that is not done, one after the other or, with `places`, spread over processes; `noted` is called when
    something has changed. A signal ends the task behind its step, and the study with it."""
    if places and world.size > 1:
        raise ConfigError(f"--jobs is for one process that starts others, and torchrun has started {world.size}")
    check_run(study, world)
    watcher = TaskWatcher(observer=observer or NullObserver(), order=study.tasks)
    report = run_grid(
        vtab_plan(study), places or world, watcher=watcher, present=lambda now: noted(outcome_of(study, now))
    )
    return world.broadcast_from_main(outcome_of(study, report) if world.is_main else None)


def vtab_plan(study: Study) -> GridPlan:
    """The tasks as a grid of runs, each in a folder of its own below `out`."""
    tasks = [VTAB_TASKS[name] for name in study.tasks]
    return GridPlan(
        cells=tuple(Cell(name=task.name, at={"group": task.group}, run=task_run(study, task)) for task in tasks),
        out=study.out,
        cells_in=study.out,
        record=study.out / STUDY,
        job=VtabJob(study=study),
        open=lambda tell: check_folder(study),
        facts=lambda outcomes: facts_of(study),
        unit="tasks",
        go_on=study.go_on,
        present_s=0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabJob:
    """Fine-tunes on a task. One whose images are not there is skipped."""

    study: Study

    def prepare(self, cell: Cell) -> PreparedCell:
        pictures = pictures_of(self.study, VTAB_TASKS[cell.name])
        if isinstance(pictures, str):
            raise Unavailable(pictures)
        run = configure(cell.run)
        return PreparedCell(run=run, splits=pictures, command=command(self.study, run))

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        score = score_in(folder, VTAB_TASKS[cell.name])
        return {} if score is None else {"accuracy": score.accuracy, "count": score.count, "loss": score.loss}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskWatcher(QuietWatcher):
    """Tells an observer which task is trained and how it did, and lets it hear all that the task's run says."""

    order: tuple[str, ...]

    def started(self, cell: Cell) -> None:
        number, task = self.order.index(cell.name) + 1, VTAB_TASKS[cell.name]
        self.observer.log(f"task {number} of {len(self.order)}: {task.title} ({task.group})")

    def ended(self, cell: Cell, outcome: GridOutcome, seconds: float) -> None:
        if not outcome.fault:
            score = outcome.values
            self.observer.log(f"{VTAB_TASKS[cell.name].title}: {score['accuracy']:.2%} of {score['count']:,.0f}")
        elif outcome.missing:
            self.observer.log(f"passed over: {outcome.fault.splitlines()[0]}")
        else:
            self.observer.log(f"failed: {outcome.fault}")


def outcome_of(study: Study, report: GridReport) -> Outcome:
    """How the tasks stand: those of this start, and all that are done in the folder."""
    outcome = so_far(study)
    for name, state in report.states.items():
        if state in ("failed", "missing", "stopped") and name not in outcome.scores:
            outcome.states[name] = state
    outcome.reasons = {one.cell: one.fault for one in report.outcomes if one.fault}
    if report.stopped and not outcome.stopped:  # between two tasks, before the next one began
        outcome.states[report.of("waiting")[0]] = "stopped"
    return outcome


def command(study: Study, run: Run) -> dict[str, Any]:
    """What the folder of a task keeps: the same run as a plain fine-tuning, and the command that goes on with all."""
    asked = Asked(
        verb="finetune",
        recipe=RECIPE,
        weights=run.weights,
        data=run.data.source,
        image_size=study.image_size,
        seed=run.seed,
        settings=study.settings,
    )
    return {**asdict(asked), "go_on": study.go_on}

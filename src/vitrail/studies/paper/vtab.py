"""VTAB-1k (4.1, Table 9): weights fine-tuned on each of 19 tasks with a thousand images, following one fixed recipe;
the scores by task and by group next to Table 9, as a Result and as a page.

    study = VtabStudy(base=build_base_run("vit.safetensors"), out=Path("runs/vtab"))
    outcome = run_vtab_tasks(study, world=world)

Each task has a run folder below `out`: the tasks are a grid of runs (vitrail.train.grid). The same call again resumes:
finished tasks are kept, and an interrupted one resumes from its checkpoint. A task whose images are missing is skipped,
with the reason.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote

from vitrail.checkpoint.find_weights import find_weights
from vitrail.core.config_overrides import diff_plain, drop_fields, to_plain
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.paper_tables import TABLE_9
from vitrail.core.text import join_words
from vitrail.data.collection import Progress, open_collection
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS, VtabTask
from vitrail.distributed.process_group import World
from vitrail.evaluation.intervals import Interval, wilson_interval
from vitrail.evaluation.result import Measure, Result, read_deduplication
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.run_overrides import start_from, with_changes, with_data, with_image_size
from vitrail.recipes.run_request import RunCommand
from vitrail.report.page import Section, Table, render_page
from vitrail.report.sections import DetailsSection, Facts, Tile, Tiles
from vitrail.train.config import Run, configure
from vitrail.train.data import DataSplits, split_collection
from vitrail.train.grid import plan as grid
from vitrail.train.grid.engine import run_grid
from vitrail.train.grid.plan import Cell, CellJob, CellOutcome, GridPlan, PreparedCell, Watcher
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.observer import NullObserver, Observer
from vitrail.train.report.page import REPORT
from vitrail.train.resolve import resolve
from vitrail.train.resume import FREE
from vitrail.train.run_folder.files import CONFIG, METRICS, is_done, read_json
from vitrail.train.run_folder.metric_rows import read_metrics

RECIPE: Final = "finetune-vtab"
STUDY: Final = "study.json"
GROUPS: Final = ("natural", "specialized", "structured")
COLUMNS: Final = ("task", "group", "test", "accuracy", "95 %", *TABLE_9)

State: TypeAlias = Literal["done", "stopped", "waiting", "missing", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabStudy(CellJob):
    """What to run and where. `base` is the run of any task apart from its images; `root` has a folder for each data set
    ($VITRAIL_DATA by default); `weights_hash` distinguishes the weights from others with the same name."""

    base: Run
    out: Path
    tasks: tuple[str, ...] = tuple(VTAB_TASKS)
    root: Path | None = None
    weights_hash: str = ""
    image_size: int = 0  # as typed, for the command that resumes one task
    settings: tuple[str, ...] = ()
    go_on: str = ""  # the command that resumes the study

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that must not change between two starts, as read back from study.json."""
        return json.loads(json.dumps({"weights": self.weights_hash, "run": to_plain(self.base)}))

    @property
    def changes(self) -> list[str]:
        """How the study differs from the paper's recipe: "steps: 2500 -> 100"."""
        free = (*FREE, "seed", "model", "weights", "preprocessing")
        found = drop_fields(diff_plain(to_plain(load_recipe(RECIPE)), to_plain(self.base)), free)
        return found + [text for text in self.settings if text.startswith("model.")]

    def prepare(self, cell: Cell) -> PreparedCell:
        """A fine-tuning on a task, recorded as the same run on its own. One whose images are missing is skipped."""
        splits = open_task(self, VTAB_TASKS[cell.name])
        if isinstance(splits, str):
            raise grid.Unavailable(splits)
        run = configure(cell.run)
        asked = RunCommand(verb="finetune", recipe=RECIPE, weights=run.weights, data=run.data.source, seed=run.seed)
        asked = replace(asked, image_size=self.image_size, settings=self.settings)
        return PreparedCell(run=run, splits=splits, command={**asdict(asked), "go_on": self.go_on})

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        score = read_score(folder, VTAB_TASKS[cell.name])
        return {} if score is None else {"accuracy": score.accuracy, "count": score.count, "loss": score.loss}


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabScore:
    """The score of a task on its whole test split."""

    task: VtabTask
    accuracy: float
    count: int
    loss: float
    step: int
    fingerprint: str  # of the test split

    @property
    def interval(self) -> Interval:
        return wilson_interval(round(self.accuracy * self.count), self.count)


@dataclass(kw_only=True, slots=True)
class VtabOutcome:
    """The state of every task, the scores of those that are done, and why others are not."""

    states: dict[str, State]
    scores: dict[str, VtabScore] = field(default_factory=dict[str, VtabScore])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def stopped(self) -> bool:
        return "stopped" in self.states.values()

    def in_state(self, *states: State) -> list[str]:
        return [name for name, state in self.states.items() if state in states]


def build_base_run(
    weights: str, *, image_size: int = 0, seed: int | None = None, settings: tuple[str, ...] = ()
) -> Run:
    """The paper's recipe on the given weights (2,500 steps of 512 at 0.01, 384 px), with changes."""
    run, bundle = load_recipe(RECIPE), find_weights(weights)
    if image_size:
        run = with_image_size(run, image_size)
    run = start_from(run, weights, bundle.config, bundle.card.preprocessing)
    return with_changes(run if seed is None else replace(run, seed=seed), settings)


def locate_task(task: VtabTask, root: Path | None) -> str:
    """The source of a task's images, as every command takes it. Below a root they lie in a folder with the data set's
    name, or as torchvision keeps them."""
    if root is None:
        return f"vtab/{task.name}"
    entry, home = SETS[task.source], root / SETS[task.source].folder
    torchvision = not home.is_dir() and any((root / folder).is_dir() for folder in entry.folders)
    return f"vtab/{task.name}:{root if torchvision else home}"


def build_task_run(study: VtabStudy, task: VtabTask) -> Run:
    """The run of one task: without a crop or a flip that would change its answer."""
    return replace(with_data(study.base, locate_task(task, study.root)), name=f"vtab-{task.name}")


def open_task(
    study: VtabStudy, task: VtabTask, *, download: bool = False, progress: Progress | None = None
) -> DataSplits | str:
    """The images of a task; if they are missing, the reason and what to put where."""
    try:
        source = locate_task(task, study.root)
        return split_collection(open_collection(source, download=download, progress=progress), study.base.data)
    except DataError as error:
        return str(error)


def check_folder(study: VtabStudy) -> None:
    """Raises ConfigError if the folder holds something else. Other weights or settings make another study; other tasks
    do not."""
    path, now = study.out / STUDY, study.facts
    if path.exists():
        record = read_json(path)
        before = {name: record[name] for name in now if name in record}
        found = drop_fields(diff_plain(before, now), (*(f"run.{name}" for name in FREE), "run.weights"))
        if found:
            changes = join_words(found, limit=12)
            raise ConfigError(f"{study.out} holds a study with another config ({changes}); give another --out")
    elif (study.out / CONFIG).exists():
        raise ConfigError(f"{study.out} holds a run, not a study of VTAB; give another --out")


def read_score(folder: Path, task: VtabTask) -> VtabScore | None:
    """The test score of a finished run; None if the task is not done."""
    rows = [row for row in read_metrics(folder / METRICS)[0] if row["kind"] == "test"] if is_done(folder) else []
    if not rows:
        return None
    numbers = {name: rows[-1][name] for name in ("accuracy", "count", "loss", "step")}
    fingerprint = str(read_json(folder / CONFIG)["data"]["fingerprint"].get("test", ""))
    return VtabScore(task=task, fingerprint=fingerprint, **numbers)


def read_progress(study: VtabStudy) -> VtabOutcome:
    """All tasks that are done in the folder, whichever are requested this time."""
    scores = {name: read_score(study.out / name, task) for name, task in VTAB_TASKS.items()}
    found = {name: score for name, score in scores.items() if score is not None}
    states: dict[str, State] = {**dict.fromkeys(study.tasks, "waiting"), **dict.fromkeys(found, "done")}
    return VtabOutcome(states=states, scores=found)


def run_vtab_tasks(
    study: VtabStudy,
    *,
    world: World,
    observer: Observer | None = None,
    present: Callable[[VtabOutcome], None] = lambda outcome: None,
    places: Sequence[DeviceSlot] = (),
) -> VtabOutcome:
    """Runs every task that is not done, one after the other or, with `places`, over several processes; `present` is
    called after each. A signal ends the task after its step, and the study with it."""
    if places and world.size > 1:
        raise ConfigError(f"--jobs starts its own processes, and torchrun has started {world.size}; use one of them")
    tasks = [VTAB_TASKS[name] for name in study.tasks]
    for task in tasks:  # a recipe that cannot work is refused before anything is written, by the first images here
        if not is_done(study.out / task.name) and not isinstance(splits := open_task(study, task), str):
            resolve(build_task_run(study, task), splits, world)
            break
    plan = GridPlan(
        cells=tuple(Cell(name=task.name, at={"group": task.group}, run=build_task_run(study, task)) for task in tasks),
        out=study.out,
        cells_in=study.out,
        record=study.out / STUDY,
        job=study,
        open=lambda tell: check_folder(study),
        facts=lambda outcomes: study.facts,
        unit="tasks",
        go_on=study.go_on,
        present_s=0.0,
    )

    def show(report: grid.GridReport) -> None:
        present(combine_outcome(study, report))

    watcher = TaskWatcher(observer=observer or NullObserver(), order=study.tasks)
    report = run_grid(plan, places or world, watcher=watcher, present=show)
    return world.broadcast_from_main(combine_outcome(study, report) if world.is_main else None)


@dataclass(kw_only=True)
class TaskWatcher(Watcher):
    """Tells an observer which task is trained and how it did, and passes on the messages of the task's run."""

    order: tuple[str, ...]

    def started(self, cell: Cell) -> None:
        number, task = self.order.index(cell.name) + 1, VTAB_TASKS[cell.name]
        self.observer.log(f"task {number} of {len(self.order)}: {task.title} ({task.group})")

    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        text = f"failed: {outcome.fault}"
        if not outcome.fault:
            accuracy, count = outcome.values["accuracy"], outcome.values["count"]
            text = f"{VTAB_TASKS[cell.name].title}: {accuracy:.2%} of {count:,.0f}"
        elif outcome.missing:
            text = f"skipped: {outcome.fault.splitlines()[0]}"
        self.observer.log(text)


def combine_outcome(study: VtabStudy, report: grid.GridReport) -> VtabOutcome:
    """The tasks of this start, and all that are done in the folder."""
    outcome = read_progress(study)
    for name, state in report.states.items():
        if state in ("failed", "missing", "stopped") and name not in outcome.scores:
            outcome.states[name] = state
    outcome.reasons = {one.cell: one.fault for one in report.outcomes if one.fault}
    if report.stopped and not outcome.stopped:  # between two tasks, before the next one started
        outcome.states[report.in_state("waiting")[0]] = "stopped"
    return outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMean:
    """A plain mean over tasks, as VTAB scores: over those that are done. The paper's is over the same."""

    name: str
    tasks: tuple[str, ...]
    total: int
    value: float
    interval: Interval

    @property
    def title(self) -> str:
        return self.name if len(self.tasks) == self.total else f"{self.name}, {len(self.tasks)} of {self.total}"

    def paper(self, network: str) -> float:
        return sum(TABLE_9[network][task] for task in self.tasks) / len(self.tasks)


def average_groups(scores: Mapping[str, VtabScore]) -> list[GroupMean]:
    """The means of each group with a finished task, and of all tasks."""
    means: list[GroupMean] = []
    for group in (*GROUPS, ""):
        tasks = [name for name, task in VTAB_TASKS.items() if group in ("", task.group)]
        done = tuple(task for task in tasks if task in scores)
        if not done:
            continue
        value = sum(scores[task].accuracy for task in done) / len(done)
        # Tasks are independent, so their variances add up; each is read off its own interval.
        intervals = [(scores[task].accuracy, scores[task].interval) for task in done]
        low = math.hypot(*(accuracy - interval.low for accuracy, interval in intervals)) / len(done)
        high = math.hypot(*(interval.high - accuracy for accuracy, interval in intervals)) / len(done)
        name = group.capitalize() or "VTAB (19)"
        around = Interval(value - low, value + high)
        means.append(GroupMean(name=name, tasks=done, total=len(tasks), value=value, interval=around))
    return means


def build_rows(outcome: VtabOutcome) -> list[list[str]]:
    """Makes one row per task in the paper's order, then one per group and one for all."""
    rows: list[list[str]] = []
    for name, task in ((name, task) for name, task in VTAB_TASKS.items() if name in outcome.states):
        score, paper = outcome.scores.get(name), [f"{table[name]:.1f}" for table in TABLE_9.values()]
        count = "" if score is None else f"{score.count:,}"
        value = [outcome.states[name], ""] if score is None else format_score(score.accuracy, score.interval)
        rows.append([task.title, task.group, count, *value, *paper])
    for mean in average_groups(outcome.scores):
        paper = [f"{mean.paper(network):.1f}" for network in TABLE_9]
        rows.append([mean.title, "mean", "", *format_score(mean.value, mean.interval), *paper])
    return rows


def format_score(value: float, interval: Interval) -> list[str]:
    return [f"{100 * value:.1f}", f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"]


def is_deduplicated(provenance: Mapping[str, Any], prints: Iterable[str]) -> bool | None:
    """What the weights record about the test images of all tasks; None if it is not the same for all."""
    known = {read_deduplication(provenance, one) for one in prints}
    return known.pop() if len(known) == 1 else None


def build_result(study: VtabStudy, outcome: VtabOutcome, weights: Mapping[str, Any]) -> Result:
    """As JSON. The mean of an incomplete group says so in its name, so it is never compared with a complete one."""
    scores = outcome.scores
    single = [(score.task.title, score.accuracy, score.count, score.interval) for score in scores.values()]
    grouped = [(mean.title, mean.value, len(mean.tasks), mean.interval) for mean in average_groups(scores)]
    prints, skipped = {name: score.fingerprint for name, score in scores.items()}, outcome.in_state("missing", "failed")
    return Result(
        kind="vtab",
        weights=dict(weights),
        data={
            "name": "VTAB-1k",
            "split": "test",
            "pictures": sum(score.count for score in scores.values()),
            "fingerprint": hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest(),
            "deduplicated": is_deduplicated(weights.get("provenance", {}), prints.values()),
            "tasks": prints,
        },
        measures=tuple(
            Measure(name=name, value=value, count=count, low=interval.low, high=interval.high)
            for name, value, count, interval in (*single, *grouped)
        ),
        config=to_plain(study.base),
        details={
            "tasks": {
                name: {"accuracy": one.accuracy, "loss": one.loss, "count": one.count, "step": one.step, "run": name}
                for name, one in scores.items()
            },
            "missing": {name: text for name, text in outcome.reasons.items() if name in skipped},
            "paper": {network: dict(table) for network, table in TABLE_9.items()},
            "changed": study.changes,
        },
    )


def build_page(study: VtabStudy, outcome: VtabOutcome, name: str) -> str:
    """The page of a study."""
    tiles: list[Tile] = []
    for mean in average_groups(outcome.scores):
        note = " · ".join(f"{network} {mean.paper(network):.1f}" for network in TABLE_9)
        tiles.append(Tile(value=f"{100 * mean.value:.1f}", label=mean.title, note=note))
    rows = build_rows(outcome)
    reports = [study.out / task / REPORT for task in VTAB_TASKS if task in outcome.states]
    links = [quote(path.relative_to(study.out).as_posix()) if path.exists() else "" for path in reports]
    links += [""] * (len(rows) - len(links))  # the means
    skipped = [
        Facts(title=VTAB_TASKS[task].title, rows=[("", line) for line in outcome.reasons[task].splitlines()])
        for task in outcome.in_state("missing", "failed")
    ]
    changes = study.changes or ["nothing: the paper's recipe"]
    facts = [(field, value) for field, _, value in (line.partition(":") for line in changes)]
    sections: list[Section] = [
        *([Tiles(tiles=tiles)] if tiles else []),
        Table(title="By task", columns=COLUMNS, rows=rows, left=2, links=links),
        *([DetailsSection(title="Skipped", groups=skipped)] if skipped else []),
        Facts(title="Changes to the paper's recipe", rows=facts),
    ]
    lead = f"{study.base.weights}, fine-tuned on a thousand images of each task and scored on its whole test split."
    return render_page(f"VTAB-1k: {name}", sections, lead=lead)

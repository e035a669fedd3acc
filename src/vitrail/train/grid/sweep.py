"""The paper's hyper-parameter search (4.1, 4.3): trains every point of a grid with a dev split held out, then the best
point on all images."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.core.config_overrides import apply_settings, diff_plain
from vitrail.core.errors import ConfigError, Diverged, TrainingError
from vitrail.distributed.process_group import World
from vitrail.evaluation.metrics import Criterion
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import task_of
from vitrail.train.config import Run, RunRequest, configure
from vitrail.train.data import hold_out_nothing, open_splits
from vitrail.train.grid.engine import run_grid
from vitrail.train.grid.plan import OUTCOME, Cell, CellJob, CellOutcome, GridPlan, PreparedCell, Watcher
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.loop import train
from vitrail.train.observer import NullObserver, Observer, listen_for_signals
from vitrail.train.resolve import resolve
from vitrail.train.resume import check_same_run, config_with_fingerprints, free_fields, raise_everywhere
from vitrail.train.run_folder.files import COMMAND, CONFIG, METRICS, POINTS, SWEEP, is_done, read_json, write_json
from vitrail.train.run_folder.metric_rows import read_metrics
from vitrail.train.run_folder.run import compare_config
from vitrail.train.scoring import TrainingResult

DEV = 0.1

Grid = Mapping[str, Sequence[Any]]
Change = Callable[[Run, Sequence[str]], Run]  # applies settings to a run


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of the grid, and its score on the dev split by the criterion; a point that diverged has no score."""

    settings: tuple[str, ...]
    value: float
    criterion: Criterion

    @property
    def diverged(self) -> bool:
        return math.isnan(self.value)

    @property
    def text(self) -> str:
        return "diverged" if self.diverged else f"{self.value:.2%}" if self.criterion.share else f"{self.value:.4g}"

    @property
    def name(self) -> str:
        return ",".join(self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The points tried, best first, and the run on all images with the best of them; None if a signal interrupted the
    sweep."""

    points: tuple[SweepPoint, ...]
    final: TrainingResult | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob(CellJob):
    """Trains a point. It is judged by its final score on the dev split, or by its best one if the run has patience."""

    command: Mapping[str, Any]

    def prepare(self, cell: Cell) -> PreparedCell:
        return PreparedCell(run=configure(cell.run), command=self.command)

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        criterion = criterion_of(cell.run)
        watched = (row.get(criterion.name) for row in read_metrics(folder / METRICS)[0] if row["kind"] == "watch")
        scores = [float(value) for value in watched if value is not None]
        if not scores:
            return {}
        best = max(scores) if criterion.larger else min(scores)
        return {name_score(criterion): best if cell.run.evaluation.patience else scores[-1]}


@dataclass(kw_only=True)
class SweepWatcher(Watcher):
    """Tells an observer which point is being tried, and passes on whatever the point's run reports."""

    order: tuple[str, ...]
    spread: bool = False  # over other processes, which report only how their runs end

    def started(self, cell: Cell) -> None:
        at = self.order.index(cell.name) + 1
        self.observer.log(f"sweep {at} of {len(self.order)}: {', '.join(list_settings(cell.at))}")

    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        if outcome.fault:
            self.observer.log(f"{cell.name}: {outcome.fault}" if self.spread else outcome.fault)
        elif self.spread:
            (point,) = rank_points([outcome], criterion_of(cell.run))
            self.observer.log(f"{cell.name}: {point.text} of dev")


def list_points(grid: Grid) -> list[tuple[str, ...]]:
    """Lists every combination, as settings. A value that is given twice counts once."""
    if not grid or not all(grid.values()):
        raise ConfigError("the grid is empty; give --sweep FIELD=VALUE,VALUE or a recipe that has a grid")
    pairs = [[f"{field}={value}" for value in values] for field, values in grid.items()]
    return list(dict.fromkeys(itertools.product(*pairs)))


def list_settings(at: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{field}={value}" for field, value in at.items())


def make_cells(run: Run, grid: Grid, change: Change) -> list[Cell]:
    """Makes a cell of every point, with a dev split held out."""
    held = replace(run, data=replace(run.data, dev=run.data.dev or DEV, watch="dev", test="none"))
    cells: list[Cell] = []
    for settings in list_points(grid):
        point = replace(change(held, settings), name=f"{run.name} {', '.join(settings)}")
        at = dict(text.split("=", 1) for text in settings)
        cells.append(Cell(name=",".join(settings), at=at, run=point))
    return cells


def relative_cost(run: Run, grid: Grid, world: World, change: Change = apply_settings) -> float:
    """The cost of a search, including its final run, as a multiple of the run on all images: by the number of images
    and their multiply-accumulates, without what patience may save. ConfigError if a point cannot be trained."""
    open_once = functools.cache(open_splits)  # points that share their data share the images

    def count_work(one: Run) -> float:
        patient = replace(one, evaluation=replace(one.evaluation, patience=0))
        whole = resolve(patient, open_once(one.data, task_of(one.objective)), world)
        return whole.steps * whole.batch * whole.macs_per_image

    whole = replace(run, data=hold_out_nothing(run.data))
    points = make_cells(run, grid, change)
    last = max(count_work(change(whole, list_settings(point.at))) for point in points)
    return (sum(count_work(configure(point.run)) for point in points) + last) / count_work(whole)


def run_sweep(
    run: Run,
    grid: Grid,
    *,
    out: Path,
    world: World,
    command: dict[str, Any] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    change: Change = apply_settings,
    places: Sequence[DeviceSlot] = (),
) -> SweepResult:
    """Tries every point in OUT/sweep, then trains the best one in OUT. The same call again resumes and keeps finished
    points. A point that diverges is ruled out, and the others still run. A point that fails in any other way is
    reported after the others, and none is chosen until it succeeds. With `places`, the points are spread over
    processes."""
    observer, command = observer or NullObserver(), command or {}
    if places and world.size > 1:
        raise ConfigError(f"--jobs starts its own processes, and torchrun has started {world.size}; use one of them")
    if not force:
        check_same_grid(out, grid, world)
    points = make_cells(run, grid, change)
    if not run.objective.labelled and not open_splits(run.data, None).class_names:
        raise ConfigError(f"a sweep chooses by the score on held-out images, and {run.data.source} has no labels")
    check_points(points, out=out, world=world, force=force)
    plan = plan_sweep(points, grid, out, command, force=force)
    with listen_for_signals():  # shared by all runs: a signal after the last point stops the run on all images
        watcher = SweepWatcher(observer=observer, order=tuple(point.name for point in points), spread=bool(places))
        report = run_grid(plan, places or world, watcher=watcher)
        tried = rank_points(report.outcomes, criterion_of(run))
        if report.stopped:
            return SweepResult(points=tried, final=None)
        best = choose_best(tried, report.outcomes, out)
        observer.log(f"best on dev: {best.name} with {best.text}; now training on all images")
        final = with_all_images(change(run, best.settings))
        last = train(final, out=out, world=world, command=command, force=force, observer=observer)
        return SweepResult(points=tried, final=last)


def criterion_of(run: RunRequest) -> Criterion:
    """The criterion by which points are chosen: the score of the run's task, or the accuracy if it has no task."""
    return (task_of(run.objective) or CLASSIFICATION).criteria[0]


def name_score(criterion: Criterion) -> str:
    """The name of a point's score: "dev accuracy"."""
    return f"dev {criterion.title or criterion.name}"


def plan_sweep(points: Sequence[Cell], grid: Grid, out: Path, command: dict[str, Any], *, force: bool) -> GridPlan:
    """Describes a sweep as a grid of runs. OUT/sweep.json holds the grid and the points tried so far, best first."""
    values = {name: [str(value) for value in values] for name, values in grid.items()}
    criterion = criterion_of(points[0].run)

    def facts(outcomes: Sequence[CellOutcome]) -> Mapping[str, Any]:
        rows = [
            {"settings": list(point.settings), name_score(criterion): "diverged" if point.diverged else point.value}
            for point in rank_points(outcomes, criterion)
        ]
        return {"grid": values, "points": len(points), "tried": rows}

    def write_command(tell: Callable[[str], None]) -> None:
        """Writes what resuming needs, until the final run replaces it with its own. A full disk does not end the
        search."""
        try:
            write_json(out / COMMAND, command)
        except OSError as error:
            tell(f"{out / COMMAND} could not be written ({error.strerror}); the search goes on")

    return GridPlan(
        cells=tuple(points),
        out=out,
        cells_in=out / POINTS,
        record=out / SWEEP,
        job=SweepJob(command=command, force=force, keep_checkpoints=True),
        open=write_command,
        facts=facts,
        unit="points",
        go_on=str(command.get("go_on", "")),
    )


def check_points(points: Sequence[Cell], *, out: Path, world: World, force: bool) -> None:
    """Raises ConfigError, before anything is trained, if a point cannot work, or if its folder holds another run. With
    `force`, such a run is continued. If a point is now evaluated differently, its outcome is removed and measured
    again. The main process reads the folders for all."""
    open_once = functools.cache(open_splits)  # points that share their data share the images
    splits = {point.name: open_once(point.run.data, task_of(point.run.objective)) for point in points}
    runs = {point.name: resolve(configure(point.run), splits[point.name], world) for point in points}
    with raise_everywhere(world):
        for point in points if world.is_main else ():
            folder = out / POINTS / point.name
            if is_done(folder) or list_checkpoints(folder / FOLDER):
                config = config_with_fingerprints(runs[point.name], splits[point.name])
                free = free_fields(folder)
                compare_config(folder, config, free=free, force=force)
                if compare_config(folder, config, free=free - {"evaluation"}, force=True):
                    (folder / OUTCOME).unlink(missing_ok=True)  # measured again on the dev split


def rank_points(outcomes: Sequence[CellOutcome], criterion: Criterion) -> tuple[SweepPoint, ...]:
    """The points that finished or diverged, best first; of equal points, the one that was tried first."""
    name = name_score(criterion)
    counted = (one for one in outcomes if one.diverged or not one.fault)
    points = (SweepPoint(list_settings(one.at), one.values.get(name, math.nan), criterion) for one in counted)
    sign = -1 if criterion.larger else 1
    return tuple(sorted(points, key=lambda point: (point.diverged, sign * point.value)))


def choose_best(tried: Sequence[SweepPoint], outcomes: Sequence[CellOutcome], out: Path) -> SweepPoint:
    """The best point. TrainingError if a point failed, since it might have been the best; Diverged if all points
    diverged."""
    failed = [one for one in outcomes if one.fault and not one.diverged]
    if failed:
        reason = f"{len(failed)} of {len(outcomes)} points of the sweep failed, first {failed[0].cell}"
        raise TrainingError(f"{reason}: {failed[0].fault}; the same command tries them again")
    if tried[0].diverged:
        raise Diverged(f"every point diverged; their runs are in {out / POINTS}. Try lower rates, or optim.clip=1")
    return tried[0]


def with_all_images(run: Run) -> Run:
    """The run with nothing held out. If that leaves no split to choose by, it cannot stop early either."""
    run = replace(run, data=hold_out_nothing(run.data))
    chooses = open_splits(run.data, task_of(run.objective)).can_select_best
    return run if chooses else replace(run, evaluation=replace(run.evaluation, patience=0))


def is_finished(run: Run, grid: Grid, *, out: Path, world: World, change: Change = apply_settings) -> bool:
    """Whether a folder holds this search, finished. ConfigError if it holds another grid or another run."""
    check_same_grid(out, grid, world)
    if not is_done(out) or not (out / SWEEP).exists():
        return False
    best = read_json(out / SWEEP)["tried"][0]["settings"]
    check_same_run(out, with_all_images(change(run, best)), world)
    return True


def check_same_grid(out: Path, grid: Grid, world: World) -> None:
    """Raises ConfigError if the folder holds another search, or a plain run. The main process reads it for all."""
    with raise_everywhere(world):
        refused = ""
        if world.is_main and (out / SWEEP).exists():
            found = diff_plain(sort_values(read_json(out / SWEEP)["grid"]), sort_values(grid))
            refused = f"{out} holds a sweep of another grid ({'; '.join(found)})" if found else ""
        elif world.is_main and (out / CONFIG).exists():
            refused = f"{out} holds a run that is not a sweep"
        if refused:
            raise ConfigError(f"{refused}; add --force to continue with the new one, or give another --out")


def sort_values(grid: Grid) -> dict[str, list[str]]:
    """A grid as plain data, with its values in a fixed order."""
    return {field: sorted(str(value) for value in values) for field, values in grid.items()}

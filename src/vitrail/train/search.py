"""The paper's search (4.1, 4.3): every point of a grid with a dev split held out, the best one on all pictures."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.core.errors import ConfigError, Exploded
from vitrail.core.settings import differences, with_settings
from vitrail.core.storage import replacing
from vitrail.distributed.world import World
from vitrail.train.config import Data, Run
from vitrail.train.folder.layout import COMMAND, CONFIG, POINTS, SWEEP, is_done, read_json
from vitrail.train.loop import train
from vitrail.train.observer import Observer, Silent
from vitrail.train.pictures import Pictures, find_pictures, on_all
from vitrail.train.resolve import resolved
from vitrail.train.result import Result
from vitrail.train.resume import same_run

DEV = 0.1

Grid = Mapping[str, Sequence[Any]]
Change = Callable[[Run, Sequence[str]], Run]  # applies settings to a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One setting of the grid and how it did on the dev split; one that exploded has no accuracy."""

    settings: tuple[str, ...]
    accuracy: float

    @property
    def exploded(self) -> bool:
        return math.isnan(self.accuracy)

    @property
    def shown(self) -> str:
        return "exploded" if self.exploded else f"{self.accuracy:.2%}"

    @property
    def name(self) -> str:
        return ",".join(self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The points tried, best first, and the run on all pictures with the best of them; none where a signal came."""

    points: tuple[Point, ...]
    final: Result | None


def points_of(grid: Grid) -> list[tuple[str, ...]]:
    """Every combination, as settings."""
    if not grid or not all(grid.values()):
        raise ConfigError("an empty grid: give --sweep FIELD=VALUE,VALUE or a recipe that has one")
    pairs = [[f"{field}={value}" for value in values] for field, values in grid.items()]
    return list(itertools.product(*pairs))


def trials(run: Run, grid: Grid, change: Change) -> list[tuple[tuple[str, ...], Run]]:
    """Every point with its run, which has a dev split held out."""
    held = replace(run, data=replace(run.data, dev=run.data.dev or DEV, watch="dev", test="none"))
    return [
        (settings, replace(change(held, settings), name=f"{run.name} {', '.join(settings)}"))
        for settings in points_of(grid)
    ]


def runs_worth(run: Run, grid: Grid, world: World, change: Change = with_settings) -> float:
    """How many times as long as the run on all pictures a search takes, its last run included, by pictures and their
    multiply-accumulates; nobody can know what patience will save. Points that cannot work are refused."""
    seen: dict[Data, Pictures] = {}

    def work(one: Run) -> float:
        if one.data not in seen:
            seen[one.data] = find_pictures(one.data, labelled=one.objective.labelled)
        patient = replace(one, evaluation=replace(one.evaluation, patience=0))
        whole = resolved(patient, seen[one.data], world)
        assert whole.model is not None
        return whole.steps * whole.batch * whole.objective.work(whole.model)

    whole = replace(run, data=on_all(run.data))
    points = trials(run, grid, change)
    last = max(work(change(whole, settings)) for settings, _ in points)
    return (sum(work(point) for _, point in points) + last) / work(whole)


def search(
    run: Run,
    grid: Grid,
    *,
    out: Path,
    world: World,
    command: dict[str, Any] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    change: Change = with_settings,
) -> Found:
    """Tries every point in OUT/sweep, then trains in OUT. The same call again goes on; points that are done stay. A
    point that explodes is out, and the others go on."""
    observer, command = observer or Silent(), command or {}
    if not force:
        refuse_another(out, grid, world)
    tried: list[Point] = []
    points = trials(run, grid, change)
    if not run.objective.labelled and not find_pictures(run.data, labelled=False).classes:
        raise ConfigError(f"a search chooses by accuracy on held-out pictures, and {run.data.source} has no labels")
    if world.first:
        begin(out, grid, command, observer)
    for number, (settings, point) in enumerate(points, 1):
        observer.told(f"sweep {number} of {len(points)}: {', '.join(settings)}")
        folder = out / POINTS / ",".join(settings)
        try:
            result = train(point, out=folder, world=world, command=command, force=force, observer=observer)
        except Exploded as error:
            observer.told(str(error))
            accuracy = math.nan
        else:
            if result.state != "done":
                return Found(points=ranked(tried), final=None)
            accuracy = result.best.accuracy if point.evaluation.patience else result.final_watch
        tried.append(Point(settings=settings, accuracy=accuracy))
        if world.first:
            note(out, grid, tried, observer)
    best = ranked(tried)[0]
    if best.exploded:
        raise Exploded(
            f"every point of the search exploded; {out / POINTS} holds their runs. Try lower rates, or optim.clip=1"
        )
    observer.told(f"best on dev: {best.name} with {best.shown}; now on all the training pictures")
    final = on_everything(change(run, best.settings))
    result = train(final, out=out, world=world, command=command, force=force, observer=observer)
    return Found(points=ranked(tried), final=result)


def on_everything(run: Run) -> Run:
    """The run with nothing held out. Where nothing is left to choose by, it cannot stop early either."""
    run = replace(run, data=on_all(run.data))
    chooses = find_pictures(run.data, labelled=run.objective.labelled).chooses
    return run if chooses else replace(run, evaluation=replace(run.evaluation, patience=0))


def is_over(run: Run, grid: Grid, *, out: Path, world: World, change: Change = with_settings) -> bool:
    """Whether this very search is done in a folder. One of another grid or another run is refused."""
    refuse_another(out, grid, world)
    if not is_done(out) or not (out / SWEEP).exists():
        return False
    best = read_json(out / SWEEP)["tried"][0]["settings"]
    same_run(out, on_everything(change(run, best)), world)
    return True


def refuse_another(out: Path, grid: Grid, world: World) -> None:
    """Refuses a folder that holds another search, or a run that is none. What the first process finds counts."""
    before, after = noted(out) if world.first else {}, in_order(grid)
    if before is None and (out / CONFIG).exists():
        refused = f"{out} holds a run and no sweep"
    else:
        found = differences(before, after) if before else []
        refused = f"{out} holds a sweep of another grid ({'; '.join(found)})" if found else ""
    refused = world.agree(refused)
    if refused:
        raise ConfigError(f"{refused}; add --force to go on with the new one, or give another --out")


def in_order(grid: Grid) -> dict[str, list[str]]:
    """A grid as plain data, whatever the order of its values."""
    return {field: sorted(str(value) for value in values) for field, values in grid.items()}


def noted(out: Path) -> dict[str, list[str]] | None:
    """The grid of the search in a folder; none where there is no search."""
    return in_order(read_json(out / SWEEP)["grid"]) if (out / SWEEP).exists() else None


def begin(out: Path, grid: Grid, command: dict[str, Any], observer: Observer) -> None:
    """Leaves what going on needs to know; the last run writes its own over it. What was tried stays noted."""
    write(out / COMMAND, command, observer)
    if noted(out) != in_order(grid):
        note(out, grid, (), observer)


def note(out: Path, grid: Grid, tried: Sequence[Point], observer: Observer) -> None:
    """OUT/sweep.json: the grid, and the points tried so far, best first."""
    rows = [
        {"settings": list(point.settings), "dev accuracy": "exploded" if point.exploded else point.accuracy}
        for point in ranked(tried)
    ]
    values = {field: [str(value) for value in values] for field, values in grid.items()}
    write(out / SWEEP, {"grid": values, "points": len(points_of(grid)), "tried": rows}, observer)


def write(path: Path, content: dict[str, Any], observer: Observer) -> None:
    """A full disk does not end the search."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        observer.told(f"{path} could not be written ({error.strerror}); the search goes on")


def ranked(points: Sequence[Point]) -> tuple[Point, ...]:
    """Best first; among equals the one that was tried first."""
    return tuple(sorted(points, key=lambda point: (point.exploded, -point.accuracy)))

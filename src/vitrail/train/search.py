"""The paper's search (4.1, 4.3): every point of a grid with a dev split held out, the best one on all pictures."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.core.errors import ConfigError, Exploded
from vitrail.core.settings import with_settings
from vitrail.core.storage import replacing
from vitrail.distributed.world import World
from vitrail.train.config import Run
from vitrail.train.loop import Observer, Result, Silent, train
from vitrail.train.pictures import find_pictures, on_all

DEV = 0.1

Grid = Mapping[str, Sequence[Any]]


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


def search(
    run: Run,
    grid: Grid,
    *,
    out: Path,
    world: World,
    command: dict[str, Any] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    change: Callable[[Run, Sequence[str]], Run] = with_settings,
) -> Found:
    """Tries every point in OUT/sweep, then trains in OUT. The same call again goes on; points that are done stay. A
    point that explodes is out, and the others go on. `change` applies settings to a run."""
    observer, command = observer or Silent(), command or {}
    trial = replace(run, data=replace(run.data, dev=run.data.dev or DEV, watch="dev", test="none"))
    tried: list[Point] = []
    points = points_of(grid)
    for number, settings in enumerate(points, 1):
        observer.told(f"sweep {number} of {len(points)}: {', '.join(settings)}")
        point = replace(change(trial, settings), name=f"{run.name} {', '.join(settings)}")
        folder = out / "sweep" / ",".join(settings)
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
            note(out, tried, len(points), observer)
    best = ranked(tried)[0]
    if best.exploded:
        raise Exploded(
            f"every point of the search exploded; {out / 'sweep'} holds their runs. Try lower rates, or optim.clip=1"
        )
    observer.told(f"best on dev: {best.name} with {best.shown}; now on all the training pictures")
    final = on_everything(change(run, best.settings))
    result = train(final, out=out, world=world, command=command, force=force, observer=observer)
    return Found(points=ranked(tried), final=result)


def on_everything(run: Run) -> Run:
    """The run with nothing held out. Where nothing is left to choose by, it cannot stop early either."""
    run = replace(run, data=on_all(run.data))
    chooses = find_pictures(run.data).chooses
    return run if chooses else replace(run, evaluation=replace(run.evaluation, patience=0))


def note(out: Path, tried: Sequence[Point], count: int, observer: Observer) -> None:
    """OUT/sweep.json: the points tried so far, best first. It is for people; a full disk does not end the search."""
    rows = [
        {"settings": list(point.settings), "dev accuracy": "exploded" if point.exploded else point.accuracy}
        for point in ranked(tried)
    ]
    try:
        with replacing(out / "sweep.json") as file:
            file.write(json.dumps({"points": count, "tried": rows}, indent=1).encode() + b"\n")
    except OSError as error:
        observer.told(f"{out / 'sweep.json'} could not be written ({error.strerror}); the search goes on")


def ranked(points: Sequence[Point]) -> tuple[Point, ...]:
    """Best first; among equals the one that was tried first."""
    return tuple(sorted(points, key=lambda point: (point.exploded, -point.accuracy)))

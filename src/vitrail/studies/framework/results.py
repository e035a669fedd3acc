"""What a study keeps, and what its folder says to whoever starts it again.

OUT/
    study.json              which study, and how every cell stands
    cells/NAME/             the run folder of a cell
    cells/NAME/outcome.json what came of it; there once it is finished, and not before
    table.md  table.csv  figure.png  figure.svg  report.html

Means and spreads over seeds, and what can be said of a difference between two of them.

    for group in groups(outcomes):
        print(group.at, percent(group.spread("accuracy")))      # "93.1 ± 0.2"

Deviations are those of a sample (n - 1 below the line): three seeds say little, and n would say less than that.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.checkpoint.store.layout import FOLDER as CHECKPOINTS
from vitrail.checkpoint.store.layout import list_checkpoints
from vitrail.core.config_overrides import diff_plain, drop_fields, from_plain, to_plain
from vitrail.core.errors import ConfigError
from vitrail.train.config import RunRequest
from vitrail.train.grid.plan import OUTCOME, Cell, CellOutcome, Coordinate, read_outcome
from vitrail.train.report.page import read_metrics
from vitrail.train.run_folder.files import BEST, COMMAND, CONFIG, METRICS, is_done, read_json
from vitrail.train.run_folder.metric_rows import best_of, headline, scores

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


def finished(out: Path, cells: Sequence[Cell]) -> dict[str, CellOutcome]:
    """The cells that need no more work, with what came of them."""
    found = {cell.name: read_outcome(cell, folder_of(out, cell.name)) for cell in cells}
    return {name: outcome for name, outcome in found.items() if outcome is not None}


def changed(out: Path, cell: Cell) -> list[str]:
    """Where the run of a cell is another than the one that was trained in its folder: "optim.lr: 0.001 -> 0.003"."""
    folder = folder_of(out, cell.name)
    trained = (folder / OUTCOME).exists() or is_done(folder) or list_checkpoints(folder / CHECKPOINTS)
    if not trained or not (folder / COMMAND).exists():
        return []
    command = read_json(folder / COMMAND)
    before, now = command.get(ASKED), as_read(to_plain(cell.run))
    if not isinstance(before, Mapping):
        return [f"it holds a run of its own, and no cell of a study ({COMMAND})"]
    lines = diff_plain(with_defaults(before), now)
    if command.get("after", "") != cell.after:
        lines.append(f"after: {command.get('after') or 'nothing'} -> {cell.after or 'nothing'}")
    return drop_fields(lines, FREE)


def as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data as it comes back from a file."""
    return json.loads(json.dumps(values))


def with_defaults(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run as it was written, with fields that there were not yet; as it is where it cannot be read any more."""
    try:
        return as_read(to_plain(from_plain(RunRequest, before)))
    except ConfigError:
        return before


def take_up(out: Path, study: str, scale: str, cells: Sequence[Cell], *, force: bool) -> list[str]:
    """Refuses a folder that holds something else, and cells whose run has changed. With `force` those are removed, with
    what was trained from their weights, to be trained again; their names are returned."""
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
            "add --force to train those again, or give another --out"
        )
    anew = set(found)
    for _ in cells:  # whatever order they stand in
        anew |= {cell.name for cell in cells if cell.after in anew}
    there = [cell.name for cell in cells if cell.name in anew and folder_of(out, cell.name).exists()]
    for name in there:
        shutil.rmtree(folder_of(out, name))
    return there


SEED: Final = "seed"
NOTHING: Final = "–"
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them that of the normal distribution is near.
STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
SHUFFLES: Final = 4000


@dataclass(frozen=True, slots=True)
class Spread:
    """One value by seed."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values, "a spread of nothing"

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.count

    @property
    def deviation(self) -> float | None:
        """The standard deviation of a sample; none for a single seed, which has no spread."""
        if self.count < 2:
            return None
        return math.sqrt(math.fsum((value - self.mean) ** 2 for value in self.values) / (self.count - 1))

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Outcomes that differ by seed alone; those that failed are not among them."""

    at: Mapping[str, Coordinate]
    outcomes: tuple[CellOutcome, ...]

    def spread(self, value: str) -> Spread | None:
        """Of a value over the seeds; none where no seed has it."""
        found = tuple(one.values[value] for one in self.outcomes if value in one.values)
        return Spread(found) if found else None

    def mean(self, value: str) -> float | None:
        found = self.spread(value)
        return None if found is None else found.mean


def groups(outcomes: Iterable[CellOutcome]) -> tuple[Group, ...]:
    """Outcomes by where they stand but for the seed, in the order of their first cell. A place where every seed failed
    is a group of none."""
    places: dict[tuple[tuple[str, Coordinate], ...], list[CellOutcome]] = {}
    for one in outcomes:
        place = tuple((name, value) for name, value in one.at.items() if name != SEED)
        places.setdefault(place, []).extend(() if one.fault else (one,))
    return tuple(Group(at=dict(place), outcomes=tuple(found)) for place, found in places.items())


def group_at(found: Iterable[Group], at: Mapping[str, Coordinate]) -> Group | None:
    """The first group that stands there; it may have places next to those named."""
    return next((one for one in found if at.items() <= one.at.items()), None)


def seeds(outcomes: Iterable[CellOutcome]) -> int:
    """How many seeds the groups have at most."""
    return max((len(group.outcomes) for group in groups(outcomes)), default=0)


def percent(spread: Spread | None, digits: int = 1) -> str:
    """Shares as people write them: "93.1 ± 0.2", without a spread for one seed, a dash for none."""
    return NOTHING if spread is None else shown(spread, scale=100, digits=digits)


def shown(spread: Spread, *, scale: float = 1.0, digits: int = 1) -> str:
    mean = f"{scale * spread.mean:.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ± {scale * spread.deviation:.{digits}f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The difference of two means, and half the width of its 95 % interval; none where no seed was repeated."""

    difference: float
    margin: float | None

    @property
    def above(self) -> bool:
        """Whether the first is above the second beyond the spread of the seeds."""
        return self.margin is not None and self.difference > self.margin

    @property
    def below(self) -> bool:
        return self.margin is not None and -self.difference > self.margin

    @property
    def open(self) -> bool:
        """Whether these seeds cannot tell."""
        return not self.above and not self.below

    def __str__(self) -> str:
        """In points: "+0.8 ± 0.3 points", where the second number is the margin."""
        margin = "" if self.margin is None else f" ± {100 * self.margin:.1f}"
        return f"{100 * self.difference:+.1f}{margin} points"


def gap(one: Spread, other: Spread, among: Sequence[Spread] = ()) -> Gap:
    """Of two means. Seeds are few, so the deviation is pooled: over these two, or over all spreads of a study that may
    be held to share it, these two among them."""
    pool = pooled(among or (one, other))
    if pool is None:
        return Gap(difference=one.mean - other.mean, margin=None)
    deviation, freedom = pool
    error = deviation * math.sqrt(1 / one.count + 1 / other.count)
    return Gap(difference=one.mean - other.mean, margin=student(freedom) * error)


def paired(one: Group, other: Group, value: str) -> Spread | None:
    """The differences seed by seed, where both have the value: what a seed gives to both, as the weights that they
    start from, falls out of them. None where no seed has both."""
    theirs = {found.at[SEED]: found.values[value] for found in other.outcomes if value in found.values}
    found = [(mine.values[value], mine.at[SEED]) for mine in one.outcomes if value in mine.values]
    differences = tuple(mine - theirs[seed] for mine, seed in found if seed in theirs)
    return Spread(differences) if differences else None


def paired_gap(differences: Spread, among: Sequence[Spread] = ()) -> Gap:
    """Of differences seed by seed, with a deviation that is pooled over those `among` which may be held to share it."""
    pool = pooled(among or (differences,))
    if pool is None:
        return Gap(difference=differences.mean, margin=None)
    deviation, freedom = pool
    return Gap(difference=differences.mean, margin=student(freedom) * deviation / math.sqrt(differences.count))


def pooled(spreads: Iterable[Spread]) -> tuple[float, int] | None:
    """The common standard deviation and its degrees of freedom; none where no seed was repeated."""
    known = list(spreads)
    freedom = sum(one.count - 1 for one in known)
    if not freedom:
        return None
    squares = math.fsum((value - one.mean) ** 2 for one in known for value in one.values)
    return math.sqrt(squares / freedom), freedom


def student(freedom: int) -> float:
    """How many standard errors a 95 % interval reaches to either side."""
    assert freedom >= 1
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    return 1.96 + 2.46 / freedom  # within 0.001 of the quantile there


def by_chance(spreads: Sequence[Spread]) -> float | None:
    """How often means would lie as far apart as these do if all values were of one kind: the share of 4,000 shuffles
    of the values over the groups, always the same ones. None for one group, or where no seed was repeated."""
    known = list(spreads)
    if len(known) < 2 or pooled(known) is None:
        return None
    counts = np.array([one.count for one in known])
    values = np.concatenate([one.values for one in known])
    ends = np.cumsum(counts)[:-1]
    draws = np.random.default_rng(0).permuted(np.tile(values, (SHUFFLES, 1)), axis=1)
    means = np.stack([part.mean(axis=1) for part in np.split(draws, ends, axis=1)], axis=1)
    found = np.ptp([one.mean for one in known])
    # The arrangement found is one of the possible ones, so that the share is never 0.
    return float((1 + (np.ptp(means, axis=1) >= found - 1e-12).sum()) / (1 + SHUFFLES))

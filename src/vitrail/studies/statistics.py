"""Means and spreads over seeds, and what can be said of a difference between two of them.

    for group in groups(outcomes):
        print(group.at, percent(group.spread("accuracy")))      # "93.1 ± 0.2"

Deviations are those of a sample (n - 1 below the line): three seeds say little, and n would say less than that.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vitrail.train.grid.cell import Outcome, Place

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

    at: Mapping[str, Place]
    outcomes: tuple[Outcome, ...]

    def spread(self, value: str) -> Spread | None:
        """Of a value over the seeds; none where no seed has it."""
        found = tuple(one.values[value] for one in self.outcomes if value in one.values)
        return Spread(found) if found else None

    def mean(self, value: str) -> float | None:
        found = self.spread(value)
        return None if found is None else found.mean


def groups(outcomes: Iterable[Outcome]) -> tuple[Group, ...]:
    """Outcomes by where they stand but for the seed, in the order of their first cell. A place where every seed failed
    is a group of none."""
    places: dict[tuple[tuple[str, Place], ...], list[Outcome]] = {}
    for one in outcomes:
        place = tuple((name, value) for name, value in one.at.items() if name != SEED)
        places.setdefault(place, []).extend(() if one.fault else (one,))
    return tuple(Group(at=dict(place), outcomes=tuple(found)) for place, found in places.items())


def group_at(found: Iterable[Group], at: Mapping[str, Place]) -> Group | None:
    """The first group that stands there; it may have places beside those named."""
    return next((one for one in found if at.items() <= one.at.items()), None)


def seeds(outcomes: Iterable[Outcome]) -> int:
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

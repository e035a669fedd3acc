"""Means and spreads over seeds, and what a difference between two of them shows.

    for group in group_by_seed(outcomes):
        print(group.at, format_spread(group.spread("accuracy")))      # "93.1 ± 0.2"

Deviations are those of a sample (divided by n - 1).

And accuracy against compute (4.4, Figure 5): the frontier, a power law fitted to it, and what equal accuracy costs.

    law = fit_power_law(find_frontier(points))          # error = a · C^-b + c
    compare_compute(vit, resnet)                        # how many times the first's compute the second needs
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, overload

import numpy as np

from vitrail.train.grid.plan import CellOutcome, Coordinate

SEED: Final = "seed"  # the axis of a grid along which runs are repeated
NOTHING: Final = "–"
WATCHED: Final = "watch"
FEWSHOT: Final = "fewshot-5"
VALUE_NAMES: Final = {"accuracy": "test accuracy", FEWSHOT: "5-shot accuracy", WATCHED: "dev accuracy"}
WIDE_MARGIN: Final = 0.02  # a share; a wider margin hides effects of the size that the paper reports
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond these the normal distribution's is close.
STUDENT: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
SHUFFLES: Final = 4000
LIMITS: Final = 200  # values of c that are tried
LIMIT_POINTS: Final = 5  # points from which on the limit c is fitted; fewer cannot tell it from the slope
LEVELS: Final = 25  # accuracies at which two families are compared


class Verdict(Enum):
    """How a finding compares with the paper's."""

    AGREES = "agrees"
    PARTLY = "agrees in part"
    DISAGREES = "disagrees"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Spread:
    """One value per seed; at least one."""

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.count

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the sample; None for a single seed."""
        pool = pool_deviations([self])
        return None if pool is None else pool[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedGroup:
    """Outcomes that differ by seed alone, without those that failed."""

    at: Mapping[str, Coordinate]
    outcomes: tuple[CellOutcome, ...]

    def spread(self, value: str) -> Spread | None:
        """A value over the seeds; None if no seed has it."""
        found = tuple(one.values[value] for one in self.outcomes if value in one.values)
        return Spread(found) if found else None

    def mean(self, value: str) -> float | None:
        found = self.spread(value)
        return None if found is None else found.mean


def group_by_seed(outcomes: Iterable[CellOutcome]) -> tuple[SeedGroup, ...]:
    """Outcomes by their place in the grid apart from the seed, in the order of their first cell. A place where every
    seed failed is an empty group."""
    places: dict[tuple[tuple[str, Coordinate], ...], list[CellOutcome]] = {}
    for one in outcomes:
        place = tuple((name, value) for name, value in one.at.items() if name != SEED)
        places.setdefault(place, []).extend(() if one.fault else (one,))
    return tuple(SeedGroup(at=dict(place), outcomes=tuple(found)) for place, found in places.items())


def find_group(groups: Iterable[SeedGroup], **at: Coordinate) -> SeedGroup | None:
    """The first group at these coordinates; it may have others."""
    return next((group for group in groups if at.items() <= group.at.items()), None)


def find_spread(groups: Iterable[SeedGroup], value: str, **at: Coordinate) -> Spread | None:
    group = find_group(groups, **at)
    return None if group is None else group.spread(value)


def select_on_dev(groups: Iterable[SeedGroup], value: str, **at: Coordinate) -> SeedGroup | None:
    """Of the groups at these coordinates that have `value`, the one with the best mean on the watched split."""
    known = [group for group in groups if at.items() <= group.at.items() and group.mean(value) is not None]
    scores = [(watched, -rank) for rank, group in enumerate(known) if (watched := group.mean(WATCHED)) is not None]
    return known[-max(scores)[1]] if scores else None


def choose_value(outcomes: Iterable[CellOutcome]) -> str:
    """The value that a study reports: few-shot accuracy where it was measured, as on JFT-300M, which has no test split;
    otherwise the test accuracy."""
    return FEWSHOT if any(FEWSHOT in one.values for one in outcomes) else "accuracy"


def format_spread(spread: Spread | None, digits: int = 1, *, scale: float = 100.0) -> str:
    """ "93.1 ± 0.2", in per cent; without a deviation for one seed, a dash for None."""
    if spread is None:
        return NOTHING
    mean = f"{scale * spread.mean:.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ± {scale * spread.deviation:.{digits}f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The difference of two means, and half the width of its 95 % interval; None if no seed was repeated."""

    difference: float
    margin: float | None

    @property
    def is_above(self) -> bool:
        """Whether the first is above the second beyond the spread over seeds."""
        return self.margin is not None and self.difference > self.margin

    @property
    def is_below(self) -> bool:
        return self.margin is not None and -self.difference > self.margin

    @property
    def is_open(self) -> bool:
        return not self.is_above and not self.is_below

    def judge(self, *, upward: bool = True) -> Verdict:
        """Whether the difference has the sign that the paper reports."""
        if self.is_open:
            return Verdict.UNDECIDED
        return Verdict.AGREES if self.is_above == upward else Verdict.DISAGREES

    @property
    def reading(self) -> str:
        """What the spread over seeds allows to conclude."""
        if self.margin is None:
            return "one seed decides nothing"
        if not self.is_open:
            return "a difference beyond the spread over seeds"
        wide = ", and the spread is too wide for a small one" if self.margin > WIDE_MARGIN else ""
        return f"no difference beyond the spread over seeds{wide}"

    def __str__(self) -> str:
        """ "+0.8 ± 0.3 points", the second number being the margin."""
        margin = "" if self.margin is None else f" ± {100 * self.margin:.1f}"
        return f"{100 * self.difference:+.1f}{margin} points"


@overload
def compare(one: Spread, other: Spread, among: Iterable[Spread | None] = ()) -> Gap: ...
@overload
def compare(one: Spread | None, other: Spread | None, among: Iterable[Spread | None] = ()) -> Gap | None: ...
def compare(one: Spread | None, other: Spread | None, among: Iterable[Spread | None] = ()) -> Gap | None:
    """The first mean minus the second; None if one is missing. Seeds are few, so the deviation is pooled over these
    two, or over all spreads of a study that may share it (`among`, these two included)."""
    if one is None or other is None:
        return None
    shares = 1 / one.count + 1 / other.count
    return gap_of(one.mean - other.mean, shares, [each for each in among if each] or [one, other])


def pair_by_seed(one: SeedGroup | None, other: SeedGroup | None, value: str) -> Spread | None:
    """The differences seed by seed, which cancels what the two share for a seed, such as the weights they start from.
    None if no seed has both values."""
    if one is None or other is None:
        return None
    theirs = {each.at[SEED]: each.values[value] for each in other.outcomes if value in each.values}
    ours = [(each.values[value], each.at[SEED]) for each in one.outcomes if value in each.values]
    differences = tuple(mine - theirs[seed] for mine, seed in ours if seed in theirs)
    return Spread(differences) if differences else None


def compare_pairs(differences: Spread, among: Sequence[Spread] = ()) -> Gap:
    """The gap of differences seed by seed; the deviation is pooled over those `among` that may share it."""
    return gap_of(differences.mean, 1 / differences.count, among or [differences])


def gap_of(difference: float, shares: float, among: Sequence[Spread]) -> Gap:
    """A gap whose variance is `shares` (the sum of 1 / count over the means involved) times the pooled variance."""
    pool = pool_deviations(among)
    margin = None if pool is None else student_quantile(pool[1]) * pool[0] * math.sqrt(shares)
    return Gap(difference=difference, margin=margin)


def pool_deviations(spreads: Iterable[Spread]) -> tuple[float, int] | None:
    """The common standard deviation and its degrees of freedom; None if no seed was repeated."""
    known = list(spreads)
    freedom = sum(one.count - 1 for one in known)
    if not freedom:
        return None
    squares = math.fsum((value - one.mean) ** 2 for one in known for value in one.values)
    return math.sqrt(squares / freedom), freedom


def student_quantile(freedom: int) -> float:
    """How many standard errors a 95 % interval extends to either side."""
    assert freedom >= 1
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.46 / freedom  # within 0.001


def permutation_test(spreads: Sequence[Spread]) -> float | None:
    """How often shuffled values would put the means as far apart as these are: a share of 4,000 shuffles, always the
    same ones. None for one group, or if no seed was repeated."""
    if len(spreads) < 2 or pool_deviations(spreads) is None:
        return None
    ends = np.cumsum([one.count for one in spreads])[:-1]
    values = np.concatenate([one.values for one in spreads])
    draws = np.random.default_rng(0).permuted(np.tile(values, (SHUFFLES, 1)), axis=1)
    means = np.stack([part.mean(axis=1) for part in np.split(draws, ends, axis=1)], axis=1)
    observed = np.ptp([one.mean for one in spreads])
    # The observed arrangement is one of the possible ones, so the share is never 0.
    return float((1 + (np.ptp(means, axis=1) >= observed - 1e-12).sum()) / (1 + SHUFFLES))


class Cost(NamedTuple):
    """A training: its compute, in any unit, and its accuracy as a share."""

    compute: float
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """error = a · C^-b + c."""

    a: float
    b: float
    c: float

    def error(self, compute: float) -> float:
        return self.a * compute**-self.b + self.c


def find_frontier(points: Iterable[Cost]) -> tuple[Cost, ...]:
    """The trainings that no cheaper or equally cheap one beats, by rising compute."""
    frontier: list[Cost] = []
    for point in sorted(points, key=lambda one: (one.compute, -one.accuracy)):
        if not frontier or point.accuracy > frontier[-1].accuracy:
            frontier.append(point)
    return tuple(frontier)


def fit_power_law(points: Sequence[Cost]) -> PowerLaw | None:
    """The power law through points, by least squares of the logarithm of the error. For each limit c that is a line;
    the limit with the smallest squares wins, with c = 0 for few points. None for fewer than two, or if the error does
    not fall."""
    known = [point for point in points if point.accuracy < 1 and point.compute > 0]
    if len({point.compute for point in known}) < 2:
        return None
    compute, errors = np.array([(point.compute, 1 - point.accuracy) for point in known]).T
    limits = np.linspace(0, errors.min(), LIMITS, endpoint=False) if len(known) >= LIMIT_POINTS else np.zeros(1)
    centred, logs = np.log(compute) - np.log(compute).mean(), np.log(errors - limits[:, None])
    slopes = logs @ centred / (centred @ centred)
    factors = np.exp(logs.mean(axis=1) - slopes * np.log(compute).mean())
    # Squares of the logarithm of the whole error, so that limits are comparable.
    fitted = factors[:, None] * compute ** slopes[:, None] + limits[:, None]
    best = int(((np.log(fitted) - np.log(errors)) ** 2).sum(axis=1).argmin())
    return PowerLaw(a=float(factors[best]), b=-float(slopes[best]), c=float(limits[best])) if slopes[best] < 0 else None


def interpolate_accuracy(points: Sequence[Cost], compute: float) -> float | None:
    """The best accuracy for a given compute along a frontier: interpolated over the logarithm of compute, and constant
    beyond the most expensive point. None below the cheapest."""
    frontier = find_frontier(points)
    if not frontier or compute < frontier[0].compute:
        return None
    costs, accuracies = zip(*frontier, strict=True)
    return float(np.interp(math.log(compute), np.log(costs), accuracies))


def compare_compute(one: Sequence[Cost], other: Sequence[Cost]) -> float | None:
    """The compute that the other needs for the same accuracy, as a multiple of the first's: the geometric mean over the
    accuracies that both frontiers reach. None if there are none."""
    edges = [find_frontier(points) for points in (one, other)]
    if min(map(len, edges)) < 2:
        return None
    low, high = max(edge[0].accuracy for edge in edges), min(edge[-1].accuracy for edge in edges)
    if low > high:
        return None
    levels = np.linspace(low, high, LEVELS)
    ours, theirs = (np.interp(levels, [p.accuracy for p in edge], np.log([p.compute for p in edge])) for edge in edges)
    return math.exp((theirs - ours).mean())

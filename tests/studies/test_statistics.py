"""Means and spreads over seeds, and what is said of differences."""

import math

import numpy as np
import pytest
from scipy import stats

from vitrail.studies.framework.results import (
    Spread,
    by_chance,
    gap,
    group_at,
    groups,
    paired,
    paired_gap,
    percent,
    pooled,
    seeds,
    student,
)
from vitrail.train.grid.plan import CellOutcome


def outcome(kind: str, seed: int, accuracy: float | None, fault: str = "") -> CellOutcome:
    values = {} if accuracy is None else {"accuracy": accuracy}
    return CellOutcome(cell=f"{kind}-{seed}", at={"kind": kind, "seed": seed}, values=values, fault=fault)


def test_mean_deviation_and_error() -> None:
    spread = Spread((0.90, 0.92, 0.97))
    assert spread.mean == pytest.approx(0.93)
    assert spread.deviation == pytest.approx(np.std(spread.values, ddof=1))
    assert spread.error == pytest.approx(np.std(spread.values, ddof=1) / math.sqrt(3))


def test_a_single_seed_has_no_spread() -> None:
    spread = Spread((0.9,))
    assert (spread.deviation, spread.error) == (None, None)


def test_texts() -> None:
    assert percent(Spread((0.929, 0.931, 0.933))) == "93.1 ± 0.2"
    assert percent(Spread((0.9312,)), 2) == "93.12"
    assert percent(None) == "–"


def test_groups_leave_the_seed_out_and_keep_the_order() -> None:
    found = groups([outcome("b", 0, 0.5), outcome("a", 0, 0.7), outcome("b", 1, 0.6)])
    assert [group.at for group in found] == [{"kind": "b"}, {"kind": "a"}]
    assert [len(group.outcomes) for group in found] == [2, 1]
    assert found[0].mean("accuracy") == pytest.approx(0.55)


def test_failed_cells_do_not_count_but_their_place_stays() -> None:
    found = groups([outcome("a", 0, None, "out of memory"), outcome("a", 1, 0.7), outcome("b", 0, None, "too")])
    assert [len(group.outcomes) for group in found] == [1, 0]
    assert found[1].spread("accuracy") is None
    assert seeds([outcome("a", 0, 0.1), outcome("a", 1, 0.1), outcome("b", 0, 0.1)]) == 2


def test_a_group_is_found_by_a_part_of_its_place() -> None:
    found = groups([CellOutcome(cell="x", at={"family": "ViT", "part": 0.1, "seed": 0}, values={"accuracy": 0.5})])
    assert group_at(found, {"part": 0.1}) is found[0]
    assert group_at(found, {"part": 0.2}) is None


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 31, 60, 500])
def test_quantiles_are_students(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-3)


def test_a_gap_has_the_interval_of_a_t_test() -> None:
    one, other = Spread((0.90, 0.92, 0.93)), Spread((0.85, 0.86, 0.89))
    found = gap(one, other)
    interval = stats.ttest_ind(one.values, other.values).confidence_interval(0.95)
    assert found.margin is not None
    assert found.difference - found.margin == pytest.approx(interval.low, abs=1e-4)
    assert found.difference + found.margin == pytest.approx(interval.high, abs=1e-4)
    assert found.above
    assert not found.below
    assert gap(other, one).below


def test_a_paired_gap_has_the_interval_of_a_paired_t_test() -> None:
    one, other = (0.70, 0.82, 0.93), (0.68, 0.81, 0.90)
    every = [outcome(kind, seed, value) for kind, some in (("a", one), ("b", other)) for seed, value in enumerate(some)]
    first, second = groups([*every, outcome("a", 3, 0.1), outcome("b", 4, 0.9), outcome("b", 3, None, "too little")])
    differences = paired(first, second, "accuracy")
    assert differences is not None
    found, interval = paired_gap(differences), stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.margin is not None
    assert found.difference - found.margin == pytest.approx(interval.low, abs=1e-4)
    assert found.difference + found.margin == pytest.approx(interval.high, abs=1e-4)
    assert paired_gap(Spread((0.1,))).margin is None
    assert paired_gap(Spread((0.1,)), [Spread((0.1,)), differences]).margin is not None
    assert paired(*groups([outcome("a", 0, 0.5), outcome("b", 1, 0.6)]), "accuracy") is None


def test_a_gap_within_the_spread_is_open() -> None:
    assert gap(Spread((0.80, 0.90)), Spread((0.78, 0.88))).open


def test_a_gap_of_single_seeds_decides_nothing() -> None:
    found = gap(Spread((0.9,)), Spread((0.1,)))
    assert found.margin is None
    assert found.open
    assert str(found) == "+80.0 points"


def test_a_deviation_pooled_over_a_study_makes_a_gap_surer() -> None:
    one, other = Spread((0.90, 0.92)), Spread((0.86, 0.88))
    more = [Spread((0.5, 0.52)), Spread((0.6, 0.62)), Spread((0.7, 0.72))]
    alone, among = gap(one, other), gap(one, other, [one, other, *more])
    assert alone.open
    assert among.above
    pool = pooled([one, other, *more])
    assert pool is not None
    assert pool[1] == 5


def test_chance_is_high_for_one_kind_and_low_for_two() -> None:
    rng = np.random.default_rng(1)
    alike = [Spread(tuple(rng.normal(0.8, 0.01, 3))) for _ in range(7)]
    apart = [*alike[:6], Spread(tuple(rng.normal(0.9, 0.01, 3)))]
    high, low = by_chance(alike), by_chance(apart)
    assert high is not None
    assert low is not None
    assert high > 0.1
    assert low < 0.01


def test_chance_is_even_over_experiments_without_a_difference() -> None:
    """Its definition: below 5 % in about 5 % of the cases."""
    rng = np.random.default_rng(2)
    found = [by_chance([Spread(tuple(rng.normal(0, 1, 3))) for _ in range(4)]) for _ in range(120)]
    assert 0.005 < np.mean([value is not None and value < 0.05 for value in found]) < 0.12


def test_chance_needs_two_groups_and_a_repeated_seed() -> None:
    assert by_chance([Spread((0.1, 0.2))]) is None
    assert by_chance([Spread((0.1,)), Spread((0.2,))]) is None

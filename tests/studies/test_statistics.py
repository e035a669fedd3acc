"""Means, spreads and differences over seeds, and frontiers of accuracy against compute."""

import math

import numpy as np
import pytest
from scipy import stats

from vitrail.core.paper_tables import TABLE_6
from vitrail.studies.statistics import (
    Cost,
    Spread,
    compare,
    compare_compute,
    compare_pairs,
    find_frontier,
    find_group,
    fit_power_law,
    format_spread,
    group_by_seed,
    interpolate_accuracy,
    pair_by_seed,
    permutation_test,
    pool_deviations,
    student_quantile,
)
from vitrail.train.grid.plan import CellOutcome


def outcome(kind: str, seed: int, accuracy: float | None, fault: str = "") -> CellOutcome:
    values = {} if accuracy is None else {"accuracy": accuracy}
    return CellOutcome(cell=f"{kind}-{seed}", at={"kind": kind, "seed": seed}, values=values, fault=fault)


def test_mean_and_deviation() -> None:
    spread = Spread((0.90, 0.92, 0.97))
    assert spread.mean == pytest.approx(0.93)
    assert spread.deviation == pytest.approx(np.std(spread.values, ddof=1))


def test_a_single_seed_has_no_spread() -> None:
    spread = Spread((0.9,))
    assert spread.deviation is None


def test_texts() -> None:
    assert format_spread(Spread((0.929, 0.931, 0.933))) == "93.1 ± 0.2"
    assert format_spread(Spread((0.9312,)), 2) == "93.12"
    assert format_spread(None) == "–"


def test_groups_leave_the_seed_out_and_keep_the_order() -> None:
    found = group_by_seed([outcome("b", 0, 0.5), outcome("a", 0, 0.7), outcome("b", 1, 0.6)])
    assert [group.at for group in found] == [{"kind": "b"}, {"kind": "a"}]
    assert [len(group.outcomes) for group in found] == [2, 1]
    assert found[0].mean("accuracy") == pytest.approx(0.55)


def test_failed_cells_do_not_count_but_their_place_stays() -> None:
    found = group_by_seed([outcome("a", 0, None, "out of memory"), outcome("a", 1, 0.7), outcome("b", 0, None, "too")])
    assert [len(group.outcomes) for group in found] == [1, 0]
    assert found[1].spread("accuracy") is None


def test_a_group_is_found_by_a_part_of_its_place() -> None:
    found = group_by_seed(
        [CellOutcome(cell="x", at={"family": "ViT", "part": 0.1, "seed": 0}, values={"accuracy": 0.5})]
    )
    assert find_group(found, part=0.1) is found[0]
    assert find_group(found, part=0.2) is None


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 31, 60, 500])
def test_quantiles_are_students(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-3)


def test_a_gap_has_the_interval_of_a_t_test() -> None:
    one, other = Spread((0.90, 0.92, 0.93)), Spread((0.85, 0.86, 0.89))
    found = compare(one, other)
    interval = stats.ttest_ind(one.values, other.values).confidence_interval(0.95)
    assert found.margin is not None
    assert found.difference - found.margin == pytest.approx(interval.low, abs=1e-4)
    assert found.difference + found.margin == pytest.approx(interval.high, abs=1e-4)
    assert found.is_above
    assert not found.is_below
    assert compare(other, one).is_below


def test_a_paired_gap_has_the_interval_of_a_paired_t_test() -> None:
    one, other = (0.70, 0.82, 0.93), (0.68, 0.81, 0.90)
    every = [outcome(kind, seed, value) for kind, some in (("a", one), ("b", other)) for seed, value in enumerate(some)]
    first, second = group_by_seed(
        [*every, outcome("a", 3, 0.1), outcome("b", 4, 0.9), outcome("b", 3, None, "too little")]
    )
    differences = pair_by_seed(first, second, "accuracy")
    assert differences is not None
    found, interval = compare_pairs(differences), stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.margin is not None
    assert found.difference - found.margin == pytest.approx(interval.low, abs=1e-4)
    assert found.difference + found.margin == pytest.approx(interval.high, abs=1e-4)
    assert compare_pairs(Spread((0.1,))).margin is None
    assert compare_pairs(Spread((0.1,)), [Spread((0.1,)), differences]).margin is not None
    assert pair_by_seed(*group_by_seed([outcome("a", 0, 0.5), outcome("b", 1, 0.6)]), "accuracy") is None


def test_a_gap_within_the_spread_is_open() -> None:
    assert compare(Spread((0.80, 0.90)), Spread((0.78, 0.88))).is_open


def test_a_gap_of_single_seeds_decides_nothing() -> None:
    found = compare(Spread((0.9,)), Spread((0.1,)))
    assert found.margin is None
    assert found.is_open
    assert str(found) == "+80.0 points"


def test_a_deviation_pooled_over_a_study_makes_a_gap_surer() -> None:
    one, other = Spread((0.90, 0.92)), Spread((0.86, 0.88))
    more = [Spread((0.5, 0.52)), Spread((0.6, 0.62)), Spread((0.7, 0.72))]
    alone, among = compare(one, other), compare(one, other, [one, other, *more])
    assert alone.is_open
    assert among.is_above
    pool = pool_deviations([one, other, *more])
    assert pool is not None
    assert pool[1] == 5


def test_chance_is_high_for_one_kind_and_low_for_two() -> None:
    rng = np.random.default_rng(1)
    alike = [Spread(tuple(rng.normal(0.8, 0.01, 3))) for _ in range(7)]
    apart = [*alike[:6], Spread(tuple(rng.normal(0.9, 0.01, 3)))]
    high, low = permutation_test(alike), permutation_test(apart)
    assert high is not None
    assert low is not None
    assert high > 0.1
    assert low < 0.01


def test_chance_is_even_over_experiments_without_a_difference() -> None:
    """Its definition: below 5 % in about 5 % of the cases."""
    rng = np.random.default_rng(2)
    found = [permutation_test([Spread(tuple(rng.normal(0, 1, 3))) for _ in range(4)]) for _ in range(120)]
    assert 0.005 < np.mean([value is not None and value < 0.05 for value in found]) < 0.12


def test_chance_needs_two_groups_and_a_repeated_seed() -> None:
    assert permutation_test([Spread((0.1, 0.2))]) is None
    assert permutation_test([Spread((0.1,)), Spread((0.2,))]) is None


def on_law(a: float, b: float, c: float, computes: list[float]) -> list[Cost]:
    return [Cost(compute, 1 - (a * compute**-b + c)) for compute in computes]


def test_what_a_cheaper_training_beats_is_not_on_the_frontier() -> None:
    points = [Cost(3, 0.7), Cost(1, 0.5), Cost(2, 0.8), Cost(1, 0.4), Cost(4, 0.8), Cost(5, 0.9)]
    assert find_frontier(points) == (Cost(1, 0.5), Cost(2, 0.8), Cost(5, 0.9))


def test_a_power_law_is_found_again() -> None:
    law = fit_power_law(on_law(0.5, 0.3, 0.0, [1, 3, 10, 30]))
    assert law is not None
    assert (law.a, law.b, law.c) == pytest.approx((0.5, 0.3, 0.0))


def test_its_limit_is_found_again_where_there_are_enough_points() -> None:
    law = fit_power_law(on_law(0.4, 0.5, 0.1, [1, 2, 5, 10, 30, 100, 300]))
    assert law is not None
    assert law.c == pytest.approx(0.1, abs=0.002)
    assert law.b == pytest.approx(0.5, rel=0.03)
    assert law.error(1000) == pytest.approx(0.4 * 1000**-0.5 + 0.1, abs=0.002)


def test_nothing_is_fitted_to_a_point_or_to_an_error_that_grows() -> None:
    assert fit_power_law([Cost(1, 0.5)]) is None
    assert fit_power_law([Cost(1, 0.5), Cost(1, 0.6)]) is None
    assert fit_power_law([Cost(1, 0.9), Cost(10, 0.5)]) is None


def test_accuracy_lies_between_points_by_the_logarithm_of_compute() -> None:
    points = [Cost(1, 0.5), Cost(100, 0.7)]
    assert interpolate_accuracy(points, 10) == pytest.approx(0.6)
    assert interpolate_accuracy(points, 1000) == pytest.approx(0.7)
    assert interpolate_accuracy(points, 0.5) is None


def test_a_family_that_needs_three_times_as_much() -> None:
    one = on_law(0.5, 0.3, 0.0, [1, 3, 10, 30, 100])
    other = [Cost(3 * point.compute, point.accuracy) for point in one]
    ratio = compare_compute(one, other)
    assert ratio is not None
    assert ratio == pytest.approx(3.0)
    back = compare_compute(other, one)
    assert back == pytest.approx(1 / 3)


def test_families_without_an_accuracy_in_common() -> None:
    assert compare_compute([Cost(1, 0.1), Cost(2, 0.2)], [Cost(1, 0.3), Cost(2, 0.4)]) is None
    assert compare_compute([], [Cost(1, 0.3)]) is None


def test_the_papers_own_rows_say_what_it_says() -> None:
    """4.4: ViTs reach the same average accuracy with 2 to 4 times less compute. Interpolated, it is 3.8."""
    vit = [Cost(row.exaflops, row.average_5 / 100) for row in TABLE_6 if row.network.startswith("ViT")]
    resnet = [Cost(row.exaflops, row.average_5 / 100) for row in TABLE_6 if row.network.startswith("BiT")]
    ratio = compare_compute(vit, resnet)
    assert ratio is not None
    assert 2 < ratio < 4.5
    law = fit_power_law(find_frontier(vit))
    assert law is not None
    assert law.b > 0
    assert not math.isnan(law.c)

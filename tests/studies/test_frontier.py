"""Frontiers of accuracy against compute, on points whose answer is known."""

import math

import pytest

from vitrail.core.paper_tables import TABLE_6
from vitrail.studies.paper.scaling_findings import Cost, accuracy_for, cheaper, compute_for, fitted, frontier


def on_law(a: float, b: float, c: float, computes: list[float]) -> list[Cost]:
    return [Cost(compute, 1 - (a * compute**-b + c)) for compute in computes]


def test_what_a_cheaper_training_beats_is_not_on_the_frontier() -> None:
    points = [Cost(3, 0.7), Cost(1, 0.5), Cost(2, 0.8), Cost(1, 0.4), Cost(4, 0.8), Cost(5, 0.9)]
    assert frontier(points) == (Cost(1, 0.5), Cost(2, 0.8), Cost(5, 0.9))


def test_a_power_law_is_found_again() -> None:
    law = fitted(on_law(0.5, 0.3, 0.0, [1, 3, 10, 30]))
    assert law is not None
    assert (law.a, law.b, law.c) == pytest.approx((0.5, 0.3, 0.0))


def test_its_limit_is_found_again_where_there_are_enough_points() -> None:
    law = fitted(on_law(0.4, 0.5, 0.1, [1, 2, 5, 10, 30, 100, 300]))
    assert law is not None
    assert law.c == pytest.approx(0.1, abs=0.002)
    assert law.b == pytest.approx(0.5, rel=0.03)
    assert law.accuracy(1000) == pytest.approx(1 - (0.4 * 1000**-0.5 + 0.1), abs=0.002)


def test_nothing_is_fitted_to_a_point_or_to_an_error_that_grows() -> None:
    assert fitted([Cost(1, 0.5)]) is None
    assert fitted([Cost(1, 0.5), Cost(1, 0.6)]) is None
    assert fitted([Cost(1, 0.9), Cost(10, 0.5)]) is None


def test_compute_lies_between_points_by_its_logarithm_and_is_not_extrapolated() -> None:
    points = [Cost(1, 0.5), Cost(100, 0.7)]
    assert compute_for(points, 0.6) == pytest.approx(10)
    assert compute_for(points, 0.5) == pytest.approx(1)
    assert compute_for(points, 0.71) is None
    assert compute_for(points, 0.49) is None


def test_accuracy_lies_between_points_by_the_logarithm_of_compute() -> None:
    points = [Cost(1, 0.5), Cost(100, 0.7)]
    assert accuracy_for(points, 10) == pytest.approx(0.6)
    assert accuracy_for(points, 1000) == pytest.approx(0.7)
    assert accuracy_for(points, 0.5) is None


def test_a_family_that_needs_three_times_as_much() -> None:
    one = on_law(0.5, 0.3, 0.0, [1, 3, 10, 30, 100])
    other = [Cost(3 * point.compute, point.accuracy) for point in one]
    ratio = cheaper(one, other)
    assert ratio is not None
    assert ratio == pytest.approx(3.0)
    back = cheaper(other, one)
    assert back == pytest.approx(1 / 3)


def test_families_without_an_accuracy_in_common() -> None:
    assert cheaper([Cost(1, 0.1), Cost(2, 0.2)], [Cost(1, 0.3), Cost(2, 0.4)]) is None
    assert cheaper([], [Cost(1, 0.3)]) is None


def test_the_papers_own_rows_say_what_it_says() -> None:
    """4.4: ViTs reach the same average accuracy with 2 to 4 times less compute. Interpolated, it is 3.8."""
    vit = [Cost(row.exaflops, row.average_5 / 100) for row in TABLE_6 if row.network.startswith("ViT")]
    resnet = [Cost(row.exaflops, row.average_5 / 100) for row in TABLE_6 if row.network.startswith("BiT")]
    ratio = cheaper(vit, resnet)
    assert ratio is not None
    assert 2 < ratio < 4.5
    law = fitted(frontier(vit))
    assert law is not None
    assert law.b > 0
    assert not math.isnan(law.c)

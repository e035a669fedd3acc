"""Calibration error as its definition says, counted by hand and by a slow loop."""

import math

import numpy as np
import pytest

from vitrail.core.errors import ConfigError
from vitrail.evaluation.intervals import Calibration, calibration_error


def slow(confidence: list[float], right: list[bool], bins: int) -> float:
    """Bins (0, 1/B], (1/B, 2/B], ..."""
    error = 0.0
    for at in range(bins):
        mine = [i for i, c in enumerate(confidence) if at / bins < c <= (at + 1) / bins]
        if mine:
            gap = sum(confidence[i] - right[i] for i in mine) / len(mine)
            error += abs(gap) * len(mine) / len(confidence)
    return error


def test_by_hand() -> None:
    confidence, right = np.array([0.9, 0.8, 0.3, 0.2]), np.array([True, False, False, False])
    # Two bins: the upper has 0.85 and one right of two, the lower 0.25 and none.
    assert calibration_error(confidence, right, bins=2) == pytest.approx(0.5 * 0.35 + 0.5 * 0.25)
    assert calibration_error(confidence, right, bins=1) == pytest.approx(0.55 - 0.25)


def test_it_is_that_of_a_slow_count() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.05, 1.0, 500)
    right = rng.uniform(size=500) < confidence**2
    found = calibration_error(confidence, right)
    assert found == pytest.approx(slow(confidence.tolist(), right.tolist(), 15), abs=1e-12)
    assert found > 0.05


def test_an_edge_belongs_to_the_bin_below() -> None:
    bins = Calibration(np.array([0.5, 1.0]), np.array([True, True]), bins=2).reliability()
    assert bins.counts.tolist() == [1.0, 1.0]


def test_bins_of_equally_many_answers() -> None:
    confidence = np.linspace(0.9, 0.99, 30)
    made = Calibration(confidence, np.arange(30) % 2 == 0, bins=15)
    assert made.reliability("count").counts.tolist() == [2.0] * 15
    assert (made.reliability("width").counts > 0).sum() == 2
    few = Calibration(np.array([0.7]), np.array([False])).reliability("count")
    assert few.error == pytest.approx(0.7)


def test_weights_count_an_answer_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    confidence, right = rng.uniform(0.1, 1, 40), rng.uniform(size=40) < 0.5
    times = rng.integers(0, 4, 40)
    weighted = Calibration(confidence, right).reliability("width", times.astype(np.float64))
    repeated = Calibration(np.repeat(confidence, times), np.repeat(right, times)).reliability("width")
    np.testing.assert_allclose(weighted.counts, repeated.counts)
    assert weighted.error == pytest.approx(repeated.error)


def test_rows_leave_out_empty_bins() -> None:
    rows = Calibration(np.array([0.95, 0.96]), np.array([True, False])).reliability().rows()
    assert len(rows) == 1
    assert (rows[0]["count"], rows[0]["accuracy"]) == (2, 0.5)
    assert not any(math.isnan(value) for row in rows for value in row.values())


def test_nothing_to_bin_is_refused() -> None:
    with pytest.raises(ConfigError):
        calibration_error(np.zeros(0), np.zeros(0, np.bool_))
    with pytest.raises(ConfigError, match="width"):
        calibration_error(np.ones(1), np.ones(1, np.bool_), kind="widht")  # type: ignore[arg-type]


def test_equal_confidences_are_not_told_apart_by_whether_they_are_right() -> None:
    """All as sure as they are right: perfect, in whatever order the images come."""
    right = np.arange(100) < 90
    for order in (np.arange(100), np.arange(100)[::-1], np.random.default_rng(0).permutation(100)):
        assert calibration_error(np.full(100, 0.9), right[order], kind="count") == pytest.approx(0.0, abs=1e-12)
    weights = np.where(right, 1.0, 0.0)  # only the right ones are drawn
    assert Calibration(np.full(100, 0.9), right).reliability("count", weights).error == pytest.approx(0.1)

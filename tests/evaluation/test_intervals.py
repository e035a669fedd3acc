"""Intervals against scipy's, and how often they hold the truth."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binomtest

from vitrail.core.errors import ConfigError
from vitrail.evaluation.intervals import Floats, bootstrap, wilson_interval


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (1, 3), (701, 1000), (765, 946), (0, 50), (50, 50)])
def test_wilson_is_that_of_scipy(right: int, count: int) -> None:
    wanted = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right, count) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert 0.0 <= wilson_interval(right, count).low <= right / count <= wilson_interval(right, count).high <= 1.0


@pytest.mark.parametrize(("right", "count"), [(1, 0), (-1, 5), (6, 5)])
def test_what_is_no_share_is_refused(right: int, count: int) -> None:
    with pytest.raises(ConfigError):
        wilson_interval(right, count)


def mean_of(values: Floats) -> Callable[[Floats], Floats]:
    return lambda weights: np.array([(values * weights).sum() / weights.sum()])


def test_the_bootstrap_of_a_mean_is_about_two_standard_errors() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    (found,) = bootstrap(mean_of(values), len(values))
    assert found is not None
    error = values.std() / len(values) ** 0.5
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.25 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.25 * error)


def test_a_seed_gives_one_interval_and_another_another() -> None:
    values = np.random.default_rng(0).normal(size=50)
    once, again, other = (bootstrap(mean_of(values), 50, seed=seed) for seed in (1, 1, 2))
    assert once == again != other


def test_it_moves_against_the_bias_and_holds_the_estimate() -> None:
    """The largest value is never larger in a resample: plain percentiles would all lie below it."""
    values = np.arange(30.0)

    def squared_mean(weights: Floats) -> Floats:
        return np.array([((values - 14.5) * weights).sum() ** 2, float(values[weights > 0].max())])

    for found, estimate in zip(bootstrap(squared_mean, 30), squared_mean(np.ones(30)), strict=True):
        assert found is not None
        assert found.low <= estimate <= found.high


def test_centred_it_has_a_width_on_both_sides_of_an_estimate_that_every_resample_exceeds() -> None:
    values = np.random.default_rng(0).normal(size=40)

    def grown_mean(weights: Floats) -> Floats:  # by about 1 in a resample
        return mean_of(values)(weights) + (weights**2).mean() - 1

    (found,), estimate = bootstrap(grown_mean, 40, centre=True), float(values.mean())
    (other,) = bootstrap(grown_mean, 40)
    assert found is not None
    assert other is not None
    assert other.low == pytest.approx(estimate)
    for width in (estimate - found.low, found.high - estimate):
        assert 0.5 * 1.96 * values.std() / 40**0.5 < width < 3 * 1.96 * values.std() / 40**0.5


def test_one_sample_says_nothing_and_neither_does_what_is_no_number() -> None:
    assert bootstrap(lambda weights: weights, 1) == [None]
    assert bootstrap(lambda weights: np.array([np.nan]), 4) == [None]


@pytest.mark.slow
def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        (found,) = bootstrap(mean_of(rng.exponential(1.0, 80)), 80, resamples=400)
        assert found is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.89 <= hits / 200 <= 0.99

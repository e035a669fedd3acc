"""95% confidence intervals, and calibration.

    wilson(701, 1000)                                    # a share: 67.2 to 72.9 %
    bootstrap(lambda weights: ..., len(losses), seed=0)  # any other statistic of samples

Intervals cover the sampling of the images, not another training of the same network.

A network is calibrated if it is right as often as it is confident: of predictions with a mean confidence of 80 %, about
80 % should be right. The expected calibration error is the mean gap, weighted by the predictions in each bin (Guo et
al., 2017): 15 bins of equal width, or of equal counts, so that a crowded end does not hide in one bin.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError, unknown_name

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 1000
FEWEST: Final = 200
DRAWS: Final = 1 << 26  # total samples drawn, above which there are fewer resamples

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    low: float
    high: float


def wilson_interval(right: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval of a share (1927): within 0 and 1, and useful for a single image."""
    if not 0 <= right <= count or not count:
        raise ConfigError(f"{right} of {count} is not a share; it must be between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    # Exact at the ends, without rounding.
    return Interval(0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half)


def bootstrap(
    statistics: Callable[[Floats], Floats],
    count: int,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    centre: bool = False,
) -> list[Interval | None]:
    """Intervals of statistics [S], each a function of sample weights [N]; None for a single sample.

    Percentiles with Efron's bias correction (1981): a calibration error is larger in nearly every resample than in the
    sample itself, and plain percentiles would lie above it. Where hardly any resample is on the other side of the
    estimate, there is nothing left to take percentiles of: with `centre` resamples are moved by their mean distance
    from the estimate instead.
    """
    estimates = np.asarray(statistics(np.ones(count)), np.float64)
    if count < 2:
        return [None] * len(estimates)
    rng = np.random.default_rng(seed)
    resamples = max(min(resamples, DRAWS // count), FEWEST)
    draws = (np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(resamples))
    drawn = np.stack([statistics(one.astype(np.float64)) for one in draws])
    if centre:
        drawn += estimates - drawn.mean(0)
    return [correct_bias(column, value) for column, value in zip(drawn.T, estimates.tolist(), strict=True)]


def correct_bias(drawn: Floats, estimate: float) -> Interval | None:
    """The bias-corrected percentiles of a statistic's resamples. The interval always contains the estimate."""
    if not (math.isfinite(estimate) and np.isfinite(drawn).all()):
        return None
    normal, count = NormalDist(), len(drawn)
    below = float((drawn < estimate).sum() + 0.5 * (drawn == estimate).sum())
    shift = normal.inv_cdf(min(max(below, 0.5), count - 0.5) / count)
    z = normal.inv_cdf(0.5 + CONFIDENCE / 2)
    low, high = np.quantile(drawn, [normal.cdf(2 * shift - z), normal.cdf(2 * shift + z)]).tolist()
    return Interval(min(low, estimate), max(high, estimate))


BINS: Final = 15
Kind: TypeAlias = Literal["width", "count"]  # what the bins share


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reliability:
    """Bins [B]: number of predictions, mean confidence and accuracy; NaN in an empty bin."""

    counts: Floats
    confidence: Floats
    accuracy: Floats

    @property
    def error(self) -> float:
        """Expected calibration error."""
        there = self.counts > 0
        gaps = np.abs(self.confidence[there] - self.accuracy[there])
        return float((gaps * self.counts[there]).sum() / self.counts.sum())

    def rows(self) -> list[dict[str, float | int]]:
        """Plain data, without the empty bins."""
        names, columns = ("confidence", "accuracy"), np.stack([self.confidence, self.accuracy], 1).tolist()
        rows = zip(self.counts.tolist(), columns, strict=True)
        return [{"count": int(count), **dict(zip(names, row, strict=True))} for count, row in rows if count]


class Calibration:
    """Predictions [N] by confidence and correctness, ready to be binned with any weights."""

    def __init__(self, confidence: NDArray[np.floating], right: NDArray[np.bool_], *, bins: int = BINS) -> None:
        if bins < 1 or len(confidence) != len(right) or not len(right):
            raise ConfigError(f"{len(confidence)} confidences and {len(right)} answers cannot fill {bins} bins")
        self.bins = bins
        # Sorted once, for bins of equal counts.
        self.order = order = np.argsort(confidence, kind="stable")
        self.confidence = np.asarray(confidence, np.float64)[order]
        self.right = np.asarray(right, np.float64)[order]
        self.level = np.unique(self.confidence, return_inverse=True)[1]  # groups of equal confidence
        # (0, 1/15], (1/15, 2/15], ... as in the definition.
        self.places = np.clip(np.ceil(self.confidence * bins).astype(np.int64) - 1, 0, bins - 1)

    def reliability(self, kind: Kind = "width", weights: Floats | None = None) -> Reliability:
        """The bins, with optional weights [N]."""
        if kind not in get_args(Kind):
            raise unknown_name("kind of bins", str(kind), get_args(Kind))
        weights = np.ones(len(self.order)) if weights is None else weights[self.order]
        places, hits = self.places, self.right
        if kind == "count":  # by the rank of each prediction
            middle = np.cumsum(weights) - weights / 2
            places = np.clip((middle * self.bins / weights.sum()).astype(np.int64), 0, self.bins - 1)
            # Correctness is averaged over predictions of equal confidence, whose order is arbitrary when an edge
            # between bins falls among them.
            drawn = np.bincount(self.level, weights)
            hits = (np.bincount(self.level, weights * self.right) / np.where(drawn > 0, drawn, 1.0))[self.level]
        values = (weights, weights * self.confidence, weights * hits)
        counts, sure, right = (np.bincount(places, each, self.bins).astype(np.float64) for each in values)
        with np.errstate(invalid="ignore"):
            return Reliability(counts=counts, confidence=sure / counts, accuracy=right / counts)


def calibration_error(
    confidence: NDArray[np.floating], right: NDArray[np.bool_], *, bins: int = BINS, kind: Kind = "width"
) -> float:
    """The expected calibration error of predictions [N]."""
    return Calibration(confidence, right, bins=bins).reliability(kind).error

"""How far a number can be trusted: intervals that hold the true value in 95 of 100 sets like the one that was scored.

    wilson(701, 1000)                                    # a share: 67.2 to 72.9 %
    bootstrap(lambda weights: ..., len(losses), seed=0)  # whatever else is computed from samples

They speak of the draw of the images alone, not of another training of the same network.

Whether a network is as often right as it is sure: expected calibration error, and the bins of a reliability diagram.

In a bin of answers with a mean confidence of 80 % about 80 % should be right. The error is the mean distance, weighted
by the answers in each bin (Guo et al., 2017): 15 bins of equal width, or of equally many answers, so that a crowded end
does not hide in one bin.
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
DRAWS: Final = 1 << 26  # samples drawn in all, above which there are fewer resamples

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    low: float
    high: float


def wilson_interval(right: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Of a share, after Wilson (1927): stays within 0 and 1, and says something of a single image, too."""
    if not 0 <= right <= count or not count:
        raise ConfigError(f"{right} of {count} is not a share")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    # Exact at the ends, where rounding would leave a hair.
    return Interval(0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half)


def bootstrap(
    statistics: Callable[[Floats], Floats],
    count: int,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> list[Interval | None]:
    """Of statistics [S], each computed from how often every sample [N] was drawn; none where one sample cannot say.

    Percentiles, moved as Efron (1981) has it by how many resamples lie below the estimate: an error of calibration is
    larger in nearly every resample than in the sample itself, and plain percentiles would lie above it.
    """
    estimates = np.asarray(statistics(np.ones(count)), np.float64)
    if count < 2:
        return [None] * len(estimates)
    rng = np.random.default_rng(seed)
    resamples = max(min(resamples, DRAWS // count), FEWEST)
    drawn = np.stack(
        [
            statistics(np.bincount(rng.integers(0, count, count), minlength=count).astype(np.float64))
            for _ in range(resamples)
        ]
    )
    return [correct_bias(column, value, confidence) for column, value in zip(drawn.T, estimates.tolist(), strict=True)]


def correct_bias(drawn: Floats, estimate: float, confidence: float) -> Interval | None:
    """The bias-corrected percentiles of a statistic's resamples. It always holds the estimate."""
    if not (math.isfinite(estimate) and np.isfinite(drawn).all()):
        return None
    normal, count = NormalDist(), len(drawn)
    below = float((drawn < estimate).sum() + 0.5 * (drawn == estimate).sum())
    shift = normal.inv_cdf(min(max(below, 0.5), count - 0.5) / count)
    z = normal.inv_cdf(0.5 + confidence / 2)
    low, high = np.quantile(drawn, [normal.cdf(2 * shift - z), normal.cdf(2 * shift + z)]).tolist()
    return Interval(min(low, estimate), max(high, estimate))


BINS: Final = 15
Kind: TypeAlias = Literal["width", "count"]  # what the bins have in common


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reliability:
    """Bins [B] with their number of answers, mean confidence and share of right ones; NaN in an empty bin."""

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
        """As plain data, without the empty bins."""
        return [
            {"count": int(count), "confidence": confidence, "accuracy": accuracy}
            for count, confidence, accuracy in zip(
                self.counts.tolist(), self.confidence.tolist(), self.accuracy.tolist(), strict=True
            )
            if count
        ]


class Calibration:
    """Answers [N] by confidence and whether they are right, ready to be binned with any weights."""

    def __init__(self, confidence: NDArray[np.floating], right: NDArray[np.bool_], *, bins: int = BINS) -> None:
        if bins < 1 or len(confidence) != len(right) or not len(right):
            raise ConfigError(f"{len(confidence)} confidences and {len(right)} answers make no {bins} bins")
        self.bins = bins
        # In one order, so that bins of equally many answers need no sorting again.
        order = np.argsort(confidence, kind="stable")
        self.order = order
        self.confidence = np.asarray(confidence, np.float64)[order]
        self.right = np.asarray(right, np.float64)[order]
        self.level = np.unique(self.confidence, return_inverse=True)[1]  # which answers are equally sure
        # (0, 1/15], (1/15, 2/15], ... as it was defined.
        self.places = np.clip(np.ceil(self.confidence * bins).astype(np.int64) - 1, 0, bins - 1)

    def reliability(self, kind: Kind = "width", weights: Floats | None = None) -> Reliability:
        """The bins, with each answer counted once or as often as the weights [N] say."""
        if kind not in get_args(Kind):
            raise unknown_name("kind of bins", str(kind), get_args(Kind))
        weights = np.ones(len(self.order)) if weights is None else weights[self.order]
        places, hits = (self.places, self.right) if kind == "width" else (self.even(weights), self.shared(weights))
        counts, sure, right = (
            np.bincount(places, weights * values, self.bins).astype(np.float64)
            for values in (1.0, self.confidence, hits)
        )
        with np.errstate(invalid="ignore"):
            return Reliability(counts=counts, confidence=sure / counts, accuracy=right / counts)

    def even(self, weights: Floats) -> NDArray[np.int64]:
        """Bins of equally many answers: where the middle of each lies in the whole."""
        middle = np.cumsum(weights) - weights / 2
        return np.clip((middle * self.bins / weights.sum()).astype(np.int64), 0, self.bins - 1)

    def shared(self, weights: Floats) -> Floats:
        """Whether answers are right, equally sure ones all as often as they are on average: an edge between bins may
        fall among them, and which of them come before it means nothing."""
        drawn = np.bincount(self.level, weights)
        mean = np.bincount(self.level, weights * self.right) / np.where(drawn > 0, drawn, 1.0)
        return mean[self.level]


def calibration_error(
    confidence: NDArray[np.floating], right: NDArray[np.bool_], *, bins: int = BINS, kind: Kind = "width"
) -> float:
    """The expected calibration error of answers [N]."""
    return Calibration(confidence, right, bins=bins).reliability(kind).error

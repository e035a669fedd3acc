"""How far a number can be trusted: intervals that hold the true value in 95 of 100 sets like the one that was scored.

    wilson(701, 1000)                                    # a share: 67.2 to 72.9 %
    bootstrap(lambda weights: ..., len(losses), seed=0)  # whatever else is computed from samples

They speak of the draw of the pictures alone, not of another training of the same network.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 1000
FEWEST: Final = 200
DRAWS: Final = 1 << 26  # samples drawn in all, above which there are fewer resamples

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    low: float
    high: float


def wilson(right: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Of a share, after Wilson (1927): stays within 0 and 1, and says something of a single picture, too."""
    if not 0 <= right <= count or not count:
        raise ConfigError(f"{right} of {count} is no share")
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
    return [corrected(column, value, confidence) for column, value in zip(drawn.T, estimates.tolist(), strict=True)]


def corrected(drawn: Floats, estimate: float, confidence: float) -> Interval | None:
    """The bias-corrected percentiles of a statistic's resamples. It always holds the estimate."""
    if not (math.isfinite(estimate) and np.isfinite(drawn).all()):
        return None
    normal, count = NormalDist(), len(drawn)
    below = float((drawn < estimate).sum() + 0.5 * (drawn == estimate).sum())
    shift = normal.inv_cdf(min(max(below, 0.5), count - 0.5) / count)
    z = normal.inv_cdf(0.5 + confidence / 2)
    low, high = np.quantile(drawn, [normal.cdf(2 * shift - z), normal.cdf(2 * shift + z)]).tolist()
    return Interval(min(low, estimate), max(high, estimate))

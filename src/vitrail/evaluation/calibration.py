"""Whether a network is as often right as it is sure: expected calibration error, and the bins of a reliability diagram.

In a bin of answers with a mean confidence of 80 % about 80 % should be right. The error is the mean distance, weighted
by the answers in each bin (Guo et al., 2017): 15 bins of equal width, or of equally many answers, so that a crowded end
does not hide in one bin.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError, unknown

BINS: Final = 15
Kind: TypeAlias = Literal["width", "count"]  # what the bins have in common
Floats = NDArray[np.float64]


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
            raise unknown("kind of bins", str(kind), get_args(Kind))
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

"""Answers, summed up: accuracy with intervals, class by class, calibration, and what is taken for what."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError
from vitrail.evaluation.metrics.accuracy import CONFUSION, TOP
from vitrail.evaluation.metrics.intervals import Calibration, Floats, Reliability, bootstrap
from vitrail.evaluation.result import ROUNDED, Measure, Unit, make_measure, measure_share
from vitrail.report.confusion_matrix import ClassCount, Confusion, rank_confusions
from vitrail.tasks.classification.answers import JudgedPredictions

# What is not a plain share, in the order of `Assessment.statistics`.
STATISTICS: Final[tuple[tuple[str, Unit], ...]] = (
    *(("mean per class", "share"), ("ECE", "share"), ("adaptive ECE", "share"), ("loss", "number")),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Assessment:
    """Of the answers that count, with the names of the network's classes. `real` are those under ReaL's labels."""

    judged: JudgedPredictions
    names: Sequence[str]
    real: JudgedPredictions | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not len(self.judged):
            raise DataError(
                "no image could be scored: all are unreadable or without a label; choose another split, or see what "
                "`vitrail data` says"
            )

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Images of each class [K]."""
        return np.bincount(self.judged.truth, minlength=len(self.names))

    @cached_property
    def hits(self) -> NDArray[np.int64]:
        """Those that were recognised [K]."""
        return np.bincount(self.judged.truth[self.judged.right], minlength=len(self.names))

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration(self.judged.confidence, self.judged.right)

    @cached_property
    def reliability(self) -> Reliability:
        return self.calibration.reliability()

    @property
    def classes(self) -> list[ClassCount]:
        """Those that have images, in their order."""
        there = np.flatnonzero(self.counts)
        return [ClassCount(self.names[at], int(self.hits[at]), int(self.counts[at])) for at in there.tolist()]

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """The confusion matrix by its cells that are not empty: rows of true class, said class and count. An answer
        that is not a number has no cell."""
        sound = self.judged.said >= 0
        pairs = np.stack([self.judged.truth[sound], self.judged.said[sound]], 1)
        cells, counts = np.unique(pairs, axis=0, return_counts=True)
        return np.concatenate([cells, counts[:, None]], 1)

    @property
    def matrix(self) -> NDArray[np.int64] | None:
        """The confusion matrix [K, K], true classes as rows; none for very many classes."""
        if len(self.names) > CONFUSION:
            return None
        whole = np.zeros((len(self.names), len(self.names)), np.int64)
        whole[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return whole

    def confused(self, most: int) -> list[Confusion]:
        """The most frequent mistakes."""
        return rank_confusions(self.cells, self.counts, self.names, most)

    def statistics(self, weights: Floats) -> Floats:
        """STATISTICS of answers that count as often as the weights [M] say."""
        # A class counts as one, however many images it has; the weights of images are held, so that a class of one
        # image that a resample lacks does not raise the others.
        each = weights / self.counts[self.judged.truth]
        return np.array(
            [
                float((each * self.judged.right).sum() / each.sum()),
                self.calibration.reliability("width", weights).error,
                self.calibration.reliability("count", weights).error,
                float((self.judged.loss.astype(np.float64) * weights).sum() / weights.sum()),
            ]
        )

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """What goes into the result. A loss that is not a number is left out."""
        count = len(self.judged)
        found = [measure_share("top-1", int(self.judged.right.sum()), count)]
        if len(self.names) > TOP:
            found.append(measure_share("top-5", int(self.judged.among.sum()), count))
        if self.real is not None and len(self.real):
            found.append(measure_share("ReaL", int(self.real.right.sum()), len(self.real)))
        values = self.statistics(np.ones(count)).tolist()
        intervals = bootstrap(self.statistics, count, seed=self.seed)
        found += [
            make_measure(name, value, interval, count, unit)
            for (name, unit), value, interval in zip(STATISTICS, values, intervals, strict=True)
            if np.isfinite(value)
        ]
        return tuple(found)

    def details(self) -> dict[str, Any]:
        """Plain data for the result: class by class, the bins, and the confusion matrix by its cells."""
        return {
            "classes": list(self.names),
            "per_class": [
                {"class": at, "right": int(self.hits[at]), "count": int(self.counts[at])}
                for at in np.flatnonzero(self.counts).tolist()
            ],
            "reliability": [
                {name: round(value, ROUNDED) for name, value in row.items()} for row in self.reliability.rows()
            ],
            "confusion": self.cells.tolist(),  # true class, said class, count
        }

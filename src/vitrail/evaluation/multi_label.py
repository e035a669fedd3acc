"""Scores of a multi-label network: mean average precision and F1, with intervals.

    found = MultiLabel(scores=scores, truth=truth, sample=sample, names=names, threshold=0.5)
    found.measures                                       # mAP, micro F1, macro F1, exact match

Average precision is the mean of the precision at every true sample, in the order of the scores; equal scores count as
one step. A class without a true sample is excluded from the mean; so is, for macro F1, a class that is neither true nor
predicted anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.data.dataset import Labels
from vitrail.evaluation.intervals import DRAWS, RESAMPLES, Floats, bootstrap
from vitrail.evaluation.metrics import REMEDY, ClassPredictions, label_rows
from vitrail.evaluation.result import ROUNDED, Measure, make_measure, measure_share

THRESHOLD: Final = 0.5  # probability from which a class is predicted
STATISTICS: Final = ("mAP", "micro F1", "macro F1")


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class: average precision, precision and recall at the threshold, and the number of true samples."""

    name: str
    count: int
    average_precision: float
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiLabelScore:
    """M readable samples with labels: scores [M, K] in [0, 1], truth [M, K], and their indices [M]."""

    scores: NDArray[np.float32]
    truth: NDArray[np.bool_]
    sample: NDArray[np.int64]
    names: Sequence[str]
    threshold: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not len(self.sample) or not self.truth.any():
            raise DataError(f"no image could be scored: all are unreadable or without a label; {REMEDY}")

    @cached_property
    def predicted(self) -> NDArray[np.bool_]:
        return self.scores >= self.threshold

    @cached_property
    def ranking(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """For each class, the samples by descending score, whether each is true, and where its run of equal scores
        ends: [M, K] each."""
        order = np.argsort(-self.scores, axis=0, kind="stable")
        ranked = np.take_along_axis(self.scores, order, 0)
        last = np.ones(ranked.shape, np.bool_)
        last[:-1] = ranked[:-1] != ranked[1:]
        places = np.where(last, np.arange(len(ranked))[:, None], len(ranked) - 1)
        ends = np.minimum.accumulate(places[::-1], axis=0)[::-1]
        return order, np.take_along_axis(self.truth, order, 0), ends

    def average_precision(self, weights: Floats) -> Floats:
        """Average precision of each class [K], with sample weights [M]."""
        order, true, ends = self.ranking
        drawn = weights[order]
        hits = np.cumsum(drawn * true, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            precision = hits / np.cumsum(drawn, axis=0)
            each = np.where(drawn * true > 0, np.take_along_axis(precision, ends, 0), 0.0)
            return (each * drawn * true).sum(0) / hits[-1]

    def counts(self, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """For each class [K]: true positives, predicted, true."""
        right, chosen, true = self.predicted & self.truth, self.predicted, self.truth
        return weights @ right, weights @ chosen, weights @ true

    def statistics(self, weights: Floats) -> Floats:
        """STATISTICS with sample weights [M]."""
        right, chosen, true = self.counts(weights)
        mean_ap = finite_mean(self.average_precision(weights))
        micro = 2 * right.sum() / max((chosen + true).sum(), 1e-300)
        return np.array([mean_ap, micro, finite_mean(divide_or_nan(2 * right, chosen + true))])

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        count = len(self.sample)
        values = self.statistics(np.ones(count)).tolist()
        draws = min(RESAMPLES, DRAWS // max(self.scores.size, 1))
        intervals = bootstrap(self.statistics, count, seed=self.seed, resamples=draws)
        exact = int((self.predicted == self.truth).all(1).sum())
        found = zip(STATISTICS, values, intervals, strict=True)
        return (
            *(make_measure(name, value, interval, count, "share") for name, value, interval in found),
            measure_share("exact match", exact, count),
        )

    @cached_property
    def classes(self) -> list[ClassScore]:
        """The classes with a true sample, in order."""
        ones = np.ones(len(self.sample))
        right, chosen, true = self.counts(ones)
        precision, recall = np.nan_to_num(divide_or_nan(right, chosen)), divide_or_nan(right, true)
        f1, means = divide_or_nan(2 * right, chosen + true), self.average_precision(ones)
        return [
            ClassScore(self.names[at], int(true[at]), *(float(column[at]) for column in (means, precision, recall, f1)))
            for at in np.flatnonzero(true).tolist()
        ]

    def details(self) -> dict[str, Any]:
        """Plain data for the result, per class."""
        fields = ("average_precision", "precision", "recall", "f1")
        rows = [
            {"class": one.name, "count": one.count} | {name: round(getattr(one, name), ROUNDED) for name in fields}
            for one in self.classes
        ]
        return {"classes": list(self.names), "threshold": self.threshold, "per_class": rows}


def score_labels(
    said: ClassPredictions, labels: Labels, names: Sequence[str], *, threshold: float, seed: int
) -> MultiLabelScore:
    """Compares scores with the labels of the source. If samples may have several labels, having none is valid; if each
    has one, a sample without a label does not count."""
    if labels.starts is None:
        said = said.judge()
    truth = encode_labels(torch.from_numpy(labels.rows(said.sample)), len(names)).numpy()
    return MultiLabelScore(
        scores=said.scores, truth=truth, sample=said.sample, names=names, threshold=threshold, seed=seed
    )


def encode_labels(labels: Tensor, num_classes: int) -> Tensor:
    """[N, K] as booleans, from labels [N] or [N, M] padded with -1."""
    rows = label_rows(labels)
    truth = torch.zeros(len(rows), num_classes + 1, dtype=torch.bool)
    return truth.scatter_(1, torch.where(rows >= 0, rows, num_classes), True)[:, :-1]


def divide_or_nan(some: Floats, of: Floats) -> Floats:
    """NaN where the divisor is zero."""
    return np.divide(some, of, out=np.full(of.shape, np.nan), where=of > 0)


def finite_mean(values: Floats) -> float:
    """The mean of the finite values."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else 0.0

"""Panoptic quality (Kirillov et al., 2019): how well a predicted panoptic map agrees with the ground truth.

    cells = count_cells(predicted, truth, n, m)          # int8..int64 [H, W] each, -1 where there is no segment
    counts = count_segments(cells, classes, truth_classes, crowd, num_classes=9)  # of one image [4, K]
    PanopticCounts(np.stack(counts_of_images)).quality().pq

A predicted and a ground-truth segment of the same class match if their IoU is above 0.5; each has at most one match. PQ
of a class is the sum of the matched IoUs divided by the mean number of its predicted and ground-truth segments. It is
the product of SQ, the mean IoU of the matches, and RQ, an F-score. Averages are over the classes that occur.

Void pixels, which have no ground-truth segment, are left out of unions. A ground-truth crowd is never matched and never
counts as missed. A predicted segment with more than half of its area on void or on crowds of its class is not a false
positive.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

MATCHED: Final = 0.5  # IoU above which two segments match


def count_cells(predicted: Tensor, truth: Tensor, segments: int, true_segments: int) -> Tensor:
    """Intersections [n + 1, m + 1] in pixels of the n predicted and m ground-truth segments of two maps [H, W]. The
    first row and column are for -1, no segment."""
    width = true_segments + 1
    cells = (predicted.long() + 1) * width + truth.long() + 1
    return torch.bincount(cells.flatten(), minlength=(segments + 1) * width).view(segments + 1, width)


def count_segments(
    cells: NDArray[Any],
    classes: NDArray[np.int64],
    truth_classes: NDArray[np.int64],
    crowd: NDArray[np.bool_],
    num_classes: int,
) -> Floats:
    """Counts of one image per class [4, K]: the sum of the IoUs of matches, and the numbers of matches, false positives
    and false negatives. Segments without pixels do not count."""
    areas, truth_areas = cells[1:].sum(1), cells[:, 1:].sum(0)
    void, both = cells[1:, :1], cells[1:, 1:].astype(np.float64)
    either = areas[:, None] + truth_areas - both - void
    ious = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    same = classes[:, None] == truth_classes
    matches = (ious > MATCHED) & same & ~crowd
    found, at = matches.nonzero()
    unclear = void[:, 0] + (both * (same & crowd)).sum(1)
    wrong = ~matches.any(1) & (areas > 0) & (2 * unclear <= areas)
    missed = ~matches.any(0) & (truth_areas > 0) & ~crowd
    columns = (classes[found], ious[found, at]), (classes[found], None), (classes[wrong], None)
    columns += ((truth_classes[missed], None),)
    return np.stack([np.bincount(of, values, num_classes).astype(np.float64) for of, values in columns])


class Quality(NamedTuple):
    """PQ and its two factors, of a class or averaged over classes; NaN if no class occurs."""

    pq: float
    sq: float
    rq: float


@dataclass(frozen=True, slots=True, eq=False)
class PanopticCounts:
    """The counts of `count_segments` for N images [N, 4, K], in the order of the split."""

    images: Floats

    def total(self) -> Floats:
        """The sum over images [4, K], added in order, so that it is bit-identical for any number of processes."""
        return np.add.accumulate(self.images, 0)[-1] if len(self.images) else self.images.sum(0)

    def per_class(self) -> Floats:
        """PQ, SQ and RQ of each class [3, K]; NaN for one that occurs in no image."""
        return rate_classes(self.total())

    def quality(self, chosen: NDArray[np.bool_] | None = None) -> Quality:
        """The averages over all classes, or over the chosen ones [K]."""
        return average_quality(self.per_class(), chosen)

    def image_quality(self) -> Floats:
        """The PQ of each image on its own [N]; 1 if it has neither ground-truth nor predicted segments."""
        rows = np.stack([rate_classes(image)[0] for image in self.images]) if len(self.images) else self.images[:, 0]
        there = ~np.isnan(rows)
        sums = np.where(there, rows, 0.0).sum(1)
        return np.where(there.any(1), sums / there.sum(1).clip(1), 1.0)

    def statistics(self, weights: Floats, things: NDArray[np.bool_]) -> Floats:
        """PQ, SQ and RQ, then the PQ of things and of stuff, with image weights [N]."""
        rates = rate_classes(np.tensordot(weights, self.images, 1))
        split = (average_quality(rates, chosen).pq for chosen in (things, ~things))
        return np.array([*average_quality(rates), *split])


def rate_classes(counts: Floats) -> Floats:
    """PQ, SQ and RQ of each class [3, K], from counts [4, K]."""
    ious, matched, wrong, missed = counts
    size = matched + wrong / 2 + missed / 2
    parts = [(ious, size), (ious, np.where((matched == 0) & (size > 0), 1.0, matched)), (matched, size)]
    rates = [np.divide(top, under, out=np.full(len(top), np.nan), where=under > 0) for top, under in parts]
    return np.stack(rates)


def average_quality(rates: Floats, chosen: NDArray[np.bool_] | None = None) -> Quality:
    """The mean of [3, K] over the classes that occur."""
    there = ~np.isnan(rates[0]) if chosen is None else ~np.isnan(rates[0]) & chosen
    if not there.any():
        return Quality(*[float("nan")] * 3)
    return Quality(*rates[:, there].mean(1).tolist())

"""Average precision and recall of masks, as defined by COCO and computed by pycocotools.

    ranking = MaskRanking(match_images(images), num_classes)
    ranking.summarise()                # AP, AP50, AP75, ..., AR of large objects
    ranking.per_class()                # AP of each class [K]

The detections of a class in all images are sorted by descending score. AP is the mean, over 101 recall levels from 0 to
1, of the highest precision at that recall or above; AR is the recall of all detections. Both are averaged over the IoU
thresholds 0.5, 0.55 ... 0.95 and over the classes that have ground-truth objects.

Precision is needed only where recall increases, so the curves store true positives only. Weighting each image has the
same effect as repeating it that many times, so a bootstrap over images takes milliseconds.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from vitrail.evaluation.intervals import RESAMPLES, Interval, bootstrap
from vitrail.evaluation.segments.matching import (
    RIGHT,
    THRESHOLDS,
    UNCOUNTED,
    Flags,
    Floats,
    ImageMatches,
    Numbers,
)

RECALLS: Final = np.linspace(0.0, 1.0, 101)
ALL, SMALL, MEDIUM, LARGE = range(4)  # of AREAS
AT50, AT75 = 0, 5  # of THRESHOLDS
EFFORT: Final = 1 << 27  # most detections in all resamples together; larger sets get fewer resamples

HEADLINES: Final = ("map", "map50", "map75")  # in the order of `MaskRanking.statistics`
# The area range of each number and, for recall, the most detections of a class per image.
PRECISIONS: Final = {"map_small": SMALL, "map_medium": MEDIUM, "map_large": LARGE}
RECALL_NUMBERS: Final = {
    "ar1": (ALL, 1),
    "ar10": (ALL, 10),
    "ar100": (ALL, 100),
    "ar_small": (SMALL, 100),
    "ar_medium": (MEDIUM, 100),
    "ar_large": (LARGE, 100),
}


class Curves:
    """The precision-recall curves of all classes for one area range, evaluated with any image weights.

    A line is the curve of one class k at one IoU threshold t; its index is k T + t."""

    def __init__(self, ranking: "MaskRanking", area: int, most: int) -> None:
        self.classes = ranking.classes
        self.lines = ranking.classes * len(THRESHOLDS)
        self.object_images = ranking.object_images[ranking.counted[area]]
        self.object_classes = ranking.object_classes[ranking.counted[area]]
        chosen = ranking.ranks < most
        self.images = ranking.images[chosen]  # the image of each detection, sorted by class and then by score
        classes = ranking.detection_classes[chosen]
        starts = np.searchsorted(classes, np.arange(ranking.classes))  # the first detection of each class
        kinds = ranking.kinds[area][:, chosen]
        line, place = order_by_line(kinds == RIGHT, classes)
        self.place, self.first = place, starts[line // len(THRESHOLDS)]
        self.right_images, self.line = self.images[place], line
        self.bounds = np.searchsorted(line, np.arange(self.lines + 1))
        # The rank of each true positive among the ignored detections, and where those of its line begin.
        other_line, other_place = order_by_line(kinds == UNCOUNTED, classes)
        self.other_images = self.images[other_place]
        self.other_first = np.searchsorted(other_line, line)
        stride = len(self.images) + 1
        self.other_place = np.searchsorted(other_line * stride + other_place, line * stride + place)

    def objects(self, weights: Floats | None = None) -> Floats:
        """The number of objects of each class [K]."""
        of = None if weights is None else weights[self.object_images]
        return np.bincount(self.object_classes, of, self.classes).astype(np.float64)

    def recall(self, weights: Floats | None = None) -> Floats:
        """The recall of each class and threshold [K, T]; NaN for a class without objects."""
        of = None if weights is None else weights[self.right_images]
        right = np.bincount(self.line, of, self.lines).reshape(self.classes, -1)
        objects = self.objects(weights)[:, None]
        return np.divide(right, objects, out=np.full(right.shape, np.nan), where=objects > 0)

    def precision(self, weights: Floats | None = None) -> Floats:
        """The average precision of each class and threshold [K, T]; NaN for a class without objects."""
        objects = self.objects(weights)
        before = [add_up(part, weights) for part in (self.images, self.right_images, self.other_images)]
        every = before[0][self.place + 1] - before[0][self.first]
        every -= before[2][self.other_place] - before[2][self.other_first]
        right = before[1][1:] - before[1][self.bounds[self.line]]
        best = right / (every + np.spacing(1))
        for start, end in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
            if end - start > 1:
                line = best[start:end][::-1]
                np.maximum.accumulate(line, out=line)
        # How many of the 101 recall levels each true positive is the first to reach.
        reached = np.searchsorted(RECALLS, right / objects.clip(1)[self.line // len(THRESHOLDS)], "right")
        steps = np.diff(reached, prepend=0)
        begins = self.bounds[:-1][np.diff(self.bounds) > 0]
        steps[begins] = reached[begins]
        found = np.bincount(self.line, best * steps, self.lines).reshape(self.classes, -1) / len(RECALLS)
        return np.where(objects[:, None] > 0, found, np.nan)


def order_by_line(flags: Flags, classes: Numbers) -> tuple[Numbers, Numbers]:
    """The lines and places of the flagged detections [T, n], sorted by line and then by place; `classes` [n] is
    sorted."""
    step, place = flags.nonzero()
    line = classes[place] * len(THRESHOLDS) + step
    order = np.argsort(line, kind="stable")
    return line[order], place[order]


def add_up(images: Numbers, weights: Floats | None) -> Floats:
    """Cumulative weights of entries, given the image of each, starting at 0."""
    out = np.arange(len(images) + 1, dtype=np.float64)
    if weights is not None:
        np.cumsum(weights[images], out=out[1:])
    return out


class MaskRanking:
    """The matches of all N images of a split, sorted by class and descending score; ties keep the order of the
    images."""

    def __init__(self, matches: Sequence[ImageMatches], classes: int) -> None:
        self.classes, self.count = classes, len(matches)
        images = np.arange(len(matches))
        of = np.concatenate([np.zeros(0, np.int64), *(one.classes for one in matches)])
        scores = np.concatenate([np.zeros(0), *(one.scores for one in matches)])
        order = np.lexsort((-scores, of))  # stable
        self.detection_classes = of[order]
        self.images = np.repeat(images, [len(one.classes) for one in matches])[order]
        self.ranks = np.concatenate([np.zeros(0, np.int64), *(one.ranks for one in matches)])[order]
        empty = np.zeros((4, len(THRESHOLDS), 0), np.int8)
        self.kinds = np.concatenate([empty, *(one.kinds for one in matches)], 2)[:, :, order]
        self.object_images = np.repeat(images, [len(one.truth_classes) for one in matches])
        self.object_classes = np.concatenate([np.zeros(0, np.int64), *(one.truth_classes for one in matches)])
        self.counted = np.concatenate([np.zeros((4, 0), np.bool_), *(one.counted for one in matches)], 1)

    @cached_property
    def whole(self) -> Curves:
        """The curves of the headline numbers."""
        return Curves(self, ALL, 100)

    def statistics(self, weights: Floats | None = None) -> Floats:
        """The HEADLINES numbers with image weights [N]."""
        found = self.whole.precision(weights)
        return np.array([average(part) for part in (found, found[:, AT50], found[:, AT75])])

    def summarise(self) -> dict[str, float | None]:
        """COCO's twelve numbers; None for a number without ground-truth objects."""
        found = dict(zip(HEADLINES, self.statistics().tolist(), strict=True))
        found |= {name: average(Curves(self, area, 100).precision()) for name, area in PRECISIONS.items()}
        found |= {name: average(Curves(self, *which).recall()) for name, which in RECALL_NUMBERS.items()}
        return {name: None if np.isnan(value) else value for name, value in found.items()}

    def per_class(self) -> Floats:
        """The AP of each class [K]; NaN for a class without objects."""
        return self.whole.precision().mean(1)

    def intervals(self, seed: int, resamples: int = RESAMPLES) -> Mapping[str, Interval | None]:
        """Confidence intervals of HEADLINES by a bootstrap over images. Copies of an image rank its detections alike,
        so the AP of rare classes is too high in nearly every resample; centring the intervals corrects this."""
        resamples = min(resamples, EFFORT // max(len(self.images) + len(self.whole.line), 1))
        found = bootstrap(self.statistics, self.count, seed=seed, resamples=resamples, centre=True)
        within = [one and Interval(max(one.low, 0.0), min(one.high, 1.0)) for one in found]
        return dict(zip(HEADLINES, within, strict=True))


def average(values: Floats) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")

"""Matches the detections of an image with its ground-truth objects by COCO's rules.

    shares = overlap_masks(masks, true_masks)  # intersections in pixels [D, N]
    image = ImageOverlaps(sample=3, classes=..., scores=..., areas=..., ious=..., ...)
    match_images([image, ...])                 # one ImageMatches each

The detections of a class are processed by descending score, at most 100 per image. Each is matched with the unmatched
object of its class that has the highest IoU, if that reaches the threshold; ties go to the last object. Crowds, and
objects outside the area range, are ignored: they are matched only if no other object can be. A detection counts as
neither true nor false positive if it matches an ignored object, or if it is unmatched and itself outside the area
range. A crowd can be matched many times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

THRESHOLDS: Final = np.linspace(0.5, 0.95, 10)  # of IoU
LARGEST: Final = 1e10
# Area ranges in pixels: all, small, medium, large.
AREAS: Final = np.array([[0, LARGEST], [0, 32**2], [32**2, 96**2], [96**2, LARGEST]], np.float64)
MOST: Final = 100  # detections of a class per image
WRONG, RIGHT, UNCOUNTED = 0, 1, 2  # kinds of detections: false positive, true positive, ignored
CHUNK: Final = 1 << 19  # most entries of a table; about five tables are held at a time

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageOverlaps:
    """The D detections and N ground-truth objects of an image, and their overlaps."""

    sample: int  # index of the image in the split
    classes: Numbers  # [D]
    scores: Floats  # [D]
    areas: Numbers  # [D], in pixels
    ious: Floats  # [D, N]
    truth_classes: Numbers  # [N]
    truth_areas: Numbers  # [N]
    crowd: Flags  # [N]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageMatches:
    """The detections of an image by descending score, for A area ranges and T IoU thresholds."""

    sample: int
    classes: Numbers  # [D]
    scores: Floats  # [D]
    ranks: Numbers  # [D], rank among the detections of the same class, from 0
    kinds: NDArray[np.int8]  # [A, T, D]: WRONG, RIGHT or UNCOUNTED
    truth_classes: Numbers  # [N]
    counted: Flags  # [A, N]: the objects that are not ignored

    def f_score(self, least: float = 0.5) -> float:
        """2 TP / (2 TP + FP + FN) at an IoU of 0.5, over the detections with a score of at least `least`; 1 if there
        are neither objects nor such detections."""
        kinds = self.kinds[0, 0, self.scores >= least]
        right, wrong, objects = int((kinds == RIGHT).sum()), int((kinds == WRONG).sum()), int(self.counted[0].sum())
        size = right + wrong + objects  # objects = TP + FN
        return 2 * right / size if size else 1.0


def overlap_masks(masks: Tensor, others: Tensor) -> Tensor:
    """Intersections [D, N] of D masks with N others, in pixels; exact up to 2**24 pixels."""
    return (masks.flatten(1).float() @ others.flatten(1).float().T).round().long()


def divide_overlaps(both: NDArray[Any], areas: Numbers, truth_areas: Numbers, crowd: Flags) -> Floats:
    """IoUs [D, N]; for a crowd, the share of the detection that lies on it."""
    own = np.broadcast_to(areas[:, None], both.shape)
    either = np.where(crowd, own, own + truth_areas - both)
    return np.divide(both, either, out=np.zeros(both.shape), where=either > 0)


class Group(NamedTuple):
    """The detections and objects of one class in one image."""

    image: int
    places: Numbers  # [d], indices of the detections in the image, by descending score
    ious: Floats  # [d, g]
    counted: Flags  # [A, g]
    crowd: Flags  # [g]


def match_images(images: Sequence[ImageOverlaps]) -> list[ImageMatches]:
    """Matches each image; many images at once are faster than one at a time."""
    kept = [rank_detections(image) for image in images]
    counted = [find_counted(image) for image in images]
    found = [np.full((len(AREAS), len(THRESHOLDS), len(order)), -1, np.int8) for order, _ in kept]
    groups = [group for at, image in enumerate(images) for group in split_classes(at, image, kept[at][0], counted[at])]
    groups.sort(key=lambda group: (-len(group.places), group.ious.shape[1]))
    for part in chunk_groups(groups):
        for group, outcome in zip(part, match_groups(part), strict=True):
            found[group.image][:, :, group.places] = outcome
    return [finish_matches(*every) for every in zip(images, kept, counted, found, strict=True)]


def rank_detections(image: ImageOverlaps) -> tuple[Numbers, Numbers]:
    """The best MOST detections of each class, by descending score, and the rank of each in its class."""
    order = np.argsort(-image.scores, kind="stable")
    of = image.classes[order]
    by_class = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[by_class], of[by_class])
    ranks = np.empty(len(order), np.int64)
    ranks[by_class] = np.arange(len(order)) - starts
    return order[ranks < MOST], ranks[ranks < MOST]


def find_counted(image: ImageOverlaps) -> Flags:
    """Which objects are not ignored, for each area range [A, N]."""
    low, high = AREAS[:, :1], AREAS[:, 1:]
    return ~image.crowd & (image.truth_areas >= low) & (image.truth_areas <= high)


def split_classes(at: int, image: ImageOverlaps, order: Numbers, counted: Flags) -> Iterator[Group]:
    """Yields a group for each class that has both detections and objects in the image."""
    classes = image.classes[order]
    for label in np.intersect1d(classes, image.truth_classes):
        places, objects = np.flatnonzero(classes == label), np.flatnonzero(image.truth_classes == label)
        ious = image.ious[np.ix_(order[places], objects)]
        yield Group(at, places, ious, counted[:, objects], image.crowd[objects])


def chunk_groups(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Splits groups, sorted by descending number of detections, into parts whose tables are at most CHUNK large."""
    part, widest = list[Group](), 0
    for group in groups:
        wide = max(widest, group.ious.shape[1])
        size = (len(part) + 1) * wide * max(len(AREAS) * len(THRESHOLDS), len((part or [group])[0].places))
        if part and size > CHUNK:
            yield part
            part, wide = [], group.ious.shape[1]
        part.append(group)
        widest = wide
    if part:
        yield part


def match_groups(groups: Sequence[Group]) -> Iterator[NDArray[np.int8]]:
    """Yields [A, T, d] for each group: RIGHT or UNCOUNTED for a matched detection, else -1. The groups advance together
    from their best detection to their worst; they must be sorted by descending number of detections."""
    count, deep = len(groups), max(len(group.places) for group in groups)
    wide = max(group.ious.shape[1] for group in groups)
    ious, crowd = np.full((count, deep, wide), -1.0), np.zeros((count, 1, 1, wide), np.bool_)
    counted = np.zeros((count, len(AREAS), 1, wide), np.bool_)
    for at, group in enumerate(groups):
        depth, width = group.ious.shape
        ious[at, :depth, :width], crowd[at, 0, 0, :width] = group.ious, group.crowd
        counted[at, :, 0, :width] = group.counted
    # Objects are ranked by IoU, ties in favour of the later; `extra` puts those that count ahead of the ignored.
    ranks = np.argsort(np.argsort(ious, 2, kind="stable"), 2).astype(np.int32)
    extra = counted * np.int32(wide)
    taken = np.zeros((count, len(AREAS), len(THRESHOLDS), wide), np.bool_)
    out = np.full((count, len(AREAS), len(THRESHOLDS), deep), -1, np.int8)
    reached = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]
    depths = np.array([len(group.places) for group in groups])
    for step in range(deep):
        active = int((depths > step).sum())
        free = (ious[:active, step, None, None] >= reached) & (~taken[:active] | crowd[:active])
        keys = np.where(free, ranks[:active, step, None, None] + extra[:active], -1)
        best = keys.max(3)
        taken[:active] |= (keys == best[..., None]) & free
        out[:active, ..., step] = np.where(best < 0, -1, np.where(best >= wide, RIGHT, UNCOUNTED))
    for at, group in enumerate(groups):
        yield out[at, :, :, : len(group.places)]


def finish_matches(
    image: ImageOverlaps, kept: tuple[Numbers, Numbers], counted: Flags, found: NDArray[np.int8]
) -> ImageMatches:
    """Completes the matches: an unmatched detection is ignored if its area is out of range, else a false positive."""
    order, ranks = kept
    areas = image.areas[order]
    outside = (areas < AREAS[:, :1]) | (areas > AREAS[:, 1:])
    alone = np.where(outside, UNCOUNTED, WRONG).astype(np.int8)[:, None]
    return ImageMatches(
        sample=image.sample,
        classes=image.classes[order],
        scores=image.scores[order],
        ranks=ranks,
        kinds=np.where(found < 0, alone, found),
        truth_classes=image.truth_classes,
        counted=counted,
    )

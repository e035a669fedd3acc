"""Which detections of an image find which of its objects, by COCO's rules.

    shares = overlap_masks(masks, true_masks)  # pixels in common [D, N]
    image = ImageOverlaps(sample=3, classes=..., scores=..., areas=..., ious=..., ...)
    match_images([image, ...])                 # one ImageMatches each

Detections of a class are taken in falling order of score, the 100 best of an image. Each takes the free object of its
class with which its IoU is largest, if this reaches the threshold; of equal ones the last. Objects that are crowds, or
whose area is outside of the range in question, are taken only where no other can be; such a detection counts as neither
right nor wrong, and nor does one that finds nothing and is itself outside of the range. A crowd can be taken by many.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

THRESHOLDS: Final = np.linspace(0.5, 0.95, 10)  # of IoU
LARGEST: Final = 1e10
# Ranges of areas in pixels: all, small, medium, large.
AREAS: Final = np.array([[0, LARGEST], [0, 32**2], [32**2, 96**2], [96**2, LARGEST]], np.float64)
MOST: Final = 100  # detections of a class in an image
WRONG, RIGHT, UNCOUNTED = 0, 1, 2  # what a detection is
CHUNK: Final = 1 << 19  # numbers of a table, of which about five are held at a time

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageOverlaps:
    """The D detections and N objects of an image, and how much they overlap."""

    sample: int  # its place in the split
    classes: Numbers  # [D]
    scores: Floats  # [D]
    areas: Numbers  # [D], in pixels
    ious: Floats  # [D, N]
    truth_classes: Numbers  # [N]
    truth_areas: Numbers  # [N]
    crowd: Flags  # [N]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageMatches:
    """The detections of an image that count, in falling order of score, for A ranges of areas and T thresholds."""

    sample: int
    classes: Numbers  # [D]
    scores: Floats  # [D]
    ranks: Numbers  # [D], among the detections of its class, from 0
    kinds: NDArray[np.int8]  # [A, T, D]: WRONG, RIGHT or UNCOUNTED
    truth_classes: Numbers  # [N]
    counted: Flags  # [A, N]: the objects that are to be found

    def f_score(self, least: float = 0.5) -> float:
        """2 TP / (2 TP + FP + FN) at an IoU of 0.5, of the detections whose score is at least `least`; 1 where there
        is neither an object nor such a detection."""
        kinds = self.kinds[0, 0, self.scores >= least]
        right, wrong, objects = int((kinds == RIGHT).sum()), int((kinds == WRONG).sum()), int(self.counted[0].sum())
        size = right + wrong + objects  # objects are found or missed
        return 2 * right / size if size else 1.0


def overlap_masks(masks: Tensor, others: Tensor) -> Tensor:
    """Pixels that each of D masks has in common with each of N others [D, N]; exact up to 2**24 pixels."""
    return (masks.flatten(1).float() @ others.flatten(1).float().T).round().long()


def divide_overlaps(both: NDArray[Any], areas: Numbers, truth_areas: Numbers, crowd: Flags) -> Floats:
    """IoUs [D, N]; with a crowd, the share of the detection that lies on it."""
    own = np.broadcast_to(areas[:, None], both.shape)
    either = np.where(crowd, own, own + truth_areas - both)
    return np.divide(both, either, out=np.zeros(both.shape), where=either > 0)


class Group(NamedTuple):
    """The detections and objects of one class in one image."""

    image: int
    places: Numbers  # [d], of the detections among those of the image, in falling order of score
    ious: Floats  # [d, g]
    counted: Flags  # [A, g]
    crowd: Flags  # [g]


def match_images(images: Sequence[ImageOverlaps]) -> list[ImageMatches]:
    """The matches of each image; many images at once are faster than one at a time."""
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
    """The detections that count, in falling order of score, and the rank of each in its class."""
    order = np.argsort(-image.scores, kind="stable")
    of = image.classes[order]
    by_class = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[by_class], of[by_class])
    ranks = np.empty(len(order), np.int64)
    ranks[by_class] = np.arange(len(order)) - starts
    return order[ranks < MOST], ranks[ranks < MOST]


def find_counted(image: ImageOverlaps) -> Flags:
    """Which objects are to be found, for each range of areas [A, N]."""
    low, high = AREAS[:, :1], AREAS[:, 1:]
    return ~image.crowd & (image.truth_areas >= low) & (image.truth_areas <= high)


def split_classes(at: int, image: ImageOverlaps, order: Numbers, counted: Flags) -> Iterator[Group]:
    """The classes of an image that have detections and objects."""
    classes = image.classes[order]
    for label in np.intersect1d(classes, image.truth_classes):
        places, objects = np.flatnonzero(classes == label), np.flatnonzero(image.truth_classes == label)
        ious = image.ious[np.ix_(order[places], objects)]
        yield Group(at, places, ious, counted[:, objects], image.crowd[objects])


def chunk_groups(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Parts of the groups, which come with most detections first, whose tables are small enough."""
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
    """For each group [A, T, d]: RIGHT or UNCOUNTED for a detection that found an object, else -1. All groups move on
    together, from the best detection of each to its worst; those with most detections come first."""
    count, deep = len(groups), max(len(group.places) for group in groups)
    wide = max(group.ious.shape[1] for group in groups)
    ious, crowd = np.full((count, deep, wide), -1.0), np.zeros((count, 1, 1, wide), np.bool_)
    counted = np.zeros((count, len(AREAS), 1, wide), np.bool_)
    for at, group in enumerate(groups):
        depth, width = group.ious.shape
        ious[at, :depth, :width], crowd[at, 0, 0, :width] = group.ious, group.crowd
        counted[at, :, 0, :width] = group.counted
    # The rank of each object by IoU, the later of equal ones first; those that count before all others.
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
    """What the detections without an object are is up to their area."""
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

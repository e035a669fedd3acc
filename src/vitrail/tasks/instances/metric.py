"""Average precision of instance masks on a split.

    score = score_batches(network, batches, preprocessing, InstanceMetric(8, device), device=device)
    score.ap, score.ranking.per_class()

Masks are compared at the size at which the network sees the images, and areas are measured in those pixels. Each
process matches the detections of its own images; the matches of all processes are gathered in the order of the split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch

from vitrail.core.errors import DataError
from vitrail.data.loader import Batch
from vitrail.distributed.process_group import World
from vitrail.evaluation.intervals import Interval
from vitrail.evaluation.metrics import REMEDY, Criterion
from vitrail.evaluation.segments.mask_ap import MaskRanking
from vitrail.evaluation.segments.matching import (
    MOST,
    ImageMatches,
    ImageOverlaps,
    divide_overlaps,
    match_images,
    overlap_masks,
)
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.decode import InstanceMasks, decode_instances
from vitrail.tasks.mask_queries.scene import (
    SceneRows,
    SceneSegments,
    SegmentedScene,
    TrueSegments,
    encode_masks,
    read_truth,
    take_readable,
)

SURE: Final = 0.5  # lowest score of the instances that are drawn and count in the F-score of a single image


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InstanceScore:
    """The score of `count` images, including those without objects. `worst` are the images with the lowest F-score at
    an IoU of 0.5."""

    criteria: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="map", title="AP", share=True),
        Criterion(name="map50", title="AP50", share=True),
        Criterion(name="map75", title="AP75", share=True),
    )
    extras: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="map_small", title="AP of small objects", share=True),
        Criterion(name="map_medium", title="AP of medium objects", share=True),
        Criterion(name="map_large", title="AP of large objects", share=True),
        Criterion(name="ar1", title="AR with 1 detection", share=True),
        Criterion(name="ar10", title="AR with 10 detections", share=True),
        Criterion(name="ar100", title="AR with 100 detections", share=True),
        Criterion(name="ar_small", title="AR of small objects", share=True),
        Criterion(name="ar_medium", title="AR of medium objects", share=True),
        Criterion(name="ar_large", title="AR of large objects", share=True),
    )

    unreadable: int
    ranking: MaskRanking
    numbers: Mapping[str, float | None]  # COCO's twelve numbers; None without ground-truth objects
    worst: tuple[SegmentedScene, ...] = ()

    @property
    def count(self) -> int:
        return self.ranking.count

    @property
    def ap(self) -> float:
        value = self.numbers["map"]
        assert value is not None
        return value

    def row(self) -> dict[str, float | int | None]:
        return {**self.numbers, "count": self.count}

    def intervals(self, seed: int) -> Mapping[str, Interval | None]:
        """Confidence intervals of AP, AP50 and AP75 by a bootstrap over images."""
        return self.ranking.intervals(seed)


class InstanceMetric:
    """Decodes the queries of each image to instances and matches them with its ground-truth objects."""

    def __init__(self, classes: int, device: torch.device, extremes: int = 0) -> None:
        self.classes, self.device = classes, device
        self.scenes = SceneRows[ImageMatches](extremes)

    def update(self, outputs: QueryOutput, batch: Batch) -> None:
        """Adds one batch, whose targets are segments at the size of its views."""
        height, width = batch.segments.planes.shape[-2:]
        readable = take_readable(outputs, batch, self.classes)
        self.scenes.count_unreadable(batch)
        every = zip(decode_instances(readable, (height, width), top=MOST), read_truth(batch), strict=True)
        kept = list[tuple[ImageOverlaps, InstanceMasks, TrueSegments]]()
        for found, (sample, truth) in every:
            kept.append((overlap_instances(sample, found, truth), drop_unsure(found, self.scenes.most), truth))
        for matches, (_, found, truth) in zip(match_images([one for one, _, _ in kept]), kept, strict=True):
            self.scenes.rows[matches.sample] = matches
            if self.scenes.most:
                self.keep(matches, found, truth)

    def keep(self, matches: ImageMatches, found: InstanceMasks, truth: TrueSegments) -> None:
        self.scenes.keep(matches.sample, matches.f_score(SURE), truth, lambda: keep_instances(found))

    def merge(self, world: World) -> None:
        self.scenes.merge(world)

    def result(self) -> InstanceScore:
        ranking, unreadable = MaskRanking(self.scenes.in_order(), self.classes), self.scenes.unreadable
        numbers = ranking.summarise()
        if numbers["map"] is None:
            rest = f"{unreadable} are unreadable and the rest have no objects other than crowds"
            raise DataError(f"no image could be scored: {rest}; {REMEDY}")
        return InstanceScore(unreadable=unreadable, ranking=ranking, numbers=numbers, worst=tuple(self.scenes.worst))


def overlap_instances(sample: int, found: InstanceMasks, truth: TrueSegments) -> ImageOverlaps:
    """Overlaps of an image's instances with its objects, computed once per query."""
    queries = found.queries.cpu().numpy()
    _, first, back = np.unique(queries, return_index=True, return_inverse=True)
    masks = found.masks[torch.from_numpy(first).to(found.masks.device)]
    whole = torch.ones(1, *masks.shape[1:], dtype=torch.bool, device=masks.device)
    both = overlap_masks(masks, torch.cat([truth.masks, whole])).cpu().numpy()[back]
    truth_areas = truth.masks.flatten(1).sum(1).cpu().numpy()
    return ImageOverlaps(
        sample=sample,
        classes=found.classes.cpu().numpy(),
        scores=found.scores.double().cpu().numpy(),
        areas=both[:, -1],
        ious=divide_overlaps(both[:, :-1], both[:, -1], truth_areas, truth.crowd),
        truth_classes=truth.classes,
        truth_areas=truth_areas,
        crowd=truth.crowd,
    )


def drop_unsure(found: InstanceMasks, most: int) -> InstanceMasks:
    """Keeps the instances that may be drawn; none if no images are kept for a report."""
    sure = found.scores >= SURE if most else torch.zeros_like(found.scores, dtype=torch.bool)
    return InstanceMasks(*(part[sure] for part in found))


def keep_instances(found: InstanceMasks) -> SceneSegments:
    scores = found.scores.double().cpu().numpy()
    return SceneSegments(masks=encode_masks(found.masks), classes=found.classes.cpu().numpy(), scores=scores)

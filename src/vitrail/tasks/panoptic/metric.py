"""Panoptic quality of a network with queries on a split.

    score = score_batches(network, batches, preprocessing, PanopticMetric(things, device), device=device)
    score.pq, score.counts.per_class()

Maps are compared at the size at which the network sees the images. The counts of each image are gathered from all
processes and added up in the order of the split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.data.loader import Batch
from vitrail.distributed.process_group import World
from vitrail.evaluation.intervals import DRAWS, RESAMPLES, Interval, bootstrap
from vitrail.evaluation.metrics import REMEDY, Criterion
from vitrail.evaluation.segments.panoptic_quality import PanopticCounts, Quality, count_cells, count_segments
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries.decode import PanopticMap, decode_panoptic
from vitrail.tasks.mask_queries.scene import (
    SceneRows,
    SceneSegments,
    SegmentedScene,
    TrueSegments,
    encode_masks,
    read_truth,
    take_readable,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PanopticScore:
    """The score of `count` images with segments. `worst` are the images with the lowest PQ of their own."""

    criteria: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="pq", title="PQ", share=True),
        Criterion(name="sq", title="SQ", share=True),
        Criterion(name="rq", title="RQ", share=True),
    )
    extras: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="pq_things", title="PQ of things", share=True),
        Criterion(name="pq_stuff", title="PQ of stuff", share=True),
    )

    unreadable: int
    counts: PanopticCounts
    things: NDArray[np.bool_]  # [K]
    worst: tuple[SegmentedScene, ...] = ()

    @property
    def count(self) -> int:
        return len(self.counts.images)

    @property
    def quality(self) -> Quality:
        """PQ, SQ and RQ over all classes that occur."""
        return self.counts.quality()

    @property
    def pq(self) -> float:
        return self.quality.pq

    def row(self) -> dict[str, float | int | None]:
        """The row of a run's metrics. PQ of things or of stuff is None if none occurs."""
        sides = {"pq_things": self.things, "pq_stuff": ~self.things}
        parts = {name: self.counts.quality(chosen).pq for name, chosen in sides.items()}
        known = {name: None if math.isnan(value) else value for name, value in parts.items()}
        return {**self.quality._asdict(), **known, "count": self.count}

    def intervals(self, seed: int) -> Mapping[str, Interval | None]:
        """Confidence intervals by a bootstrap over images."""
        names = [one.name for one in (*self.criteria, *self.extras)]
        found = bootstrap(
            lambda weights: self.counts.statistics(weights, self.things),
            self.count,
            seed=seed,
            resamples=min(RESAMPLES, DRAWS // max(self.counts.images.size, 1)),
        )
        return dict(zip(names, found, strict=True))


class PanopticMetric:
    """Decodes the queries of each image to a panoptic map and counts its segments. `things` says which classes are
    things."""

    def __init__(self, things: Sequence[bool], device: torch.device, extremes: int = 0) -> None:
        self.things, self.device = tuple(things), device
        self.scenes = SceneRows[NDArray[np.float64]](extremes)

    def update(self, outputs: QueryOutput, batch: Batch) -> None:
        """Adds one batch, whose targets are segments at the size of its views."""
        height, width = batch.segments.planes.shape[-2:]
        readable = take_readable(outputs, batch, len(self.things))
        self.scenes.count_unreadable(batch)
        maps = decode_panoptic(readable, (height, width), self.things)
        for found, (sample, truth) in zip(maps, read_truth(batch), strict=True):
            if len(truth.classes):
                self.count_image(found, sample, truth)

    def count_image(self, found: PanopticMap, sample: int, truth: TrueSegments) -> None:
        cells = count_cells(found.ids, number_pixels(truth.masks), len(found.classes), len(truth.classes))
        classes = found.classes.cpu().numpy()
        counts = count_segments(cells.cpu().numpy(), classes, truth.classes, truth.crowd, len(self.things))
        self.scenes.rows[sample] = counts
        if self.scenes.most:
            value = float(PanopticCounts(counts[None]).image_quality()[0])
            self.scenes.keep(sample, value, truth, lambda: keep_map(found))

    def merge(self, world: World) -> None:
        self.scenes.merge(world)

    def result(self) -> PanopticScore:
        rows, unreadable = self.scenes.in_order(), self.scenes.unreadable
        counts = PanopticCounts(np.stack(rows) if rows else np.zeros((0, 4, len(self.things))))
        if math.isnan(counts.quality().pq):
            rest = f"{unreadable} are unreadable and the rest have no segments other than crowds"
            raise DataError(f"no image could be scored: {rest}; {REMEDY}")
        return PanopticScore(
            unreadable=unreadable, counts=counts, things=np.array(self.things), worst=tuple(self.scenes.worst)
        )


def number_pixels(masks: Tensor) -> Tensor:
    """Numbers the pixels of m masks [m, H, W]: a map int16 [H, W] of their indices, -1 where there is none. Where masks
    overlap, the last one wins."""
    numbers = torch.arange(1, len(masks) + 1, dtype=torch.int16, device=masks.device)
    return (masks * numbers[:, None, None]).amax(0) - 1


def keep_map(found: PanopticMap) -> SceneSegments:
    """The segments of a predicted map."""
    numbers = torch.arange(len(found.classes), device=found.ids.device)
    masks = found.ids == numbers[:, None, None]
    scores = found.scores.double().cpu().numpy()
    return SceneSegments(masks=encode_masks(masks), classes=found.classes.cpu().numpy(), scores=scores)

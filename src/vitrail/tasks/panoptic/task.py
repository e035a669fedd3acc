"""Panoptic segmentation: every pixel belongs to at most one segment, each of a thing or of stuff. Scored by panoptic
quality. The card of the weights records which classes are things.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vitrail.checkpoint.bundle import Card
from vitrail.core.errors import DataError
from vitrail.core.text import pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.segment_targets import SegmentTargets
from vitrail.data.targets import Geometry
from vitrail.objectives.objective import ObjectiveConfig
from vitrail.tasks.mask_queries.coco_results import PanopticResults
from vitrail.tasks.mask_queries.decode import THRESHOLD
from vitrail.tasks.mask_queries.objective import PanopticQueries
from vitrail.tasks.mask_queries.prediction import PredictedSegments
from vitrail.tasks.mask_queries.report import ClassTable
from vitrail.tasks.mask_queries.task import SegmentsTask, check_masks, has_panoptic_maps
from vitrail.tasks.panoptic.metric import PanopticMetric, PanopticScore
from vitrail.tasks.panoptic.prediction import find_segments, write_ids
from vitrail.tasks.task import PredictionOptions


class PanopticTask(SegmentsTask):
    name = "panoptic"
    objective = PanopticQueries
    targets = SegmentTargets()
    criteria = PanopticScore.criteria
    extras = PanopticScore.extras
    threshold = THRESHOLD
    value_of_image = "PQ"

    def tabulate(self, score: PanopticScore) -> ClassTable:
        _, found, _, missed = score.counts.total()
        pq, sq, rq = score.counts.per_class()
        return {"PQ": pq, "SQ": sq, "RQ": rq, "segments": found + missed}

    def recognises(self, collection: Collection) -> bool:
        return has_panoptic_maps(collection) and not any(source.boxes_only for source in collection.splits.values())

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        check_masks(collection, "panoptic")
        if not has_panoptic_maps(collection):
            remedy = "panoptic segmentation needs at most one segment per pixel; use --task instances"
            raise DataError(f"{collection.name} has objects that may overlap: {remedy}")
        return tuple(one.name for one in collection.segment_classes)

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{pluralise(len(names), 'class', 'classes')} of segments"

    def card_facts(self, objective: ObjectiveConfig, source: ImageDataset) -> Mapping[str, Any]:
        return {"things": tuple(one.thing for one in source.segment_classes)}

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> PanopticMetric:
        """Treats all classes as things; `metric_for` takes them from the card."""
        return PanopticMetric((True,) * outputs, device, extremes)

    def metric_for(self, card: Card, outputs: int, device: torch.device, *, extremes: int = 0) -> PanopticMetric:
        return PanopticMetric(card.things or (True,) * outputs, device, extremes)

    def find(
        self, classes: torch.Tensor, masks: torch.Tensor, view: Geometry, options: PredictionOptions
    ) -> PredictedSegments:
        return find_segments(classes, masks, view, options)

    def describe_predictions(self, *, multi_label: bool) -> str:
        return "The segments of each image: single objects, and regions such as sky or road"

    def file_of(self, prediction: PredictedSegments) -> tuple[str, bytes]:
        """A PNG of segment ids in COCO's panoptic format."""
        return ".png", write_ids(prediction)

    def collect(self, options: PredictionOptions) -> PanopticResults:
        return PanopticResults(options.names, options.things)


PANOPTIC: Final = PanopticTask()

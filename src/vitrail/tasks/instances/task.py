"""Instance segmentation: a class, a score and a mask for each object; masks may overlap. Scored by COCO's mean average
precision of masks. Of panoptic annotations only the things are used.
"""

import json
from collections.abc import Sequence
from typing import Final

import torch

from vitrail.core.errors import DataError
from vitrail.core.text import pluralise
from vitrail.data.collection import Collection
from vitrail.data.segment_targets import SegmentTargets
from vitrail.data.targets import Geometry
from vitrail.evaluation.segments.mask_ap import AT50, AT75
from vitrail.tasks.instances.metric import SURE, InstanceMetric, InstanceScore
from vitrail.tasks.instances.prediction import find_instances
from vitrail.tasks.mask_queries.coco_results import InstanceResults, list_results
from vitrail.tasks.mask_queries.objective import InstanceQueries
from vitrail.tasks.mask_queries.prediction import PredictedSegments
from vitrail.tasks.mask_queries.report import ClassTable
from vitrail.tasks.mask_queries.task import SegmentsTask, check_masks
from vitrail.tasks.task import PredictionOptions


class InstancesTask(SegmentsTask):
    name = "instances"
    objective = InstanceQueries
    targets = SegmentTargets(things_only=True)
    criteria = InstanceScore.criteria
    extras = InstanceScore.extras
    value_of_image = "F-score"
    about_value = f"Instances with a score of at least {SURE:g} count; a match needs an IoU of at least 0.5."

    def tabulate(self, score: InstanceScore) -> ClassTable:
        ranking = score.ranking
        at, objects = ranking.whole.precision(), ranking.whole.objects()
        return {"AP": ranking.per_class(), "AP50": at[:, AT50], "AP75": at[:, AT75], "objects": objects}

    def recognises(self, collection: Collection) -> bool:
        """Also true for data with boxes only: `output_names` then explains that masks are missing."""
        return bool(collection.segment_classes)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        check_masks(collection, "instance")
        names = tuple(one.name for one in collection.segment_classes if one.thing)
        if not names:
            raise DataError(f"{collection.name} has stuff classes but no things; use --task segmentation")
        return names

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{pluralise(len(names), 'class', 'classes')} of objects"

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> InstanceMetric:
        return InstanceMetric(outputs, device, extremes)

    def find(
        self, classes: torch.Tensor, masks: torch.Tensor, view: Geometry, options: PredictionOptions
    ) -> PredictedSegments:
        return find_instances(classes, masks, view, options)

    def describe_predictions(self, *, multi_label: bool) -> str:
        return "The objects in each image, with their masks"

    def file_of(self, prediction: PredictedSegments) -> tuple[str, bytes]:
        """A JSON file of the image's COCO results."""
        return ".json", json.dumps(list_results(prediction)).encode()

    def collect(self, options: PredictionOptions) -> InstanceResults:
        return InstanceResults()


INSTANCES: Final = InstancesTask()

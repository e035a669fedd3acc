"""Classification: one class for each image, or several of which each is a question of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.data.collection import Collection
from vitrail.data.geometry import Geometry
from vitrail.data.source import Source
from vitrail.data.targets import ClassLabels
from vitrail.evaluation.accuracy import ClassificationMetric, Score
from vitrail.objectives.objective import ObjectiveConfig
from vitrail.tasks.classification.objective import Classification
from vitrail.tasks.classification.prediction import Prediction, rank_classes
from vitrail.tasks.task import PredictionOptions, Task


class ClassificationTask(Task):
    """Labels are class numbers of whole images, so crops and flips leave them as they are."""

    name = "classification"
    objective = Classification
    targets = ClassLabels()
    criteria = Score.criteria
    mixes = True
    has_closed_form = True

    def recognises(self, collection: Collection) -> bool:
        return bool(collection.classes)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        collection.need_labels()
        return collection.classes

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{len(names):,} classes"

    def card_facts(self, objective: ObjectiveConfig, source: Source) -> Mapping[str, Any]:
        several = isinstance(objective, Classification) and objective.is_multi_label(source.labels)
        return {"multi_label": several}

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> ClassificationMetric:
        return ClassificationMetric(outputs, device, extremes)

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> list[Prediction]:
        """Ranks the classes: rows sum to 1 (softmax), unless the weights are multi-label: then each class is by itself
        (sigmoid)."""
        del views
        return rank_classes(outputs.sigmoid() if options.multi_label else outputs.softmax(-1), options)


CLASSIFICATION: Final = ClassificationTask()

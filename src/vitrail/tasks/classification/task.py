"""Classification: one class per image, or several classes that are decided separately."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle, list_other_names
from vitrail.core.errors import ConfigError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, RelabelledDataset
from vitrail.data.targets import ClassTargets, Geometry
from vitrail.evaluation.metrics import ClassificationMetric, ClassificationScore
from vitrail.evaluation.scoring import EvaluationOutcome, EvaluationSetting, ScoringOptions, Subject
from vitrail.objectives.objective import ObjectiveConfig
from vitrail.report.confusion_matrix import ConfusionSection
from vitrail.report.page import Section
from vitrail.report.sections import Galleries, Gallery
from vitrail.tasks.classification.evaluation import assess_classifier
from vitrail.tasks.classification.metrics import match_classes
from vitrail.tasks.classification.objective import Classification
from vitrail.tasks.classification.prediction import SCHEMA, Prediction, rank_classes
from vitrail.tasks.classification.report import show_answers
from vitrail.tasks.task import PredictionBar, PredictionOptions, Task


class ClassificationTask(Task):
    """Labels are class numbers of whole images, so crops and flips do not change them."""

    name = "classification"
    objective = Classification
    targets = ClassTargets()
    criteria = ClassificationScore.criteria
    mixes = True
    has_classes = True
    has_closed_form = True

    def recognises(self, collection: Collection) -> bool:
        return bool(collection.classes)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        collection.need_labels()
        return collection.classes

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{len(names):,} classes"

    def card_facts(self, objective: ObjectiveConfig, source: ImageDataset) -> Mapping[str, Any]:
        return {"multi_label": isinstance(objective, Classification) and objective.is_multi_label(source.labels)}

    def check_targets(self, objective: ObjectiveConfig, source: ImageDataset, names: Sequence[str]) -> list[str]:
        """Returns warnings about empty or very uneven classes, and about labels that do not suit the loss."""
        found: list[str] = []
        counts = source.labels.counts(len(names))
        if counts.min() == 0:
            found.append(f"{int((counts == 0).sum())} of {len(counts)} classes have no training image")
        elif counts.max() > 20 * counts.min():
            found.append(f"the largest class has {counts.max():,} images and the smallest {counts.min():,}")
        if source.labels.multiple and isinstance(objective, Classification) and objective.loss == "softmax":
            found.append("images may have several labels, but softmax expects one; use objective.loss=sigmoid")
        return found

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> ClassificationMetric:
        return ClassificationMetric(outputs, device, extremes)

    def report_sections(
        self, score: ClassificationScore, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        """Builds the confusion matrix, if there is one, and the galleries. `title` is the split and, after a comma, the
        weights."""
        found: list[Section] = []
        if score.confusion is not None:
            found.append(ConfusionSection(title=f"Confusion on {title}", counts=score.confusion, classes=names))
        _, comma, weights = title.partition(", ")
        galleries = [
            Gallery(title=f"{name}{comma}{weights}", shots=show_answers(some, source, names))
            for name, some in (("Worst answers", score.worst), ("Surest right answers", score.best))
            if some
        ]
        return [*found, Galleries(galleries=galleries)] if galleries else found

    def check_scoring(self, how: ScoringOptions, about: Subject) -> None:
        if how.threshold is not None and not about.multi_label:
            raise ConfigError(f"a threshold of {how.threshold:g} is for multi-label weights, which {about.name} is not")
        self.check_windows(how, about)

    def assess(self, setting: EvaluationSetting) -> EvaluationOutcome:
        """Computes accuracy with calibration, confusion and ReaL labels, or mean average precision if multi-label."""
        return assess_classifier(setting)

    def match_targets(
        self, collection: Collection, split: str, bundle: Bundle, *, by_number: bool = False
    ) -> tuple[ImageDataset | None, tuple[str, ...]]:
        source, outputs = collection.splits[split], bundle.config.classes
        if not source.classes or not outputs:
            return None, ()
        labels, also, name = bundle.card.labels, list_other_names(bundle.card), collection.name
        matching = match_classes(outputs, labels, source.classes, name, by_number=by_number, also=also)
        return RelabelledDataset(source, matching.relabel(source.labels), matching.names), matching.notes

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> list[Prediction]:
        """Ranks the classes by probability: softmax, or sigmoid if the weights are multi-label."""
        return rank_classes(outputs.sigmoid() if options.multi_label else outputs.softmax(-1), options)

    def prediction_options(self, *, multi_label: bool) -> tuple[str, ...]:
        return ("topk", "threshold") if multi_label else ("topk",)

    def describe_predictions(self, *, multi_label: bool) -> str:
        return "The classes that each image shows" if multi_label else "The likeliest classes of each image"

    def prediction_schema(self) -> dict[str, Any]:
        return SCHEMA

    def bars(self, prediction: Prediction) -> list[PredictionBar]:
        num_chosen, answers = len(prediction.labels), enumerate(prediction.display_classes)
        return [PredictionBar(one.label, one.probability, at < num_chosen) for at, one in answers]

    def columns(self, *, multi_label: bool) -> tuple[str, ...]:
        return ("rank", "label", "index", "probability", *(("chosen",) if multi_label else ()))

    def rows(self, prediction: Prediction) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for at, one in enumerate(prediction.display_classes):
            chosen = [] if prediction.chosen is None else [int(at < len(prediction.chosen))]
            rows.append([at + 1, one.label, one.index, f"{one.probability:.6g}", *chosen])
        return rows


CLASSIFICATION: Final = ClassificationTask()

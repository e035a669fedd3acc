"""The base of instance and panoptic segmentation: networks with queries, and predictions that are segments."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.targets import Geometry
from vitrail.evaluation.intervals import Interval
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import query_config
from vitrail.models.query_output import QueryOutput
from vitrail.models.zoo import adapt_config
from vitrail.report.page import Section
from vitrail.tasks.mask_queries.prediction import SCHEMA, PredictedSegments
from vitrail.tasks.mask_queries.report import ClassTable, build_class_table, build_scene_rows, list_class_numbers
from vitrail.tasks.task import PredictionBar, PredictionOptions, Task

if TYPE_CHECKING:
    from PIL.Image import Image


class SegmentsTask(Task):
    """Targets are segments that follow the crops and flips of their image; queries are matched with them."""

    has_classes = True
    about_value: ClassVar[str] = ""  # how `value_of_image` is computed, for the report
    value_of_image: ClassVar[str]  # name of the per-image score by which the worst images are chosen

    @abstractmethod
    def tabulate(self, score: Any) -> ClassTable:
        """The numbers of each class."""

    def fit_model(self, model: ModelConfig, outputs: int, *, new_head: bool) -> ModelConfig:
        """Adapts a network with queries to the number of classes; turns a plain ViT into EoMT."""
        if model.has_queries:
            return adapt_config(model, classes=outputs)
        return query_config(model, "eomt", outputs)

    def report_sections(
        self, score: Any, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        """A table of classes, and images next to their annotated and predicted segments."""
        found: list[Section] = [build_class_table(self.tabulate(score), names, title)]
        if source is not None and score.worst:
            found.append(build_scene_rows(score.worst, source, self.value_of_image, title, self.about_value))
        return found

    def intervals(self, score: Any, *, seed: int) -> Mapping[str, Interval | None]:
        return score.intervals(seed)

    def details(self, score: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """The numbers of each class that occurs."""
        return {"classes": list(names), "per_class": list_class_numbers(self.tabulate(score), names)}

    # Predictions.

    @abstractmethod
    def find(
        self, classes: torch.Tensor, masks: torch.Tensor, view: Geometry, options: PredictionOptions
    ) -> PredictedSegments:
        """Decodes the segments of one image from its queries."""

    def predict(self, outputs: Any, views: Sequence[Geometry], options: PredictionOptions) -> list[PredictedSegments]:
        if not isinstance(outputs, QueryOutput):
            raise ConfigError(f"{self.name} segmentation needs a network with queries; this one gives a single tensor")
        return [self.find(*one, options) for one in zip(*outputs, views, strict=True)]

    def prediction_options(self, *, multi_label: bool) -> tuple[str, ...]:
        return ("threshold",)

    def prediction_schema(self) -> dict[str, Any]:
        return SCHEMA

    def bars(self, prediction: PredictedSegments) -> list[PredictionBar]:
        """The score of each segment."""
        parts = zip(prediction.segments, prediction.colours, strict=True)
        return [PredictionBar(one.label, one.score, chosen=True, colour=colour) for one, colour in parts]

    def columns(self, *, multi_label: bool) -> tuple[str, ...]:
        return ("label", "index", "score", "area", "left", "top", "right", "bottom")

    def rows(self, prediction: PredictedSegments) -> list[list[Any]]:
        found = [
            [one.label, one.index, f"{one.score:.6g}", one.area, *(f"{side:g}" for side in one.box)]
            for one in prediction.segments
        ]
        return found or [[""] * len(self.columns(multi_label=False))]

    def draw(self, prediction: PredictedSegments, image: "Image") -> "Image":
        return prediction.draw(image)


def check_masks(collection: Collection, name: str) -> None:
    """DataError unless the data have segments with masks."""
    if any(source.boxes_only for source in collection.splits.values()):
        remedy = f"{name} segmentation needs polygons or masks; there are no networks that detect boxes yet"
        raise DataError(f"{collection.name} has boxes only: {remedy}")
    if not collection.segment_classes:
        formats = "COCO annotations (instances or panoptic), YOLO polygons or Pascal VOC masks"
        raise DataError(f"{collection.name} has no segments; provide {formats}")


def has_panoptic_maps(collection: Collection) -> bool:
    """Whether each pixel of the data has at most one segment, or some classes are stuff."""
    overlap = any(source.segments_overlap for source in collection.splits.values())
    return bool(collection.segment_classes) and (
        not overlap or not all(one.thing for one in collection.segment_classes)
    )

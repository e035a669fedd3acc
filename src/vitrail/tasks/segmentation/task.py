"""Semantic segmentation with a linear head on the patch tokens: a class for each pixel."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.geometry import Geometry
from vitrail.data.targets import Masks
from vitrail.evaluation.metrics.intervals import Interval
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapted
from vitrail.report.page import Section
from vitrail.tasks.segmentation import report
from vitrail.tasks.segmentation.images import list_colours, blend_mask
from vitrail.tasks.segmentation.metric import SegmentationMetric, SegmentationScore
from vitrail.tasks.segmentation.objective import Segmentation
from vitrail.tasks.segmentation.prediction import SCHEMA, PredictedMask, segment
from vitrail.tasks.task import PredictionBar, PredictionOptions, Task

if TYPE_CHECKING:
    from PIL.Image import Image

UNPAINTED: Final = "#8c8c8c"  # of class 0, which a drawing leaves as it is


class SegmentationTask(Task):
    """Masks of class indices move with the pixels; 255 counts for nothing."""

    name = "segmentation"
    objective = Segmentation
    targets = Masks()
    criteria = SegmentationScore.criteria
    has_classes = True

    def recognises(self, collection: Collection) -> bool:
        return bool(collection.pixel_classes)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        collection.need_masks()
        return collection.pixel_classes

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{len(names):,} classes of pixels"

    def fit_model(self, model: ModelConfig, outputs: int, *, new_head: bool) -> ModelConfig:
        del new_head  # whatever head there was read the whole image
        return adapted(model, **model.patch_head(outputs))

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> SegmentationMetric:
        return SegmentationMetric(outputs, device, extremes)

    def report_sections(
        self, score: Any, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        return report.build_sections(score, source, names, title)

    def intervals(self, score: SegmentationScore, *, seed: int) -> Mapping[str, Interval | None]:
        return {} if score.images is None else score.images.intervals(seed)

    def details(self, score: SegmentationScore, names: Sequence[str]) -> Mapping[str, Any]:
        """The IoU of each class that occurs, and the pixels of each true and predicted class."""
        ious = zip(names, score.ious.tolist(), strict=True)
        return {
            "classes": list(names),
            "iou": {name: iou for name, iou in ious if not math.isnan(iou)},
            "confusion": score.confusion.tolist(),
        }

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> list[PredictedMask]:
        if outputs.ndim != 4:
            raise ConfigError(f"segmentation needs logits per pixel [B, K, H, W], not {tuple(outputs.shape)}")
        return [
            PredictedMask(segment(logits, view), options.names) for logits, view in zip(outputs, views, strict=True)
        ]

    def describe_predictions(self, *, multi_label: bool) -> str:
        del multi_label
        return "The class of every pixel of each image"

    def prediction_schema(self) -> dict[str, Any]:
        return SCHEMA

    def bars(self, prediction: PredictedMask) -> list[PredictionBar]:
        colours = list_colours(len(prediction.names))
        return [
            PredictionBar(region.label, region.share, chosen=True, colour=colours[region.index] or UNPAINTED)
            for region in prediction.regions
        ]

    def columns(self, *, multi_label: bool) -> tuple[str, ...]:
        del multi_label
        return ("label", "index", "share")

    def rows(self, prediction: PredictedMask) -> list[list[Any]]:
        return [[region.label, region.index, f"{region.share:.6g}"] for region in prediction.regions]

    def draw(self, prediction: PredictedMask, image: "Image") -> "Image":
        return blend_mask(prediction.mask, image)

    def file_of(self, prediction: PredictedMask) -> tuple[str, bytes]:
        return ".png", prediction.png()


SEGMENTATION: Final = SegmentationTask()

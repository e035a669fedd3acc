"""Semantic segmentation: one class per pixel, by a linear head on the patch tokens or by queries. A linear head is
trained with the softmax cross-entropy of every pixel. Reports show the IoU of each class and the images with the lowest
IoU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, VitrailError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_mask
from vitrail.data.loader import Batch
from vitrail.data.targets import IGNORED, Geometry, MaskTargets
from vitrail.evaluation.intervals import Interval
from vitrail.evaluation.scoring import EvaluationSetting
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.models.query_output import Output, QueryOutput
from vitrail.models.zoo import adapt_config
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from vitrail.report.axis import format_share
from vitrail.report.page import Section, Table
from vitrail.report.sections import LARGE_SIDE, ImageRow, ImageRows, Shot, make_pane
from vitrail.tasks.segmentation.full_size import score_windows
from vitrail.tasks.segmentation.mask_drawing import blend_mask, colour_mask, list_colours
from vitrail.tasks.segmentation.metric import SegmentationMetric, SegmentationScore, SegmentedImage
from vitrail.tasks.segmentation.prediction import SCHEMA, PredictedMask, segment, segment_queries
from vitrail.tasks.segmentation.windows import Scale, SlidingWindows
from vitrail.tasks.task import EXTREMES, PredictionBar, PredictionOptions, Task

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation(ObjectiveConfig):
    """The loss of an image is the mean over its pixels, without those that the mask ignores (255)."""

    task: ClassVar[str] = "segmentation"

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        self.check_numbers("be at least 0 and below 1", lambda value: 0 <= value < 1, "smoothing")

    def macs_per_image(self, model: ModelConfig) -> float:
        return model.macs

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return SegmentationObjective(network, self, context)


class SegmentationObjective(Objective):
    """Logits per pixel [B, K, H, W] against masks [B, H, W]. An image with only ignored pixels does not count."""

    config: Segmentation

    def __init__(self, network: Backbone, config: Segmentation, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        self.config = config

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Pixels as bytes [B, 3, H, W], masks [B, H, W], and which images are valid [B]."""
        return batch.pixels, batch.target, batch.valid

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, mask, valid = inputs
        logits = cast(Tensor, self.network(self.normalise(pixels))).float()
        smoothing = self.config.smoothing
        losses = F.cross_entropy(logits, mask.long(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
        seen = mask != IGNORED
        pixels_seen = seen.sum((1, 2)).clamp(min=1)
        right = ((logits.detach().max(1).indices == mask) & seen).sum((1, 2)) / pixels_seen
        counted = valid & seen.flatten(1).any(1)
        total = torch.where(counted, losses.sum((1, 2)) / pixels_seen, 0.0).sum()
        tallies = {"pixel_accuracy": torch.where(counted, right, 0.0).sum()}
        return ObjectiveOutput(total, counted.float().sum(), tallies)


def build_class_table(score: SegmentationScore, names: Sequence[str], title: str) -> Table:
    truth, said = score.confusion.sum(1), score.confusion.sum(0)
    total = max(int(truth.sum()), 1)
    ious = ["–" if math.isnan(iou) else format_share(iou) for iou in score.ious]
    shares = [[format_share(one / total) for one in counts] for counts in (truth, said)]
    rows = list(zip(names, ious, *shares, strict=True))
    columns = ("class", "IoU", "pixels", "predicted")
    return Table(title=f"Classes{on(title)}", columns=columns, rows=rows, colours=list_colours(names))


def on(title: str) -> str:
    return f" on {title}" if title else ""


def build_panes(one: SegmentedImage, source: ImageDataset, sides: Sequence[str], names: Sequence[str]) -> list[Shot]:
    """The image, then its annotated and predicted masks drawn over it; blank if it can no longer be read. If the
    network saw only part of the image, the masks of that part are shown on their own."""
    try:
        image = source.open_image(one.sample).rgb()
        truth = read_mask(source.mask(one.sample))
    except (OSError, VitrailError):
        return [make_pane(None, side) for side in sides]
    if np.array_equal(stretch_mask(truth, one.truth.shape), one.truth):
        shown = (image, blend_mask(truth, image, names), blend_mask(stretch_mask(one.mask, truth.shape), image, names))
    else:
        shown = (image, colour_mask(one.truth, names), colour_mask(one.mask, names))
    return [make_pane(one, side, side=LARGE_SIDE) for one, side in zip(shown, sides, strict=True)]


def stretch_mask(mask: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Resizes a whole mask as `MaskTargets` does."""
    whole, inner = (mask.shape[0], mask.shape[1]), (size[0], size[1])
    return Geometry(whole=whole, box=(0, 0, *whole), inner=inner).mask(torch.from_numpy(mask), IGNORED).numpy()


UNPAINTED: Final = "#8c8c8c"  # bar colour of classes that are not painted


class SegmentationTask(Task):
    """Targets are masks of class indices that follow the crops and flips of their image; 255 is ignored."""

    name = "segmentation"
    objective = Segmentation
    targets = MaskTargets()
    criteria = SegmentationScore.criteria
    extras = SegmentationScore.extras
    has_classes = True
    slides = True
    has_closed_form = True

    def recognises(self, collection: Collection) -> bool:
        return bool(collection.pixel_classes)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        collection.need_masks()
        return collection.pixel_classes

    def describe_outputs(self, names: Sequence[str]) -> str:
        return f"{len(names):,} classes of pixels"

    def fit_model(self, model: ModelConfig, outputs: int, *, new_head: bool) -> ModelConfig:
        """Adds a linear head on the patches; a network with queries keeps them."""
        return adapt_config(model, **({"classes": outputs} if model.has_queries else model.patch_head(outputs)))

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> SegmentationMetric:
        return SegmentationMetric(outputs, device, extremes)

    def score(self, setting: EvaluationSetting, outputs: int) -> SegmentationScore:
        if setting.how.windows is None:
            return super().score(setting, outputs)
        return score_windows(setting, outputs, SlidingWindows(cast(Scale, setting.how.windows)), extremes=EXTREMES)

    def report_sections(
        self, score: SegmentationScore, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        """A table of classes, and images next to their annotated and predicted masks."""
        found: list[Section] = [build_class_table(score, names, title)]
        if source is not None and score.worst:
            sides, strips = ("image", "mask", "predicted"), list[ImageRow]()
            for one in score.worst:
                caption, note = f"IoU {format_share(one.iou)}", source.name(one.sample)
                strips.append(ImageRow(panes=build_panes(one, source, sides, names), caption=caption, note=note))
            found.append(ImageRows(title=f"Lowest IoU{on(title)}", sides=sides, strips=strips, large=True))
        return found

    def intervals(self, score: SegmentationScore, *, seed: int) -> Mapping[str, Interval | None]:
        return {} if score.images is None else score.images.intervals(seed)

    def details(self, score: SegmentationScore, names: Sequence[str]) -> Mapping[str, Any]:
        """The IoU of each class that occurs, and the pixels of each true and predicted class."""
        ious = {name: iou for name, iou in zip(names, score.ious.tolist(), strict=True) if not math.isnan(iou)}
        return {"classes": list(names), "iou": ious, "confusion": score.confusion.tolist()}

    def predict(self, outputs: Output, views: Sequence[Geometry], options: PredictionOptions) -> list[PredictedMask]:
        if isinstance(outputs, QueryOutput):
            masks = [segment_queries(*one) for one in zip(*outputs, views, strict=True)]
            return [PredictedMask(mask, options.names) for mask in masks]
        if outputs.ndim != 4:
            raise ConfigError(f"segmentation needs logits per pixel [B, K, H, W], not {tuple(outputs.shape)}")
        return [PredictedMask(segment(*one), options.names) for one in zip(outputs, views, strict=True)]

    def describe_predictions(self, *, multi_label: bool) -> str:
        return "The class of every pixel of each image"

    def prediction_schema(self) -> dict[str, Any]:
        return SCHEMA

    def bars(self, prediction: PredictedMask) -> list[PredictionBar]:
        colours = list_colours(prediction.names)
        return [
            PredictionBar(region.label, region.share, chosen=True, colour=colours[region.index] or UNPAINTED)
            for region in prediction.regions
        ]

    def columns(self, *, multi_label: bool) -> tuple[str, ...]:
        return ("label", "index", "share")

    def rows(self, prediction: PredictedMask) -> list[list[Any]]:
        return [[region.label, region.index, f"{region.share:.6g}"] for region in prediction.regions]

    def draw(self, prediction: PredictedMask, image: "Image") -> "Image":
        return blend_mask(prediction.mask, image, prediction.names)

    def file_of(self, prediction: PredictedMask) -> tuple[str, bytes]:
        return ".png", prediction.png()


SEGMENTATION: Final = SegmentationTask()

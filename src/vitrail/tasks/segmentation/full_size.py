"""Scores sliding-window predictions at the size of each image, one image at a time."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadImage, DataError
from vitrail.data.decode.image import EncodedImage
from vitrail.data.targets import IGNORED, MaskTargets
from vitrail.data.unreadable_log import UnreadableSample
from vitrail.evaluation.frozen.features import inference_context, make_normaliser
from vitrail.evaluation.metrics import REMEDY
from vitrail.evaluation.scoring import EvaluationSetting
from vitrail.tasks.mask_queries.decode import to_dense
from vitrail.tasks.segmentation.metric import ImageCounts, SegmentationScore, SegmentedImage
from vitrail.tasks.segmentation.windows import SlidingWindows, segment_windows

WINDOWS: Final = (8, 64)  # windows per batch on a CPU and on a GPU


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullSizeScore(SegmentationScore):
    """A score without a loss: at the size of the image there are classes but no logits."""

    def row(self) -> dict[str, float | int]:
        return {"miou": self.miou, "pixel_accuracy": self.pixel_accuracy, "count": self.count}


class ScoredImage(NamedTuple):
    """One image: its confusion matrix [K, K], true classes as rows, and both masks."""

    sample: int
    cells: NDArray[np.int64]
    predicted: NDArray[np.uint8]
    truth: NDArray[np.uint8]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The sample, its number of pixels, and the intersections and unions of the classes: [2 + 2 K]."""
        both = self.cells.diagonal()
        either = self.cells.sum(0) + self.cells.sum(1) - both
        return np.concatenate([[self.sample, self.cells.sum()], both, either])

    @property
    def iou(self) -> float:
        """The mean IoU over the classes that occur in the image."""
        both, either = np.split(self.counts[2:], 2)
        return float((both[either > 0] / either[either > 0]).mean())


def score_windows(
    setting: EvaluationSetting, classes: int, windows: SlidingWindows, *, extremes: int
) -> SegmentationScore:
    """Scores a network by sliding windows and keeps the `extremes` images with the lowest mean IoU. The images are
    divided among the processes; every process gets the whole score."""
    world, rows = setting.world, list[NDArray[np.int64]]()
    cells, worst = np.zeros((classes, classes), np.int64), list[tuple[float, int, ScoredImage]]()
    for one in iterate_scored(setting, classes, windows):
        if not one.cells.any():
            continue
        cells += one.cells
        rows.append(one.counts)
        entry = (-one.iou, -one.sample, one)  # samples are distinct, so images are never compared
        (heapq.heappush if len(worst) < extremes else heapq.heappushpop)(worst, entry)
    parts = world.gather((cells, rows, worst, len(setting.ledger)))
    images = sorted((row for _, some, *_ in parts for row in some), key=lambda row: int(row[0]))
    unreadable = sum(count for *_, count in parts)
    if not images:
        rest = f"{unreadable} are unreadable and the rest have no pixels with a class"
        raise DataError(f"no image could be scored: {rest}; {REMEDY}")
    table = np.stack(images)
    both, either = np.split(table[:, 2:], 2, axis=1)
    lowest = heapq.nlargest(extremes, (entry for _, _, some, _ in parts for entry in some))
    return FullSizeScore(
        count=len(table),
        unreadable=unreadable,
        loss=math.nan,
        confusion=sum((part for part, *_ in parts), np.zeros_like(cells)),
        worst=tuple(SegmentedImage(one.sample, -value, one.predicted, one.truth) for value, _, one in lowest),
        images=ImageCounts(pixels=table[:, 1], both=both, either=either, loss=np.zeros(len(table), np.float32)),
    )


def iterate_scored(setting: EvaluationSetting, classes: int, windows: SlidingWindows) -> Iterator[ScoredImage]:
    """Predicts and yields the readable images of this process."""
    world, source, about, how = setting.world, setting.source, setting.about, setting.how
    prepared, device = about.preprocessing, world.device
    normalise, batch = make_normaliser(prepared, device, about.precision), how.batch or WINDOWS[device.type == "cuda"]

    def segment(views: Tensor) -> Tensor:
        with inference_context(about.network, device, about.precision):
            return to_dense(about.network(normalise(views.to(device))), prepared.image)

    for at in range(world.rank, len(source), world.size):
        if world.is_main:
            setting.advance("images", at, len(source))
        try:
            image = EncodedImage(source.read(at))
            truth = MaskTargets().read(source, at, image.size).numpy()
            pixels = windows.cut(image.rgb(), prepared)
        except (BadImage, OSError) as error:
            reason = str(getattr(error, "strerror", None) or error)
            setting.ledger.note([UnreadableSample(at, source.name(at), reason)])
            continue
        predicted = segment_windows(segment, pixels, image.size, windows, prepared.image, batch)
        seen = truth != IGNORED
        cell = truth[seen].astype(np.int64) * classes + predicted[seen]
        cells = np.bincount(cell, minlength=classes**2).reshape(classes, classes).astype(np.int64)
        yield ScoredImage(at, cells, predicted, truth)

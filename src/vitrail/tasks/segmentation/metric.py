"""Intersection over union of each class over all pixels of a split.

    score = score_batches(network, batches, preprocessing, SegmentationMetric(9, device), device=device)
    score.miou, score.ious

Pixels with the ignore index 255 do not count. mIoU is the mean over the classes that occur in the ground truth or in
predictions. Boundary IoU, the IoU of the bands along class boundaries, is computed if images are kept for a report. The
counts of each image allow confidence intervals by a bootstrap over images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, DataError
from vitrail.data.loader import Batch
from vitrail.data.targets import IGNORED
from vitrail.distributed.process_group import World, widest_float
from vitrail.evaluation.intervals import DRAWS, RESAMPLES, Floats, Interval, bootstrap
from vitrail.evaluation.metrics import REMEDY, Criterion, gather_rows
from vitrail.evaluation.segments.boundary_iou import count_boundaries, count_overlap
from vitrail.models.query_output import Output
from vitrail.tasks.mask_queries.decode import to_dense

NUMBERS: Final = ("miou", "pixel_accuracy", "loss", "boundary_iou")  # in the order of `ImageCounts.statistics`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageCounts:
    """Pixel counts of the N images with at least one pixel that is not ignored, in the order of the split."""

    pixels: NDArray[np.int64]  # [N], not ignored
    both: NDArray[np.int64]  # [N, K], intersections of prediction and ground truth
    either: NDArray[np.int64]  # [N, K], unions
    loss: NDArray[np.float32]  # [N]
    # Intersections and unions of the bands along class boundaries, if they were computed: [N, 2, K]
    bands: NDArray[np.int64] | None = None

    def statistics(self, weights: Floats) -> Floats:
        """The NUMBERS with image weights [N]; without the boundary IoU if there are no bands."""
        both, either = weights @ self.both, weights @ self.either
        accuracy = both.sum() / (weights @ self.pixels)
        found = [average_ious(both, either), accuracy, weights @ self.loss.astype(np.float64) / weights.sum()]
        if self.bands is not None:
            found.append(average_ious(*np.tensordot(weights, self.bands, 1)))
        return np.array(found)

    @property
    def boundary_iou(self) -> float | None:
        """The mean boundary IoU over the classes that occur; None if there are no bands."""
        return None if self.bands is None else average_ious(*self.bands.sum(0))

    def intervals(self, seed: int) -> Mapping[str, Interval | None]:
        """Confidence intervals by a bootstrap over images."""
        resamples = min(RESAMPLES, DRAWS // max(self.both.size, 1))
        found = bootstrap(self.statistics, len(self.pixels), seed=seed, resamples=resamples)
        return dict(zip(NUMBERS, found, strict=False))


def average_ious(both: NDArray[Any], either: NDArray[Any]) -> float:
    """The mean IoU over the classes that occur, from intersections and unions [K]."""
    there = either > 0
    return float((both[there] / either[there]).mean())


MOST_CLASSES: Final = IGNORED  # that a uint8 mask can hold


@dataclass(frozen=True, slots=True, eq=False)
class SegmentedImage:
    """One image of a split: its mean IoU, and its predicted and ground-truth masks at the size that was scored."""

    sample: int
    iou: float
    mask: NDArray[np.uint8]  # [H, W]
    truth: NDArray[np.uint8]  # [H, W]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentationScore:
    """The score of `count` images with at least one pixel that is not ignored. The confusion matrix [K, K] counts
    pixels, with true classes as rows. `worst` are the images with the lowest mean IoU; `images` has the counts of each
    image."""

    criteria: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="miou", title="mIoU", share=True),
        Criterion(name="pixel_accuracy", title="pixel accuracy", share=True),
        Criterion(name="loss", larger=False, rounding=1e-6),
    )
    extras: ClassVar[tuple[Criterion, ...]] = (Criterion(name="boundary_iou", title="boundary IoU", share=True),)

    count: int
    unreadable: int
    loss: float
    confusion: NDArray[np.int64]
    worst: tuple[SegmentedImage, ...] = ()
    images: ImageCounts | None = None

    @property
    def ious(self) -> NDArray[np.float64]:
        """The IoU of each class [K]; NaN for a class that occurs neither in the ground truth nor in predictions."""
        both = self.confusion.diagonal().astype(np.float64)
        either = self.confusion.sum(0) + self.confusion.sum(1) - both
        return np.divide(both, either, out=np.full(len(both), np.nan), where=either > 0)

    @property
    def miou(self) -> float:
        return float(np.nanmean(self.ious))

    @property
    def pixel_accuracy(self) -> float:
        return float(self.confusion.trace() / self.confusion.sum())

    def row(self) -> dict[str, float | int]:
        """The row of a run's metrics, with the boundary IoU if it was computed."""
        edges = None if self.images is None else self.images.boundary_iou
        found = {"miou": self.miou, "pixel_accuracy": self.pixel_accuracy, "loss": self.loss}
        return {**found, **({} if edges is None else {"boundary_iou": edges}), "count": self.count}


class SegmentationMetric:
    """Counts pixels on the device in int64, so that results are exact and do not depend on the order of processes."""

    def __init__(self, classes: int, device: torch.device, extremes: int = 0) -> None:
        if classes > MOST_CLASSES:
            raise ConfigError(f"{classes} classes of pixels; a mask can hold at most {MOST_CLASSES}")
        self.classes, self.most = classes, extremes
        self.loss = torch.zeros(1, dtype=widest_float(device), device=device)  # summed over images
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # scored images, unreadable images
        self.cells = torch.zeros(classes**2, dtype=torch.int64, device=device)
        # For each image: sample, pixels, both and either, then both and either of the bands: [B, 2 + 4 K]; losses [B]
        self.images, self.losses = list[Tensor](), list[Tensor]()
        # mIoUs [n], samples [n], predicted and ground-truth masks [n, 2, H, W]
        self.worst: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, outputs: Output, batch: Batch) -> None:
        """Adds one batch: logits [B, K, H, W], or queries, against masks [B, H, W]."""
        mask, classes = batch.target, self.classes
        outputs = to_dense(outputs, (mask.shape[-2], mask.shape[-1]))
        if outputs.shape != (len(batch), classes, *mask.shape[1:]):
            wanted = f"[B, {classes}, {mask.shape[1]}, {mask.shape[2]}]"
            raise ConfigError(f"the network's outputs are {tuple(outputs.shape)}; {classes} classes need {wanted}")
        logits, predicted = outputs.float(), outputs.max(1).indices  # like argmax, but ten times as fast
        seen = (mask != IGNORED) & batch.valid[:, None, None]
        counted = seen.flatten(1).any(1)
        losses = F.cross_entropy(logits, mask.long(), ignore_index=IGNORED, reduction="none").sum((1, 2))
        losses = torch.where(counted, losses / seen.sum((1, 2)).clamp(min=1), 0.0)
        self.loss += losses.to(self.loss.dtype).sum()
        self.counts += torch.stack([counted, ~batch.valid & (batch.sample >= 0)]).sum(1)
        cell = torch.where(seen, mask.long() * classes + predicted, 0).flatten(1)  # [B, H W]
        self.cells.scatter_add_(0, cell.flatten(), seen.long().flatten())
        if self.most:
            own, said = (torch.where(seen, labels.long(), classes) for labels in (mask, predicted))
            both, either = count_overlap(own, said, classes)
            pixels = torch.stack([batch.sample, seen.sum((1, 2))], 1)
            bands = count_boundaries(predicted, mask, classes)
            self.images.append(torch.cat([pixels, both, either, *bands], 1).int())
            self.losses.append(losses.float())
            ious = (both / either.clamp(min=1)).sum(1) / (either > 0).sum(1).clamp(min=1)  # per image
            self.keep_worst(ious, counted, batch.sample, torch.stack([predicted, mask], 1))

    def keep_worst(self, ious: Tensor, counted: Tensor, samples: Tensor, masks: Tensor) -> None:
        """Keeps the images with the lowest mIoU. Ties go to the earlier sample, whatever the batch."""
        found = (torch.where(counted, ious.double(), torch.inf), samples, masks.to(torch.uint8))
        if self.worst is not None:
            found = tuple(torch.cat([old, new]) for old, new in zip(self.worst, found, strict=True))
        order = found[1].argsort(stable=True)
        order = order[found[0][order].argsort(stable=True)][: self.most]
        self.worst = (found[0][order], found[1][order], found[2][order])

    def merge(self, world: World) -> None:
        for sums in (self.loss, self.counts, self.cells):
            world.sum_(sums)
        if self.worst is None:  # in every process, because all have seen the same number of batches
            return
        self.images = [gather_rows(torch.cat(self.images), world)]
        self.losses = [gather_rows(torch.cat(self.losses), world)]
        ious, samples, masks = self.worst
        missing = self.most - len(ious)
        ious = gather_rows(F.pad(ious, (0, missing), value=torch.inf), world)
        samples = gather_rows(F.pad(samples, (0, missing)), world)
        masks = gather_rows(F.pad(masks.int(), (0, 0, 0, 0, 0, 0, 0, missing)), world)
        self.worst = None
        self.keep_worst(ious, ious.isfinite(), samples, masks)

    def result(self) -> SegmentationScore:
        count, unreadable = (int(value) for value in self.counts.tolist())
        if not count:
            rest = f"{unreadable} are unreadable and the rest have no pixels with a class"
            raise DataError(f"no image could be scored: {rest}; {REMEDY}")
        return SegmentationScore(
            count=count,
            unreadable=unreadable,
            loss=float(self.loss.item()) / count,
            confusion=self.cells.view(self.classes, self.classes).cpu().numpy(),
            worst=self.read_worst(),
            images=self.read_images(),
        )

    def read_worst(self) -> tuple[SegmentedImage, ...]:
        ious, samples, masks = self.worst or (torch.zeros(0),) * 3
        rows = zip(samples.tolist(), ious.tolist(), masks.cpu().numpy(), strict=True)
        return tuple(SegmentedImage(sample, iou, *both) for sample, iou, both in rows if iou != float("inf"))

    def read_images(self) -> ImageCounts | None:
        if not self.images:
            return None
        rows, losses = torch.cat(self.images).long().cpu().numpy(), torch.cat(self.losses).cpu().numpy()
        order = np.argsort(rows[:, 0], kind="stable")
        order = order[rows[order, 1] > 0]
        parts = rows[order, 2:].reshape(len(order), 4, self.classes)
        pixels, both, either = rows[order, 1], parts[:, 0], parts[:, 1]
        return ImageCounts(pixels=pixels, both=both, either=either, loss=losses[order], bands=parts[:, 2:])

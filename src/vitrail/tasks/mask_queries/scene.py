"""Shared parts of the instance and panoptic metrics: the segments of scored images, one row of results per image,
gathered from all processes, and the images that a report shows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.annotations.rle import Rle, encode
from vitrail.data.loader import Batch
from vitrail.data.segment_targets import unpack_planes
from vitrail.distributed.process_group import World
from vitrail.models.query_output import QueryOutput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SceneSegments:
    """n segments of an image at the size that the network saw."""

    masks: tuple[Rle, ...]
    classes: NDArray[np.int64]  # [n]
    scores: NDArray[np.float64] | None = None  # [n], of predicted segments
    crowd: NDArray[np.bool_] | None = None  # [n], of ground-truth segments

    def __len__(self) -> int:
        return len(self.masks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentedScene:
    """One image of a split: its score on its own, and its predicted and ground-truth segments."""

    sample: int
    value: float  # 1 is best
    pixels: NDArray[np.uint8]  # [H, W, 3], as the network saw them
    predicted: SceneSegments
    truth: SceneSegments


class TrueSegments(NamedTuple):
    """The m ground-truth segments of a readable image, and its pixels."""

    pixels: Tensor  # uint8 [3, H, W]
    masks: Tensor  # bool [m, H, W], on the device
    classes: NDArray[np.int64]  # [m]
    crowd: NDArray[np.bool_]  # [m]

    def keep(self) -> SceneSegments:
        return SceneSegments(masks=encode_masks(self.masks), classes=self.classes, crowd=self.crowd)


def encode_masks(masks: Tensor) -> tuple[Rle, ...]:
    """Run-length encodes masks [n, H, W]."""
    return tuple(encode(mask) for mask in masks.cpu().numpy())


def read_truth(batch: Batch) -> Iterator[tuple[int, TrueSegments]]:
    """Yields the sample and the ground-truth segments of each readable image of a batch, in order."""
    planes, *rest = batch.segments
    classes, crowd = (part.cpu().numpy() for part in rest)
    samples = batch.sample.tolist()
    for at, valid in enumerate(batch.valid.tolist()):
        if valid:
            there = classes[at] >= 0
            chosen = torch.from_numpy(np.flatnonzero(there)).to(planes.device)
            masks = unpack_planes(planes[at])[chosen].bool()
            yield samples[at], TrueSegments(batch.pixels[at], masks, classes[at, there], crowd[at, there])


def take_readable(outputs: QueryOutput, batch: Batch, classes: int) -> QueryOutput:
    """Keeps the outputs for the readable images of a batch. ConfigError if they have another number of classes."""
    if len(outputs.classes) != len(batch) or outputs.classes.shape[-1] != classes + 1:
        wanted = f"[{len(batch)}, Q, {classes} + 1] for {classes} classes and no object"
        raise ConfigError(f"the queries' class logits have shape {tuple(outputs.classes.shape)}; this needs {wanted}")
    return QueryOutput(outputs.classes[batch.valid], outputs.masks[batch.valid])


RowT = TypeVar("RowT")


class SceneRows(Generic[RowT]):
    """One row for each readable image, and the `most` images with the lowest values; ties go to the earlier image. The
    order of both does not depend on batches or processes."""

    def __init__(self, most: int) -> None:
        self.most, self.unreadable = most, 0
        self.rows = dict[int, RowT]()  # by sample
        self.worst = list[SegmentedScene]()

    def count_unreadable(self, batch: Batch) -> None:
        """Counts the images of a batch that could not be read."""
        self.unreadable += int((~batch.valid & (batch.sample >= 0)).sum())

    def keep(self, sample: int, value: float, truth: TrueSegments, predict: Callable[[], SceneSegments]) -> None:
        """Keeps an image, with the segments that `predict` returns, if its value is among the lowest so far."""
        if self.most and (len(self.worst) < self.most or (value, sample) < place_scene(self.worst[-1])):
            pixels = truth.pixels.permute(1, 2, 0).contiguous().cpu().numpy()
            kept, found = truth.keep(), predict()
            self.add(SegmentedScene(sample=sample, value=value, pixels=pixels, predicted=found, truth=kept))

    def add(self, scene: SegmentedScene) -> None:
        self.worst = sorted([*self.worst, scene], key=place_scene)[: self.most]

    def merge(self, world: World) -> None:
        """Merges the rows and images of all processes."""
        parts = world.gather((self.rows, self.worst, self.unreadable))
        self.rows, self.worst = {sample: row for rows, _, _ in parts for sample, row in rows.items()}, []
        for scene in (scene for _, scenes, _ in parts for scene in scenes):
            self.add(scene)
        self.unreadable = sum(unreadable for _, _, unreadable in parts)

    def in_order(self) -> list[RowT]:
        """The rows in the order of the split."""
        return [self.rows[sample] for sample in sorted(self.rows)]


def place_scene(scene: SegmentedScene) -> tuple[float, int]:
    """The sort key of kept images."""
    return scene.value, scene.sample

"""Targets of samples (classes, masks), and the geometry by which masks, boxes and points follow their image.

    for batch in train_batches(dataset, augmentation, BatchStream(batch=8), targets=MaskTargets()):
        batch.pixels, batch.target  # uint8 [B, 3, H, W] and [B, H, W], cropped and flipped alike

    geometry = augmentation.geometry(image.size, draws)
    geometry.mask(mask, 255), geometry.boxes(boxes), geometry.points(points)  # as the view shows them

Coordinates are continuous: x grows to the right and y downward, the image spans 0 to its width and height, and the
centre of its first pixel is at (0.5, 0.5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.core.text import Pair
from vitrail.data.dataset import ImageDataset
from vitrail.data.sized_annotations import read_sized_mask

TIE: Final = 1e-7  # in pixels: a centre this close to a pixel boundary belongs to the later pixel


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """How a view is made: a box (top, left, height, width, not necessarily whole pixels) of an upright image of size
    `whole` is resized to `inner`, padded by `pad` (left, top, right, bottom) pixels and, with `flip`, mirrored."""

    whole: Pair
    box: tuple[float, float, float, float]
    inner: Pair
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    flip: bool = False

    @property
    def size(self) -> Pair:
        """The size of the view."""
        left, top, right, bottom = self.pad
        return (top + self.inner[0] + bottom, left + self.inner[1] + right)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Maps pixel values [..., H, W] to the view [..., h, w] by nearest neighbour; padding gets `fill`."""
        down, across = (torch.from_numpy(self._sources(axis).copy()).to(mask.device) for axis in (0, 1))
        found = mask.index_select(-2, down.clamp(min=0)).index_select(-1, across.clamp(min=0))
        return found.masked_fill((down < 0)[:, None] | (across < 0), fill)

    def points(self, points: Tensor) -> Tensor:
        """Maps points [..., 2] (x, y) of the image to the view; they may lie outside it."""
        top, left, height, width = self.box
        scale = torch.tensor([self.inner[1] / width, self.inner[0] / height], dtype=torch.float64)
        moved = (points.double() - torch.tensor([left, top], dtype=torch.float64)) * scale
        moved = moved + torch.tensor(self.pad[:2], dtype=torch.float64)
        if self.flip:
            moved[..., 0] = self.size[1] - moved[..., 0]
        return moved.to(points.dtype if points.is_floating_point() else torch.float32)

    def boxes(self, boxes: Tensor) -> Tensor:
        """Maps boxes [..., 4] (left, top, right, bottom) of the image to the view, clipped to the visible part of the
        image. A box outside the view becomes empty."""
        moved = self.points(boxes.unflatten(-1, (2, 2)))
        (left, top, right, bottom), (height, width) = self.pad, self.size
        if self.flip:
            left, right = right, left
        low, high = torch.tensor([[left, top], [width - right, height - bottom]], dtype=moved.dtype)
        return torch.cat([corner.clamp(low, high) for corner in (moved.amin(-2), moved.amax(-2))], -1)

    def _sources(self, axis: int) -> NDArray[np.int64]:
        """The nearest image row (axis 0) or column (axis 1) for each of the view's; -1 in the padding."""
        first, length, inner = self.box[axis], self.box[axis + 2], self.inner[axis]
        centres = first + (2 * np.arange(inner) + 1) * length / (2 * inner)
        found = np.floor(centres + TIE).astype(np.int64).clip(0, self.whole[axis] - 1)
        out, border = np.full(self.size[axis], -1), self.pad[1 - axis]
        out[border : border + inner] = found
        return out[::-1] if axis == 1 and self.flip else out


class TargetSegments(NamedTuple):
    """The segments of B views, with N places each: enough for the view with the most segments, rounded up.

    A byte of `planes` holds one pixel of eight segments: bit i of plane j is segment 8j + i."""

    planes: Tensor  # uint8 [B, N / 8, H, W]
    classes: Tensor  # int64 [B, N]; -1 where there is no segment
    crowd: Tensor  # bool [B, N]


Target: TypeAlias = Tensor | TargetSegments  # of a batch of views


def map_target(target: Target, change: Callable[[Tensor], Tensor]) -> Target:
    """Applies a function to each tensor of a target."""
    return change(target) if isinstance(target, Tensor) else TargetSegments(*map(change, target))


IGNORED: Final = 255  # the ignore index of masks: such pixels count neither in losses nor in scores


class Targets:
    """What the loader yields with the images. Targets are either one tensor per batch (`batch`) or, with `moves`,
    spatial: they follow the crops and flips of each view (`read`, `view`, `stack`). Each loader process gets a copy."""

    moves: ClassVar[bool] = False
    # The padding value of targets that are pixel values; with it, whole batches can be transformed on a device.
    fill: ClassVar[int | None] = None

    def check(self, source: ImageDataset) -> None:
        """DataError if a source does not have these targets."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        """The targets of the samples [B, ...], if they do not move."""
        raise NotImplementedError(f"{type(self).__name__}.batch")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Any:
        """Reads the target of one sample, whose upright image has `size`, once for all its views. BadImage if it cannot
        be used, which makes the sample unreadable."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def view(self, target: Any, geometry: Geometry) -> Any:
        """Transforms what `read` returned to one view."""
        raise NotImplementedError(f"{type(self).__name__}.view")

    def stack(self, views: Sequence[Any], size: Pair) -> Target:
        """Collates the results of `view` for a batch of views of `size`; None stands for a missing image."""
        blank = self.blank(size)
        return torch.stack([blank if view is None else view for view in views])

    def blank(self, size: Pair) -> Tensor:
        """The placeholder for a missing image of `size`, for targets that are one tensor per view."""
        raise NotImplementedError(f"{type(self).__name__}.blank")


class ClassTargets(Targets):
    """The classes of whole images: int64 [B]; with several per sample [B, M], padded with -1."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(source.labels.rows(samples))


CLASS_LABELS: Final = ClassTargets()  # the default of sources and loaders


class MaskTargets(Targets):
    """The class of every pixel: uint8 [B, H, W]; IGNORED where there is none."""

    moves, fill = True, IGNORED

    def check(self, source: ImageDataset) -> None:
        if not source.pixel_classes:
            raise DataError("these data have no masks; provide a PNG of class indices for every image")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Tensor:
        return torch.from_numpy(read_sized_mask(source, sample, size))

    def view(self, target: Tensor, geometry: Geometry) -> Tensor:
        return geometry.mask(target, IGNORED)

    def blank(self, size: Pair) -> Tensor:
        return torch.full(size, IGNORED, dtype=torch.uint8)

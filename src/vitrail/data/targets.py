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

TIE: Final = 1e-7  # pixels: a centre that lies this near to an edge of pixels belongs to the later one


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """A box of an upright image of size `whole` (top, left, height, width, perhaps in fractions of pixels) becomes
    `inner` pixels, gets borders of `pad` (left, top, right, bottom) pixels, and is mirrored with them where `flip`."""

    whole: Pair
    box: tuple[float, float, float, float]
    inner: Pair
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    flip: bool = False

    @property
    def size(self) -> Pair:
        """Of the view."""
        left, top, right, bottom = self.pad
        return (top + self.inner[0] + bottom, left + self.inner[1] + right)

    def mask(self, mask: Tensor, fill: int) -> Tensor:
        """Values of pixels [..., H, W] as the view shows them [..., h, w]: those nearest to the centres of its pixels,
        and `fill` in the borders."""
        down, across = (torch.from_numpy(self._sources(axis).copy()).to(mask.device) for axis in (0, 1))
        found = mask.index_select(-2, down.clamp(min=0)).index_select(-1, across.clamp(min=0))
        return found.masked_fill((down < 0)[:, None] | (across < 0), fill)

    def points(self, points: Tensor) -> Tensor:
        """x, y [..., 2] in the image to x, y in the view; they may lie outside of it."""
        top, left, height, width = self.box
        scale = torch.tensor([self.inner[1] / width, self.inner[0] / height], dtype=torch.float64)
        moved = (points.double() - torch.tensor([left, top], dtype=torch.float64)) * scale
        moved = moved + torch.tensor(self.pad[:2], dtype=torch.float64)
        if self.flip:
            moved[..., 0] = self.size[1] - moved[..., 0]
        return moved.to(points.dtype if points.is_floating_point() else torch.float32)

    def boxes(self, boxes: Tensor) -> Tensor:
        """Left, top, right, bottom [..., 4] in the image to the same in the view, clipped to what it shows of the
        image; a box that it does not show comes out empty."""
        moved = self.points(boxes.unflatten(-1, (2, 2)))
        (left, top, right, bottom), (height, width) = self.pad, self.size
        if self.flip:
            left, right = right, left
        low, high = torch.tensor([[left, top], [width - right, height - bottom]], dtype=moved.dtype)
        return torch.cat([corner.clamp(low, high) for corner in (moved.amin(-2), moved.amax(-2))], -1)

    def _sources(self, axis: int) -> NDArray[np.int64]:
        """For each row (axis 0) or column (1) of the view, the one of the image that is nearest; -1 in the borders."""
        first, length, inner = self.box[axis], self.box[axis + 2], self.inner[axis]
        centres = first + (2 * np.arange(inner) + 1) * length / (2 * inner)
        found = np.floor(centres + TIE).astype(np.int64).clip(0, self.whole[axis] - 1)
        out, border = np.full(self.size[axis], -1), self.pad[1 - axis]
        out[border : border + inner] = found
        return out[::-1] if axis == 1 and self.flip else out


class TargetSegments(NamedTuple):
    """The segments of B views, N places each: as many as fit the image with the most, rounded up.

    A byte of `planes` holds one pixel of eight segments: bit i of plane j is segment 8j + i."""

    planes: Tensor  # uint8 [B, N / 8, H, W]
    classes: Tensor  # int64 [B, N]; -1 where there is no segment
    crowd: Tensor  # bool [B, N]


Target: TypeAlias = Tensor | TargetSegments  # of a batch of views


def map_target(target: Target, change: Callable[[Tensor], Tensor]) -> Target:
    """The target with each of its tensors changed."""
    return change(target) if isinstance(target, Tensor) else TargetSegments(*map(change, target))


IGNORED: Final = 255  # of a mask: a pixel that counts for nothing, in losses and in scores


class Targets:
    """Either one tensor a batch (`batch`), or places in the image that follow the crops and flips of each view
    (`moves`; then `read`, `view` and `stack`). A loader process gets a copy."""

    moves: ClassVar[bool] = False
    # Of those that are values of pixels, the value of borders: whole batches can be moved on a device then.
    fill: ClassVar[int | None] = None

    def check(self, source: ImageDataset) -> None:
        """DataError where a source does not have them."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        """Those of the samples [B, ...], where they do not move."""
        raise NotImplementedError(f"{type(self).__name__}.batch")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Any:
        """Those of one sample, whose upright image has `size`: read once for all its views. BadImage where they
        cannot be used, which makes the sample unreadable."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def view(self, target: Any, geometry: Geometry) -> Any:
        """What `read` gave, as one view shows it."""
        raise NotImplementedError(f"{type(self).__name__}.view")

    def stack(self, views: Sequence[Any], size: Pair) -> Target:
        """Those of a batch of views of `size`, each of which is what `view` gave, or None where there is no image."""
        blank = self.blank(size)
        return torch.stack([blank if view is None else view for view in views])

    def blank(self, size: Pair) -> Tensor:
        """What stands where a view of `size` has no image, for targets that are one tensor a view."""
        raise NotImplementedError(f"{type(self).__name__}.blank")


class ClassTargets(Targets):
    """The classes of whole images: int64 [B], or [B, M], filled up with -1, where samples have several."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(source.labels.rows(samples))


CLASS_LABELS: Final = ClassTargets()  # what sources and loaders give unless asked for something else


class MaskTargets(Targets):
    """The class of every pixel: uint8 [B, H, W], with IGNORED where there is none."""

    moves, fill = True, IGNORED

    def check(self, source: ImageDataset) -> None:
        if not source.pixel_classes:
            raise DataError("these data have no masks; put a PNG of class indices next to every image")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Tensor:
        return torch.from_numpy(read_sized_mask(source, sample, size))

    def view(self, target: Tensor, geometry: Geometry) -> Tensor:
        return geometry.mask(target, IGNORED)

    def blank(self, size: Pair) -> Tensor:
        return torch.full(size, IGNORED, dtype=torch.uint8)

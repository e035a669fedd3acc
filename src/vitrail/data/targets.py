"""What a task learns from the samples of a source: classes, masks, numbers. Batches carry them next to the pixels.

for batch in stream(source, augmentation, batch=8, seed=0, targets=Masks()):
    batch.pixels, batch.target    # uint8 [B, 3, H, W] and [B, H, W], cropped and mirrored alike
"""

from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadImage, DataError
from vitrail.core.text import Pair, format_size
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_indices
from vitrail.data.geometry import Geometry

IGNORED: Final = 255  # of a mask: a pixel that counts for nothing, in losses and in scores


class Targets:
    """Either one tensor a batch (`batch`), or places in the image that follow the crops and flips of each view
    (`moves`; then `read`, `view` and `blank`). A loader process gets a copy."""

    moves: ClassVar[bool] = False
    # Of those that are one value a pixel, the value of borders: whole batches can be moved on a device then.
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

    def view(self, target: Any, geometry: Geometry) -> Tensor:
        """What `read` gave, as one view shows it."""
        raise NotImplementedError(f"{type(self).__name__}.view")

    def blank(self, size: Pair) -> Tensor:
        """What stands where a view of `size` has no image."""
        raise NotImplementedError(f"{type(self).__name__}.blank")


class ClassLabels(Targets):
    """The classes of whole images: int64 [B], or [B, M], filled up with -1, where samples have several."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(source.labels.rows(samples))


CLASS_LABELS: Final = ClassLabels()  # what sources and loaders give unless asked for something else


class Masks(Targets):
    """The class of every pixel: uint8 [B, H, W], with IGNORED where there is none."""

    moves, fill = True, IGNORED

    def check(self, source: ImageDataset) -> None:
        if not source.pixel_classes:
            raise DataError("these data have no masks; put a PNG of class indices next to every image")

    def read(self, source: ImageDataset, sample: int, size: Pair) -> Tensor:
        try:
            indices = read_indices(source.mask(sample))
        except BadImage as error:
            raise BadImage(f"mask: {error}") from None
        except OSError as error:
            raise BadImage(f"mask: {error.strerror or error}") from None
        height, width = indices.shape
        if (height, width) != size:
            raise BadImage(f"mask: its size is {format_size((height, width))}, that of the image {format_size(size)}")
        known = len(source.pixel_classes)
        among = f"are {known} classes, 0 to {known - 1}"
        if (wrong := indices[(indices >= known) & (indices != IGNORED)]).size:
            raise BadImage(
                f"mask: class {wrong.max()} of pixels, but there {'is 1 class, 0' if known == 1 else among}, "
                f"and {IGNORED} for pixels that count for nothing"
            )
        return torch.from_numpy(indices)

    def view(self, target: Tensor, geometry: Geometry) -> Tensor:
        return geometry.mask(target, IGNORED)

    def blank(self, size: Pair) -> Tensor:
        return torch.full(size, IGNORED, dtype=torch.uint8)

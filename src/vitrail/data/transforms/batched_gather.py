"""Masks of whole batches, moved where they lie: a gather of the pixels that `Geometry.mask` takes, for B samples."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.shapes import Pair
from vitrail.data.draws import Draws
from vitrail.data.geometry import TIE
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop


def find_sources(augmentation: Augmentation, draws: Draws, whole: Pair) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For the B samples, all of one size, the rows [B, h] and columns [B, w] of the image that the pixels of the view
    are nearest to; -1 in its borders."""
    crop, count = augmentation.crop, len(draws)
    found: list[NDArray[np.int64]] = []
    windows = crop.windows(draws, whole) if isinstance(crop, ResizeCrop) else None
    boxes = crop.boxes(draws, *whole) if isinstance(crop, InceptionCrop) else np.array([[0, 0, *whole]] * count)
    for axis, side in enumerate(whole):
        places = np.arange(crop.size[axis])
        if isinstance(crop, ResizeCrop) and windows is not None:
            resized = crop.resized(whole)[axis]
            places = windows[:, axis, None] - crop.padding + places
            centres, inside = (2 * places + 1) * side / (2 * resized), (places >= 0) & (places < resized)
        else:
            centres = boxes[:, axis, None] + (2 * places + 1) * boxes[:, axis + 2, None] / (2 * crop.size[axis])
            inside = np.True_
        found.append(np.where(inside, np.floor(centres + TIE).astype(np.int64).clip(0, side - 1), -1))
    rows, columns = found
    return rows, np.where(augmentation.flips(draws)[:, None], columns[:, ::-1], columns)


def gather_masks(masks: Tensor, rows: Tensor, columns: Tensor, fill: int) -> Tensor:
    """[B, H, W] to [B, h, w], with `fill` where a row or a column is -1."""
    found = masks.gather(1, rows.clamp(min=0)[:, :, None].expand(-1, -1, masks.shape[2]))
    found = found.gather(2, columns.clamp(min=0)[:, None, :].expand(-1, rows.shape[1], -1))
    return found.masked_fill_((rows < 0)[:, :, None] | (columns < 0)[:, None, :], fill)

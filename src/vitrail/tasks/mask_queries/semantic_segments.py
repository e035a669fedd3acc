"""Turns semantic masks into segments: one for each class in an image, even if it is not connected."""

from typing import Final

import torch
from torch import Tensor

from vitrail.data.segment_targets import BITS, pack_masks
from vitrail.data.targets import IGNORED

MOST: Final = 64  # most segments per image; beyond that, the classes with the most pixels


def count_places(classes: int) -> int:
    """The number of places for the segments of an image, which fill a whole number of planes."""
    return -(-min(classes, MOST) // BITS) * BITS


def list_class_segments(masks: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Lists the segments of masks uint8 [B, H, W] by descending area: planes [B, N / 8, H, W] and classes [B, N],
    padded with -1. Ignored pixels belong to no segment. Runs on the masks' device without synchronisation."""
    pixels = masks.flatten(1).long()
    counts = torch.zeros(len(masks), IGNORED + 1, dtype=torch.int64, device=masks.device)
    counts = counts.scatter_add_(1, pixels, torch.ones_like(pixels))[:, :classes]
    order = counts * classes + torch.arange(classes, device=masks.device).flip(0)  # no ties
    largest = order.topk(min(classes, MOST), dim=1).indices
    names = torch.where(counts.gather(1, largest) > 0, largest, -1)
    names = torch.nn.functional.pad(names, (0, count_places(classes) - names.shape[1]), value=-1)
    eights = [masks[:, None] == some[:, :, None, None] for some in names.split(BITS, 1)]
    return torch.cat([pack_masks(eight) for eight in eights], 1), names

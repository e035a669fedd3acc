"""Masks of classes as segments: each class that an image shows is one, whatever it consists of."""

from typing import Final

import torch
from torch import Tensor

from vitrail.data.segment_targets import BITS, pack_masks
from vitrail.data.targets import IGNORED

MOST: Final = 64  # segments of an image; of more classes, those with the most pixels


def count_places(classes: int) -> int:
    """Places for the segments of an image: a whole number of planes."""
    return -(-min(classes, MOST) // BITS) * BITS


def list_class_segments(masks: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Planes [B, N / 8, H, W] and classes [B, N] of masks uint8 [B, H, W], largest first; -1 where there are no more.
    Pixels that are ignored belong to none. On the masks' device, which nobody waits for."""
    pixels = masks.flatten(1).long()
    counts = torch.zeros(len(masks), IGNORED + 1, dtype=torch.int64, device=masks.device)
    counts = counts.scatter_add_(1, pixels, torch.ones_like(pixels))[:, :classes]
    order = counts * classes + torch.arange(classes, device=masks.device).flip(0)  # no two alike
    largest = order.topk(min(classes, MOST), dim=1).indices
    names = torch.where(counts.gather(1, largest) > 0, largest, -1)
    names = torch.nn.functional.pad(names, (0, count_places(classes) - names.shape[1]), value=-1)
    eights = [masks[:, None] == some[:, :, None, None] for some in names.split(BITS, 1)]
    return torch.cat([pack_masks(eight) for eight in eights], 1), names

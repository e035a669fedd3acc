"""Boundary IoU (Cheng et al., 2021): the IoU of the bands along the boundaries of two masks.

    boundary_ious(masks, others)                         # of pairs of binary masks
    both, either = count_boundaries(predicted, truth, classes)  # of class maps, to be summed over images

A band contains the pixels of a mask that are within a given distance of its boundary or the image border: by default 2%
of the image diagonal, measured along rows and columns. Large objects are thus judged by their outline, to which plain
IoU is insensitive.
"""

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.targets import IGNORED

RATIO: Final = 0.02  # band width as a share of the image diagonal


def band_width(height: int, width: int, ratio: float = RATIO) -> int:
    """The band width in pixels for an image of this size."""
    return max(round(ratio * math.hypot(height, width)), 1)


def find_edges(values: Tensor, width: int) -> Tensor:
    """Marks the pixels of maps [..., H, W] that are within `width` of a different value or of the image border.

    If a rectangle contains more than one value, two neighbours differ within one of its rows or, if all its rows are
    constant, within each of its columns.
    """
    height, across = values.shape[-2:]
    planes = values.reshape(-1, height, across)
    # Differences between neighbours, as bytes 0 or 1; outside the image counts as a different value.
    steps = F.pad((planes[:, :, 1:] != planes[:, :, :-1]).byte(), (width,) * 2, value=1)
    rows = slide_maximum(steps, 2 * width, 2)
    steps = torch.maximum(rows[:, 1:], rows[:, :-1]) | (planes[:, 1:] != planes[:, :-1])
    steps = F.pad(steps, (0, 0, width, width), value=1)
    return slide_maximum(steps, 2 * width, 1).view(torch.bool).view(values.shape)


def slide_maximum(values: Tensor, length: int, dim: int) -> Tensor:
    """Sliding maximum over `length` neighbours along a dimension, which shrinks by length - 1."""
    have = 1
    while have < length:
        step = min(have, length - have)
        left = values.shape[dim] - step
        values = torch.maximum(values.narrow(dim, 0, left), values.narrow(dim, step, left))
        have += step
    return values


def find_bands(masks: Tensor, ratio: float = RATIO) -> Tensor:
    """The pixels of binary masks [..., H, W] in the band along their boundary."""
    there = masks.bool()
    return there & find_edges(there, band_width(masks.shape[-2], masks.shape[-1], ratio))


def boundary_ious(masks: Tensor, others: Tensor, ratio: float = RATIO) -> Tensor:
    """The boundary IoU of each pair of binary masks [..., H, W]; NaN where both are empty."""
    one, other = find_bands(masks, ratio), find_bands(others, ratio)
    both, either = (part.flatten(-2).sum(-1) for part in (one & other, one | other))
    return both / either


def count_boundaries(predicted: Tensor, truth: Tensor, classes: int, ratio: float = RATIO) -> tuple[Tensor, Tensor]:
    """Intersections and unions of the bands of two class maps [B, H, W], in pixels per image and class [B, K]. Pixels
    that the ground truth ignores belong to no class in either map, so masks end there."""
    seen, width = truth != IGNORED, band_width(truth.shape[-2], truth.shape[-1], ratio)
    own, said = truth.long(), torch.where(seen, predicted, IGNORED)
    edges, said_edges = find_edges(truth, width) & seen, find_edges(said, width) & seen
    return count_overlap(torch.where(edges, own, classes), torch.where(said_edges, said, classes), classes)


def count_overlap(maps: Tensor, others: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Intersections and unions of two class maps, int64 [B, H, W], in pixels per image and class [B, K]. The value K
    stands for no class."""
    cells = torch.add(others, maps, alpha=classes + 1).flatten(1)
    found = torch.zeros(len(maps), (classes + 1) ** 2, dtype=torch.int64, device=maps.device)
    found.scatter_add_(1, cells, found.new_ones(1).expand_as(cells))
    found = found.view(-1, classes + 1, classes + 1)
    both = found.diagonal(dim1=1, dim2=2)
    return both[:, :classes], (found.sum(1) + found.sum(2) - both)[:, :classes]

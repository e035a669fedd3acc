"""Boundary IoU (Cheng et al., 2021): the IoU of the bands along the edges of two masks.

    boundary_ious(masks, others)                         # of pairs of binary masks
    both, either = count_boundaries(predicted, truth, classes)  # of maps of classes, to be summed over images

A band holds the pixels of a mask that lie within a distance of anything that is not of it, the border of the image
included: in rows and in columns, 2% of the image's diagonal. Large objects are so judged by their outline, which plain
IoU hardly sees.
"""

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.targets import IGNORED

RATIO: Final = 0.02  # of the image's diagonal


def band_width(height: int, width: int, ratio: float = RATIO) -> int:
    """The width of the bands in an image of this size, in pixels."""
    return max(round(ratio * math.hypot(height, width)), 1)


def find_edges(values: Tensor, width: int) -> Tensor:
    """Whether each pixel of maps [..., H, W], of whole numbers from 0 to 65,535, is within `width` of a pixel of
    another value or of the border [..., H, W]."""
    height, across = values.shape[-2:]
    planes = values.reshape(-1, 1, height, across).float()
    # The largest and the smallest value around a pixel; outside of the image is larger than any.
    planes = torch.cat([planes, -planes], 1)
    for window, pad in (((1, 2 * width + 1), (width, width, 0, 0)), ((2 * width + 1, 1), (0, 0, width, width))):
        planes = F.max_pool2d(F.pad(planes, pad, value=65536.0), window, stride=1)
    return (planes[:, 0] != -planes[:, 1]).view(values.shape)


def find_bands(masks: Tensor, ratio: float = RATIO) -> Tensor:
    """The pixels of binary masks [..., H, W] along their edges."""
    there = masks.bool()
    return there & find_edges(there, band_width(masks.shape[-2], masks.shape[-1], ratio))


def boundary_ious(masks: Tensor, others: Tensor, ratio: float = RATIO) -> Tensor:
    """The boundary IoU of each pair of binary masks [..., H, W]; NaN where both are empty."""
    one, other = find_bands(masks, ratio), find_bands(others, ratio)
    both, either = (part.flatten(-2).sum(-1) for part in (one & other, one | other))
    return both / either


def count_boundaries(predicted: Tensor, truth: Tensor, classes: int, ratio: float = RATIO) -> tuple[Tensor, Tensor]:
    """Pixels of each image and class [B, K] that lie in the bands of both maps [B, H, W], and in either. Ignored pixels
    of the truth are of no class, in both maps: the masks end there."""
    seen = truth != IGNORED
    own, said = truth.long(), torch.where(seen, predicted.long(), IGNORED)
    width = band_width(truth.shape[-2], truth.shape[-1], ratio)
    edges, said_edges = find_edges(own, width) & seen, find_edges(said, width) & seen

    def per_class(indices: Tensor, where: Tensor) -> Tensor:
        rows = torch.zeros(len(truth), classes, dtype=torch.int64, device=truth.device)
        return rows.scatter_add_(1, torch.where(where, indices, 0).flatten(1), where.long().flatten(1))

    both = per_class(own, edges & said_edges & (own == said))
    return both, per_class(own, edges) + per_class(said, said_edges) - both

"""Draws the points at which masks are compared, and samples masks there.

A point (x, y) lies in the unit square whatever the size of a mask, so predictions need not be upsampled. Values are
interpolated bilinearly between pixel centres; outside the mask they are 0. Points are a pure function of a key per
image, so they do not depend on micro-batches or processes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.randomness import shift_right, splitmix64_tensor
from vitrail.data.segment_targets import BITS
from vitrail.objectives.patch_ops import STEP

FRACTION_BITS = 24  # bits of a coordinate, which a float32 holds exactly


class PointCounts(NamedTuple):
    """The number of points for matching, and for the loss: candidates, those of them to keep, and other points."""

    matching: int
    candidates: int
    uncertain: int
    others: int


class LossPoints(NamedTuple):
    """The loss points of one prediction, for B images with N places for segments."""

    candidates: Tensor  # [B, N, R, 2]
    uncertain: int  # number of candidates to keep, where the network is least certain
    others: Tensor  # [B, N, S, 2]: kept unconditionally


def count_points(points: int, oversample: float, importance: float) -> PointCounts:
    """The point counts from Mask2Former's settings (Cheng et al. 2022): of the `points` in the loss of a mask, a share
    of `importance` is chosen among `oversample * points` candidates."""
    uncertain = int(importance * points)
    return PointCounts(points, int(points * oversample), uncertain, points - uncertain)


def split_keys(keys: Tensor, count: int) -> Tensor:
    """Derives `count` keys from each key: int64 [...] -> [..., count]."""
    places = torch.arange(1, count + 1, device=keys.device)
    # Inductor of torch 2.11 treats the product with STEP as a 32-bit index and fails; a bitwise "or" prevents this.
    return splitmix64_tensor(keys[..., None] + (places | 0) * STEP)


def draw_points(keys: Tensor, count: int) -> Tensor:
    """Draws `count` points from each key: int64 [...] -> [..., count, 2] in [0, 1)."""
    bits = split_keys(keys, count)
    x, y = shift_right(bits, 64 - FRACTION_BITS), shift_right(bits, 64 - 2 * FRACTION_BITS) & (2**FRACTION_BITS - 1)
    return torch.stack([x, y], -1).float() * 2.0**-FRACTION_BITS


def draw_loss_points(keys: Tensor, places: int, counts: PointCounts) -> LossPoints:
    """Draws separate loss points for each segment, from one key per image [B]."""
    candidates, others = split_keys(keys, 2 * places).chunk(2, 1)
    return LossPoints(draw_points(candidates, counts.candidates), counts.uncertain, draw_points(others, counts.others))


def sample_maps(maps: Tensor, points: Tensor) -> Tensor:
    """Samples maps [B, C, h, w] at points that all maps of an image share, [B, P, 2], or at points of each map,
    [B, C, P, 2]; returns [B, C, P]."""
    if points.dim() == 3:
        return F.grid_sample(maps, 2 * points[:, :, None] - 1, align_corners=False)[..., 0]
    grid = 2 * points.flatten(0, 1)[:, :, None] - 1
    return F.grid_sample(maps.flatten(0, 1)[:, None], grid, align_corners=False)[:, 0, :, 0].unflatten(
        0, maps.shape[:2]
    )


def sample_planes(planes: Tensor, points: Tensor) -> Tensor:
    """Samples the masks of N segments, like `sample_maps`, from planes [B, N / 8, H, W] without unpacking them: only
    the four pixels around each point are read. Returns float32 [B, N, P]."""
    pixels, size = planes.flatten(2), (planes.shape[2], planes.shape[3])
    shifts = torch.arange(BITS, dtype=torch.uint8, device=planes.device)[:, None]
    values = torch.zeros((), device=planes.device)
    for at, weight in list_neighbours(points, size):
        if points.dim() == 3:
            found = pixels.gather(2, at[:, None].expand(-1, pixels.shape[1], -1))[:, :, None]  # [B, N / 8, 1, P]
            weight = weight[:, None]
        else:
            at = at.unflatten(1, (-1, BITS))
            found = pixels.gather(2, at.flatten(2)).view_as(at)  # [B, N / 8, 8, P]
        values = values + ((found >> shifts) & 1).flatten(1, 2).float() * weight
    return values


def list_neighbours(points: Tensor, size: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the four pixels around each point [..., 2]: row-major indices [...] and interpolation weights [...]."""
    height, width = size
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = x.floor(), y.floor()
    for down in (0, 1):
        for right in (0, 1):
            column, row = left.long() + right, top.long() + down
            share = (x - left if right else 1 - (x - left)) * (y - top if down else 1 - (y - top))
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
            yield place, torch.where(inside, share, 0.0)

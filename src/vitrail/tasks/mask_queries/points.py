"""Points at which masks are compared, and the values of masks there.

A point (x, y) lies in the unit square whatever the size of a mask, so predictions need not be enlarged. Values between
the centres of pixels are interpolated, and are 0 outside. Points are a pure function of a key for each image, so that
neither micro-batches nor processes change them; code that compares masks is given them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.randomness import shift_right, splitmix64_tensor
from vitrail.data.segment_targets import BITS
from vitrail.objectives.patch_ops import STEP

FRACTION_BITS = 24  # of a coordinate: as many as a float32 has room for


class PointCounts(NamedTuple):
    """How many points there are of each kind, and how many candidates the loss takes."""

    matching: int
    candidates: int
    uncertain: int
    others: int


class LossPoints(NamedTuple):
    """Those of the loss of one prediction, for B images with N places for segments."""

    candidates: Tensor  # [B, N, R, 2]
    uncertain: int  # so many of them are taken, where the network is least certain
    others: Tensor  # [B, N, S, 2]: taken as they are


def count_points(points: int, oversample: float, importance: float) -> PointCounts:
    """The counts of Mask2Former's (Cheng et al. 2022) three numbers: of `points` in the loss of a mask a share of
    `importance` is chosen among `oversample` times as many."""
    uncertain = int(importance * points)
    return PointCounts(points, int(points * oversample), uncertain, points - uncertain)


def split_keys(keys: Tensor, count: int) -> Tensor:
    """So many keys from each: int64 [...] -> [..., count]."""
    places = torch.arange(1, count + 1, device=keys.device)
    # Inductor of torch 2.11 takes their product with STEP for an index of 32 bits and fails; not behind a bitwise "or".
    return splitmix64_tensor(keys[..., None] + (places | 0) * STEP)


def draw_points(keys: Tensor, count: int) -> Tensor:
    """So many points of each key: int64 [...] -> [..., count, 2] in [0, 1)."""
    bits = split_keys(keys, count)
    x, y = shift_right(bits, 64 - FRACTION_BITS), shift_right(bits, 64 - 2 * FRACTION_BITS) & (2**FRACTION_BITS - 1)
    return torch.stack([x, y], -1).float() * 2.0**-FRACTION_BITS


def draw_loss_points(keys: Tensor, places: int, counts: PointCounts) -> LossPoints:
    """Each segment's own, from a key for each image [B]."""
    candidates, others = split_keys(keys, 2 * places).chunk(2, 1)
    return LossPoints(draw_points(candidates, counts.candidates), counts.uncertain, draw_points(others, counts.others))


def sample_maps(maps: Tensor, points: Tensor) -> Tensor:
    """Values of maps [B, C, h, w] at points that all maps of an image share [B, P, 2], or at their own [B, C, P, 2]: to
    [B, C, P]."""
    if points.dim() == 3:
        return F.grid_sample(maps, 2 * points[:, :, None] - 1, align_corners=False)[..., 0]
    grid = 2 * points.flatten(0, 1)[:, :, None] - 1
    return F.grid_sample(maps.flatten(0, 1)[:, None], grid, align_corners=False)[:, 0, :, 0].unflatten(
        0, maps.shape[:2]
    )


def sample_planes(planes: Tensor, points: Tensor) -> Tensor:
    """What `sample_maps` gives for the masks of N segments in planes [B, N / 8, H, W], which are never unpacked: only
    the four pixels around each point are read. To float32 [B, N, P]."""
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
    """The four pixels around each point [..., 2] of a map, as their places in raster order and their weights [...]."""
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

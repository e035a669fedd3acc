"""Resampling of a grid of vectors by a product with a matrix of weights along each axis."""

from typing import get_args

import torch
from torch import Tensor

from vitrail.core.errors import unknown_name
from vitrail.core.text import Pair
from vitrail.models.vit_config import Numerics


def resize_grid(grid: Tensor, size: Pair, numerics: Numerics = "reference") -> Tensor:
    """Resamples a grid of vectors: [rows, columns, D] -> [new rows, new columns, D]."""
    if numerics not in get_args(Numerics):
        raise unknown_name("position numerics", numerics, get_args(Numerics))
    if tuple(grid.shape[:2]) == tuple(size):
        return grid
    return resample_grid(grid.to(torch.float64), size, numerics).to(grid.dtype).contiguous()


def resample_grid(table: Tensor, grid: Pair, numerics: Numerics = "reference") -> Tensor:
    """Resamples a grid of vectors: [rows, columns, D] -> [new rows, new columns, D]. All operations work in a graph
    with an open image size. On the table's own grid the matrices are the identity, so the result is bit-identical."""
    rows, columns, width = table.shape
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    offset = _other_size(exact, grid) * 0.1 if numerics == "bicubic-offset" else None
    tall = interpolation_matrix(rows, grid[0], exact, numerics, offset) @ exact.flatten(1)
    wide = interpolation_matrix(columns, grid[1], exact, numerics, offset) @ tall.view(-1, columns, width)
    return wide.to(table.dtype)


def _other_size(table: Tensor, grid: Pair) -> Tensor:
    """Whether a grid is not the table's own, 1 or 0. It is a tensor, because an open size is unknown in a graph."""
    rows, columns = (torch.arange(length, device=table.device)[-1:] + 1 for length in grid)
    return ((rows != table.shape[0]) | (columns != table.shape[1])).to(table.dtype)


def interpolation_matrix(
    old: int, new: int, like: Tensor, numerics: Numerics = "reference", offset: Tensor | None = None
) -> Tensor:
    """Computes weights [new, old] that resample `old` positions to `new` ones. `offset` is added to the new size."""
    steps = torch.arange(new, device=like.device, dtype=like.dtype)[:, None]
    places = torch.arange(old, device=like.device, dtype=like.dtype)[None]
    if numerics == "reference":
        return _hat(steps * (old - 1) / steps[-1:].clamp_min(1) - places)
    size = steps[-1:] + 1  # a tensor, because `new` may be symbolic in a graph
    scale = old / (size if offset is None else size + offset)
    centre = (steps + 0.5) * scale - 0.5
    if numerics in ("bilinear-antialias", "bicubic"):
        away = (centre - places) / scale.clamp_min(1)
        kernel = _cubic(away, -0.5) if numerics == "bicubic" else _hat(away)
        return kernel / kernel.sum(1, keepdim=True)
    # Without antialiasing, weights beyond the border are added to the border's.
    far = torch.arange(-2, old + 2, device=like.device, dtype=like.dtype)[None]
    centre = centre.clamp_min(0) if numerics == "bilinear" else centre
    kernel = _hat(centre - far) if numerics == "bilinear" else _cubic(centre - far, -0.75)
    if old == 1:
        return kernel.sum(1, keepdim=True)
    first, last = kernel[:, :3].sum(1, keepdim=True), kernel[:, -3:].sum(1, keepdim=True)
    return torch.cat([first, kernel[:, 3:-3], last], dim=1)


def _hat(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: Tensor, a: float) -> Tensor:
    """Keys' kernel; a is -0.5 in Pillow's and in torch's antialiased resampling, and -0.75 in torch's plain one."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))

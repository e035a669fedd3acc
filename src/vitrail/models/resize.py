"""Positions at a new resolution (3.2): the patch size stays, the grid changes, positions are resampled in 2-D.

Three numerics. `reference` is what the official code computes, `scipy.ndimage.zoom(order=1)`: corner to corner,
bilinear. `bilinear` is the half-pixel form. `bicubic` is antialiased half-pixel bicubic. All work in float64 and return
the table's own type; the class token's row is left alone, and a table of the right size is returned as it is.
`resample` is the first of them for a single forward pass at another size.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, unknown
from vitrail.core.shapes import Pair, times
from vitrail.models.vit_config import ViTConfig

Numerics: TypeAlias = Literal["reference", "bilinear", "bicubic"]


def resize_grid(grid: Tensor, size: Pair, numerics: Numerics = "reference") -> Tensor:
    """A grid of vectors resampled: [rows, columns, D] -> [new rows, new columns, D]."""
    if numerics not in get_args(Numerics):
        raise unknown("position numerics", numerics, get_args(Numerics))
    if tuple(grid.shape[:2]) == tuple(size):
        return grid
    wide = grid.to(torch.float64).permute(2, 0, 1)[None]
    if numerics == "reference":
        out = F.interpolate(wide, size, mode="bilinear", align_corners=True)
    elif numerics == "bilinear":
        out = F.interpolate(wide, size, mode="bilinear", align_corners=False)
    else:
        out = _bicubic(_bicubic(wide[0], size[1]).transpose(1, 2), size[0]).transpose(1, 2)[None]
    return out[0].permute(1, 2, 0).to(grid.dtype).contiguous()


def _bicubic(lines: Tensor, size: int) -> Tensor:
    """Antialiased bicubic along the last of three axes. In 2-D torch errs where a grid becomes one vector wide, so each
    axis goes by itself, with a second, equal line beside it."""
    doubled = lines.flatten(0, 1)[None, :, None].expand(-1, -1, 2, -1)
    out = F.interpolate(doubled, (2, size), mode="bicubic", align_corners=False, antialias=True)
    return out[0, :, 0].unflatten(0, lines.shape[:2])


def resample(table: Tensor, grid: Pair) -> Tensor:
    """A grid of vectors on another grid, in operations that a graph with an open image size can hold: [rows, columns,
    D] -> [new rows, new columns, D]. Corner to corner and bilinear, the `reference` numerics in float32: along each
    axis a product with a matrix of hats. On the table's own grid that matrix is the identity, so nothing changes
    there, not by a bit."""
    rows, columns, width = table.shape
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    tall = hats(rows, grid[0], exact) @ exact.flatten(1)
    return (hats(columns, grid[1], exact) @ tall.view(-1, columns, width)).to(table.dtype)


def hats(old: int, new: int, like: Tensor) -> Tensor:
    """Weights [new, old] of linear interpolation between `old` places, from the first to the last."""
    steps = torch.arange(new, device=like.device, dtype=like.dtype)
    place = steps * (old - 1) / steps[-1:].clamp_min(1)
    return (1 - (place[:, None] - torch.arange(old, device=like.device, dtype=like.dtype)).abs()).clamp_min(0)


def resize_position(table: Tensor, old: Pair, new: Pair, numerics: Numerics = "reference") -> Tensor:
    """A learned table [1, prefix + N, D] (or [prefix + N, D]) for another grid; rows in front of the grid stay."""
    rows = table.shape[-2]
    prefix = rows - old[0] * old[1]
    if prefix < 0:
        raise ConfigError(f"a table of {rows} positions is too short for a grid of {times(old)}")
    if tuple(old) == tuple(new):
        return table
    flat = table.reshape(rows, table.shape[-1])
    grid = resize_grid(flat[prefix:].unflatten(0, tuple(old)), new, numerics).flatten(0, 1)
    return torch.cat([flat[:prefix], grid]).reshape(*table.shape[:-2], -1, table.shape[-1])


def resize_positions(
    tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig, numerics: Numerics = "reference"
) -> dict[str, Tensor]:
    """All position tables of a network's tensors for another grid, of whatever kind and wherever placed (D.4)."""
    if old.grid == new.grid:
        return tensors
    if old.tied_to_size:
        raise ConfigError(f"{old.tied_to_size}; keep image_size={times(old.image)}")
    out = dict(tensors)
    for name, tensor in tensors.items():
        if not name.startswith("position.tables."):
            continue
        match name.rsplit(".", 1)[1]:
            case "table":
                out[name] = resize_position(tensor, old.grid, new.grid, numerics)
            case "rows":
                out[name] = resize_grid(tensor[:, None], (new.grid[0], 1), numerics)[:, 0]
            case "columns":
                out[name] = resize_grid(tensor[None], (1, new.grid[1]), numerics)[0]
            case _:
                pass
    return out


def redraw_grid(tensors: dict[str, Tensor], drawn: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Tensors with the grid's positions as another network has them; a class token keeps its own."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("position.tables.") and not name.endswith(".prefix"):
            kept = tensor.shape[-2] - config.patches if name.endswith(".table") else 0
            out[name] = torch.cat([tensor[..., :kept, :], drawn[name][..., kept:, :].to(tensor.dtype)], dim=-2)
    return out

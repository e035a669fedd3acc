"""Positions on a grid that is known only when a picture comes (3.2): resampled inside the graph.

Corner to corner and bilinear, as models/resize.py does it in `reference` numerics: along each axis a product with a
matrix of hats. On the network's own grid that matrix is the identity, so nothing changes there, not by a bit.
"""

import torch
from torch import Tensor, nn

from vitrail.core.shapes import Pair
from vitrail.models.config import ViTConfig
from vitrail.models.position import AxesTable, LearnedTable, Positions, SineTable


def hats(old: int, new: int) -> Tensor:
    """Weights [new, old] of linear interpolation between `old` places, from the first to the last."""
    steps = torch.arange(new, dtype=torch.float32)
    place = steps * (old - 1) / steps[-1:].clamp_min(1)
    return (1 - (place[:, None] - torch.arange(old, dtype=torch.float32)).abs()).clamp_min(0)


def resampled(table: Tensor, grid: Pair) -> Tensor:
    """A grid of vectors on another grid: [rows, columns, D] -> [new rows, new columns, D]."""
    rows, columns, width = table.shape
    tall = hats(rows, grid[0]) @ table.flatten(1)
    return hats(columns, grid[1]) @ tall.view(-1, columns, width)


def sines(grid: Pair, width: int) -> Tensor:
    """Fixed positions of a grid (D.4): [rows, columns, D]."""
    quarter = width // 4
    rate = (10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / max(quarter - 1, 1))).float()
    shape = (grid[0], grid[1], quarter)
    x = (torch.arange(grid[1], dtype=torch.float32)[:, None] * rate)[None].expand(shape)
    y = (torch.arange(grid[0], dtype=torch.float32)[:, None] * rate)[:, None].expand(shape)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)


class OpenPositions(nn.Module):
    """`models.position.Positions` of the additive kinds, for whatever grid."""

    def __init__(self, positions: Positions, config: ViTConfig):
        super().__init__()
        self.tables, self.placed, self.config = positions.tables, positions.placed, config

    def forward(self, z: Tensor, layer: int, grid: Pair) -> Tensor:
        """Tokens with what positions add at the input of a layer, counted from 0."""
        if not len(self.tables) or (self.placed == "stem" and layer):
            return z
        prefix, table = self.parts(self.tables[layer if self.placed == "every" else 0], grid)
        empty = torch.zeros(1, self.config.prefix - prefix.shape[1], self.config.width)
        return z + torch.cat([prefix, empty, table.flatten(0, 1)[None]], dim=1)

    def parts(self, table: nn.Module, grid: Pair) -> tuple[Tensor, Tensor]:
        """Positions of the class token [1, 0 or 1, D], and of the grid [rows, columns, D]."""
        none = torch.zeros(1, 0, self.config.width)
        match table:
            case LearnedTable():
                split = table.table.shape[1] - self.config.patches
                own = table.table[0, split:].unflatten(0, self.config.grid)
                return table.table[:, :split], resampled(own, grid)
            case AxesTable():
                shape = (grid[0], grid[1], table.columns.shape[1])
                x = resampled(table.columns[None], (1, grid[1])).expand(shape)
                y = resampled(table.rows[:, None], (grid[0], 1)).expand(shape)
                joined = torch.cat([x, y], dim=-1) if self.config.position == "learned2d" else x + y
                return (none if table.prefix is None else table.prefix), joined
            case SineTable():
                return none, sines(grid, self.config.width)
            case _:
                raise AssertionError(f"{type(table).__name__} cannot be resampled")

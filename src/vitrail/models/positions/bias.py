"""Positions that enter the attention logits: BEiT's bias tables, and the decomposed form of SAM and ViTDet.

A table holds one number for each head and each pair of row and column offsets between two patches; with a class token
there are three more, for class to patch, patch to class, and class to class. The decomposed form holds a vector for
each row offset and each column offset, and adds its products with the query. For a grid of another size both are
resampled linearly over offsets.
"""

import math

import torch
from torch import Tensor, nn

from vitrail.core.text import Pair
from vitrail.models.resampling.interpolation import resample_grid, resize_grid
from vitrail.models.vit_config import ViTConfig


class BiasTable(nn.Module):
    """A bias for each head and offset (BEiT): table [(2h-1)(2w-1) + 3, heads], without the 3 if there is no class
    token."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.grid = config.grid
        self.prefix = config.prefix
        rows, columns = (2 * length - 1 for length in config.grid)
        self.table = nn.Parameter(torch.empty(rows * columns + (3 if self.prefix else 0), config.heads))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self, q: Tensor, grid: Pair) -> Tensor:
        """Computes the bias of all pairs of tokens: [heads, T, T]."""
        offsets = (2 * self.grid[0] - 1, 2 * self.grid[1] - 1)
        count = math.prod(offsets)
        table = self.table[:count].unflatten(0, offsets)
        if tuple(grid) != self.grid:
            table = resample_grid(table, (2 * grid[0] - 1, 2 * grid[1] - 1), "bilinear")
        rows, columns = _offsets(grid[0], q.device), _offsets(grid[1], q.device)
        # [rows, columns, rows, columns, heads], of queries and then of keys
        bias = table[rows[:, None, :, None], columns[None, :, None, :]].flatten(2, 3).flatten(0, 1).permute(2, 0, 1)
        if not self.prefix:
            return bias
        to_patch, to_class, itself = self.table[count:].unbind(0)
        heads, patches = bias.shape[0], bias.shape[1]
        first = torch.cat([itself.view(heads, 1, 1), to_patch.view(heads, 1, 1).expand(-1, -1, patches)], dim=2)
        rest = torch.cat([to_class.view(heads, 1, 1).expand(-1, patches, -1), bias], dim=2)
        return torch.cat([first, rest], dim=1)


class DecomposedBias(nn.Module):
    """A vector for each row offset and one for each column offset (SAM, ViTDet): q_i · (r_rows + r_columns)."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        side = config.window_of(layer)
        rows, columns = (side, side) if side else config.grid
        self.rows = nn.Parameter(torch.empty(2 * rows - 1, config.head_size))
        self.columns = nn.Parameter(torch.empty(2 * columns - 1, config.head_size))

    def initialise(self) -> None:
        nn.init.normal_(self.rows, std=0.02)
        nn.init.normal_(self.columns, std=0.02)

    def forward(self, q: Tensor, grid: Pair) -> Tensor:
        """[S, heads, T, D_h] -> the bias of all pairs of tokens, [S, heads, T, T]."""
        query = q.unflatten(2, grid)  # [S, heads, rows, columns, D_h]
        rows = self._vectors(self.rows, grid[0])
        columns = self._vectors(self.columns, grid[1])
        of_rows = torch.einsum("bhrcd,rkd->bhrck", query, rows)
        of_columns = torch.einsum("bhrcd,ckd->bhrck", query, columns)
        return (of_rows[..., :, None] + of_columns[..., None, :]).flatten(4, 5).flatten(2, 3)

    def _vectors(self, table: Tensor, length: int) -> Tensor:
        """Returns the vector for each query and key along an axis: [length, length, D_h]."""
        if table.shape[0] != 2 * length - 1:
            table = resample_grid(table[:, None], (2 * length - 1, 1), "bilinear")[:, 0]
        return table[_offsets(length, table.device)]


def _offsets(length: int, device: torch.device) -> Tensor:
    """Returns the index in a table of the offset from each key to each query: [queries, keys]."""
    place = torch.arange(length, device=device)
    return place[:, None] - place[None, :] + length - 1


def build_bias(config: ViTConfig, layer: int) -> BiasTable | DecomposedBias | None:
    """Builds a layer's own bias; None if there is none, or if all layers share one."""
    if config.position_bias == "decomposed":
        return DecomposedBias(config, layer)
    return BiasTable(config) if config.position_bias == "table" else None


def resize_bias(name: str, tensor: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
    """Resizes a tensor of position biases to another grid. Those within windows are unchanged."""
    part = name.rpartition(".")[2]
    if part == "table":
        before, after = ((2 * g[0] - 1, 2 * g[1] - 1) for g in (old.grid, new.grid))
        count = math.prod(before)
        grid = resize_grid(tensor[:count].unflatten(0, before), after, "bilinear").flatten(0, 1)
        return torch.cat([grid, tensor[count:]])
    layer = int(name.split(".")[1])
    if old.window_of(layer):
        return tensor
    length = 2 * new.grid[0 if part == "rows" else 1] - 1
    return resize_grid(tensor[:, None], (length, 1), "bilinear")[:, 0]

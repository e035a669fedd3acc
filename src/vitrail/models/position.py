"""Position embeddings (D.4): what they are, and where they enter.

Additive kinds (learned 1-D, two learned 2-D forms, fixed sine-cosine) give a table [1, T, D] that is added to the
tokens: once at the stem, or at the input of each layer with a table of its own (every) or one for all (shared). The
relative kind gives offsets [2T-1, D_h] to the attention: of the first layer (stem), of each its own, or one for all.
The class token has a row of its own unless `position_prefix` is off; registers have none.
"""

import torch
from torch import Tensor, nn

from vitrail.core.shapes import Pair
from vitrail.models.resize import resample
from vitrail.models.vit_config import ViTConfig


class LearnedTable(nn.Module):
    """1-D learned positions in raster order, the class token's row first: the paper's default."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.empty(1, config.patches + _prefix_rows(config), config.width))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self, grid: Pair | None = None) -> Tensor:
        split = _prefix_rows(self.config)
        if grid is not None:
            own = resample(self.table[0, split:].unflatten(0, self.config.grid), grid)
            return _whole(self.config, self.table[:, :split] if split else None, own.flatten(0, 1)[None])
        if self.table.shape[1] == self.config.tokens:
            return self.table
        return _whole(self.config, self.table[:, :split] if split else None, self.table[:, split:])


class AxesTable(nn.Module):
    """2-D learned positions: one table for columns and one for rows, joined at half width or summed at full width."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        width = config.width // 2 if config.position == "learned2d" else config.width
        rows, columns = config.grid
        self.columns = nn.Parameter(torch.empty(columns, width))
        self.rows = nn.Parameter(torch.empty(rows, width))
        self.prefix = nn.Parameter(torch.empty(1, 1, config.width)) if _prefix_rows(config) else None

    def initialise(self) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, grid: Pair | None = None) -> Tensor:
        columns, rows = self.columns[None], self.rows[:, None]
        if grid is not None:
            columns, rows = resample(columns, (1, grid[1])), resample(rows, (grid[0], 1))
        shape = (*(grid or self.config.grid), self.columns.shape[1])
        x, y = columns.expand(shape), rows.expand(shape)
        both = torch.cat([x, y], dim=-1) if self.config.position == "learned2d" else x + y
        return _whole(self.config, self.prefix, both.flatten(0, 1)[None])


class SineTable(nn.Module):
    """Fixed 2-D sine-cosine positions: a quarter of the width each for sin x, cos x, sin y, cos y."""

    table: Tensor
    fixed: bool = True  # no weight file brings it: it makes itself

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.register_buffer("table", self._table(), persistent=False)

    def _table(self) -> Tensor:
        return sines(self.config.grid, self.config.width, torch.float64).flatten(0, 1)[None].float()

    def initialise(self) -> None:
        self.table.copy_(self._table())

    def materialise(self, like: Tensor) -> None:
        """Fixed tables are in no weight file: make one where the network was built without storage."""
        self.table = self._table().to(like.device, like.dtype)

    def forward(self, grid: Pair | None = None) -> Tensor:
        if grid is None:
            return _whole(self.config, None, self.table)
        made = sines(grid, self.config.width, torch.float32, self.table.device).to(self.table.dtype)
        return _whole(self.config, None, made.flatten(0, 1)[None])


def sines(grid: Pair, width: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Fixed positions of a grid: [rows, columns, D]. A graph with an open grid holds them in float32."""
    quarter = width // 4
    rate = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / max(quarter - 1, 1))
    rate = rate.to(dtype=dtype, device=device)
    shape = (grid[0], grid[1], quarter)
    x = (torch.arange(grid[1], dtype=dtype, device=device)[:, None] * rate)[None].expand(shape)
    y = (torch.arange(grid[0], dtype=dtype, device=device)[:, None] * rate)[:, None].expand(shape)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)


class RelativeOffsets(nn.Module):
    """1-D relative positions over the raster index: one learned vector for each difference p_q - p_k, for all heads."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.table = nn.Parameter(torch.empty(2 * config.tokens - 1, config.width // config.heads))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> Tensor:
        return self.table


KINDS: dict[str, type[LearnedTable | AxesTable | SineTable | RelativeOffsets]] = {
    "learned": LearnedTable,
    "learned2d": AxesTable,
    "learned2d-sum": AxesTable,
    "sincos2d": SineTable,
    "relative": RelativeOffsets,
}


class Positions(nn.Module):
    """All position tables of a network and the rule for where each enters."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.relative = config.position == "relative"
        self.placed = config.placed
        count = 0 if config.position == "none" else config.depth if config.placed == "every" else 1
        self.tables = nn.ModuleList(KINDS[config.position](config) for _ in range(count))

    def _at(self, layer: int) -> nn.Module | None:
        if not self.tables or (self.placed == "stem" and layer):
            return None
        return self.tables[layer if self.placed == "every" else 0]

    def forward(self, z: Tensor, layer: int, grid: Pair | None = None) -> Tensor:
        """Tokens with what positions add at the input of a layer, counted from 0. For a grid that is not the network's
        own they are resampled (3.2)."""
        table = None if self.relative else self._at(layer)
        return z if table is None else z + table(grid)

    def offsets(self, layer: int) -> Tensor | None:
        """What relative positions give to the attention of a layer."""
        table = self._at(layer) if self.relative else None
        return None if table is None else table()


def _prefix_rows(config: ViTConfig) -> int:
    return int(config.class_token and config.position_prefix)


def _whole(config: ViTConfig, prefix: Tensor | None, grid: Tensor) -> Tensor:
    """The table for all tokens, with zeros where a class token or register has no position: [1, T, D]."""
    have = 0 if prefix is None else prefix.shape[1]
    empty = grid.new_zeros(1, config.prefix - have, config.width)
    before = [part for part in (prefix, empty) if part is not None and part.shape[1]]
    return torch.cat([*before, grid], dim=1) if before else grid

"""Position embeddings (D.4): their kinds, where they enter, and how they are resized (3.2).

Additive kinds (learned 1-D, two learned 2-D forms, fixed sine-cosine) give a table [1, T, D] that is added to the
tokens: once at the stem, or at the input of each layer, from its own table (every) or a common one (shared). The
relative kind gives offsets [2T-1, D_h] to attention: of the first layer only (stem), of each layer its own (every), or
the same for all (shared). The class token has its own row unless `position_prefix` is off; registers have none.

At a new resolution the patch size stays, the grid changes and positions are resampled in 2-D, by a product with a
matrix of weights along each axis. The config's `position_resample` names the method, because weights must be used as
they were trained. `reference` is the official code's `scipy.ndimage.zoom(order=1)`: bilinear, with aligned corners. The
others align half-pixel centres: `bilinear` and `bilinear-antialias`, `bicubic`, which is antialiased, `bicubic-sharp`,
which is not, and `bicubic-offset`, which is `bicubic-sharp` with 0.1 added to the new size, as in DINOv2's own code.
Resizing computes in float64 and returns the table's type; a forward pass at another size computes in float32. The rows
of class token and registers do not change, and a table of the right size is returned unchanged.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, format_size
from vitrail.models.positions.bias import resize_bias
from vitrail.models.resampling.interpolation import resample_grid, resize_grid
from vitrail.models.vit_config import Numerics, ViTConfig


def resize_position(table: Tensor, old: Pair, new: Pair, numerics: Numerics = "reference") -> Tensor:
    """Resizes a learned table [1, prefix + N, D] (or [prefix + N, D]) to another grid. Prefix rows are unchanged."""
    rows = table.shape[-2]
    prefix = rows - old[0] * old[1]
    if prefix < 0:
        raise ConfigError(f"a table of {rows} positions is too short for a grid of {format_size(old)}")
    if tuple(old) == tuple(new):
        return table
    flat = table.reshape(rows, table.shape[-1])
    grid = resize_grid(flat[prefix:].unflatten(0, tuple(old)), new, numerics).flatten(0, 1)
    return torch.cat([flat[:prefix], grid]).reshape(*table.shape[:-2], -1, table.shape[-1])


def resize_positions(
    tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig, numerics: Numerics | None = None
) -> dict[str, Tensor]:
    """Resizes all position tables among a network's tensors to another grid, of any kind and placement (D.4), in the
    given numerics or the network's own."""
    if old.grid == new.grid:
        return tensors
    numerics = numerics or old.position_resample
    if old.tied_to_size:
        raise ConfigError(f"{old.tied_to_size}; keep image_size={format_size(old.image)}")
    out = dict(tensors)
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        if place.startswith("position.tables."):
            if part == "table" and old.position_grid is None:
                out[name] = resize_position(tensor, old.grid, new.grid, numerics)
            elif part == "rows":
                out[name] = resize_grid(tensor[:, None], (new.grid[0], 1), numerics)[:, 0]
            elif part == "columns":
                out[name] = resize_grid(tensor[None], (1, new.grid[1]), numerics)[0]
        elif "position_bias." in name:
            out[name] = resize_bias(name, tensor, old, new)
    return out


def redraw_positions(tensors: dict[str, Tensor], drawn: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Replaces the grid's positions in tensors by those of another network. A class token keeps its own."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("position.tables.") and not name.endswith(".prefix"):
            kept = config.position_rows if name.endswith(".table") else 0
            out[name] = torch.cat([tensor[..., :kept, :], drawn[name][..., kept:, :].to(tensor.dtype)], dim=-2)
    return out


class LearnedTable(nn.Module):
    """1-D learned positions in raster order, the class token's row first: the paper's default."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.empty(1, math.prod(config.table_grid) + config.position_rows, config.width))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self, grid: Pair | None = None) -> Tensor:
        split = self.config.position_rows
        own = self.table[:, split:]
        if grid is not None or self.config.table_grid != self.config.grid:
            grid, table = grid or self.config.grid, own[0].unflatten(0, self.config.table_grid)
            own = resample_grid(table, grid, self.config.position_resample).flatten(0, 1)[None]
        elif self.table.shape[1] == self.config.tokens:
            return self.table
        return _with_prefix(self.config, self.table[:, :split] if split else None, own)


class AxesTable(nn.Module):
    """2-D learned positions: one table for columns and one for rows, joined at half width or summed at full width."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        width = config.width // 2 if config.position == "learned2d" else config.width
        self.columns = nn.Parameter(torch.empty(config.grid[1], width))
        self.rows = nn.Parameter(torch.empty(config.grid[0], width))
        self.prefix = nn.Parameter(torch.empty(1, rows, config.width)) if (rows := config.position_rows) else None

    def initialise(self) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, grid: Pair | None = None) -> Tensor:
        columns, rows = self.columns[None], self.rows[:, None]
        if grid is not None:
            numerics = self.config.position_resample
            columns, rows = resample_grid(columns, (1, grid[1]), numerics), resample_grid(rows, (grid[0], 1), numerics)
        shape = (*(grid or self.config.grid), self.columns.shape[1])
        x, y = columns.expand(shape), rows.expand(shape)
        both = torch.cat([x, y], dim=-1) if self.config.position == "learned2d" else x + y
        return _with_prefix(self.config, self.prefix, both.flatten(0, 1)[None])


class SineTable(nn.Module):
    """Fixed 2-D sine-cosine positions: a quarter of the width each for sin x, cos x, sin y, cos y."""

    table: Tensor
    fixed: bool = True  # computed, so weight files do not contain it

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> Tensor:
        return sine_positions(self.config.grid, self.config.width, torch.float64).flatten(0, 1)[None].float()

    def initialise(self) -> None:
        self.table.copy_(self.compute_table())

    def forward(self, grid: Pair | None = None) -> Tensor:
        table = self.table
        if grid is not None:
            made = sine_positions(grid, self.config.width, torch.float32, table.device).to(table.dtype)
            table = made.flatten(0, 1)[None]
        return _with_prefix(self.config, None, table)


def sine_positions(grid: Pair, width: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Computes the fixed positions of a grid: [rows, columns, D]. A graph with an open grid holds them in float32."""
    quarter = width // 4
    rate = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / max(quarter - 1, 1))
    rate = rate.to(dtype=dtype, device=device)
    shape = (grid[0], grid[1], quarter)
    x = (torch.arange(grid[1], dtype=dtype, device=device)[:, None] * rate)[None].expand(shape)
    y = (torch.arange(grid[0], dtype=dtype, device=device)[:, None] * rate)[:, None].expand(shape)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)


class RelativeOffsets(nn.Module):
    """1-D relative positions over the raster index: one learned vector per difference p_q - p_k, for all heads."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.table = nn.Parameter(torch.empty(2 * config.tokens - 1, config.head_size))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> Tensor:
        return self.table


KINDS: dict[str, type[LearnedTable | AxesTable | SineTable | RelativeOffsets]] = {
    "learned": LearnedTable, "learned2d": AxesTable, "learned2d-sum": AxesTable, "sincos2d": SineTable,
    "relative": RelativeOffsets,
}  # fmt: skip


class PositionEmbeddings(nn.Module):
    """All position tables of a network and the rule for where each enters."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.relative = config.position == "relative"
        self.entry = config.entry
        count = 0 if config.position == "none" else config.depth if config.entry == "every" else 1
        self.tables = nn.ModuleList(KINDS[config.position](config) for _ in range(count))

    def _at(self, layer: int) -> nn.Module | None:
        if not self.tables or (self.entry == "stem" and layer):
            return None
        return self.tables[layer if self.entry == "every" else 0]

    def forward(self, z: Tensor, layer: int, grid: Pair | None = None) -> Tensor:
        """Adds the positions that enter at the input of a layer, counted from 0. For another grid than the network's
        own they are resampled (3.2)."""
        table = None if self.relative else self._at(layer)
        return z if table is None else z + table(grid)

    def offsets(self, layer: int) -> Tensor | None:
        """Returns the relative positions for the attention of a layer, if there are any."""
        table = self._at(layer) if self.relative else None
        return None if table is None else table()


def _with_prefix(config: ViTConfig, prefix: Tensor | None, grid: Tensor) -> Tensor:
    """Builds the table for all tokens, with zeros for class tokens and registers without a position: [1, T, D]."""
    have = 0 if prefix is None else prefix.shape[1]
    empty = grid.new_zeros(1, config.prefix - have, config.width)
    before = [part[0] for part in (prefix, empty) if part is not None and part.shape[1]]
    # Without the first axis, so that gradients have the memory layout of the table.
    return torch.cat([*before, grid[0]])[None] if before else grid

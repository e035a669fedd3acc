"""The layers of the encoder: pre-norm (Eqs. 2 and 3) or post-norm, over all tokens, within windows, or along the axes
of the grid (D.6)."""

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from vitrail.core.text import Pair, join_words
from vitrail.models.attention import (
    Attention,
    Places,
    count_windows,
    expand_line_weights,
    expand_window_weights,
    merge_lines,
    merge_windows,
    split_lines,
    split_windows,
)
from vitrail.models.backbone import Taps, has_hooks
from vitrail.models.kernels.float8_layers import MULTIPLE
from vitrail.models.kernels.fused_ops import TensorFacts, can_fuse_stream
from vitrail.models.layers import MLP, LayerScale, StochasticDepth, make_norm
from vitrail.models.positions.bias import build_bias
from vitrail.models.streams import AnyStream
from vitrail.models.vit_config import ViTConfig

RESIDUAL: Final = "residual sums with norms"  # in lists of kernels


class Block(nn.Module):
    """One encoder layer, pre-norm (Eqs. 2 and 3): [B, T, D] -> [B, T, D].

    With `queries` it returns only the first tokens, [B, queries, D]. They attend to all others, so their values are the
    same, but nothing is computed that only the others need. Given a stream it returns one.
    """

    recomputed: bool = False  # in the backward pass; storing the sum of a stream then takes less than storing its parts

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        norm = partial(make_norm, config)
        self.grid = config.grid
        self.norm_attention = norm(config.width)
        self.attention = Attention(
            config.width,
            config.heads,
            head_width=config.head_width,
            qkv_bias=config.qkv_bias,
            key_bias=config.key_bias,
            out_bias=config.out_bias,
            dropout=config.attention_dropout,
            norm=norm if config.norm_qk else None,
            norm_inner=norm if config.norm_inner_attention else None,
            rotary_pairs=config.rotary is not None and config.rotary.layout == "pairs",
        )
        self.position_bias = build_bias(config, layer)
        self.scale_attention = self._scale(config)
        self.norm_mlp = norm(config.width)
        self.mlp = MLP(config)
        self.scale_mlp = self._scale(config)
        self.dropout = nn.Dropout(config.dropout)
        self.skip = StochasticDepth(config.stochastic_depth * layer / max(config.depth - 1, 1))

    def _scale(self, config: ViTConfig) -> nn.Module:
        return LayerScale(config.width, config.layer_scale) if config.layer_scale else nn.Identity()

    def can_fuse(self, z: Tensor | TensorFacts) -> bool:
        """Whether the block accepts a stream: its parts are the standard ones without hooks, and in training its
        branches add only a product and a bias."""
        attention, mlp = self.attention, self.mlp
        if (type(self), type(attention), type(mlp)) != (Block, Attention, MLP) or self.recomputed:
            return False
        branches = ((attention.out, self.norm_attention), (mlp.contract, self.norm_mlp))
        if not all(can_fuse_stream(z, last, norm) for last, norm in branches) or has_hooks(self):
            return False
        dropped = self.training and max(self.dropout.p, mlp.dropout.p, self.skip.p) > 0
        scaled = isinstance(self.scale_mlp, LayerScale)
        return not (dropped or scaled) if torch.is_grad_enabled() else not self.training

    def list_kernels(self, z: TensorFacts) -> list[str]:
        """Lists the operations of a training step with such tokens that run in vitrail's own kernels."""
        found: list[str] = []
        if (type(self), type(self.attention), type(self.mlp)) == (Block, Attention, MLP):
            found += ["GELU"] if self.mlp.fuses(z) else []
            found += ["attention"] if self.attention.fuses(z) and self.position_bias is None else []
            found += [RESIDUAL] if self.can_fuse(z) else []
        return found

    def float8_obstacle(self) -> str:
        """Why the block cannot compute in fp8, in its current mode; empty if it can."""
        attention, mlp = self.attention, self.mlp
        if (type(self), type(attention), type(mlp)) != (Block, Attention, MLP):
            return "its layers are not plain ones over all tokens"
        if not all(type(norm) is nn.LayerNorm for norm in (self.norm_attention, self.norm_mlp)):
            return "its norms are not LayerNorm"
        if self.training and isinstance(self.scale_mlp, LayerScale):
            return "it has LayerScale"
        if self.training and max(self.dropout.p, mlp.dropout.p, self.skip.p) > 0:
            return "it drops at random; set model.dropout=0 and model.stochastic_depth=0"
        layers = (attention.qkv, attention.out, mlp.expand, mlp.contract)
        sides = {side for layer in layers for side in layer.weight.shape if side % MULTIPLE}
        return f"sides of {join_words(sorted(sides))} are no multiples of {MULTIPLE}" if sides else ""

    def forward(
        self,
        z: Tensor | AnyStream,
        places: Places | None = None,
        queries: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor | AnyStream:
        if not isinstance(z, Tensor):
            return self.forward_stream(z, places or Places(self.grid))
        places = places or Places(self.grid)
        attended = self.attend(self.norm_attention(z), places, queries, taps)
        within: Tensor = z[:, :queries] + self.skip(self.scale_attention(self.dropout(attended)))  # Eq. 2
        after: Tensor = within + self.skip(self.scale_mlp(self.transform(self.norm_mlp(within))))  # Eq. 3
        if taps is not None:
            taps.take_layer(z, after, partial(self.expand_weights, grid=places.grid))
        return after

    def forward_stream(self, stream: AnyStream, places: Places) -> AnyStream:
        """Eqs. 2 and 3."""
        stream, normed = stream.normalise(self.norm_attention)
        mixed = self.attention.mix(normed, places, None, None, self.position_bias)
        stream, normed = stream.add(mixed, self.attention.out, self.scale_attention).normalise(self.norm_mlp)
        return stream.add(self.mlp.hide(normed), self.mlp.contract, self.scale_mlp)

    def attend(self, z: Tensor, places: Places, queries: int | None, taps: Taps | None) -> Tensor:
        return self.attention(z, places, queries, taps, self.position_bias)

    def transform(self, z: Tensor) -> Tensor:
        return self.mlp(z)

    def expand_weights(self, weights: Tensor, grid: Pair) -> Tensor:
        """Expands attention weights to all tokens of an image; here they already cover them."""
        del grid
        return weights


class PostNormBlock(Block):
    """A layer that normalises the outputs of its branches instead of their inputs (EVA-02's E)."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - never given a stream
        self, z: Tensor, places: Places | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        before, places = z, places or Places(self.grid)
        attended = self.norm_attention(self.dropout(self.attend(z, places, queries, taps)))
        z = z[:, :queries] + self.skip(self.scale_attention(attended))
        z = z + self.skip(self.scale_mlp(self.norm_mlp(self.transform(z))))
        if taps is not None:
            taps.take_layer(before, z, partial(self.expand_weights, grid=places.grid))
        return z


class WindowBlock(Block):
    """A layer whose tokens attend only to their own window of the grid (ViTDet, SAM). Leading tokens without a place in
    the image are in every window, and take the mean of their results."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__(config, layer)
        self.size = config.window_of(layer)

    def attend(self, z: Tensor, places: Places, queries: int | None, taps: Taps | None) -> Tensor:
        ahead, hidden = places.ahead, places.hidden
        if hidden is not None:
            hidden = split_windows(hidden.transpose(1, 2), places.grid, self.size).transpose(1, 2)
        inside = Places((self.size, self.size), ahead=ahead, hidden=hidden)
        windows = split_windows(z[:, ahead:], places.grid, self.size)
        rows, columns = count_windows(places.grid, self.size)
        if ahead:
            visitors = z[:, None, :ahead].expand(-1, rows * columns, -1, -1)
            windows = torch.cat([visitors.flatten(0, 1), windows], dim=1)
        mixed = self.attention(windows, inside, None, taps, self.position_bias)
        merged = merge_windows(mixed[:, ahead:], places.grid, self.size)
        if ahead:
            visited = mixed[:, :ahead].unflatten(0, (-1, rows * columns)).mean(dim=1)
            merged = torch.cat([visited, merged], dim=1)
        return merged[:, :queries]

    def expand_weights(self, weights: Tensor, grid: Pair) -> Tensor:
        return expand_window_weights(weights, grid, self.size)


class RowBlock(Block):
    """A layer whose tokens attend only to their own row of the grid (D.6)."""

    columns: bool = False

    def attend(self, z: Tensor, places: Places, queries: int | None, taps: Taps | None) -> Tensor:
        mixed = self.attention(split_lines(z, places.grid, columns=self.columns), None, None, taps)
        return merge_lines(mixed, places.grid, columns=self.columns)[:, :queries]

    def expand_weights(self, weights: Tensor, grid: Pair) -> Tensor:
        return expand_line_weights(weights, grid, columns=self.columns)


class ColumnBlock(RowBlock):
    """A layer whose tokens attend only to their own column of the grid (D.6)."""

    columns: bool = True


class AxialBlock(nn.Module):
    """Row attention and MLP, then column attention and MLP: two layers, each along one axis (D.6)."""

    def __init__(self, config: ViTConfig, layer: int):
        super().__init__()
        self.row = RowBlock(config, layer)
        self.column = ColumnBlock(config, layer)

    def forward(
        self, z: Tensor, places: Places | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        return self.column(self.row(z, places, None, taps), places, queries, taps)

"""Multi-head self-attention (Appendix A, Eqs. 5-8), fused and explicit, over all tokens, along the axes of the grid
(D.6) and within windows."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.backbone import AttentionTap, Taps
from vitrail.models.kernels import float8_layers
from vitrail.models.kernels.float8_layers import Float8
from vitrail.models.kernels.fused_ops import (
    TensorFacts,
    can_fuse_attention,
    can_fuse_linear,
    fused_attention,
    fused_qkv,
)


class Places(NamedTuple):
    """What a layer's attention knows about the positions of its tokens. In a plain network this is only the grid."""

    grid: Pair
    offsets: Tensor | None = None  # vectors of relative positions (D.4): [2T-1, D_h]
    rotation: Tensor | None = None  # cosines and sines of rotary ones: [2, T, D_h], or [2, B or heads, ..., T, D_h]
    bias: Tensor | None = None  # of the logits, for all layers: [heads, T, T]
    ahead: int = 0  # number of leading tokens without a place in the image: not rotated, and without a bias
    hidden: Tensor | None = None  # patches, the last tokens, that the leading tokens do not attend to: [B, ahead, N]


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """A = softmax(q kᵀ/√D_h + bias), Eq. 6, written out: [..., T, D_h] twice -> [..., T, T]."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (logits if bias is None else logits + bias).softmax(dim=-1)


def relative_logits(q: Tensor, offsets: Tensor) -> Tensor:
    """q_i · r_{i-j} / √D_h for the first Q tokens as queries (D.4): [..., Q, D_h] and [2T-1, D_h] -> [..., Q, T]."""
    queries, tokens = q.shape[-2], (offsets.shape[0] + 1) // 2
    by_offset = (q * q.shape[-1] ** -0.5) @ offsets.transpose(0, 1)  # [..., Q, 2T-1]
    place = torch.arange(tokens, device=q.device)
    index = place[:queries, None] - place[None, :] + tokens - 1
    return by_offset.gather(-1, index.expand(*q.shape[:-2], queries, tokens))


def rotate(z: Tensor, rotation: Tensor, *, pairs: bool) -> Tensor:
    """Rotates z by its rotary positions, given as cosines and sines: [..., T, D_h] -> [..., T, D_h]."""
    cosine, sine = rotation.unbind(0)
    if pairs:
        turned = torch.stack([-z[..., 1::2], z[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = z.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return z * cosine + turned * sine


def pad_rotation(rotation: Tensor, ahead: int) -> Tensor:
    """Extends rotary positions by leading tokens that are not rotated:
    [2, ..., T, D_h] -> [2, ..., ahead + T, D_h]."""
    if not ahead:
        return rotation
    cosine, sine = rotation.unbind(0)
    return torch.stack([F.pad(cosine, (0, 0, ahead, 0), value=1.0), F.pad(sine, (0, 0, ahead, 0))])


def attend_masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor, dropout: float) -> Tensor:
    """Attention whose first tokens do not attend to the patches that are `hidden` from them, [B, ahead, N]. Only these
    few tokens need a mask, so their weights are computed explicitly, in float32; the others keep the fast kernel. The
    first tokens always attend to each other, so no row is empty."""
    ahead, seen = hidden.shape[1], k.shape[2] - hidden.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    mask = F.pad(torch.zeros_like(hidden, dtype=exact).masked_fill(hidden, float("-inf")), (seen, 0))[:, None]
    mask, rest = (mask, None) if bias is None else (mask + bias[..., :ahead, :], bias[..., ahead:, :])
    with torch.autocast("cuda", enabled=False) if q.is_cuda else nullcontext():
        weights = attention_weights(q[:, :, :ahead].to(exact), k.to(exact), mask).to(v.dtype)
    first = F.dropout(weights, dropout) @ v
    others = F.scaled_dot_product_attention(q[:, :, ahead:], k, v, attn_mask=rest, dropout_p=dropout)
    return torch.cat([first, others], dim=2)


class QKV(nn.Linear):
    """q, k and v in one product, stacked in that order. If keys have no bias, `bias` holds only those of q and v."""

    def __init__(self, width: int, inner: int, *, bias: bool, key_bias: bool):
        super().__init__(width, 3 * inner, bias=bias and key_bias)
        self.inner = inner
        self.key_bias = key_bias
        if bias and not key_bias:
            self.bias = nn.Parameter(torch.zeros(2 * inner))

    def reset_parameters(self) -> None:
        if self.bias is None or len(self.bias) == self.out_features:
            super().reset_parameters()
        else:  # a bias for q and v only is made after torch's constructor, so no random numbers are drawn for it
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @property
    def full_bias(self) -> Tensor | None:
        """The bias of q, k and v, with zeros for keys that have none."""
        if self.key_bias or self.bias is None:
            return self.bias
        q, v = self.bias.chunk(2)
        return torch.cat([q, torch.zeros_like(q), v])

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.full_bias)


class Attention(nn.Module):
    """MSA(z), Eqs. 5-8. q, k and v share one matrix, stacked in that order, each part initialised separately.

    `norm` makes norms for queries and keys, `norm_inner` one for the output of the heads. `position_bias` computes a
    bias of the logits from the queries and the grid.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        qkv_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] | None = None,
        norm_inner: Callable[[int], nn.Module] | None = None,
        rotary_pairs: bool = False,
    ):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.rotary_pairs = rotary_pairs
        inner = heads * (head_width or width // heads)
        self.qkv = QKV(width, inner, bias=qkv_bias, key_bias=key_bias)
        self.norm_q = None if norm is None else norm(inner // heads)
        self.norm_k = None if norm is None else norm(inner // heads)
        self.norm = None if norm_inner is None else norm_inner(inner)
        self.out = nn.Linear(inner, width, bias=out_bias)

    def initialise(self) -> None:
        for part in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(part)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, z: Tensor | Float8, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: [B, T, D] -> q, k, v of [B, k, T, D_h] each, all views of one product. With `queries`, q is only of
        the first tokens, [B, k, queries, D_h]."""
        weight, bias, inner = self.qkv.weight, self.qkv.full_bias, self.qkv.inner
        if isinstance(z, Float8):
            q, k, v = float8_layers.qkv(z, weight, bias)
        elif queries is not None:
            q = F.linear(z[:, :queries].contiguous(), weight[:inner], None if bias is None else bias[:inner])
            k, v = F.linear(z, weight[inner:], None if bias is None else bias[inner:]).chunk(2, dim=-1)
        elif can_fuse_linear(z, self.qkv):
            q, k, v = fused_qkv(z, weight, bias)
        else:
            q, k, v = self.qkv(z).chunk(3, dim=-1)
        q, k, v = self._by_head(q), self._by_head(k), self._by_head(v)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        return q, k, v

    def _by_head(self, z: Tensor) -> Tensor:
        """[B, T, k·D_h] -> [B, k, T, D_h]."""
        return z.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def place(
        self, q: Tensor, k: Tensor, places: Places | None, position_bias: nn.Module | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotates q and k by rotary positions, and computes the bias of the logits from other kinds of positions."""
        if places is None:
            return q, k, None
        ahead = places.ahead
        if places.rotation is not None:
            pairs, table = self.rotary_pairs, pad_rotation(places.rotation, ahead).to(q.dtype)
            q, k = rotate(q, table[..., : q.shape[-2], :], pairs=pairs), rotate(k, table, pairs=pairs)
        bias = None if places.offsets is None else relative_logits(q, places.offsets)
        if position_bias is not None:
            bias = position_bias(q[..., ahead:, :], places.grid)
        elif places.bias is not None:
            bias = places.bias
        if bias is not None and ahead:
            bias = F.pad(bias, (ahead, 0, ahead, 0))
        return q, k, None if bias is None else bias[..., : q.shape[-2], :]

    def weights(self, z: Tensor, places: Places | None = None, position_bias: nn.Module | None = None) -> Tensor:
        """Eq. 6 for inspection: [B, T, D] -> [B, k, T, T]."""
        q, k, _ = self.project(z)
        return attention_weights(*self.place(q, k, places, position_bias))

    def forward(
        self,
        z: Tensor,
        places: Places | None = None,
        queries: int | None = None,
        taps: Taps | None = None,
        position_bias: nn.Module | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], or [B, queries, D] for only the first tokens, which still attend to all others."""
        return self.out(self._mix(z, places, queries, taps, position_bias))  # Eq. 8

    def mix(
        self,
        z: Tensor | Float8,
        places: Places | None = None,
        queries: int | None = None,
        taps: Taps | None = None,
        position_bias: nn.Module | None = None,
    ) -> Tensor | Float8:
        """Computes everything before the last product: the concatenated heads, in fp8 if the input is."""
        if not isinstance(z, Float8):
            return self._mix(z, places, queries, taps, position_bias)
        plain = self.norm is None and self._is_plain(places, queries, taps, position_bias)
        if plain and can_fuse_attention(z.full, self.qkv, self.heads):
            return float8_layers.attention(z, self.qkv.weight, self.qkv.full_bias, self.heads)
        return float8_layers.round_tensor(self._mix(z, places, queries, taps, position_bias))

    def fuses(self, z: Tensor | TensorFacts) -> bool:
        """Whether attention over all tokens, without its own positions, runs as one kernel."""
        return self._is_plain(None, None, None, None) and can_fuse_attention(z, self.qkv, self.heads)

    def _is_plain(
        self, places: Places | None, queries: int | None, taps: Taps | None, position_bias: nn.Module | None
    ) -> bool:
        """Whether attention is exactly Eqs. 5-7, over all tokens."""
        dropout = self.dropout if self.training else 0.0
        tapped = taps is not None and taps.attention
        bare = places is None or all(part is None for part in (places[1], places[2], places[3], places.hidden))
        return bare and queries is None and position_bias is None and self.norm_q is None and not (dropout or tapped)

    def _mix(
        self,
        z: Tensor | Float8,
        places: Places | None,
        queries: int | None,
        taps: Taps | None,
        position_bias: nn.Module | None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        tapped = taps is not None and taps.attention
        plain = self._is_plain(places, queries, taps, position_bias)
        if isinstance(z, Tensor) and plain and can_fuse_attention(z, self.qkv, self.heads):
            return self._normalise(fused_attention(z, self.qkv.weight, self.qkv.full_bias, self.heads))  # Eqs. 5-7
        few = None if position_bias is not None else queries  # a bias computed from queries needs all of them
        q, k, v = self.project(z, few)
        q, k, bias = self.place(q, k, places, position_bias)
        if few is not queries:
            q, bias = q[..., :queries, :], None if bias is None else bias[..., :queries, :]
        if taps is not None and tapped:
            weights = attention_weights(q, k, bias)
            taps.inside = AttentionTap(q, k, v, weights)
            if taps.explicit:
                return self._normalise((weights @ v).transpose(1, 2).flatten(2))
        bias = None if bias is None else bias.to(q.dtype)
        if places is not None and places.hidden is not None:
            mixed = attend_masked(q, k, v, bias, places.hidden, dropout)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eqs. 6, 7
        return self._normalise(mixed.transpose(1, 2).flatten(2))

    def _normalise(self, mixed: Tensor) -> Tensor:
        return mixed if self.norm is None else self.norm(mixed)


def split_lines(z: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    """Splits the grid into one sequence per row, or per column: [B, N, D] -> [B·rows, columns, D]."""
    z = z.unflatten(1, grid)
    return (z.transpose(1, 2) if columns else z).flatten(0, 1)


def merge_lines(z: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    z = z.unflatten(0, (-1, grid[1 if columns else 0]))
    return (z.transpose(1, 2) if columns else z).flatten(1, 2)


def expand_line_weights(weights: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    """Expands weights within rows to all tokens, with zeros between rows: [B·rows, X, columns, columns] -> [B, X, N, N]
    for X heads; likewise for columns."""
    own = weights.unflatten(0, (-1, grid[1 if columns else 0])).movedim(1, 2)  # [B, X, rows, columns, columns]
    whole = weights.new_zeros(*own.shape[:2], *grid, *grid)
    each, every = torch.arange(grid[1 if columns else 0], device=weights.device), slice(None)
    place = (every, each, every, each) if columns else (each, every, each, every)
    whole[(every, every, *place)] = own.movedim(2, 0)
    return whole.flatten(4, 5).flatten(2, 3)


def count_windows(grid: Pair, size: int) -> Pair:
    """Counts the rows and columns of windows, the last of which may be padded. The division avoids negative numbers,
    which other runtimes round differently from Python."""
    return (grid[0] + size - 1) // size, (grid[1] + size - 1) // size


def split_windows(z: Tensor, grid: Pair, size: int) -> Tensor:
    """Splits the grid into one sequence per window, the last ones padded with zeros:
    [B, N, D] -> [B·windows, size·size, D]."""
    rows, columns = count_windows(grid, size)
    z = F.pad(z.unflatten(1, grid), (0, 0, 0, columns * size - grid[1], 0, rows * size - grid[0]))
    z = z.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # [B, rows, size, columns, size, D]
    return z.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def merge_windows(z: Tensor, grid: Pair, size: int) -> Tensor:
    rows, columns = count_windows(grid, size)
    z = z.unflatten(0, (-1, rows, columns)).unflatten(3, (size, size)).transpose(2, 3)
    return z.flatten(3, 4).flatten(1, 2)[:, : grid[0], : grid[1]].flatten(1, 2)


def expand_window_weights(weights: Tensor, grid: Pair, size: int) -> Tensor:
    """Expands weights within windows to all tokens, with zeros between windows:
    [B·windows, X, size², size²] -> [B, X, N, N] for X heads. The weights of padding are left out."""
    rows, columns = count_windows(grid, size)
    windows = torch.arange(rows * columns, device=weights.device)
    heads, inside = weights.shape[1], size * size
    own = weights.unflatten(0, (-1, rows * columns)).movedim(1, 0)  # [windows, B, X, size², size²]
    whole = weights.new_zeros(own.shape[1], heads, rows * columns, inside, rows * columns, inside)
    whole[:, :, windows, :, windows] = own
    place = torch.arange(rows * size * columns * size, device=weights.device).view(1, rows * size, columns * size)
    split = split_windows(place.flatten(1)[..., None].float(), (rows * size, columns * size), size).long().flatten()
    back = split.argsort().view(rows * size, columns * size)[: grid[0], : grid[1]].flatten()
    flat = whole.flatten(4, 5).flatten(2, 3)
    return flat[:, :, back][:, :, :, back]

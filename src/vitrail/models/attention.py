"""Multi-head self-attention (Appendix A, Eqs. 5-8), fused and explicit, plain and along the axes of the grid (D.6)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.backbone import AttentionTap, Taps
from vitrail.models.kernels.fused_ops import can_fuse_attention, can_fuse_linear, fused_attention, fused_qkv


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


class Attention(nn.Module):
    """MSA(z), Eqs. 5-8. q, k and v share one matrix, stacked in that order, each D x D part initialised by itself."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True, out_bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width, bias=out_bias)

    def initialise(self) -> None:
        for part in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(part)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: [B, T, D] -> q, k, v of [B, k, T, D_h] each, all views of one product."""
        q, k, v = fused_qkv(z, self.qkv) if can_fuse_linear(z, self.qkv) else self.qkv(z).chunk(3, dim=-1)
        return self._by_head(q), self._by_head(k), self._by_head(v)

    def project_first(self, z: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5 with the queries of the first tokens alone: q of [B, k, queries, D_h], k and v of [B, k, T, D_h]."""
        d, weight, bias = z.shape[-1], self.qkv.weight, self.qkv.bias
        q = F.linear(z[:, :queries], weight[:d], None if bias is None else bias[:d])
        k, v = F.linear(z, weight[d:], None if bias is None else bias[d:]).chunk(2, dim=-1)
        return self._by_head(q), self._by_head(k), self._by_head(v)

    def _by_head(self, z: Tensor) -> Tensor:
        """[B, T, D] -> [B, k, T, D_h]."""
        return z.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weights(self, z: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Eq. 6 for inspection: [B, T, D] -> [B, k, T, T]."""
        q, k, _ = self.project(z)
        return attention_weights(q, k, None if offsets is None else relative_logits(q, offsets))

    def forward(
        self, z: Tensor, offsets: Tensor | None = None, queries: int | None = None, taps: Taps | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], or [B, queries, D] for the first tokens alone, which still see all others."""
        dropout = self.dropout if self.training else 0.0
        tapped = taps is not None and taps.attention
        plain = queries is None and offsets is None and not dropout and not tapped
        if plain and can_fuse_attention(z, self.qkv, self.heads):
            return self.out(fused_attention(z, self.qkv, self.heads))  # Eqs. 5-8
        q, k, v = self.project(z) if queries is None else self.project_first(z, queries)
        bias = None if offsets is None else relative_logits(q, offsets)
        if taps is not None and tapped:
            weights = attention_weights(q, k, bias)
            taps.inside = AttentionTap(q, k, v, weights)
            if taps.explicit:
                return self.out((weights @ v).transpose(1, 2).flatten(2))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eqs. 6, 7
        return self.out(mixed.transpose(1, 2).flatten(2))  # Eq. 8


def split_lines(z: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    """Every row of the grid, or column, as a sequence of its own: [B, N, D] -> [B·rows, columns, D]."""
    z = z.unflatten(1, grid)
    return (z.transpose(1, 2) if columns else z).flatten(0, 1)


def merge_lines(z: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    z = z.unflatten(0, (-1, grid[1 if columns else 0]))
    return (z.transpose(1, 2) if columns else z).flatten(1, 2)


def expand_line_weights(weights: Tensor, grid: Pair, *, columns: bool) -> Tensor:
    """Weights within rows as weights over all tokens, zero between rows: [B·rows, X, columns, columns] -> [B, X, N, N]
    for X heads. The same of columns."""
    own = weights.unflatten(0, (-1, grid[1 if columns else 0])).movedim(1, 2)  # [B, X, rows, columns, columns]
    whole = weights.new_zeros(*own.shape[:2], *grid, *grid)
    each, every = torch.arange(grid[1 if columns else 0], device=weights.device), slice(None)
    place = (every, each, every, each) if columns else (each, every, each, every)
    whole[(every, every, *place)] = own.movedim(2, 0)
    return whole.flatten(4, 5).flatten(2, 3)

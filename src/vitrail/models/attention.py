"""Multi-head self-attention (Appendix A, Eqs. 5-8), fused and explicit, plain and along the axes of the grid (D.6)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.shapes import Pair


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """A = softmax(q kᵀ/√D_h + bias), Eq. 6, written out: [..., T, D_h] twice -> [..., T, T]."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (logits if bias is None else logits + bias).softmax(dim=-1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """SA(z) = A v, Eq. 7; what `scaled_dot_product_attention` computes without ever holding A."""
    return attention_weights(q, k, bias) @ v


def relative_logits(q: Tensor, offsets: Tensor) -> Tensor:
    """q_i · r_{i-j} / √D_h for every pair (D.4): [..., T, D_h] and [2T-1, D_h] -> [..., T, T]."""
    tokens = q.shape[-2]
    by_offset = (q * q.shape[-1] ** -0.5) @ offsets.transpose(0, 1)  # [..., T, 2T-1]
    place = torch.arange(tokens, device=q.device)
    index = place[:, None] - place[None, :] + tokens - 1
    return by_offset.gather(-1, index.expand(*q.shape[:-2], tokens, tokens))


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
        """Eq. 5: [B, T, D] -> q, k, v of [B, k, T, D_h] each."""
        b, t, d = z.shape
        q, k, v = self.qkv(z).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def weights(self, z: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Eq. 6 for inspection: [B, T, D] -> [B, k, T, T]."""
        q, k, _ = self.project(z)
        return attention_weights(q, k, None if offsets is None else relative_logits(q, offsets))

    def forward(self, z: Tensor, offsets: Tensor | None = None) -> Tensor:
        q, k, v = self.project(z)
        bias = None if offsets is None else relative_logits(q, offsets)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eqs. 6, 7
        return self.out(mixed.transpose(1, 2).flatten(2))  # Eq. 8


def rows(z: Tensor, grid: Pair) -> Tensor:
    """Every row of the grid as a sequence of its own: [B, N, D] -> [B·rows, columns, D]."""
    return z.unflatten(1, grid).flatten(0, 1)


def from_rows(z: Tensor, grid: Pair) -> Tensor:
    return z.unflatten(0, (-1, grid[0])).flatten(1, 2)


def columns(z: Tensor, grid: Pair) -> Tensor:
    """Every column of the grid as a sequence of its own: [B, N, D] -> [B·columns, rows, D]."""
    return z.unflatten(1, grid).transpose(1, 2).flatten(0, 1)


def from_columns(z: Tensor, grid: Pair) -> Tensor:
    return z.unflatten(0, (-1, grid[1])).transpose(1, 2).flatten(1, 2)

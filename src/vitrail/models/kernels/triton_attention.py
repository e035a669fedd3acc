"""Triton kernels for attention over at most 256 tokens, forward and backward, a program for each head of each image.

All tokens of a head fit into a tile, so the softmax needs no second look and the backward pass no second pass. q, k and
v are read where their product left them, side by side, and so are their gradients written; these are summed over the
tokens while they are there, which is the gradient of the bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# What Triton compiles is not Python: names have no types, and annotations are marks for its compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false


LOG2E = 1.4426950408889634  # the exponential that a GPU has is that of 2
ROWS = 64  # queries at once in the forward pass, keys at once in the backward pass


@triton.jit
def _forward(
    qkv,
    out,
    logs,
    heads,
    width,
    scale,
    tokens: tl.constexpr,
    head: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
):
    picture, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = picture.to(tl.int64) * tokens
    column, key = which * head + tl.arange(0, head), tl.arange(0, keys)
    there = key < tokens
    at = (first + key)[:, None] * (3 * width) + column[None, :]
    k = tl.load(qkv + at + width, there[:, None], other=0.0)
    v = tl.load(qkv + at + 2 * width, there[:, None], other=0.0)
    for start in range(0, tokens, rows):
        row = start + tl.arange(0, rows)
        inside = row < tokens
        q = tl.load(qkv + (first + row)[:, None] * (3 * width) + column[None, :], inside[:, None], other=0.0)
        s = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.max(s, 1)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(q.dtype), v) / total[:, None]
        tl.store(out + (first + row)[:, None] * width + column[None, :], o.to(q.dtype), inside[:, None])
        tl.store(logs + tl.program_id(0).to(tl.int64) * tokens + row, top + tl.log2(total), inside)


@triton.jit
def _backward(
    qkv,
    out,
    grad,
    logs,
    grads,
    sums,
    heads,
    width,
    scale,
    factor,
    tokens: tl.constexpr,
    head: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
):
    picture, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = picture.to(tl.int64) * tokens
    column, row = which * head + tl.arange(0, head), tl.arange(0, rows)
    inside = row < tokens
    wide = (first + row)[:, None] * (3 * width) + column[None, :]
    narrow = (first + row)[:, None] * width + column[None, :]
    q = tl.load(qkv + wide, inside[:, None], other=0.0)
    g = tl.load(grad + narrow, inside[:, None], other=0.0)
    o = tl.load(out + narrow, inside[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    # Where there is no row, p becomes exp2(-inf), and all that follows from it nothing.
    log = tl.load(logs + tl.program_id(0).to(tl.int64) * tokens + row, inside, other=float("inf"))
    dq = tl.zeros((rows, head), tl.float32)
    sum_k = tl.zeros((head,), tl.float32)
    sum_v = tl.zeros((head,), tl.float32)
    for start in range(0, tokens, keys):
        key = start + tl.arange(0, keys)
        there = key < tokens
        at = (first + key)[:, None] * (3 * width) + column[None, :]
        k = tl.load(qkv + at + width, there[:, None], other=0.0)
        v = tl.load(qkv + at + 2 * width, there[:, None], other=0.0)
        s = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        p = tl.exp2(s - log[:, None])
        dv = tl.dot(tl.trans(p.to(q.dtype)), g)
        ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q) * factor
        dq += tl.dot(ds, k)
        tl.store(grads + at + width, dk.to(q.dtype), there[:, None])
        tl.store(grads + at + 2 * width, dv.to(q.dtype), there[:, None])
        sum_k += tl.sum(dk, 0)
        sum_v += tl.sum(dv, 0)
    dq *= factor
    tl.store(grads + wide, dq.to(q.dtype), inside[:, None])
    line = sums + picture.to(tl.int64) * (3 * width) + column
    tl.store(line, tl.sum(dq, 0))
    tl.store(line + width, sum_k)
    tl.store(line + 2 * width, sum_v)


def forward(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """[B, T, 3D] -> [B, T, D], and of each row the logarithm to base 2 of its sum of exponentials: [B, k, T]."""
    pictures, tokens, width = _shape(qkv)
    out, logs = qkv.new_empty(pictures, tokens, width), qkv.new_empty(pictures, heads, tokens, dtype=torch.float32)
    kernel: Any = _forward
    kernel[(pictures * heads,)](
        qkv,
        out,
        logs,
        heads,
        width,
        LOG2E * (width // heads) ** -0.5,
        tokens=tokens,
        head=width // heads,
        rows=ROWS,
        keys=_whole(tokens),
        num_warps=4,
        num_stages=1,
    )
    return out, logs


def backward(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv` from that of the output [B, T, D], and its sums over tokens: [B, T, 3D], [B, 3D]."""
    pictures, tokens, width = _shape(qkv)
    grads, sums = torch.empty_like(qkv), qkv.new_empty(pictures, 3 * width, dtype=torch.float32)
    rows = _whole(tokens)
    kernel: Any = _backward
    kernel[(pictures * heads,)](
        qkv,
        out,
        grad,
        logs,
        grads,
        sums,
        heads,
        width,
        LOG2E * (width // heads) ** -0.5,
        (width // heads) ** -0.5,
        tokens=tokens,
        head=width // heads,
        rows=rows,
        keys=ROWS,
        num_warps=8 if rows > ROWS else 4,
        num_stages=3,
    )
    return grads, sums


def _shape(qkv: Tensor) -> tuple[int, int, int]:
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3


def _whole(tokens: int) -> int:
    """A tile that holds them all."""
    return max(ROWS, 1 << (tokens - 1).bit_length())

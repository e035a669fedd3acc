"""Triton kernels for attention over at most 256 tokens, and for concatenating the gradients of q, k and v.

Imported only where a GPU is used. Attention launches one program per head and image. All tokens of a head fit into one
tile, so the softmax and the backward pass need a single pass. q, k and v are read in place from the output of the qkv
product, and their gradients are written in the same layout.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels.float8_kernels import load_factor, store_low
from vitrail.models.kernels.math_kernels import exp2, reciprocal

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

LOG2E = 1.4426950408889634  # GPUs compute exponentials to base 2
ATTENTION_ROWS = 64  # queries per step of the forward pass, keys per step of the backward pass
TILE_ROWS, TILE_COLUMNS = 8, 256  # tile of gradients that a program holds at once


@triton.jit
def _concat_kernel(
    q, k, v, out, scale, sums, rows, width,
    eight: tl.constexpr, each: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * each
    column = tl.program_id(0) * tile_columns  # in the concatenation; a tile never spans two of the three
    part = column // width
    source = q
    if part == 1:
        source = k
    if part == 2:
        source = v
    row, across = tl.arange(0, tile_rows), tl.arange(0, tile_columns)
    read = row[:, None] * width + (column - part * width + across)[None, :]
    write = row[:, None] * (3 * width) + (column + across)[None, :]
    if eight:
        factor = load_factor(scale)
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(0, each, tile_rows):
        start = first + step
        inside = (start + row < rows)[:, None]
        g = tl.load(source + start * width + read, inside, other=0.0)
        if eight:
            store_low(out + start * (3 * width), write, g.to(tl.float32), factor, inside)
        else:
            tl.store(out + start * (3 * width) + write, g, inside)
        total += g.to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * (3 * width) + column + across, tl.sum(total, 0))


def concat_qkv_grad(q: Tensor, k: Tensor, v: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Concatenates three matrices and sums columns over every `each` rows: 3 x [M, D] -> [M, 3D], [M/each, 3D]."""
    return _concat(q, k, v, each, None)


def concat_qkv_grad_float8(q: Tensor, k: Tensor, v: Tensor, each: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The column sums, and the concatenation in e5m2."""
    low, sums = _concat(q, k, v, each, scale)
    return sums, low


def _concat(q: Tensor, k: Tensor, v: Tensor, each: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, width = q.shape
    tile = min(width & -width, TILE_COLUMNS)  # the largest power of two that divides the width
    tile_rows = min(2 * TILE_ROWS * TILE_COLUMNS // tile, each)
    out = q.new_empty(rows, 3 * width, dtype=None if scale is None else torch.float8_e5m2)
    sums = q.new_empty(ceil_divide(rows, each), 3 * width, dtype=torch.float32)
    kernel: Any = _concat_kernel
    kernel[(3 * width // tile, len(sums))](
        q, k, v, out, sums if scale is None else scale, sums, rows, width,
        eight=scale is not None, each=each, tile_rows=tile_rows, tile_columns=tile,
    )  # fmt: skip
    return out, sums


@triton.jit
def _load_tile(base, place, stride, column, tokens: tl.constexpr, start, tile: tl.constexpr):
    """Loads rows of a matrix [T, D] from `start`, one head wide; rows from T on are 0."""
    row = start + tl.arange(0, tile)
    at = (place + row)[:, None] * stride + column[None, :]
    return tl.load(base + at, (row < tokens)[:, None], other=0.0)


@triton.jit
def _attend_rows(
    qkv, out, low, logs, factor, first, column, width, scale, k, v, start,
    eight: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Attends from the queries at `start` to all keys at once."""
    row = start + tl.arange(0, rows)
    inside = row < tokens
    q = _load_tile(qkv, first, 3 * width, column, tokens, start, rows)
    s = tl.where((tl.arange(0, keys) < tokens)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
    top = tl.max(s, 1) * scale
    p = exp2(s * scale - top[:, None])
    total = tl.sum(p, 1)
    o = tl.dot(p.to(q.dtype), v) * reciprocal(total)[:, None]
    place = (first + row)[:, None] * width + column[None, :]
    tl.store(out + place, o.to(q.dtype), inside[:, None])
    if eight:
        store_low(low, place, o, factor, inside[:, None])
    tl.store(logs + row, top + tl.log2(total), inside)


@triton.jit
def _attention_kernel(
    qkv, out, low, low_scale, logs, heads, width, scale,
    eight: tl.constexpr, tokens: tl.constexpr, head: tl.constexpr, rows: tl.constexpr, tail: tl.constexpr,
    keys: tl.constexpr,
):  # fmt: skip
    image, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = image.to(tl.int64) * tokens
    column = which * head + tl.arange(0, head)
    factor = scale
    if eight:
        factor = load_factor(low_scale)
    logs += tl.program_id(0).to(tl.int64) * tokens
    k = _load_tile(qkv + width, first, 3 * width, column, tokens, 0, keys)
    v = _load_tile(qkv + 2 * width, first, 3 * width, column, tokens, 0, keys)
    for start in range(0, tokens // rows * rows, rows):
        _attend_rows(
            qkv, out, low, logs, factor, first, column, width, scale, k, v, start, eight, tokens, rows, keys
        )  # fmt: skip
    if tail > 0:
        start = tokens // rows * rows
        _attend_rows(
            qkv, out, low, logs, factor, first, column, width, scale, k, v, start, eight, tokens, tail, keys
        )  # fmt: skip


@triton.jit
def _backward_keys(
    qkv, grads, factor, first, column, width, scale, times, q, g, delta, log, dq, start,
    eight: tl.constexpr, tokens: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the keys and values at `start`, and adds their share to the gradient of the queries."""
    key = start + tl.arange(0, keys)
    there = key < tokens
    k = _load_tile(qkv + width, first, 3 * width, column, tokens, start, keys)
    v = _load_tile(qkv + 2 * width, first, 3 * width, column, tokens, start, keys)
    s = tl.dot(q, tl.trans(k)) * scale - log[:, None]
    if masked:
        s = tl.where(there[None, :], s, float("-inf"))
    p = exp2(s)
    dv = tl.dot(tl.trans(p.to(q.dtype)), g)
    ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q) * times
    dq = tl.dot(ds, k, dq)
    at = (first + key)[:, None] * (3 * width) + column[None, :]
    if eight:
        store_low(grads, at + width, dk, factor, there[:, None])
        store_low(grads, at + 2 * width, dv, factor, there[:, None])
    else:
        tl.store(grads + at + width, dk.to(k.dtype), there[:, None])
        tl.store(grads + at + 2 * width, dv.to(k.dtype), there[:, None])
    return dq


@triton.jit
def _attention_backward_kernel(
    qkv, out, grad, logs, grads, low_scale, sums, heads, width, scale, times,
    eight: tl.constexpr, tokens: tl.constexpr, head: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    tail: tl.constexpr,
):  # fmt: skip
    image, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = image.to(tl.int64) * tokens
    column, row = which * head + tl.arange(0, head), tl.arange(0, rows)
    inside = row < tokens
    factor = scale
    if eight:
        factor = load_factor(low_scale)
    q = _load_tile(qkv, first, 3 * width, column, tokens, 0, rows)
    g = _load_tile(grad, first, width, column, tokens, 0, rows)
    o = _load_tile(out, first, width, column, tokens, 0, rows)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    # Rows past the last token get p = exp2(-inf) = 0, so they contribute nothing.
    log = tl.load(logs + tl.program_id(0).to(tl.int64) * tokens + row, inside, other=float("inf"))
    # Every row of p sums to 1: the bias of the values gets the summed gradient of the output, that of the keys none.
    line = sums + image.to(tl.int64) * (3 * width) + column
    tl.store(line + width, tl.zeros((head,), tl.float32))
    tl.store(line + 2 * width, tl.sum(g.to(tl.float32), 0))
    dq = tl.zeros((rows, head), tl.float32)
    for start in range(0, tokens // keys * keys, keys):
        dq = _backward_keys(
            qkv, grads, factor, first, column, width, scale, times, q, g, delta, log, dq, start,
            eight, tokens, keys, False,
        )  # fmt: skip
    if tail > 0:
        dq = _backward_keys(
            qkv, grads, factor, first, column, width, scale, times, q, g, delta, log, dq, tokens // keys * keys,
            eight, tokens, tail, True,
        )  # fmt: skip
    dq *= times
    at = (first + row)[:, None] * (3 * width) + column[None, :]
    if eight:
        store_low(grads, at, dq, factor, inside[:, None])
    else:
        tl.store(grads + at, dq.to(q.dtype), inside[:, None])
    tl.store(line, tl.sum(dq, 0))


def attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The output of attention, and the base-2 log-sum-exp of each row: [B, T, 3D] -> [B, T, D], [B, k, T]."""
    out, logs, _ = _attention(qkv, heads, None)
    return out, logs


def attention_float8(qkv: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention`, plus the output in e4m3."""
    return _attention(qkv, heads, scale)


def _attention(qkv: Tensor, heads: int, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    images, tokens, width = _qkv_shape(qkv)
    out, logs = qkv.new_empty(images, tokens, width), qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    low = out if scale is None else torch.empty_like(out, dtype=torch.float8_e4m3fn)
    head, kernel = width // heads, cast(Any, _attention_kernel)
    kernel[(images * heads,)](
        qkv, out, low, logs if scale is None else scale, logs, heads, width, LOG2E * head**-0.5,
        eight=scale is not None, tokens=tokens, head=head, rows=ATTENTION_ROWS, tail=_tail(tokens),
        keys=_tile_for(tokens), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, logs, low


def attention_backward(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv`, given that of the output [B, T, D], and its sums over tokens: [B, T, 3D], [B, 3D]."""
    return _attention_backward(qkv, out, grad, logs, heads, None)


def attention_backward_float8(
    qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The sums, and the gradient in e5m2."""
    low, sums = _attention_backward(qkv, out, grad, logs, heads, scale)
    return sums, low


def _attention_backward(
    qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    images, tokens, width = _qkv_shape(qkv)
    grads = torch.empty_like(qkv, dtype=None if scale is None else torch.float8_e5m2)
    sums = qkv.new_empty(images, 3 * width, dtype=torch.float32)
    rows, head, kernel = _tile_for(tokens), width // heads, cast(Any, _attention_backward_kernel)
    kernel[(images * heads,)](
        qkv, out, grad, logs, grads, logs if scale is None else scale, sums, heads, width,
        LOG2E * head**-0.5, head**-0.5,
        eight=scale is not None, tokens=tokens, head=head, rows=rows, keys=ATTENTION_ROWS, tail=_tail(tokens),
        num_warps=8 if rows > ATTENTION_ROWS else 4, num_stages=2,
    )  # fmt: skip
    return grads, sums


def _qkv_shape(qkv: Tensor) -> tuple[int, int, int]:
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3


def _tile_for(tokens: int) -> int:
    """Rows of a tile that holds all tokens."""
    return max(ATTENTION_ROWS, 1 << (tokens - 1).bit_length())


def _tail(tokens: int) -> int:
    """Rows of the last tile, which holds the remaining tokens; 0 if none remain."""
    rest = tokens % ATTENTION_ROWS
    return max(16, 1 << (rest - 1).bit_length()) if rest else 0

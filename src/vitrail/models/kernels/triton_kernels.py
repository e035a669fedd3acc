"""Triton kernels for a GPU: GELU, gradients of q, k and v, attention over at most 256 tokens, and the sums and
norms between the branches of layers.

Imported only where a GPU is used. A backward pass sums the columns of a gradient, which is the gradient of the bias,
while the gradient is in registers; each program sums `each` rows and the caller adds up the rest.

Attention runs one program for each head of each image. All tokens of a head fit into a tile, so the softmax and the
backward pass need a single pass. q, k and v are read side by side as their product left them, and so are their
gradients written.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

# What Triton compiles is not Python: names have no types, and annotations are marks for its compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false


TILE_ROWS, TILE_COLUMNS = 8, 256  # of a tile that a program holds at once: 16 values a thread
NORM_VALUES = 2048  # of the rows that a program normalises at once


@triton.jit
def _gelu_parts(x, tanh: tl.constexpr):
    """Φ(x), or what stands for it, and its slope.

    The exact one is by Abramowitz and Stegun's 7.1.26, whose error is below 1.5e-7: one exponential for both, in a few
    instructions, where the library's error function would keep the kernel from reading at full speed.
    """
    if tanh:
        cdf = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = cdf * (1 - cdf) * (1.5957691216057308 + 0.2140644488 * x * x)
    else:
        bell = tl.exp(-0.5 * x * x)
        t = 1 / (1 + 0.2316418882663604 * tl.abs(x))
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        cdf = tl.where(x < 0, poly * bell, 1 - poly * bell)
        slope = 0.3989422804014327 * bell
    return cdf, slope


@triton.jit
def _gelu_kernel(pre, out, count, tanh: tl.constexpr, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    inside = first + at < count
    x = tl.load(pre + first + at, inside, other=0.0).to(tl.float32)
    cdf, _ = _gelu_parts(x, tanh)
    tl.store(out + first + at, x * cdf, inside)


@triton.jit
def _gelu_spread_kernel(pre, out, columns, run, block: tl.constexpr):
    place, down = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, right = place // columns, place % columns
    at = tl.program_id(2) * block + tl.arange(0, block)
    x = tl.load(pre + (2 * place + down) * run + at, at < run, other=0.0).to(tl.float32)
    cdf, _ = _gelu_parts(x, False)
    tl.store(out + ((2 * line + down) * columns + right) * run + at, x * cdf, at < run)


@triton.jit
def _gelu_backward_kernel(
    grad,
    pre,
    out,
    sums,
    rows,
    columns,
    tanh: tl.constexpr,
    each: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    first = tl.program_id(1).to(tl.int64) * each
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    row = tl.arange(0, tile_rows)
    at = row[:, None] * columns + column[None, :]
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(0, each, tile_rows):
        start = (first + step) * columns
        inside = (first + step + row < rows)[:, None] & (column < columns)[None, :]
        g = tl.load(grad + start + at, inside, other=0.0).to(tl.float32)
        x = tl.load(pre + start + at, inside, other=0.0).to(tl.float32)
        cdf, slope = _gelu_parts(x, tanh)
        g = g * (cdf + x * slope)
        tl.store(out + start + at, g, inside)
        total += g
    tl.store(sums + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), column < columns)


@triton.jit
def _concat_kernel(
    q, k, v, out, sums, rows, width, each: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    first = tl.program_id(1).to(tl.int64) * each
    column = tl.program_id(0) * tile_columns  # of the three side by side; a tile never lies across two of them
    part = column // width
    source = q
    if part == 1:
        source = k
    if part == 2:
        source = v
    row, across = tl.arange(0, tile_rows), tl.arange(0, tile_columns)
    read = row[:, None] * width + (column - part * width + across)[None, :]
    write = row[:, None] * (3 * width) + (column + across)[None, :]
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(0, each, tile_rows):
        start = first + step
        inside = (start + row < rows)[:, None]
        g = tl.load(source + start * width + read, inside, other=0.0)
        tl.store(out + start * (3 * width) + write, g, inside)
        total += g.to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * (3 * width) + column + across, tl.sum(total, 0))


@triton.jit
def _add_norm_kernel(
    z, branch, bias, weight, shift, total, out, rows, width, eps,
    biased: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    there = column < width
    inside = (row < rows)[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(z + at, inside, other=0.0).to(tl.float32) + tl.load(branch + at, inside, other=0.0).to(tl.float32)
    if biased:
        x += tl.load(bias + column, there, other=0.0).to(tl.float32)[None, :]
    x = x.to(total.dtype.element_ty)
    tl.store(total + at, x, inside)
    x = x.to(tl.float32)  # the norm is that of the sum as it is handed on
    centred = tl.where(there[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    times = tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(shift + column, there, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, (centred * scale[:, None] * times + plus).to(out.dtype.element_ty), inside)


def add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x = z + branch + bias and LN(x): [..., D] twice -> [..., D] twice."""
    total, out = torch.empty_like(z), torch.empty_like(z)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(z)
    kernel: Any = _add_norm_kernel
    kernel[(_ceil_divide(rows, tile_rows),)](
        z, branch, weight if bias is None else bias, weight, shift, total, out, rows, width, eps,
        biased=bias is not None, tile_rows=tile_rows, tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return total, out


@triton.jit
def _add_norm_backward_kernel(
    of_total, of_normed, total, weight, out, sums, rows, width, eps,
    each: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, tile_columns)
    there = column < width
    times = tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_shift = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_bias = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(0, each, tile_rows):
        row = tl.program_id(0) * each + step + tl.arange(0, tile_rows)
        inside = (row < rows)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(total + at, inside, other=0.0).to(tl.float32)
        g = tl.load(of_normed + at, inside, other=0.0).to(tl.float32)
        handed = tl.load(of_total + at, inside, other=0.0).to(tl.float32)
        centred = tl.where(there[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
        standard, slope = centred * scale[:, None], g * times
        along, level = tl.sum(slope * standard, 1) / width, tl.sum(slope, 1) / width
        grad = handed + scale[:, None] * (slope - level[:, None] - standard * along[:, None])
        tl.store(out + at, grad.to(out.dtype.element_ty), inside)
        of_weight += g * standard
        of_shift += g
        of_bias += tl.where(inside, grad, 0.0)
    line = sums + tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(line, tl.sum(of_weight, 0), there)
    tl.store(line + width, tl.sum(of_shift, 0), there)
    tl.store(line + 2 * width, tl.sum(of_bias, 0), there)


def add_norm_backward(
    of_total: Tensor, of_normed: Tensor, total: Tensor, weight: Tensor, eps: float, each: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum's parts, and sums over `each` rows of those of the norm's weight, its shift and the bias:
    [..., D] thrice -> [..., D] and [M/each, 3, D]."""
    out = torch.empty_like(total)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(total)
    sums = total.new_empty(_ceil_divide(rows, each), 3, width, dtype=torch.float32)
    kernel: Any = _add_norm_backward_kernel
    kernel[(len(sums),)](
        of_total, of_normed, total, weight, out, sums, rows, width, eps,
        each=each, tile_rows=min(tile_rows, each), tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return out, sums


def _norm_tiles(z: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, columns, both of a tile, and the warps that hold one."""
    width = z.shape[-1]
    columns = 1 << (width - 1).bit_length()
    return z.numel() // width, width, max(1, NORM_VALUES // columns), columns, 4 if columns <= NORM_VALUES else 8


@triton.jit
def _shifted_norm_kernel(
    z, shift, weight, bias, out, rows, width, eps,
    shifted: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    there = column < width
    inside = (row < rows)[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(z + at, inside, other=0.0).to(tl.float32)
    if shifted:
        x += tl.load(shift + column, there, other=0.0)[None, :]
    centred = tl.where(there[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    times = tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(bias + column, there, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, (centred * scale[:, None] * times + plus).to(out.dtype.element_ty), inside)


def shifted_norm(z: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LN(z + shift), with a shift [D] in float32: [..., D] -> [..., D]."""
    out = torch.empty_like(z)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(z)
    kernel: Any = _shifted_norm_kernel
    kernel[(_ceil_divide(rows, tile_rows),)](
        z, weight if shift is None else shift, weight, bias, out, rows, width, eps,
        shifted=shift is not None, tile_rows=tile_rows, tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return out


def gelu(pre: Tensor, tanh: bool) -> Tensor:
    out, block = torch.empty_like(pre), 2048
    kernel: Any = _gelu_kernel
    kernel[(_ceil_divide(pre.numel(), block),)](pre, out, pre.numel(), tanh=tanh, block=block)
    return out


def gelu_spread(pre: Tensor) -> Tensor:
    """GELU of a pixel's four, put side by side: [B, h, w, 4M] -> [B, 2h, 2w, M]."""
    images, rows, columns, width = pre.shape
    out, run = pre.new_empty(images, 2 * rows, 2 * columns, width // 4), width // 2
    block = min(1 << (run - 1).bit_length(), 2048)
    kernel: Any = _gelu_spread_kernel
    kernel[(images * rows * columns, 2, _ceil_divide(run, block))](pre, out, columns, run, block=block)
    return out


def gelu_backward(grad: Tensor, pre: Tensor, tanh: bool, each: int) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU was given, and sums of its columns over `each` rows: [M, N] twice -> [M, N] and
    [M/each, N]."""
    rows, columns = pre.shape
    out, sums = torch.empty_like(pre), pre.new_empty(_ceil_divide(rows, each), columns, dtype=torch.float32)
    kernel: Any = _gelu_backward_kernel
    kernel[(_ceil_divide(columns, TILE_COLUMNS), len(sums))](
        grad, pre, out, sums, rows, columns, tanh=tanh, each=each, tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS
    )
    return out, sums


def concat_qkv_grad(q: Tensor, k: Tensor, v: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Three side by side, and sums of their columns over `each` rows: [M, D] thrice -> [M, 3D], [M/each, 3D]."""
    rows, width = q.shape
    tile = min(width & -width, TILE_COLUMNS)  # the largest power of two that divides the width
    tile_rows = min(2 * TILE_ROWS * TILE_COLUMNS // tile, each)
    out, sums = q.new_empty(rows, 3 * width), q.new_empty(_ceil_divide(rows, each), 3 * width, dtype=torch.float32)
    kernel: Any = _concat_kernel
    kernel[(3 * width // tile, len(sums))](
        q, k, v, out, sums, rows, width, each=each, tile_rows=tile_rows, tile_columns=tile
    )
    return out, sums


def _ceil_divide(count: int, size: int) -> int:
    return -(-count // size)


LOG2E = 1.4426950408889634  # the exponential that a GPU has is that of 2
ATTENTION_ROWS = 64  # queries at once in the forward pass, keys at once in the backward pass


@triton.jit
def _attention_kernel(
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
    image, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = image.to(tl.int64) * tokens
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
def _attention_backward_kernel(
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
    image, which = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = image.to(tl.int64) * tokens
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
    line = sums + image.to(tl.int64) * (3 * width) + column
    tl.store(line, tl.sum(dq, 0))
    tl.store(line + width, sum_k)
    tl.store(line + 2 * width, sum_v)


def attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """[B, T, 3D] -> [B, T, D], and of each row the logarithm to base 2 of its sum of exponentials: [B, k, T]."""
    images, tokens, width = _qkv_shape(qkv)
    out, logs = qkv.new_empty(images, tokens, width), qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    head, kernel = width // heads, cast(Any, _attention_kernel)
    kernel[(images * heads,)](
        qkv,
        out,
        logs,
        heads,
        width,
        LOG2E * head**-0.5,
        tokens=tokens,
        head=head,
        rows=ATTENTION_ROWS,
        keys=_tile_for(tokens),
        num_warps=4,
        num_stages=1,
    )
    return out, logs


def attention_backward(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv` from that of the output [B, T, D], and its sums over tokens: [B, T, 3D], [B, 3D]."""
    images, tokens, width = _qkv_shape(qkv)
    grads, sums = torch.empty_like(qkv), qkv.new_empty(images, 3 * width, dtype=torch.float32)
    rows, head, kernel = _tile_for(tokens), width // heads, cast(Any, _attention_backward_kernel)
    kernel[(images * heads,)](
        qkv,
        out,
        grad,
        logs,
        grads,
        sums,
        heads,
        width,
        LOG2E * head**-0.5,
        head**-0.5,
        tokens=tokens,
        head=head,
        rows=rows,
        keys=ATTENTION_ROWS,
        num_warps=8 if rows > ATTENTION_ROWS else 4,
        num_stages=3,
    )
    return grads, sums


def _qkv_shape(qkv: Tensor) -> tuple[int, int, int]:
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3


def _tile_for(tokens: int) -> int:
    """A tile that holds them all."""
    return max(ATTENTION_ROWS, 1 << (tokens - 1).bit_length())

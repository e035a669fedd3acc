"""Triton kernels for training on a GPU: GELU, and two backward passes that sum columns while they are there.

Imported where a GPU is at work and nowhere else. A column sum goes over thousands of rows, so each program sums a
part of them (`each` rows) and the caller adds up the rest.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# What Triton compiles is not Python: names have no types, and annotations are marks for its compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false


TILE_ROWS, TILE_COLUMNS = 8, 256  # of a tile that a program holds at once: 16 values a thread


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
def _gelu(pre, out, count, tanh: tl.constexpr, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    inside = first + at < count
    x = tl.load(pre + first + at, inside, other=0.0).to(tl.float32)
    cdf, _ = _gelu_parts(x, tanh)
    tl.store(out + first + at, x * cdf, inside)


@triton.jit
def _gelu_backward(
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
def _join(
    q,
    k,
    v,
    out,
    sums,
    rows,
    width,
    each: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
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


def gelu(pre: Tensor, tanh: bool) -> Tensor:
    out, block = torch.empty_like(pre), 2048
    kernel: Any = _gelu
    kernel[(_parts(pre.numel(), block),)](pre, out, pre.numel(), tanh=tanh, block=block)
    return out


def gelu_backward(grad: Tensor, pre: Tensor, tanh: bool, each: int) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU was given, and sums of its columns over `each` rows: [M, N] twice -> [M, N] and
    [M/each, N]."""
    rows, columns = pre.shape
    out, sums = torch.empty_like(pre), pre.new_empty(_parts(rows, each), columns, dtype=torch.float32)
    kernel: Any = _gelu_backward
    kernel[(_parts(columns, TILE_COLUMNS), len(sums))](
        grad, pre, out, sums, rows, columns, tanh=tanh, each=each, tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS
    )
    return out, sums


def join(q: Tensor, k: Tensor, v: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Three side by side, and sums of their columns over `each` rows: [M, D] thrice -> [M, 3D], [M/each, 3D]."""
    rows, width = q.shape
    tile = min(width & -width, TILE_COLUMNS)  # the largest power of two that divides the width
    tile_rows = min(2 * TILE_ROWS * TILE_COLUMNS // tile, each)
    out, sums = q.new_empty(rows, 3 * width), q.new_empty(_parts(rows, each), 3 * width, dtype=torch.float32)
    kernel: Any = _join
    kernel[(3 * width // tile, len(sums))](
        q, k, v, out, sums, rows, width, each=each, tile_rows=tile_rows, tile_columns=tile
    )
    return out, sums


def _parts(count: int, size: int) -> int:
    return -(-count // size)

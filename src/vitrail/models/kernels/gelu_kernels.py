"""Triton kernels for GELU: alone, fused with the gradient of the preceding bias, fused with 2x2 upscaling, and in fp8
with its transpose.

Imported only where a GPU is used. The backward pass sums the columns of the gradient, which gives the gradient of the
bias, while the gradient is in registers; each program sums `each` rows and the caller adds up the partial sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels.float8_kernels import (
    TURNED_COLUMNS,
    TURNED_WORDS,
    find_rows,
    load_factor,
    store_byte,
    store_low,
    store_turned,
)
from vitrail.models.kernels.math_kernels import exp2, reciprocal

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

TILE_ROWS, TILE_COLUMNS = 8, 256  # tile that a program holds at once: 16 values per thread


@triton.jit
def _gelu_parts(x, tanh: tl.constexpr):
    """Φ(x), or its tanh approximation, and its slope.

    The exact form uses formula 7.1.26 of Abramowitz and Stegun, with an error below 1.5e-7. One exponential serves
    both, in a few instructions; the library's error function would keep the kernel from reading at full speed.
    """
    if tanh:
        cdf = reciprocal(1 + exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
        slope = cdf * (1 - cdf) * (1.5957691216057308 + 0.2140644488 * x * x)
    else:
        bell = exp2(-0.7213475204444817 * x * x)
        t = reciprocal(1 + 0.2316418882663604 * tl.abs(x))
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        cdf = tl.where(x < 0, poly * bell, 1 - poly * bell)
        slope = 0.3989422804014327 * bell
    return cdf, slope


@triton.jit
def _gelu_kernel(pre, out, scale, count, tanh: tl.constexpr, eight: tl.constexpr, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    inside = first + at < count
    if eight:
        factor = load_factor(scale)
    x = tl.load(pre + first + at, inside, other=0.0).to(tl.float32)
    cdf, _ = _gelu_parts(x, tanh)
    if eight:
        store_low(out + first, at, x * cdf, factor, inside)
    else:
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
def _gelu_turned_kernel(
    pre,
    low,
    turned,
    scale,
    rows,
    columns,
    padded,
    tanh: tl.constexpr,
    tile_words: tl.constexpr,
    tile_columns: tl.constexpr,
):
    word = tl.program_id(0) * tile_words + tl.arange(0, tile_words)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    factor = load_factor(scale)
    packed = tl.zeros((tile_words, tile_columns), tl.int32)
    for place in tl.static_range(4):
        at, inside = find_rows(word, place, column, rows, columns)
        x = tl.load(pre + at, inside, other=0.0).to(tl.float32)
        cdf, _ = _gelu_parts(x, tanh)
        packed |= store_byte(low, at, x * cdf, factor, inside, place)
    store_turned(turned, packed, word, column, columns, padded)


@triton.jit
def _gelu_backward_float8_kernel(
    grad,
    pre,
    low,
    turned,
    scale,
    sums,
    rows,
    columns,
    padded,
    tanh: tl.constexpr,
    steps: tl.constexpr,
    tile_words: tl.constexpr,
    tile_columns: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    factor = load_factor(scale)
    total = tl.zeros((tile_words, tile_columns), tl.float32)
    for step in range(steps):
        word = (tl.program_id(1) * steps + step) * tile_words + tl.arange(0, tile_words)
        packed = tl.zeros((tile_words, tile_columns), tl.int32)
        for place in tl.static_range(4):
            at, inside = find_rows(word, place, column, rows, columns)
            g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
            x = tl.load(pre + at, inside, other=0.0).to(tl.float32)
            cdf, slope = _gelu_parts(x, tanh)
            g = g * (cdf + x * slope)
            total += g
            packed |= store_byte(low, at, g, factor, inside, place)
        store_turned(turned, packed, word, column, columns, padded)
    tl.store(sums + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), column < columns)


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


def gelu(pre: Tensor, tanh: bool) -> Tensor:
    out, block = torch.empty_like(pre), 2048
    kernel: Any = _gelu_kernel
    kernel[(ceil_divide(pre.numel(), block),)](pre, out, out, pre.numel(), tanh=tanh, eight=False, block=block)
    return out


def gelu_float8(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    """GELU in e4m3."""
    low = torch.empty_like(pre, dtype=torch.float8_e4m3fn)
    block = 1024  # eight values per thread, so that each thread stores the values that it loaded
    kernel: Any = _gelu_kernel
    kernel[(ceil_divide(pre.numel(), block),)](pre, low, scale, pre.numel(), tanh=tanh, eight=True, block=block)
    return low


def gelu_turned_float8(pre: Tensor, tanh: bool, scale: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """GELU in e4m3, as it is and transposed, padded with zeros: [M, N] -> [M, N] and [N, padded]."""
    rows, columns = pre.shape
    low = torch.empty_like(pre, dtype=torch.float8_e4m3fn)
    turned = low.new_empty(columns, padded)
    grid = ceil_divide(padded // 4, TURNED_WORDS), ceil_divide(columns, TURNED_COLUMNS)
    kernel: Any = _gelu_turned_kernel
    kernel[grid](
        pre, low, turned.view(torch.int32), scale, rows, columns, padded // 4,
        tanh=tanh, tile_words=TURNED_WORDS, tile_columns=TURNED_COLUMNS, num_warps=4,
    )  # fmt: skip
    return low, turned


def gelu_spread(pre: Tensor) -> Tensor:
    """GELU, with the four outputs of a pixel spread over 2x2 pixels: [B, h, w, 4M] -> [B, 2h, 2w, M]."""
    images, rows, columns, width = pre.shape
    out, run = pre.new_empty(images, 2 * rows, 2 * columns, width // 4), width // 2
    block = min(1 << (run - 1).bit_length(), 2048)
    kernel: Any = _gelu_spread_kernel
    kernel[(images * rows * columns, 2, ceil_divide(run, block))](pre, out, columns, run, block=block)
    return out


def gelu_backward(grad: Tensor, pre: Tensor, tanh: bool, each: int) -> tuple[Tensor, Tensor]:
    """The gradient of GELU's input, and sums of its columns over every `each` rows: [M, N] twice -> [M, N] and
    [M/each, N]."""
    rows, columns = pre.shape
    out = torch.empty_like(pre)
    sums = pre.new_empty(ceil_divide(rows, each), columns, dtype=torch.float32)
    kernel: Any = _gelu_backward_kernel
    kernel[(ceil_divide(columns, TILE_COLUMNS), len(sums))](
        grad, pre, out, sums, rows, columns,
        tanh=tanh, each=each, tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out, sums


def gelu_backward_float8(
    grad: Tensor, pre: Tensor, tanh: bool, each: int, scale: Tensor, padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over every `each` rows, a multiple of 128, and the gradient in e5m2, as it is and transposed."""
    rows, columns = pre.shape
    low = torch.empty_like(pre, dtype=torch.float8_e5m2)
    turned = low.new_empty(columns, padded)
    sums = pre.new_empty(ceil_divide(padded, each), columns, dtype=torch.float32)
    kernel: Any = _gelu_backward_float8_kernel
    kernel[(ceil_divide(columns, TURNED_COLUMNS), len(sums))](
        grad, pre, low, turned.view(torch.int32), scale, sums, rows, columns, padded // 4,
        tanh=tanh, steps=each // (4 * TURNED_WORDS), tile_words=TURNED_WORDS, tile_columns=TURNED_COLUMNS, num_warps=8,
    )  # fmt: skip
    return sums, low, turned

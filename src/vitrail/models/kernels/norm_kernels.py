"""Triton kernels for the residual stream: the sums and norms between the branches of the layers.

Imported only where a GPU is used. Each program holds whole rows, so everything is read once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels.float8_kernels import load_factor, store_low

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

NORM_VALUES = 2048  # values in the rows that a program holds at once


@triton.jit
def _measure(x, there, width, eps) -> tuple[tl.tensor, tl.tensor]:
    """The mean and reciprocal standard deviation of each row."""
    mean = tl.sum(x, 1) / width
    centred = tl.where(there[None, :], x - mean[:, None], 0.0)
    return mean, 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)


@triton.jit
def _load_scale(weight, shift, column, there) -> tuple[tl.tensor, tl.tensor]:
    """Loads a norm's weight and shift."""
    times = tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(shift + column, there, other=0.0).to(tl.float32)[None, :]
    return times, plus


@triton.jit
def _add_norm_kernel(
    z, branch, bias, weight, shift, total, out, scale, stats, rows, width, eps,
    biased: tl.constexpr, eight: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    there = column < width
    inside = (row < rows)[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(z + at, inside, other=0.0).to(tl.float32) + tl.load(branch + at, inside, other=0.0).to(tl.float32)
    times, plus = _load_scale(weight, shift, column, there)
    if eight:
        factor = load_factor(scale)
    if biased:
        x += tl.load(bias + column, there, other=0.0).to(tl.float32)[None, :]
    x = x.to(total.dtype.element_ty)
    tl.store(total + at, x, inside)
    x = x.to(tl.float32)  # the norm is that of the sum as stored, after rounding
    mean, over = _measure(x, there, width, eps)
    tl.store(stats + 2 * row, mean, row < rows)
    tl.store(stats + 2 * row + 1, over, row < rows)
    normed = (x - mean[:, None]) * over[:, None] * times + plus
    if eight:
        store_low(out, at, normed, factor, inside)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), inside)


def add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x = z + branch + bias, LN(x), and the mean and reciprocal standard deviation of each row: [..., D] twice ->
    [..., D] twice and [M, 2]."""
    return _add_norm(z, branch, bias, weight, shift, eps, None)


def add_norm_float8(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `add_norm`, with LN(x) in e4m3."""
    return _add_norm(z, branch, bias, weight, shift, eps, scale)


def _add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    total, out = torch.empty_like(z), torch.empty_like(z, dtype=None if scale is None else torch.float8_e4m3fn)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(z)
    if scale is not None:
        tile_rows, warps = _narrow(tile_rows, warps)
    stats = z.new_empty(rows, 2, dtype=torch.float32)
    kernel: Any = _add_norm_kernel
    kernel[(ceil_divide(rows, tile_rows),)](
        z, branch, weight if bias is None else bias, weight, shift, total, out,
        weight if scale is None else scale, stats, rows, width, eps,
        biased=bias is not None, eight=scale is not None,
        tile_rows=tile_rows, tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return total, out, stats


@triton.jit
def _add_pairs(a, b, c, d) -> tuple[tl.tensor, tl.tensor]:
    return a + c, b + d


@triton.jit
def _add_norm_backward_kernel(
    of_total, of_normed, total, stats, weight, out, sums, rows, width,
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
        mean = tl.load(stats + 2 * row, row < rows, other=0.0)
        over = tl.load(stats + 2 * row + 1, row < rows, other=0.0)
        x = tl.load(total + at, inside, other=0.0).to(tl.float32)
        g = tl.load(of_normed + at, inside, other=0.0).to(tl.float32)
        handed = tl.load(of_total + at, inside, other=0.0).to(tl.float32)
        standard = (x - mean[:, None]) * over[:, None]  # past the last column it is multiplied by g = 0
        slope = g * times
        along, level = tl.reduce((slope * standard, slope), 1, _add_pairs)
        grad = handed + over[:, None] * (slope - (level / width)[:, None] - standard * (along / width)[:, None])
        tl.store(out + at, grad.to(out.dtype.element_ty), inside)
        of_weight += g * standard
        of_shift += g
        of_bias += tl.where(inside, grad, 0.0)
    line = sums + tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(line, tl.sum(of_weight, 0), there)
    tl.store(line + width, tl.sum(of_shift, 0), there)
    tl.store(line + 2 * width, tl.sum(of_bias, 0), there)


def add_norm_backward(
    of_total: Tensor, of_normed: Tensor, total: Tensor, stats: Tensor, weight: Tensor, each: int
) -> tuple[Tensor, Tensor]:
    """The gradient of each summand, and sums over every `each` rows for the gradients of the norm's weight, its shift
    and the bias: 3 x [..., D] -> [..., D] and [M/each, 3, D]."""
    out = torch.empty_like(total)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(total)
    tile_rows, warps = _narrow(tile_rows, warps)
    sums = total.new_empty(ceil_divide(rows, each), 3, width, dtype=torch.float32)
    kernel: Any = _add_norm_backward_kernel
    kernel[(len(sums),)](
        of_total, of_normed, total, stats, weight, out, sums, rows, width,
        each=each, tile_rows=min(tile_rows, each), tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return out, sums


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
    times, plus = _load_scale(weight, bias, column, there)
    mean, over = _measure(x, there, width, eps)
    normed = (x - mean[:, None]) * over[:, None] * times + plus
    tl.store(out + at, normed.to(out.dtype.element_ty), inside)


def shifted_norm(z: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LN(z + shift), with a shift [D] in float32: [..., D] -> [..., D]."""
    out = torch.empty_like(z)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(z)
    kernel: Any = _shifted_norm_kernel
    kernel[(ceil_divide(rows, tile_rows),)](
        z, weight if shift is None else shift, weight, bias, out, rows, width, eps,
        shifted=shift is not None, tile_rows=tile_rows, tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return out


def _norm_tiles(z: Tensor) -> tuple[int, int, int, int, int]:
    """Rows and columns of the tensor and of a tile, and the warps per tile."""
    width = z.shape[-1]
    columns = 1 << (width - 1).bit_length()
    return z.numel() // width, width, max(1, NORM_VALUES // columns), columns, 4 if columns <= NORM_VALUES else 8


def _narrow(tile_rows: int, warps: int) -> tuple[int, int]:
    """A tile with half as many values per thread, for kernels that hold more for each value."""
    return (tile_rows // 2, warps) if tile_rows > 1 else (1, min(2 * warps, 16))

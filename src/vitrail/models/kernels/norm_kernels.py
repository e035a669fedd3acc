"""Triton kernels of the residual stream: the sums and norms between the branches of layers.

Imported only where a GPU is used. Each program holds whole rows, so everything is read once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels.float8_kernels import store_low

# What Triton compiles is not Python: names have no types, and annotations are marks for its compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false

NORM_VALUES = 2048  # of the rows that a program holds at once


@triton.jit
def _standardise(x, there, width, eps):
    """Rows less their mean, over their deviation, and one over that."""
    centred = tl.where(there[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
    over = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * over[:, None], over


@triton.jit
def _scale(standard, weight, shift, column, there):
    """What a norm makes of standardised rows."""
    times = tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    plus = tl.load(shift + column, there, other=0.0).to(tl.float32)[None, :]
    return standard * times + plus


@triton.jit
def _add_norm_kernel(
    z, branch, bias, weight, shift, total, out, low, scale, rows, width, eps,
    biased: tl.constexpr, full: tl.constexpr, eight: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
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
    standard, _ = _standardise(x, there, width, eps)
    normed = _scale(standard, weight, shift, column, there)
    if full:
        tl.store(out + at, normed.to(out.dtype.element_ty), inside)
    if eight:
        store_low(low, at, normed, scale, inside)


def add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x = z + branch + bias and LN(x): [..., D] twice -> [..., D] twice."""
    total, normed, _ = _add_norm(z, branch, bias, weight, shift, eps, None, full=True)
    return total, normed


def add_norm_float8(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor, full: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and LN(x) in eight bits; without `full` in eight bits alone."""
    return _add_norm(z, branch, bias, weight, shift, eps, scale, full=full)


def _add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor | None,
    *, full: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total, out = torch.empty_like(z), torch.empty_like(z) if full else z.new_empty(0)
    low = out if scale is None else torch.empty_like(z, dtype=torch.float8_e4m3fn)
    rows, width, tile_rows, tile_columns, warps = _norm_tiles(z)
    kernel: Any = _add_norm_kernel
    kernel[(ceil_divide(rows, tile_rows),)](
        z, branch, weight if bias is None else bias, weight, shift, total, out, low,
        weight if scale is None else scale, rows, width, eps,
        biased=bias is not None, full=full, eight=scale is not None,
        tile_rows=tile_rows, tile_columns=tile_columns, num_warps=warps,
    )  # fmt: skip
    return total, out, low


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
        standard, over = _standardise(x, there, width, eps)
        slope = g * times
        along, level = tl.sum(slope * standard, 1) / width, tl.sum(slope, 1) / width
        grad = handed + over[:, None] * (slope - level[:, None] - standard * along[:, None])
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
    sums = total.new_empty(ceil_divide(rows, each), 3, width, dtype=torch.float32)
    kernel: Any = _add_norm_backward_kernel
    kernel[(len(sums),)](
        of_total, of_normed, total, weight, out, sums, rows, width, eps,
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
    standard, _ = _standardise(x, there, width, eps)
    tl.store(out + at, _scale(standard, weight, bias, column, there).to(out.dtype.element_ty), inside)


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
    """Rows, columns, both of a tile, and the warps that hold one."""
    width = z.shape[-1]
    columns = 1 << (width - 1).bit_length()
    return z.numel() // width, width, max(1, NORM_VALUES // columns), columns, 4 if columns <= NORM_VALUES else 8

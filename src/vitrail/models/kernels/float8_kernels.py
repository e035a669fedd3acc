"""Triton kernels for fp8: scales, quantisation, and the transpose of quantised matrices.

Imported only where a GPU is used. A scale is two float32 numbers: the factor that dequantises, and its reciprocal, by
which values are multiplied before they are rounded. Other kernels write fp8 straight from registers with `store_low`,
or with `store_byte` and `store_turned` if they also write its transpose: a thread then packs the bytes of four rows
into words, so that the transpose moves words.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels.math_kernels import NVIDIA, pick_bytes

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false

TURNED = 32  # words per side of a tile of the transpose
TURNED_WORDS, TURNED_COLUMNS = 32, 64  # tile of kernels that also transpose what they write: words of four rows
TINY = tl.constexpr(1e-30)  # the least peak: anything smaller is as good as 0


@triton.jit
def load_factor(scale) -> tl.tensor:
    """Loads the factor applied before rounding. If it is loaded before the first store, nothing waits for it."""
    return tl.load(scale + 1)


@triton.jit
def round_low(values, factor, kind: tl.constexpr) -> tl.tensor:
    """Scales and rounds to an fp8 type. Values out of range saturate; NaN stays NaN."""
    values = values * factor
    if not NVIDIA:  # NVIDIA's conversion saturates by itself
        limit: tl.constexpr = 448.0 if kind == tl.float8e4nv else 57344.0  # pyright: ignore
        values = tl.clamp(values, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return values.to(kind)


@triton.jit
def store_low(low, at, values, factor, inside) -> None:
    """Scales, rounds to the type of `low` and stores."""
    tl.store(low + at, round_low(values, factor, low.dtype.element_ty), inside)


@triton.jit
def find_rows(word, place: tl.constexpr, column, rows, columns) -> tuple[tl.tensor, tl.tensor]:
    """One of the four rows of each word: where its values lie in a matrix, and which of them exist."""
    row = 4 * word + place
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def store_byte(low, at, values, factor, inside, place: tl.constexpr) -> tl.tensor:
    """Like `store_low`; returns the bytes shifted to their place in a word of four rows."""
    rounded = round_low(values, factor, low.dtype.element_ty)
    tl.store(low + at, rounded, inside)
    return rounded.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * place)


@triton.jit
def store_turned(turned, packed, word, column, columns, padded) -> None:
    """Stores words of four rows [words, columns] transposed, as rows of `padded` words."""
    at = column.to(tl.int64)[:, None] * padded + word[None, :]
    tl.store(turned + at, tl.trans(packed), (column < columns)[:, None] & (word < padded)[None, :])


@triton.jit
def _write_scale(scale, target, peak) -> None:
    peak = tl.maximum(peak, TINY)
    tl.store(scale, peak / target)
    tl.store(scale + 1, target / peak)


@triton.jit
def _sample_scale_kernel(
    x, scale, rows, columns, stride, target, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):  # fmt: skip
    step = tl.arange(0, tile_rows)
    row = (step * (rows // tile_rows) + (step % 2) * (rows // (2 * tile_rows))) % rows
    taken = tl.minimum(columns, tile_columns)
    first = (step * taken) % (columns - taken + 1)  # the rows' windows cover all columns in turn
    column = first[:, None] + tl.arange(0, tile_columns)[None, :]
    at = row.to(tl.int64)[:, None] * stride + column
    values = tl.load(x + at, column < columns, other=0.0).to(tl.float32)
    peaks = tl.max(tl.where(tl.abs(values) < float("inf"), tl.abs(values), 0.0), 1)
    _write_scale(scale, target, tl.max(peaks, 0))


def sample_scale(x: Tensor, target: float, rows: int, most: int) -> Tensor:
    """The scale that maps the peak of a sample of a matrix to `target`: [M, N] -> [2]. The sample is `rows` rows, with
    at most `most` columns of each."""
    scale = x.new_empty(2, dtype=torch.float32)
    tile = min(most, 1 << (x.shape[1] - 1).bit_length())
    kernel: Any = _sample_scale_kernel
    kernel[(1,)](
        x, scale, *x.shape, x.stride(0), target, tile_rows=rows, tile_columns=tile, num_warps=8
    )  # fmt: skip
    return scale


@triton.jit
def _norm_scale_kernel(weight, shift, scale, width, root, target, tile: tl.constexpr):
    column = tl.arange(0, tile)
    times = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, column < width, other=0.0).to(tl.float32)
    _write_scale(scale, target, tl.max(tl.abs(times) * root + tl.abs(plus), 0))


def norm_scale(weight: Tensor, shift: Tensor, target: float) -> Tensor:
    """The scale that maps a bound on a norm's output to `target`: [D] twice -> [2]. No entry of a standardised vector
    of length D exceeds √D."""
    width, scale = len(weight), weight.new_empty(2, dtype=torch.float32)
    tile = 1 << (width - 1).bit_length()
    kernel: Any = _norm_scale_kernel
    kernel[(1,)](weight, shift, scale, width, width**0.5, target, tile=tile, num_warps=4)
    return scale


@triton.jit
def _round_kernel(x, low, scale, count, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * block
    at = tl.arange(0, block)
    inside = first + at < count
    values = tl.load(x + first + at, inside, other=0.0).to(tl.float32)
    store_low(low + first, at, values, load_factor(scale), inside)


def round_scaled(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Quantises x to `kind` with its scale."""
    low, block = torch.empty_like(x, dtype=kind), 4096
    kernel: Any = _round_kernel
    kernel[(ceil_divide(x.numel(), block),)](x, low, scale, x.numel(), block=block)
    return low


@triton.jit
def _round_turned_kernel(
    x,
    low,
    turned,
    scale,
    rows,
    columns,
    padded,
    tile_words: tl.constexpr,
    tile_columns: tl.constexpr,
):
    word = tl.program_id(0) * tile_words + tl.arange(0, tile_words)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    factor = load_factor(scale)
    packed = tl.zeros((tile_words, tile_columns), tl.int32)
    for place in tl.static_range(4):
        at, inside = find_rows(word, place, column, rows, columns)
        values = tl.load(x + at, inside, other=0.0).to(tl.float32)
        packed |= store_byte(low, at, values, factor, inside, place)
    store_turned(turned, packed, word, column, columns, padded)


def round_turned(x: Tensor, scale: Tensor, kind: torch.dtype, padded: int) -> tuple[Tensor, Tensor]:
    """Quantises a matrix with its scale, as it is and transposed, padded with zeros: [M, N] -> [M, N] and
    [N, padded]."""
    rows, columns = x.shape
    low = torch.empty_like(x, dtype=kind)
    turned = low.new_empty(columns, padded)
    kernel: Any = _round_turned_kernel
    kernel[(ceil_divide(padded // 4, TURNED_WORDS), ceil_divide(columns, TURNED_COLUMNS))](
        x, low, turned.view(torch.int32), scale, rows, columns, padded // 4,
        tile_words=TURNED_WORDS, tile_columns=TURNED_COLUMNS, num_warps=4,
    )  # fmt: skip
    return low, turned


@triton.jit
def _turn_kernel(low, turned, rows, columns, padded, tile: tl.constexpr):
    """Transposes four bytes at a time: a word holds four columns of a row, and then four rows of a column."""
    word = tl.arange(0, tile)
    first, left = tl.program_id(0) * tile, tl.program_id(1) * tile  # in words, as `columns` and `padded` are
    low += (4 * first).to(tl.int64) * columns + left
    turned += (4 * left).to(tl.int64) * padded + first
    row, across = 4 * (first + word)[:, None], (left + word < columns)[None, :]
    at = (4 * word)[:, None] * columns + word[None, :]
    a = tl.load(low + at, (row < rows) & across, other=0)
    b = tl.load(low + columns + at, (row + 1 < rows) & across, other=0)
    c = tl.load(low + 2 * columns + at, (row + 2 < rows) & across, other=0)
    d = tl.load(low + 3 * columns + at, (row + 3 < rows) & across, other=0)
    place = (4 * word)[:, None] * padded + word[None, :]
    inside = (left + word < columns)[:, None] & (first + word < padded)[None, :]
    ab, cd = pick_bytes(a, b, 0x5140), pick_bytes(c, d, 0x5140)
    tl.store(turned + place, tl.trans(pick_bytes(ab, cd, 0x5410)), inside)
    tl.store(turned + padded + place, tl.trans(pick_bytes(ab, cd, 0x7632)), inside)
    ab, cd = pick_bytes(a, b, 0x7362), pick_bytes(c, d, 0x7362)
    tl.store(turned + 2 * padded + place, tl.trans(pick_bytes(ab, cd, 0x5410)), inside)
    tl.store(turned + 3 * padded + place, tl.trans(pick_bytes(ab, cd, 0x7632)), inside)


def turn(low: Tensor, padded: int) -> Tensor:
    """Transposes bytes and pads with zeros: [M, N] -> [N, padded]. N and `padded` are multiples of 4, M need not be."""
    rows, columns = low.shape
    turned = low.new_empty(columns, padded)
    grid = ceil_divide(padded // 4, TURNED), ceil_divide(columns // 4, TURNED)
    kernel: Any = _turn_kernel
    kernel[grid](
        low.view(torch.int32), turned.view(torch.int32), rows, columns // 4, padded // 4,
        tile=TURNED, num_warps=8,
    )  # fmt: skip
    return turned

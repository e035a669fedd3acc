"""The fp8 kernels as custom operators, opaque to the compiler. On a CPU they are written out in torch, for tests."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.models.kernels import ceil_divide
from vitrail.models.kernels import fused_ops as fused

ACTIVATIONS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # largest number of e4m3
TINY = 1e-30
TURNED_MULTIPLE = 64  # rows are padded to a multiple of it by the transpose, which then stores four words at once
SAMPLED_ROWS, SAMPLED_COLUMNS = 32, 512  # of a tensor whose peak is estimated


@torch.library.custom_op("vitrail::multiply_float8", mutates_args=())
def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: torch.dtype, fast: bool
) -> Tensor:
    """a bᵀ + bias in fp8: [..., K] and [N, K] -> [..., N]; `fast` accumulates at lower precision. A custom operator,
    because Inductor of torch 2.11 takes the scale, one element of a tensor, for the whole tensor."""
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
    factors = {"scale_a": scale_a, "scale_b": scale_b}
    out = product(a.view(-1, a.shape[-1]), b.t(), **factors, bias=bias, out_dtype=kind, use_fast_accum=fast)
    return out.view(*a.shape[:-1], -1)


@multiply.register_kernel("cpu")
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: torch.dtype, fast: bool
) -> Tensor:
    exact = F.linear(a.to(kind) * scale_a.to(kind), b.to(kind) * scale_b.to(kind))
    return exact if bias is None else exact + bias


@multiply.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0], dtype=kind)


@torch.library.custom_op("vitrail::sample_scale", mutates_args=())
def sample_scale(x: Tensor, target: float) -> Tensor:
    """The scale that maps the peak of a sample of a matrix to `target`: [M, N] -> [2]."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.sample_scale(x, target, SAMPLED_ROWS, SAMPLED_COLUMNS)


@sample_scale.register_kernel("cpu")
def _(x: Tensor, target: float) -> Tensor:
    rows, columns = x.shape
    step, width = torch.arange(SAMPLED_ROWS), min(SAMPLED_COLUMNS, columns)
    row = (step * (rows // SAMPLED_ROWS) + step % 2 * (rows // (2 * SAMPLED_ROWS))) % rows
    column = (step * width % (columns - width + 1))[:, None] + torch.arange(width)
    return _make_scale(x[row[:, None], column].abs().nan_to_num(0, 0, 0).amax(), target)


@sample_scale.register_fake
def _(x: Tensor, target: float) -> Tensor:
    return x.new_empty(2, dtype=fused.exact(x))


@torch.library.custom_op("vitrail::norm_scale", mutates_args=())
def norm_scale(weight: Tensor, shift: Tensor, target: float) -> Tensor:
    """The scale that maps a bound on a norm's output to `target`: [D] twice -> [2]."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.norm_scale(weight, shift, target)


@norm_scale.register_kernel("cpu")
def _(weight: Tensor, shift: Tensor, target: float) -> Tensor:
    return _make_scale((weight.abs() * len(weight) ** 0.5 + shift.abs()).amax(), target)


@norm_scale.register_fake
def _(weight: Tensor, shift: Tensor, target: float) -> Tensor:
    return weight.new_empty(2, dtype=fused.exact(weight))


def _make_scale(peak: Tensor, target: float) -> Tensor:
    peak = peak.to(fused.exact(peak)).clamp_min(TINY)
    return torch.stack([peak / target, target / peak])


@torch.library.custom_op("vitrail::round_scaled", mutates_args=())
def round_scaled(x: Tensor, scale: Tensor, gradient: bool) -> Tensor:
    """Quantises x with its scale: a gradient to e5m2, anything else to e4m3."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.round_scaled(x, scale, GRADIENTS if gradient else ACTIVATIONS)


@round_scaled.register_kernel("cpu")
def _(x: Tensor, scale: Tensor, gradient: bool) -> Tensor:
    kind = GRADIENTS if gradient else ACTIVATIONS
    limit = torch.finfo(kind).max
    return (x * scale[1]).clamp(-limit, limit).to(kind)


@round_scaled.register_fake
def _(x: Tensor, scale: Tensor, gradient: bool) -> Tensor:
    return torch.empty_like(x, dtype=GRADIENTS if gradient else ACTIVATIONS)


@torch.library.custom_op("vitrail::round_turned", mutates_args=())
def round_turned(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a gradient to e5m2, as it is and transposed: [M, N] -> [M, N] and [N, M rounded up]."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.round_turned(x, scale, GRADIENTS, pad_rows(x))


@round_turned.register_kernel("cpu")
def _(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    low = round_scaled(x, scale, gradient=True)
    return low, turn(low)


@round_turned.register_fake
def _(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _low_and_turned(x, GRADIENTS)


@torch.library.custom_op("vitrail::turn_float8", mutates_args=())
def turn(low: Tensor) -> Tensor:
    """Transposes and pads rows with zeros to a multiple of 64: [M, N] -> [N, M rounded up]."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.turn(low, pad_rows(low))


@turn.register_kernel("cpu")
def _(low: Tensor) -> Tensor:
    turned = low.new_zeros(low.shape[1], pad_rows(low))
    turned[:, : low.shape[0]] = low.t()
    return turned


@turn.register_fake
def _(low: Tensor) -> Tensor:
    return low.new_empty(low.shape[1], pad_rows(low))


def _low_and_turned(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=kind), x.new_empty(x.shape[1], pad_rows(x), dtype=kind)


def pad_rows(low: Tensor) -> int:
    return (low.shape[0] + TURNED_MULTIPLE - 1) // TURNED_MULTIPLE * TURNED_MULTIPLE


@torch.library.custom_op("vitrail::add_norm_float8", mutates_args=())
def add_norm_float8(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x = z + branch + bias, LN(x) in e4m3, and the mean and reciprocal standard deviation of each row [M, 2]."""
    from vitrail.models.kernels import norm_kernels

    return norm_kernels.add_norm_float8(z, branch, bias, weight, shift, eps, scale)


@add_norm_float8.register_kernel("cpu")
def _(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed, stats = fused.add_norm(z, branch, bias, weight, shift, eps)
    return total, round_scaled(normed, scale, gradient=False), stats


@add_norm_float8.register_fake
def _(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(z, dtype=ACTIVATIONS), fused.row_stats(z)


@torch.library.custom_op("vitrail::gelu_float8", mutates_args=())
def gelu_float8(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    """GELU in e4m3."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_float8(pre, tanh, scale)


@gelu_float8.register_kernel("cpu")
def _(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    return round_scaled(fused.gelu(pre, tanh), scale, gradient=False)


@gelu_float8.register_fake
def _(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    return torch.empty_like(pre, dtype=ACTIVATIONS)


@torch.library.custom_op("vitrail::gelu_turned_float8", mutates_args=())
def gelu_turned_float8(pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    """GELU in e4m3, as it is and transposed: [M, N] -> [M, N] and [N, M rounded up]."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_turned_float8(pre, tanh, scale, pad_rows(pre))


@gelu_turned_float8.register_kernel("cpu")
def _(pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    low = gelu_float8(pre, tanh, scale)
    return low, turn(low)


@gelu_turned_float8.register_fake
def _(pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _low_and_turned(pre, ACTIVATIONS)


@torch.library.custom_op("vitrail::gelu_backward_float8", mutates_args=())
def gelu_backward_float8(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Partial column sums of a gradient, as from every gradient operator below, and the gradient in e5m2, as it is and
    transposed."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_backward_float8(grad, pre, tanh, rows_per_sum(pre), scale, pad_rows(pre))


@gelu_backward_float8.register_kernel("cpu")
def _(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, sums = fused.gelu_backward(grad, pre, tanh)
    return sums, *round_turned(out, scale)


@gelu_backward_float8.register_fake
def _(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = 1 if pre.device.type == "cpu" else ceil_divide(pad_rows(pre), rows_per_sum(pre))
    return pre.new_empty(count, pre.shape[1], dtype=fused.exact(pre)), *_low_and_turned(pre, GRADIENTS)


def rows_per_sum(pre: Tensor) -> int:
    """Rows that a program sums, a multiple of the 128 that it transposes at once."""
    return max(fused.rows_per_program(*pre.shape), 128)


@torch.library.custom_op("vitrail::concat_qkv_grad_float8", mutates_args=())
def concat_qkv_grad_float8(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    each = fused.rows_per_program(q.shape[0], 3 * q.shape[1])
    return attention_kernels.concat_qkv_grad_float8(q, k, v, each, scale)


@concat_qkv_grad_float8.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    out, sums = fused.concat_qkv_grad(q, k, v)
    return sums, round_scaled(out, scale, gradient=True)


@concat_qkv_grad_float8.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    low = q.new_empty(q.shape[0], 3 * q.shape[1], dtype=GRADIENTS)
    return fused.partial_sums(q, low.shape[1]), low


@torch.library.custom_op("vitrail::attention_float8", mutates_args=())
def attention_float8(three: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    return attention_kernels.attention_float8(three, heads, scale)


@attention_float8.register_kernel("cpu")
def _(three: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, logs = fused.attention(three, heads)
    out = out.contiguous()
    return out, logs, round_scaled(out, scale, gradient=False)


@attention_float8.register_fake
def _(three: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    images, tokens, width = three.shape
    out = three.new_empty(images, tokens, width // 3)
    logs = three.new_empty(images, heads, tokens, dtype=fused.exact(three))
    return out, logs, torch.empty_like(out, dtype=ACTIVATIONS)


@torch.library.custom_op("vitrail::attention_backward_float8", mutates_args=())
def attention_backward_float8(
    three: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int, scale: Tensor
) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    return attention_kernels.attention_backward_float8(three, out, grad, logs, heads, scale)


@attention_backward_float8.register_kernel("cpu")
def _(three: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    grads, sums = fused.attention_backward(three, out, grad, logs, heads)
    return sums, round_scaled(grads, scale, gradient=True)


@attention_backward_float8.register_fake
def _(three: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    sums = three.new_empty(three.shape[0], three.shape[2], dtype=fused.exact(three))
    return sums, torch.empty_like(three, dtype=GRADIENTS)

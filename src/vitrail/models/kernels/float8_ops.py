"""Layers of the encoder whose products read eight bits, on a GPU that multiplies them.

What a product reads is rounded to e4m3, and gradients to e5m2, after a scale for the whole tensor has been taken out.
Weights are scaled by their largest value, norms by a bound on theirs. Other tensors are scaled by the largest of some
values of theirs, with room for what those may have missed: this costs next to nothing, needs no state, and what lies
beyond the room is cut off. The kernels that make a tensor write its eight bits, and where products alone read it,
nothing else. Gradients of weights are products over tokens, and a GPU multiplies eight bits along rows, so both of what
they read is turned first. On a CPU everything is written out, for tests.
"""

from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.models.kernels import fused_ops as fused

ACTIVATIONS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # of e4m3
ROOM = 16.0  # of activations: how many times as large as all that were looked at others may be
GRADIENT_TARGET = 224.0  # what the largest that was looked at becomes: 256 times as large is still within e5m2
ATTENTION_TARGET = 16.0  # for gradients of q, k and v, by those of what the heads find
TINY = 1e-30
MULTIPLE = 16  # what sides of a product have to be multiples of
TURNED_MULTIPLE = 64  # that rows are padded to before they become columns, so that these are stored four words at once
CAPABILITY = (8, 9)  # of GPUs that multiply eight bits
SAMPLED_ROWS, SAMPLED_COLUMNS = 32, 512  # of a tensor whose size is estimated


class Float8(NamedTuple):
    """A tensor in eight bits, and what gradients pass through: the tensor in full, or one of its shape that nobody
    reads and that takes no memory."""

    full: Tensor
    low: Tensor
    scale: Tensor  # what the eight bits are to be multiplied by, and one over it: [2]


Grads: TypeAlias = tuple[Tensor | None, ...]


def float8_obstacle(device: torch.device) -> str:
    """Why a device cannot multiply eight bits; empty where it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} does not multiply eight bits; Ada, Hopper and later do"
    return "" if fused.TRITON else "its kernels need Triton, which is not installed"


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """In eight bits, and what they are to be multiplied by."""
    peak = weight.abs().amax().to(fused.exact(weight)).clamp_min(TINY)
    return (weight * (LARGEST / peak)).clamp(-LARGEST, LARGEST).to(ACTIVATIONS), peak / LARGEST


def round_tensor(x: Tensor) -> Float8:
    """By the largest of some of its values. Gradients pass through `full`."""
    with torch.no_grad():
        scale = sample_scale(fused.flat(x), LARGEST / ROOM)
        return Float8(x, round_scaled(x.contiguous(), scale, gradient=False), scale)


def round_norm(x: Tensor, norm: nn.LayerNorm) -> Float8:
    """What a norm has given."""
    with torch.no_grad():
        scale = norm_scale(norm.weight, norm.bias, LARGEST)
        return Float8(x, round_scaled(x.contiguous(), scale, gradient=False), scale)


def add_norm(z: Tensor, branch: Tensor, bias: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Float8]:
    """x = z + branch + bias and LN(x): [..., D] twice -> [..., D] twice."""
    args = (z, branch, bias, norm.weight, norm.bias, norm.eps)
    total, full, low, scale = cast("tuple[Tensor, ...]", _RoundedAddNorm.apply(*args))
    return total, Float8(full, low, scale)


def linear(x: Float8, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: [..., D] -> [..., N]."""
    return _RoundedLinear.apply(*x, weight, bias)


def gelu_linear(x: Float8, layer: nn.Linear, tanh: bool) -> Float8:
    """GELU(x Wᵀ + b): [..., D] -> [..., N]."""
    args = (*x, layer.weight, layer.bias, tanh)
    return Float8(*cast("tuple[Tensor, ...]", _RoundedGeluLinear.apply(*args)))


def qkv(x: Float8, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x Wᵀ + b in three equal parts: [..., D] -> [..., N/3] thrice."""
    return _RoundedSplitLinear.apply(*x, weight, bias)


def attention(x: Float8, weight: Tensor, bias: Tensor | None, heads: int) -> Float8:
    """softmax(q kᵀ/√D_h) v with [q, k, v] = x Wᵀ + b, the heads side by side: [B, T, D] -> [B, T, D]."""
    return Float8(*cast("tuple[Tensor, ...]", _RoundedAttend.apply(*x, weight, bias, heads)))


class _RoundedAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = norm_scale(weight, shift, LARGEST)
        args = (z.contiguous(), branch.contiguous(), bias, weight, shift, eps, scale)
        total, low, stats = add_norm_float8(*args)
        ctx.mark_non_differentiable(low, scale)
        ctx.save_for_backward(total, stats, weight)
        ctx.biased = bias is not None
        return total, _stand_in(total), low, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return fused.add_norm_grads(ctx, grads[0], grads[1])


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out, *saved = _forward(low, scale, weight, bias)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        grad = fused.flat(grads[0])
        scale = sample_scale(grad, GRADIENT_TARGET)
        return _backward(ctx, ctx.saved_tensors, round_scaled(grad, scale, gradient=True), scale, grad, grad.dtype)


class _RoundedGeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        pre, *saved = _forward(low, scale, weight, bias)
        of_out = sample_scale(fused.flat(pre), LARGEST / ROOM)
        low_out = gelu_float8(pre, tanh, of_out)
        ctx.mark_non_differentiable(low_out, of_out)
        ctx.save_for_backward(*saved, pre)
        ctx.tanh = tanh
        return _stand_in(pre), low_out, of_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *saved, pre = ctx.saved_tensors
        grad = fused.flat(grads[0])
        scale = sample_scale(grad, GRADIENT_TARGET)
        sums, low = gelu_backward_float8(grad, fused.flat(pre), ctx.tanh, scale)
        return *_backward(ctx, saved, low, scale, sums, pre.dtype), None


class _RoundedSplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        out, *saved = _forward(low, scale, weight, bias)
        ctx.save_for_backward(*saved)
        return out.chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        q, k, v = (fused.flat(grad) for grad in grads)
        scale = sample_scale(v, ATTENTION_TARGET)
        sums, low = concat_qkv_grad_float8(q, k, v, scale)
        return _backward(ctx, ctx.saved_tensors, low, scale, sums, v.dtype)


class _RoundedAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        three, *saved = _forward(low, scale, weight, bias)
        values = three.view(-1, three.shape[-1])[:, 2 * three.shape[-1] // 3 :]  # nothing found lies beyond these
        of_out = sample_scale(values, LARGEST / ROOM)
        out, logs, low_out = attention_float8(three, heads, of_out)
        ctx.mark_non_differentiable(low_out, of_out)
        ctx.save_for_backward(*saved, three, out, logs)
        ctx.heads = heads
        return out, low_out, of_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *saved, three, out, logs = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale = sample_scale(fused.flat(grad), ATTENTION_TARGET)
        sums, low = attention_backward_float8(three, out, grad, logs, ctx.heads, scale)
        return *_backward(ctx, saved, fused.flat(low), scale, sums, three.dtype), None


def _stand_in(like: Tensor) -> Tensor:
    """What gradients pass through where there is a tensor in eight bits alone."""
    return like.new_empty(1).expand(like.shape)


def _forward(low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The product, and what its gradients need."""
    rounded, of_weight = round_weight(weight)
    out = multiply(low, rounded, scale[0], of_weight, bias, weight.dtype, fast=True)
    return out, low, scale, rounded, of_weight


def _backward(
    ctx: Any, saved: Any, grad: Tensor, scale: Tensor, sums: Tensor, kind: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Gradients of a product's input, its weight and its bias, from that of the output [M, N] in eight bits, and
    partial sums of its columns. That of the weight is a sum over all tokens, whose terms are not to be lost: it is
    added up in full."""
    low, of_low, rounded, of_weight = saved
    of_x, _, _, asks_weight, asks_bias = ctx.needs_input_grad[:5]
    found = [None, None]
    if of_x:
        turned = rounded.t().contiguous()
        found[0] = multiply(grad, turned, scale[0], of_weight, None, kind, fast=True).view(low.shape)
    if asks_weight:
        found[1] = multiply(turn(grad), turn(fused.flat(low)), scale[0], of_low[0], None, kind, fast=False)
    return found[0], None, None, found[1], sums.sum(0).to(kind) if asks_bias else None


# The kernels as operators, which a compiler takes as they are. On a CPU they are written out, for tests.


@torch.library.custom_op("vitrail::multiply_float8", mutates_args=())
def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: torch.dtype, fast: bool
) -> Tensor:
    """a bᵀ + bias, of eight bits: [..., K] and [N, K] -> [..., N]; `fast` adds up with fewer digits. An operator of its
    own, since Inductor of torch 2.11 takes the scale, an element of a tensor, for the whole tensor."""
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
    """The scale that takes the largest of some values of a matrix to `target`: [M, N] -> [2]."""
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
    """The scale that takes the largest value that a norm can give to `target`: no value of D that are standardised is
    beyond √D. [D] twice -> [2]."""
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
    """Rounded after the scale has been taken out."""
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


@torch.library.custom_op("vitrail::turn_float8", mutates_args=())
def turn(low: Tensor) -> Tensor:
    """Rows for columns: [M, N] -> [N, M], with zeros up to a multiple of 64."""
    from vitrail.models.kernels import float8_kernels

    return float8_kernels.turn(low, _pad_rows(low))


@turn.register_kernel("cpu")
def _(low: Tensor) -> Tensor:
    turned = low.new_zeros(low.shape[1], _pad_rows(low))
    turned[:, : low.shape[0]] = low.t()
    return turned


@turn.register_fake
def _(low: Tensor) -> Tensor:
    return low.new_empty(low.shape[1], _pad_rows(low))


def _pad_rows(low: Tensor) -> int:
    return (low.shape[0] + TURNED_MULTIPLE - 1) // TURNED_MULTIPLE * TURNED_MULTIPLE


@torch.library.custom_op("vitrail::add_norm_float8", mutates_args=())
def add_norm_float8(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x = z + branch + bias, LN(x) in eight bits, and the mean of each row and one over its deviation [M, 2]."""
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
    """GELU in eight bits."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_float8(pre, tanh, scale)


@gelu_float8.register_kernel("cpu")
def _(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    return round_scaled(fused.gelu(pre, tanh), scale, gradient=False)


@gelu_float8.register_fake
def _(pre: Tensor, tanh: bool, scale: Tensor) -> Tensor:
    return torch.empty_like(pre, dtype=ACTIVATIONS)


@torch.library.custom_op("vitrail::gelu_backward_float8", mutates_args=())
def gelu_backward_float8(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Partial sums of the columns of a gradient, and the gradient in eight bits. The same of all that follow."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_backward_float8(grad, pre, tanh, fused.rows_per_program(*pre.shape), scale)


@gelu_backward_float8.register_kernel("cpu")
def _(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    out, sums = fused.gelu_backward(grad, pre, tanh)
    return sums, round_scaled(out, scale, gradient=True)


@gelu_backward_float8.register_fake
def _(grad: Tensor, pre: Tensor, tanh: bool, scale: Tensor) -> tuple[Tensor, Tensor]:
    return fused.partial_sums(pre, pre.shape[1]), torch.empty_like(pre, dtype=GRADIENTS)


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

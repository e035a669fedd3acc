"""Encoder layers whose matrix products run in fp8, on GPUs with fp8 tensor cores.

The inputs of a product are quantised to e4m3, and gradients to e5m2, with one scale per tensor. Weights are scaled by
their largest magnitude, norms by a bound on their output. Other tensors are scaled by the peak of a small sample, with
headroom for larger values outside it: this costs next to nothing and needs no state, and values beyond the headroom
saturate. The kernels that produce a tensor also write it in fp8, and only in fp8 if nothing but products read it. The
gradient of a weight sums over tokens, and fp8 products require the summed axis to be contiguous, so both of its
operands are transposed: by the kernel that writes them (GELU, its gradient, and gradients of the residual stream), or
by a kernel of its own.
"""

from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from vitrail.core.precision import FLOAT8_CAPABILITY
from vitrail.models.kernels import float8_ops as ops
from vitrail.models.kernels import fused_ops as fused

ROOM = 16.0  # headroom of activations, as a multiple of the sampled peak
GRADIENT_TARGET = 224.0  # for the sampled peak of a gradient: 256 times as much is still within e5m2
ATTENTION_TARGET = 16.0  # for gradients of q, k and v, sampled from the gradient of v or of the output
MULTIPLE = 16  # the sides of a product must be multiples of this


class Float8(NamedTuple):
    """A quantised tensor, and the one that gradients flow through: the tensor in full, or a placeholder of its shape
    that is never read and takes no memory."""

    full: Tensor
    low: Tensor
    scale: Tensor  # the factor that dequantises, and its reciprocal: [2]
    turned: Tensor | None = None  # transposed and padded, if the kernel that made it wrote it so as well


Grads: TypeAlias = tuple[Tensor | None, ...]


def float8_obstacle(device: torch.device) -> str:
    """Why a device cannot compute in fp8; empty if it can."""
    if device.type != "cuda":
        return "fp8 needs a GPU"
    if torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} does not support fp8; Ada, Hopper and later GPUs do"
    return "" if fused.TRITON else "the fp8 kernels need Triton, which is not installed"


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in e4m3, and the factor that dequantises it."""
    peak = weight.abs().amax().to(fused.exact(weight)).clamp_min(ops.TINY)
    return (weight * (ops.LARGEST / peak)).clamp(-ops.LARGEST, ops.LARGEST).to(ops.ACTIVATIONS), peak / ops.LARGEST


def round_tensor(x: Tensor) -> Float8:
    """Quantises a tensor by the peak of a sample. Gradients flow through `full`."""
    with torch.no_grad():
        scale = ops.sample_scale(fused.flat(x), ops.LARGEST / ROOM)
        return Float8(x, ops.round_scaled(x.contiguous(), scale, gradient=False), scale)


def round_norm(x: Tensor, norm: nn.LayerNorm) -> Float8:
    """Quantises the output of a norm, by a bound on it."""
    with torch.no_grad():
        scale = ops.norm_scale(norm.weight, norm.bias, ops.LARGEST)
        return Float8(x, ops.round_scaled(x.contiguous(), scale, gradient=False), scale)


def add_norm(z: Tensor, branch: Tensor, bias: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Float8]:
    """x = z + branch + bias and LN(x): [..., D] twice -> [..., D] twice."""
    args = (z, branch, bias, norm.weight, norm.bias, norm.eps)
    total, full, low, scale = cast("tuple[Tensor, ...]", _RoundedAddNorm.apply(*args))
    return total, Float8(full, low, scale)


def linear(x: Float8, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: [..., D] -> [..., N]."""
    return _RoundedLinear.apply(*x[:3], weight, bias, x.turned)


def gelu_linear(x: Float8, layer: nn.Linear, tanh: bool) -> Float8:
    """GELU(x Wᵀ + b): [..., D] -> [..., N]."""
    args = (*x[:3], layer.weight, layer.bias, tanh, torch.is_grad_enabled())
    return Float8(*cast("tuple[Tensor, ...]", _RoundedGeluLinear.apply(*args)))


def qkv(x: Float8, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x Wᵀ + b, split into q, k and v: [..., D] -> 3 x [..., N/3]."""
    return _RoundedSplitLinear.apply(*x[:3], weight, bias)


def attention(x: Float8, weight: Tensor, bias: Tensor | None, heads: int) -> Float8:
    """softmax(q kᵀ/√D_h) v with [q, k, v] = x Wᵀ + b, the heads side by side: [B, T, D] -> [B, T, D]."""
    return Float8(*cast("tuple[Tensor, ...]", _RoundedAttend.apply(*x[:3], weight, bias, heads)))


class _RoundedAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = ops.norm_scale(weight, shift, ops.LARGEST)
        args = (z.contiguous(), branch.contiguous(), bias, weight, shift, eps, scale)
        total, low, stats = ops.add_norm_float8(*args)
        ctx.mark_non_differentiable(low, scale)
        ctx.save_for_backward(total, stats, weight)
        ctx.biased = bias is not None
        return total, _stand_in(total), low, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return fused.add_norm_grads(ctx, grads[0], grads[1])


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor,
        low: Tensor,
        scale: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: Tensor | None,
    ) -> Tensor:
        out, *saved = _forward(low, scale, weight, bias)
        ctx.is_turned = turned is not None
        ctx.save_for_backward(saved[0] if turned is None else turned, *saved[1:])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        grad = fused.flat(grads[0])
        scale = ops.sample_scale(grad, GRADIENT_TARGET)
        low, turned = ops.round_turned(grad, scale)
        return *_backward(ctx, ctx.saved_tensors, low, scale, grad, grads[0], turned, ctx.is_turned), None


class _RoundedGeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor,
        low: Tensor,
        scale: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tanh: bool,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        pre, *saved = _forward(low, scale, weight, bias)
        of_out = ops.sample_scale(fused.flat(pre), ops.LARGEST / ROOM)
        if not keep:
            return _stand_in(pre), ops.gelu_float8(pre, tanh, of_out), of_out
        low_out, turned = ops.gelu_turned_float8(fused.flat(pre), tanh, of_out)
        low_out = low_out.view(pre.shape)
        ctx.mark_non_differentiable(low_out, of_out, turned)
        ctx.save_for_backward(*saved, pre)
        ctx.tanh = tanh
        return _stand_in(pre), low_out, of_out, turned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *saved, pre = ctx.saved_tensors
        grad = fused.flat(grads[0])
        scale = ops.sample_scale(grad, GRADIENT_TARGET)
        sums, low, turned = ops.gelu_backward_float8(grad, fused.flat(pre), ctx.tanh, scale)
        return *_backward(ctx, saved, low, scale, sums, pre, turned), None, None


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
        scale = ops.sample_scale(v, ATTENTION_TARGET)
        sums, low = ops.concat_qkv_grad_float8(q, k, v, scale)
        return _backward(ctx, ctx.saved_tensors, low, scale, sums, grads[0])


class _RoundedAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        three, *saved = _forward(low, scale, weight, bias)
        values = three.view(-1, three.shape[-1])[:, 2 * three.shape[-1] // 3 :]  # the output is an average of these
        of_out = ops.sample_scale(values, ops.LARGEST / ROOM)
        out, logs, low_out = ops.attention_float8(three, heads, of_out)
        ctx.mark_non_differentiable(low_out, of_out)
        ctx.save_for_backward(*saved, three, out, logs)
        ctx.heads = heads
        return out, low_out, of_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        *saved, three, out, logs = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale = ops.sample_scale(fused.flat(grad), ATTENTION_TARGET)
        sums, low = ops.attention_backward_float8(three, out, grad, logs, ctx.heads, scale)
        return *_backward(ctx, saved, fused.flat(low), scale, sums, three), None


def _stand_in(like: Tensor) -> Tensor:
    """A placeholder for gradients to flow through, if a tensor exists only in fp8."""
    return like.new_empty(1).expand(like.shape)


def _forward(low: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The product, and what its backward pass needs."""
    rounded, of_weight = round_weight(weight)
    out = ops.multiply(low, rounded, scale[0], of_weight, bias, weight.dtype, fast=True)
    return out, low, scale, rounded, of_weight


def _backward(
    ctx: Any,
    saved: Any,
    grad: Tensor,
    scale: Tensor,
    sums: Tensor,
    like: Tensor,
    turned: Tensor | None = None,
    is_turned: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of a product's input, weight and bias, given the output's gradient [M, N] in e5m2, also transposed if
    it was written so, partial sums of its columns, and a tensor of the output's outer shape and type. The weight's is a
    sum over all tokens, so it accumulates at full precision, to lose no small terms."""
    low, of_low, rounded, of_weight = saved
    of_x, _, _, asks_weight, asks_bias = ctx.needs_input_grad[:5]
    kind, found = like.dtype, [None, None]
    if of_x:
        across = rounded.t().contiguous()
        found[0] = ops.multiply(grad, across, scale[0], of_weight, None, kind, fast=True).view(*like.shape[:-1], -1)
    if asks_weight:
        x, rows = low if is_turned else ops.turn(fused.flat(low)), ops.turn(grad) if turned is None else turned
        found[1] = ops.multiply(rows, x, scale[0], of_low[0], None, kind, fast=False)
    return found[0], None, None, found[1], sums.sum(0).to(kind) if asks_bias else None

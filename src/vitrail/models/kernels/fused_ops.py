"""Encoder layers that make a single pass over memory, in half precision on a GPU.

In training, the gradient of a bias is a sum over all tokens. The compiler would compute it in a separate pass over the
largest tensors of the step; here it is summed while the gradient is written. In inference, the product at the end of a
branch adds to the residual stream in place. Results match the plain layers within the precision of the type. Wherever
`can_fuse_...` is false, the plain layers run.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TRITON = importlib.util.find_spec("triton") is not None
MANY_ROWS = 1 << 15
MANY_SUMS = 900 * 256  # columns times blocks of 256 rows: 900 programs, about seven per multiprocessor of an H200
TOKENS, HEADS = 256, (16, 32, 64)  # limits of single-tile attention: tokens, and widths of a head
TILE_BYTES = 208 * 1024  # of shared memory that it takes, for 256 tokens of width 64
WIDEST = 8192  # row of a residual sum that a program can hold
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What decides which kernels apply to a tensor, without the tensor."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def can_fuse_linear(z: Tensor | TensorFacts, layer: nn.Linear) -> bool:
    """Whether the kernels apply: training, half precision on a CUDA device, and rows that suit vector loads."""
    if not (TRITON and z.is_cuda and layer.training and torch.is_grad_enabled()):
        return False
    half = z.dtype in HALF and layer.weight.dtype == z.dtype
    aligned = layer.bias is not None and layer.in_features % 16 == 0 and layer.out_features % 16 == 0
    return half and aligned and not torch.is_autocast_enabled("cuda")


def rows_per_program(rows: int, columns: int) -> int:
    """Rows summed by each program of a kernel: 32 where 256 would leave part of the GPU idle, else 256, because the
    partial sums are read once more."""
    return 256 if rows >= MANY_ROWS or rows // 256 * columns >= MANY_SUMS else 32


def can_fuse_attention(z: Tensor | TensorFacts, layer: nn.Linear, heads: int) -> bool:
    """Whether single-tile attention applies, on a GPU with enough shared memory for the tile."""
    if not can_fuse_linear(z, layer) or z.shape[1] > TOKENS:
        return False
    fits = layer.out_features // 3 // heads in HEADS
    return fits and query_shared_memory(z.device.index) >= TILE_BYTES


def can_fuse_stream(z: Tensor | TensorFacts, layer: nn.Module, norm: nn.Module) -> bool:
    """Whether the kernels can add the output of `layer`, the last of a branch, to the residual stream and compute the
    norm that reads it: half precision on a CUDA device, with unsharded parameters."""
    if not (TRITON and z.is_cuda) or torch.is_autocast_enabled("cuda"):
        return False
    if type(layer) is not nn.Linear or type(norm) is not nn.LayerNorm or norm.bias is None or z.shape[-1] > WIDEST:
        return False  # also if another module replaces one of these
    return z.dtype in HALF and _lies_whole(layer.weight, z) and _lies_whole(norm.weight, z)


def can_fuse_gelu(pre: Tensor) -> bool:
    """Whether the GELU kernel applies: inference in half precision on a CUDA device."""
    return TRITON and pre.is_cuda and pre.dtype in HALF and not torch.is_grad_enabled()


def _lies_whole(parameter: Tensor, z: Tensor | TensorFacts) -> bool:
    """Whether a parameter is unsharded and has the type of z."""
    return type(parameter) in (nn.Parameter, Tensor) and parameter.dtype == z.dtype


def query_shared_memory(device: int | None) -> int:
    """Bytes of shared memory that one program can use on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fused_gelu_linear(z: Tensor, layer: nn.Linear, tanh: bool) -> Tensor:
    """GELU(z Wᵀ + b): [..., D] -> [..., N]."""
    return _GeluLinear.apply(z, layer.weight, layer.bias, tanh)


def fused_gelu(pre: Tensor, tanh: bool) -> Tensor:
    """GELU without gradients, in one pass at memory bandwidth."""
    return gelu(pre.contiguous(), tanh)


def fused_add_norm(z: Tensor, branch: Tensor, bias: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x = z + branch + bias and LN(x): [..., D] twice -> [..., D] twice."""
    return _AddNorm.apply(z, branch, bias, norm.weight, norm.bias, norm.eps)


def fused_upscale(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of a 2x2 transposed convolution with stride 2, as a matrix product: [B, h, w, D] and [D, M, 2, 2] ->
    [B, 2h, 2w, M]. Without gradients."""
    pre = F.linear(z, weight.permute(2, 3, 1, 0).flatten(0, 2), bias.repeat(4))
    return gelu_spread(pre.contiguous())


def fused_qkv(z: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """z Wᵀ + b, split into q, k and v: [..., D] -> 3 x [..., N/3]."""
    return _SplitLinear.apply(z, weight, bias)


def fused_attention(z: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """softmax(q kᵀ/√D_h) v with [q, k, v] = z Wᵀ + b, the heads side by side: [B, T, D] -> [B, T, D]."""
    return _Attend.apply(z, weight, bias, heads)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        pre = F.linear(z, weight, bias)
        ctx.save_for_backward(z, weight, pre)
        ctx.tanh = tanh
        return gelu(pre, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, pre = ctx.saved_tensors
        out, sums = gelu_backward(flat(grads[0]), flat(pre), ctx.tanh)
        return *_linear_backward(ctx, out, sums, z, weight), None


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(z, weight)
        return F.linear(z, weight, bias).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weight = ctx.saved_tensors
        q, k, v = grads
        out, sums = concat_qkv_grad(flat(q), flat(k), flat(v))
        return _linear_backward(ctx, out, sums, z, weight)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed, stats = add_norm(z.contiguous(), branch.contiguous(), bias, weight, shift, eps)
        ctx.save_for_backward(total, stats, weight)
        ctx.biased = bias is not None
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return add_norm_grads(ctx, *grads)


def add_norm_grads(ctx: Any, of_total: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs of `fused_add_norm`, given those of the sum and of its norm."""
    total, stats, weight = ctx.saved_tensors
    grad, sums = add_norm_backward(of_total.contiguous(), of_normed.contiguous(), total, stats, weight)
    of_weight, of_shift, of_bias = sums.sum(0).to(weight.dtype).unbind(0)
    return grad, grad, of_bias if ctx.biased else None, of_weight, of_shift, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
        qkv = F.linear(z, weight, bias)
        out, logs = attention(qkv, heads)
        ctx.save_for_backward(z, weight, qkv, out, logs)
        ctx.heads = heads
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, qkv, out, logs = ctx.saved_tensors
        of_qkv, sums = attention_backward(qkv, out, grads[0].contiguous(), logs, ctx.heads)
        return *_linear_backward(ctx, flat(of_qkv), sums, z, weight), None


def _linear_backward(
    ctx: Any, grad: Tensor, sums: Tensor, z: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, given the output's gradient [M, N] and partial sums of its columns."""
    of_z, of_weight, of_bias = ctx.needs_input_grad[:3]
    return (
        (grad @ weight).view(z.shape) if of_z else None,
        grad.t() @ flat(z) if of_weight else None,
        sums.sum(0).to(grad.dtype) if of_bias else None,
    )


def flat(z: Tensor) -> Tensor:
    """[..., D] -> [M, D], contiguous."""
    return z.reshape(-1, z.shape[-1]).contiguous()


# The kernels as custom operators, opaque to the compiler. On a CPU they are written out in torch, for tests.


@torch.library.custom_op("vitrail::gelu", mutates_args=())
def gelu(pre: Tensor, tanh: bool) -> Tensor:
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu(pre, tanh)


@gelu.register_kernel("cpu")
def _(pre: Tensor, tanh: bool) -> Tensor:
    return F.gelu(pre, approximate="tanh" if tanh else "none")


@gelu.register_fake
def _(pre: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(pre)


@torch.library.custom_op("vitrail::gelu_spread", mutates_args=())
def gelu_spread(pre: Tensor) -> Tensor:
    """GELU, with the four outputs of a pixel spread over 2x2 pixels: [B, h, w, 4M] -> [B, 2h, 2w, M]."""
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_spread(pre)


@gelu_spread.register_kernel("cpu")
def _(pre: Tensor) -> Tensor:
    four = F.gelu(pre).unflatten(3, (2, 2, -1))  # [B, h, w, 2, 2, M]
    return four.transpose(2, 3).flatten(3, 4).flatten(1, 2).contiguous()


@gelu_spread.register_fake
def _(pre: Tensor) -> Tensor:
    images, rows, columns, width = pre.shape
    return pre.new_empty(images, 2 * rows, 2 * columns, width // 4)


@torch.library.custom_op("vitrail::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, pre: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import gelu_kernels

    return gelu_kernels.gelu_backward(grad, pre, tanh, rows_per_program(*pre.shape))


@gelu_backward.register_kernel("cpu")
def _(grad: Tensor, pre: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    out = torch.ops.aten.gelu_backward(grad, pre, approximate="tanh" if tanh else "none")
    return out, out.sum(0, keepdim=True)


@gelu_backward.register_fake
def _(grad: Tensor, pre: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(pre), partial_sums(pre, pre.shape[1])


@torch.library.custom_op("vitrail::add_norm", mutates_args=())
def add_norm(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x = z + branch + bias, LN(x), and the mean and reciprocal standard deviation of each row [M, 2]."""
    from vitrail.models.kernels import norm_kernels

    return norm_kernels.add_norm(z, branch, bias, weight, shift, eps)


@add_norm.register_kernel("cpu")
def _(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = z + (branch if bias is None else branch + bias)
    variance, mean = torch.var_mean(flat(total), -1, correction=0)
    return (
        total,
        F.layer_norm(total, z.shape[-1:], weight, shift, eps),
        torch.stack([mean, (variance + eps).rsqrt()], 1),
    )


@add_norm.register_fake
def _(
    z: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(z), row_stats(z)


def row_stats(z: Tensor) -> Tensor:
    """An uninitialised tensor for two numbers per row."""
    return z.new_empty(count_rows(z), 2, dtype=exact(z))


@torch.library.custom_op("vitrail::add_norm_backward", mutates_args=())
def add_norm_backward(
    of_total: Tensor, of_normed: Tensor, total: Tensor, stats: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of each summand, and partial sums [..., 3, D] for the gradients of the norm's weight, its shift and
    the bias."""
    from vitrail.models.kernels import norm_kernels

    return norm_kernels.add_norm_backward(of_total, of_normed, total, stats, weight, norm_rows(total))


@add_norm_backward.register_kernel("cpu")
def _(of_total: Tensor, of_normed: Tensor, total: Tensor, stats: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    mean, over = (part.view(*total.shape[:-1], 1) for part in stats.unbind(1))
    standard, slope = (total - mean) * over, of_normed * weight
    along = (slope * standard).mean(-1, keepdim=True)
    grad = of_total + over * (slope - slope.mean(-1, keepdim=True) - standard * along)
    return grad, torch.stack([flat(part).sum(0) for part in (of_normed * standard, of_normed, grad)])[None]


@add_norm_backward.register_fake
def _(of_total: Tensor, of_normed: Tensor, total: Tensor, stats: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    parts = 1 if total.device.type == "cpu" else -(-count_rows(total) // norm_rows(total))
    return torch.empty_like(total), total.new_empty(parts, 3, total.shape[-1], dtype=exact(total))


def norm_rows(total: Tensor) -> int:
    """Rows summed by each program of a norm's backward pass."""
    return 64 if count_rows(total) >= MANY_ROWS else 16


def count_rows(z: Tensor) -> int:
    return math.prod(z.shape[:-1])


@torch.library.custom_op("vitrail::shifted_norm", mutates_args=())
def shifted_norm(z: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LN(z + shift), with a shift [D] in full precision: [..., D] -> [..., D]."""
    from vitrail.models.kernels import norm_kernels

    return norm_kernels.shifted_norm(z, shift, weight, bias, eps)


@shifted_norm.register_kernel("cpu")
def _(z: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(z if shift is None else z + shift, z.shape[-1:], weight, bias, eps)


@shifted_norm.register_fake
def _(z: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(z)


@torch.library.custom_op("vitrail::add_product", mutates_args=("z",))
def add_product(z: Tensor, x: Tensor, weight: Tensor) -> None:
    """z += x Wᵀ, added by the product itself at no extra cost: [M, D], [M, N], [D, N]."""
    z.addmm_(x, weight.t())


@add_product.register_fake
def _(z: Tensor, x: Tensor, weight: Tensor) -> None:
    return None


@torch.library.custom_op("vitrail::join", mutates_args=())
def concat_qkv_grad(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    return attention_kernels.concat_qkv_grad(q, k, v, rows_per_program(q.shape[0], 3 * q.shape[1]))


@concat_qkv_grad.register_kernel("cpu")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.cat([q, k, v], dim=1)
    return out, out.sum(0, keepdim=True)


@concat_qkv_grad.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[0], 3 * q.shape[1]), partial_sums(q, 3 * q.shape[1])


def partial_sums(like: Tensor, columns: int) -> Tensor:
    rows = 1 if like.device.type == "cpu" else -(-like.shape[0] // rows_per_program(like.shape[0], columns))
    return like.new_empty(rows, columns, dtype=exact(like))


@torch.library.custom_op("vitrail::attention", mutates_args=())
def attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    return attention_kernels.attention(qkv, heads)


@attention.register_kernel("cpu")
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    q, k, v = by_head(qkv, heads)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return _merge_heads(logits.softmax(-1) @ v), logits.logsumexp(-1) / math.log(2)


@attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    images, tokens, width = qkv.shape
    logs = qkv.new_empty(images, heads, tokens, dtype=exact(qkv))
    return qkv.new_empty(images, tokens, width // 3), logs


@torch.library.custom_op("vitrail::attention_backward", mutates_args=())
def attention_backward(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    from vitrail.models.kernels import attention_kernels

    return attention_kernels.attention_backward(qkv, out, grad, logs, heads)


@attention_backward.register_kernel("cpu")
def _(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    q, k, v = by_head(qkv, heads)
    (g,) = by_head(grad, heads, 1)
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale - logs[..., None] * math.log(2)).exp()
    slope = p * (g @ v.mT - (out * grad).unflatten(-1, (heads, -1)).sum(-1).mT[..., None]) * scale
    grads = torch.cat([_merge_heads(part) for part in (slope @ k, slope.mT @ q, p.mT @ g)], dim=-1)
    return grads, grads.sum(1)


@attention_backward.register_fake
def _(qkv: Tensor, out: Tensor, grad: Tensor, logs: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), qkv.new_empty(qkv.shape[0], qkv.shape[2], dtype=exact(qkv))


def by_head(z: Tensor, heads: int, parts: int = 3) -> list[Tensor]:
    """[B, T, parts·D] -> [B, k, T, D_h] each."""
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in z.chunk(parts, dim=-1)]


def _merge_heads(z: Tensor) -> Tensor:
    """[B, k, T, D_h] -> [B, T, D]."""
    return z.transpose(1, 2).flatten(2)


def exact(like: Tensor) -> torch.dtype:
    """The type that sums are kept in: float32, or on a CPU, which only tests use, the tensor's own."""
    return like.dtype if like.device.type == "cpu" else torch.float32

"""Heads on a network's representation for contrastive learning and distillation, discarded after training.

Statistics and norms are computed in float32 (or wider), products in the type of the weights.

A teacher is a copy of the student without gradients that follows it after each step: θ' ← m·θ' + (1 - m)·θ.
"""

import copy
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.distributed.meta_init import local_rows
from vitrail.distributed.process_group import World, sum_across
from vitrail.models.backbone import Backbone
from vitrail.models.vit import ViT


class ValidRows(NamedTuple):
    """Which rows of a batch hold an image [B], and how many do in all processes (1 where none does)."""

    valid: Tensor
    number: Tensor
    world: World

    @classmethod
    def from_mask(cls, valid: Tensor, world: World) -> "ValidRows":
        return cls(valid, sum_across(valid.float().sum(), world).clamp(min=1.0), world)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the rows of all processes that hold an image: [..., B, D] -> [..., 1, D]."""
        own = torch.where(self.valid[:, None], x, 0.0).sum(-2, keepdim=True)
        return sum_across(own, self.world) / self.number


class BatchNorm(nn.Module):
    """Normalises each feature by its mean and variance over the rows of all processes that hold an image: [..., B, D],
    separately for each leading index. There are no running statistics: these heads are not used in evaluation."""

    def __init__(self, width: int, *, affine: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.eps = eps

    def forward(self, x: Tensor, rows: ValidRows) -> Tensor:
        x = to_float32(x)
        x = x - rows.mean(x)
        x = x * (rows.mean(x.square()) + self.eps).rsqrt()
        return x if self.weight is None or self.bias is None else x * self.weight + self.bias


class NormedMLP(nn.Module):
    """Linear layers without bias, each followed by a batch norm, with ReLUs in between; the last norm has no affine
    parameters (MoCo v3). `widths` are those of the input, the hidden layers and the output."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        ends = list(pairwise(widths))
        last = len(ends) - 1
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ends)
        self.norms = nn.ModuleList(BatchNorm(b, affine=at < last) for at, (_, b) in enumerate(ends))

    def forward(self, x: Tensor, rows: ValidRows) -> Tensor:
        """[..., B, D] -> [..., B, width]."""
        for at, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(apply_linear(layer, x.relu() if at else x), rows)
        return x


class Prototypes(nn.Linear):
    """Cosines between inputs of unit length and `outputs` learnt directions: the rows of the weight, whatever their
    length."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        directions = F.normalize(to_float32(self.weight), dim=-1)
        return F.linear(input.to(self.weight.dtype), directions.to(self.weight.dtype))


class PrototypeHead(nn.Module):
    """Three layers with GELU to a bottleneck of unit length, then cosines to prototypes (DINO): [B, D] -> [B, K]."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((width, hidden, hidden, bottleneck)))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.last = Prototypes(bottleneck, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = apply_linear(layer, F.gelu(x) if at else x)
        return to_float32(self.last(F.normalize(to_float32(x), dim=-1)))


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output, for an input of any floating-point type."""
    assert isinstance(layer, nn.Linear)
    return layer(x.to(layer.weight.dtype))


def to_float32(x: Tensor) -> Tensor:
    """Converts to float32, unless the type is float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mlp_macs(*widths: int) -> int:
    """Multiply-accumulates of one row through layers of these widths."""
    return sum(a * b for a, b in pairwise(widths))


aten: Any = torch.ops.aten  # torch._foreach_* are these


class Teacher(nn.Module):
    """A network and its head, always in evaluation mode: its outputs are deterministic.

    Its weights are float32 like the student's, and are cast with them if the step runs in bfloat16. When sharded, it is
    split like the student, so that every process updates the rows it holds.
    """

    def __init__(self, network: ViT, head: nn.Module) -> None:
        super().__init__()
        self.network, self.head = copy.deepcopy(network), copy.deepcopy(head)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher":
        del mode
        return super().train(False)

    @torch.no_grad()
    def copy_from(self, network: Backbone, head: nn.Module) -> None:
        """Copies the student, fixed tables included."""
        for own, theirs in ((self.network, network), (self.head, head)):
            aten._foreach_copy_(local_tensors(own.parameters()), local_tensors(theirs.parameters()))
            for table, other in zip(own.buffers(), theirs.buffers(), strict=True):
                table.copy_(other)

    @torch.no_grad()
    def follow(self, network: Backbone, head: nn.Module, momentum: float) -> None:
        """Moves 1 - momentum of the way towards the student."""
        for own, theirs in ((self.network, network), (self.head, head)):
            values = local_tensors(own.parameters()), local_tensors(theirs.parameters())
            aten._foreach_lerp_.Scalar(*values, 1 - momentum)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's shard of each tensor."""
    return [local_rows(tensor)[0] for tensor in tensors]


def momentum_at(step: int, *, start: float, steps: int) -> float:
    """The teacher's momentum at a step: from `start` to 1 along half a cosine, over all steps of a run."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2

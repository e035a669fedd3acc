"""What contrast and distillation put on a network's representation, and lay aside after training.

Statistics and norms are taken in float32 (or wider), products in the type of the weights.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.distributed.exchange import summed
from vitrail.distributed.world import World


class Rows(NamedTuple):
    """Which rows of a batch hold a picture [B], and how many do in all processes (1 where none does)."""

    valid: Tensor
    number: Tensor
    world: World

    @classmethod
    def of(cls, valid: Tensor, world: World) -> "Rows":
        return cls(valid, summed(valid.float().sum(), world).clamp(min=1.0), world)

    def mean(self, x: Tensor) -> Tensor:
        """Over the rows of all processes that hold a picture: [..., B, D] -> [..., 1, D]."""
        own = torch.where(self.valid[:, None], x, 0.0).sum(-2, keepdim=True)
        return summed(own, self.world) / self.number


class BatchNorm(nn.Module):
    """Each feature by its mean and variance over the rows of all processes that hold a picture: [..., B, D], whatever
    stands in front of the rows by itself. Nothing is remembered for evaluation, where a head like this has no place."""

    def __init__(self, width: int, *, affine: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.eps = eps

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        x = widened(x)
        x = x - rows.mean(x)
        x = x * (rows.mean(x.square()) + self.eps).rsqrt()
        return x if self.weight is None or self.bias is None else x * self.weight + self.bias


class NormedMLP(nn.Module):
    """Layers without bias, a batch norm behind each, a ReLU between them; the last norm has no scale of its own
    (MoCo v3). `widths` are those of the input, the hidden layers and the output."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        ends = list(pairwise(widths))
        last = len(ends) - 1
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ends)
        self.norms = nn.ModuleList(BatchNorm(b, affine=at < last) for at, (_, b) in enumerate(ends))

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """[..., B, D] -> [..., B, width]."""
        for at, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(product(layer, x.relu() if at else x), rows)
        return x


class Prototypes(nn.Linear):
    """Cosines between inputs of unit length and `outputs` learnt directions: the rows of the weight, whatever their
    length."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        directions = F.normalize(widened(self.weight), dim=-1)
        return F.linear(input.to(self.weight.dtype), directions.to(self.weight.dtype))


class PrototypeHead(nn.Module):
    """Three layers with GELU to a bottleneck of unit length, then cosines to prototypes (DINO): [B, D] -> [B, K]."""

    def __init__(self, width: int, *, hidden: int, bottleneck: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((width, hidden, hidden, bottleneck)))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.last = Prototypes(bottleneck, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = product(layer, F.gelu(x) if at else x)
        return widened(self.last(F.normalize(widened(x), dim=-1)))


def product(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output, for an input of whatever type."""
    assert isinstance(layer, nn.Linear)
    return layer(x.to(layer.weight.dtype))


def widened(x: Tensor) -> Tensor:
    """In float32, where it is not that or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mlp_macs(*widths: int) -> int:
    """Multiply-accumulates of one row through layers of these widths."""
    return sum(a * b for a, b in pairwise(widths))

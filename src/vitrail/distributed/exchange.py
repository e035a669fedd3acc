"""Tensors that a loss needs of all processes: gathered as they are, or summed so that gradients find their way back.

Both are part of a forward pass, which the caller counts as one call; both do nothing in a world of one. A gradient here
is that of the sum of all processes' losses, which is what the processes' own gradients add up to.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from vitrail.distributed.world import World


def gathered(tensor: Tensor, world: World) -> Tensor:
    """Every process's rows in the order of ranks, without gradient: [B, ...] -> [processes · B, ...]."""
    rows = tensor.detach()
    if world.size == 1:
        return rows
    sent = rows.contiguous()
    if sent.dtype == torch.bool:  # which not every backend sends
        sent = sent.view(torch.uint8)
    out = sent.new_empty(world.size * sent.shape[0], *sent.shape[1:])
    dist.all_gather_into_tensor(out, sent)
    return out.view(torch.bool) if rows.dtype == torch.bool else out


def summed(tensor: Tensor, world: World) -> Tensor:
    """The sum over processes, in every process. All of their losses depend on what this one put in, so the gradient is
    a sum over processes, too."""
    return tensor if world.size == 1 else cast(Tensor, _Sum.apply(tensor))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return _added(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return _added(grads[0])


def _added(tensor: Tensor) -> Tensor:
    out = tensor.contiguous().clone()
    dist.all_reduce(out)
    return out

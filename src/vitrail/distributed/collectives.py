"""Flags that any process may raise and that all act upon at the same step: that a signal came, that it is time to save.

Every second step the flags go round on the CPU, in the background, and are looked at two steps later, when they have
long come back. So a flag is seen by all within three steps, and no step waits for a device.

Tensors that a loss needs of all processes: gathered as they are, or summed so that gradients find their way back.

Both are part of a forward pass, which the caller counts as one call; both do nothing in a world of one. A gradient here
is that of the sum of all processes' losses, which is what the processes' own gradients add up to.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from vitrail.distributed.process_group import World

EVERY = 2  # steps between two rounds


class FlagSync:
    """The flags of a world, step by step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: tuple[Tensor, Callable[[], object]] | None = None

    def __call__(self, step: int, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which flags some process had raised, as all of them know it after this step: a process alone at once. All
        call this after the same steps. A flag that is seen now is not sent on: whatever raised it is about to go."""
        if self.world.size == 1:
            return flags
        if step % EVERY:
            return (False,) * len(flags)
        seen = self._receive() or (False,) * len(flags)
        count = torch.tensor([mine and not told for mine, told in zip(flags, seen, strict=True)], dtype=torch.int32)
        self.sent = count, self.world.all_reduce_async(count)
        return seen

    def _receive(self) -> tuple[bool, ...]:
        """What went round the time before; nothing at the first time."""
        if self.sent is None:
            return ()
        count, wait = self.sent
        wait()
        return tuple(number > 0 for number in count.tolist())


def gather_rows(tensor: Tensor, world: World) -> Tensor:
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


def sum_across(tensor: Tensor, world: World) -> Tensor:
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

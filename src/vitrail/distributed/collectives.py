"""Exchanges between processes: flags that all act upon at the same step, and tensors that a loss needs from all.

Every second step `FlagSync` sums the flags on the CPU in the background; they are read two steps later. All processes
therefore see a flag (a signal arrived, it is time to save) within three steps, and no step waits for a device.

`gather_rows` and `sum_across` are part of a forward pass, which the caller counts as one collective; with one process
they do nothing. Gradients are those of the sum of all processes' losses.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from vitrail.distributed.process_group import World

EVERY = 2  # steps between two rounds


class FlagSync:
    """Shares flags between all processes, step by step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: tuple[Tensor, Callable[[], object]] | None = None

    def __call__(self, step: int, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """The flags that any process had raised, identical in all processes; with one process, immediately. All
        processes call this after the same steps. A flag that is reported now is not sent again."""
        if self.world.size == 1:
            return flags
        if step % EVERY:
            return (False,) * len(flags)
        seen = self._receive() or (False,) * len(flags)
        count = torch.tensor([mine and not known for mine, known in zip(flags, seen, strict=True)], dtype=torch.int32)
        self.sent = count, self.world.all_reduce_async(count)
        return seen

    def _receive(self) -> tuple[bool, ...]:
        """The flags of the previous round; empty at first."""
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
    if sent.dtype == torch.bool:  # not every backend supports bool
        sent = sent.view(torch.uint8)
    out = sent.new_empty(world.size * sent.shape[0], *sent.shape[1:])
    dist.all_gather_into_tensor(out, sent)
    return out.view(torch.bool) if rows.dtype == torch.bool else out


def sum_across(tensor: Tensor, world: World) -> Tensor:
    """The sum over processes, in every process. All losses depend on this process's input, so the gradient is summed
    over processes too."""
    return tensor if world.size == 1 else cast(Tensor, _Sum.apply(tensor))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return _all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return _all_reduce(grads[0])


def _all_reduce(tensor: Tensor) -> Tensor:
    out = tensor.contiguous().clone()
    dist.all_reduce(out)
    return out

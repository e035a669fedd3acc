"""Flags that any process may raise and that all act upon at the same step: that a signal came, that it is time to save.

Every second step the flags go round on the CPU, in the background, and are looked at two steps later, when they have
long come back. So a flag is seen by all within three steps, and no step waits for a device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.distributed.world import World

EVERY = 2  # steps between two rounds


class Accord:
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
        seen = self.taken() or (False,) * len(flags)
        count = torch.tensor([mine and not told for mine, told in zip(flags, seen, strict=True)], dtype=torch.int32)
        self.sent = count, self.world.summing(count)
        return seen

    def taken(self) -> tuple[bool, ...]:
        """What went round the time before; nothing at the first time."""
        if self.sent is None:
            return ()
        count, wait = self.sent
        wait()
        return tuple(number > 0 for number in count.tolist())

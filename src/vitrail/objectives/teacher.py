"""A teacher: a copy of the learner that gets no gradients and follows it, θ' ← m·θ' + (1 - m)·θ, after each step."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.distributed.pieces import local
from vitrail.models.backbone import Backbone
from vitrail.models.vit import ViT

aten: Any = torch.ops.aten  # torch._foreach_* are these


class Teacher(nn.Module):
    """A network and what stands on it. It is always in evaluation mode: what it teaches is not a matter of chance.

    Its values are float32 like the learner's own, and are cast with them where the step runs in bfloat16; sharded, it
    is cut like the learner, so that every process follows with the rows it holds.
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
    def start(self, network: Backbone, head: nn.Module) -> None:
        """Becomes the learner as it is, fixed tables included."""
        for own, theirs in ((self.network, network), (self.head, head)):
            aten._foreach_copy_(held(own.parameters()), held(theirs.parameters()))
            for table, other in zip(own.buffers(), theirs.buffers(), strict=True):
                table.copy_(other)

    @torch.no_grad()
    def follow(self, network: Backbone, head: nn.Module, momentum: float) -> None:
        """Moves 1 - momentum of the way to the learner."""
        for own, theirs in ((self.network, network), (self.head, head)):
            aten._foreach_lerp_.Scalar(held(own.parameters()), held(theirs.parameters()), 1 - momentum)


def held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each."""
    return [local(tensor)[0] for tensor in tensors]


def momentum_at(step: int, *, start: float, steps: int) -> float:
    """From `start` to 1 along half a cosine, over all steps of a run."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2

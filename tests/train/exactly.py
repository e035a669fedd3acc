"""Some updates of a run in float64 throughout, where two ways of doing the same sums agree to many digits.

In float32 they need not: the batch norms of MoCo's heads divide by deviations of almost nothing, and what was rounding
before a few updates is visible after them. How much of it there is depends on the processor.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed import parallel
from vitrail.distributed.meta_init import gather_tensor, local_rows
from vitrail.distributed.process_group import World
from vitrail.optim.schedules import Rates
from vitrail.tasks.registry import task_of
from vitrail.train.assemble import make_network, place_objective
from vitrail.train.config import Run
from vitrail.train.data import TrainBatches, open_splits
from vitrail.train.resolve import resolve
from vitrail.train.step import TrainingStep


class PlainSGD:
    """SGD with momentum in the parameters' own type; vitrail's optimisers know float32 alone."""

    def __init__(self, module: nn.Module, momentum: float) -> None:
        self.params = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.velocity = [torch.zeros_like(local_rows(parameter)[0]) for parameter in self.params]
        self.momentum = momentum

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.params if parameter.grad is not None]

    @torch.no_grad()
    def step(self, rates: Rates, *, divisor: Tensor, ok: Tensor) -> None:
        assert ok
        for parameter, velocity in zip(self.params, self.velocity, strict=True):
            if parameter.grad is not None:
                velocity.mul_(self.momentum).add_(local_rows(parameter.grad)[0] / divisor)
                local_rows(parameter)[0].sub_(velocity, alpha=float(rates.head))

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None


def learnt(world: World, run: Run, dtype: torch.dtype, nudge: float = 0.0) -> dict[str, Tensor]:
    """All that the objective holds after the run's steps, teacher included, whole, in the first process. With a
    `nudge` the parameters start that much off, each to one side."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    policy: Any = lambda **kinds: MixedPrecisionPolicy(**{**kinds, "reduce_dtype": dtype})  # noqa: E731
    parallel.MixedPrecisionPolicy = policy  # in this process, which ends with the call
    splits = open_splits(run.data, task_of(run.objective))
    run = resolve(run, splits, world)
    network, values = make_network(run, splits, world, None, None)
    objective, made = place_objective(run, splits, world, network, values)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.parameters() if nudge else ():
            parameter += nudge * (2 * torch.randint(2, parameter.shape, generator=draw) - 1)
    optimiser: Any = PlainSGD(objective, run.optim.momentum)
    run = replace(run, optim=replace(run.optim, clip=0.0))
    step = TrainingStep(objective, made, optimiser, None, world, run)
    run = replace(run, data=replace(run.data, resident="off"))
    feed = TrainBatches(run, splits.train, objective.views(run.augmentation), world, UnreadableLog())
    for batch in feed.iterate(0, run.steps):
        step(batch, step=batch.step, rates=Rates(run.optim.lr, run.optim.lr), micro=run.micro)
    return {
        name: gather_tensor(tensor, world).detach().clone()
        for name, tensor in objective.state_dict(keep_vars=True).items()
    }

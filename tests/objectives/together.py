"""One step of an objective with a teacher, alone or as one of several processes, and all that it leaves."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.objectives.taught import batch, contrast, dealt, distil
from vitrail.distributed.meta_init import gather_tensor
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.distributed.process_group import World


class Left(NamedTuple):
    """Sums over processes; gradients and state whole, in the first process."""

    total: float
    tallies: dict[str, float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def stepped(world: World, kind: str, sharding: Sharding, double: bool, micro: int = 1) -> Left:
    objective: Any = contrast(world) if kind == "moco" else distil(world)
    if double:
        objective.double()
    inputs = dealt(objective.inputs(batch(small=0 if kind == "moco" else 3), seed=0, step=0), world)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP firing post-backward hooks", UserWarning)
        parallel = parallelise(objective, world=world, sharding=sharding)
        sums, names = torch.zeros(4, dtype=torch.float64), list[str]()
        for at in range(micro):
            with parallel.micro(last=at == micro - 1):
                outcome = parallel(*(tensor.chunk(micro)[at] for tensor in inputs))
                outcome.total.backward()
            sums += torch.stack([outcome.total, outcome.count, *outcome.tallies.values()]).detach()
            names = list(outcome.tallies)
    world.sum_(sums)
    gradients = {
        name: gather_tensor(parameter.grad, world) * parallel.gradient_factor
        for name, parameter in objective.named_parameters()
        if parameter.grad is not None
    }
    with torch.no_grad():
        for parameter in objective.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parallel.gradient_factor * parameter.grad
    objective.after_step(0)
    assert sums[1] == 7
    state = {name: gather_tensor(tensor, world) for name, tensor in objective.state_dict(keep_vars=True).items()}
    tallies = dict(zip(names, sums[2:].tolist(), strict=True))
    return Left(float(sums[0]), tallies, gradients, {name: tensor.detach() for name, tensor in state.items()})

"""All that a run must remember, as named tensors, and how they go to a checkpoint and come back.

Parameters, the optimiser's moments, the average: nothing else. Order, augmentation, mixing and dropout are computed
from the seed and the step. Any number of processes may write, and any other number read.
"""

from collections.abc import Mapping

from torch import Tensor

from vitrail.checkpoint.files.soundness import first_unsound
from vitrail.checkpoint.store.pieces import Piece
from vitrail.checkpoint.store.saved import Saved
from vitrail.core.errors import MismatchedWeights
from vitrail.distributed.pieces import local, owned, put
from vitrail.distributed.world import World
from vitrail.objectives.objective import Objective
from vitrail.optim.averaging import Average
from vitrail.optim.optimiser import Optimiser


def state_of(objective: Objective, optimiser: Optimiser, average: Average | None) -> dict[str, Tensor]:
    """The live tensors by name; under sharding each process has its part of them."""
    model = {f"model/{name}": tensor for name, tensor in objective.state_dict(keep_vars=True).items()}
    optim = {f"optim/{name}": tensor for name, tensor in optimiser.state().items()}
    averages = {} if average is None else average.state()
    return {**model, **optim, **averages}


def pieces(state: Mapping[str, Tensor], world: World) -> dict[str, Piece]:
    """What this process writes of it."""
    found: dict[str, Piece] = {}
    for name, tensor in state.items():
        if owned(tensor, world):
            part, shape, start = local(tensor.detach())
            found[name] = Piece(tensor=part, shape=shape, start=start)
    return found


def fault_in(state: Mapping[str, Tensor]) -> str:
    """The first tensor that is not finite in what this process holds, in words; nothing where all are sound."""
    unsound = first_unsound({name: local(tensor.detach())[0] for name, tensor in state.items()})
    return "" if unsound is None else f"{unsound[0]} holds {unsound[1]}"


def restore(state: Mapping[str, Tensor], saved: Saved) -> None:
    """Puts a checkpoint's values in their places. Names and shapes must be the same, all of them."""
    names = set(saved.names)
    for what, left in (("lacks", sorted(set(state) - names)), ("also holds", sorted(names - set(state)))):
        if left:
            raise MismatchedWeights(
                f"the checkpoint of step {saved.step} {what} {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: "
                "it is of another network or optimiser; start in another folder"
            )
    for name, tensor in state.items():
        part, shape, start = local(tensor.detach())
        found = saved.names[name][0]
        if tuple(found) != tuple(shape):
            raise MismatchedWeights(
                f"the checkpoint of step {saved.step} holds {name} as {tuple(found)}, the network as {tuple(shape)}"
            )
        put(tensor.detach(), saved.read(name, start, part.shape[0]) if shape else saved.read(name))

"""Named tensors that go into a checkpoint, and back in place or not at all."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.core.errors import MismatchedWeights
from vitrail.optim.foreach import local


@torch.no_grad()
def refill(own: Mapping[str, Tensor], given: Mapping[str, Tensor], whose: str) -> None:
    """Copies given tensors into one's own of the same names and shapes; a mismatch is refused before anything changes.
    Types may differ, for a run that goes on with another accumulator. Sharded tensors take shards of the same kind."""
    for name, tensor in own.items():
        if name not in given:
            raise MismatchedWeights(f"{whose}: {name!r} is missing; these are of another network or optimiser")
        if given[name].shape != tensor.shape:
            raise MismatchedWeights(
                f"{whose}: {name!r} has shape {tuple(given[name].shape)}, but {tuple(tensor.shape)} is wanted; "
                "these are of another network"
            )
    for name in given:
        if name not in own:
            raise MismatchedWeights(f"{whose}: {name!r} is left over; these are of another network or optimiser")
    for name, tensor in own.items():
        local(tensor).copy_(local(given[name]))

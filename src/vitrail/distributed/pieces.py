"""Who holds which rows of a tensor, and who writes them. A checkpoint is made of rows, whatever the world.

Whole tensors are held alike by every process and written by the first. Sharded ones (FSDP2) are cut along dimension 0
into runs of ceil(rows / shards), the last ones shorter or empty; where shards are replicated (HSDP), the first replica
writes.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from vitrail.distributed.world import World


def local(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """The rows that this process holds, sharing storage; the whole tensor's shape; the first of these rows."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), shape, 0
    with torch.no_grad():
        rows = tensor.to_local()
    shards, place = _shard(tensor)
    return rows, shape, min(place * -(-shape[0] // shards), shape[0])


def owned(tensor: Tensor, world: World) -> bool:
    """Whether this process writes its rows: for each row of each tensor exactly one does."""
    if not isinstance(tensor, DTensor):
        return world.first
    replicas = [
        place
        for place, placement in zip(_coordinate(tensor), tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    ]
    _, place = _shard(tensor)
    return not any(replicas) and (place == 0 or local(tensor)[0].shape[0] > 0)


@torch.no_grad()
def put(target: Tensor, rows: Tensor) -> None:
    """Fills the rows that this process holds."""
    here = local(target)[0]
    if here.shape != rows.shape:
        raise ValueError(f"rows of {tuple(rows.shape)} do not fit the {tuple(here.shape)} that are held here")
    here.copy_(rows)


@torch.no_grad()
def whole(tensor: Tensor, world: World) -> Tensor:
    """The tensor with all its rows on the CPU, in the first process; elsewhere its shape without storage. Every process
    must call it, tensor by tensor."""
    world.moved()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if world.first else torch.empty_like(full, device="meta")


def _shard(tensor: DTensor) -> tuple[int, int]:
    """Into how many runs of rows a tensor is cut, and which of them is here."""
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    if not cuts:
        return 1, 0
    ((axis, placement),) = cuts
    assert placement.dim == 0, placement
    return tensor.device_mesh.size(axis), _coordinate(tensor)[axis]


def _coordinate(tensor: DTensor) -> tuple[int, ...]:
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this process is outside the mesh"
    return tuple(place)

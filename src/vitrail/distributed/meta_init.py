"""Which process holds and writes which rows of a tensor, and values for modules built on the meta device.

A checkpoint consists of rows, however many processes there are. Unsharded tensors are identical in every process and
written by the first. Sharded ones (FSDP2) are split along dimension 0 into runs of ceil(rows / shards), the last ones
shorter or empty; with replicated shards (HSDP), the first replica writes.

A network that fits in no single process is built on the meta device, sharded, given storage for its local rows only,
and then filled from a file, row by row, or with fresh weights. Fresh weights equal those of one process with the same
seed: every process draws every full tensor on the CPU in the same order, one module at a time, and keeps its rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vitrail.distributed.process_group import World


def local_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """The rows that this process holds, sharing storage; the full tensor's shape; the index of the first row."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), shape, 0
    with torch.no_grad():
        rows = tensor.to_local()
    shards, place = _shard(tensor)
    return rows, shape, min(place * -(-shape[0] // shards), shape[0])


def is_writer(tensor: Tensor, world: World) -> bool:
    """Whether this process writes its rows; exactly one process does for each row."""
    if not isinstance(tensor, DTensor):
        return world.is_main
    places = zip(_coordinate(tensor), tensor.placements, strict=True)
    first_replica = not any(place for place, placement in places if isinstance(placement, Replicate))
    return first_replica and (_shard(tensor)[1] == 0 or local_rows(tensor)[0].shape[0] > 0)


@torch.no_grad()
def copy_rows(target: Tensor, rows: Tensor) -> None:
    """Fills the rows that this process holds."""
    here = local_rows(target)[0]
    if here.shape != rows.shape:
        raise ValueError(f"rows of {tuple(rows.shape)} do not fit the {tuple(here.shape)} that are held here")
    here.copy_(rows)


@torch.no_grad()
def gather_tensor(tensor: Tensor, world: World) -> Tensor:
    """The full tensor on the CPU in the main process; elsewhere a meta tensor. All processes must call this in the
    same order."""
    world.count_collective()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if world.is_main else torch.empty_like(full, device="meta")


def _shard(tensor: DTensor) -> tuple[int, int]:
    """The number of row shards of a tensor, and the index of the local one."""
    axis = next((axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)), None)
    return (1, 0) if axis is None else (tensor.device_mesh.size(axis), _coordinate(tensor)[axis])


def _coordinate(tensor: DTensor) -> tuple[int, ...]:
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this process is outside the mesh"
    return tuple(place)


DRAWING = ("reset_parameters", "initialise")  # how torch's modules and ours name their initialisation


@torch.no_grad()
def give_storage(module: nn.Module, device: torch.device) -> None:
    """Allocates memory for meta tensors, uninitialised; other tensors keep their values."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kept = {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}
    if len(kept) == len(tensors):
        if device.type == "mps":
            module.float()  # mps has no float64, and trained modules hold nothing narrower than float32
        module.to(device)
        return
    module.to_empty(device=device)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in kept:
            tensor.copy_(kept[name])


def draw_parameters(module: nn.Module, initialise: Callable[[Any], None]) -> None:
    """Fresh weights from torch's current seed, the same as if the module had been built with storage and then given to
    `initialise`. Torch's modules draw in `reset_parameters` when they are built, ours in `initialise`."""
    drawing = [(part, name) for part in module.modules() for name in DRAWING if callable(getattr(part, name, None))]
    for part, name in drawing:
        setattr(part, name, partial(_draw_full, part, getattr(part, name)))
    try:
        for part in module.modules():
            if callable(drawn := getattr(part, "reset_parameters", None)):
                drawn()
        initialise(module)
    finally:
        for part, name in drawing:
            delattr(part, name)


def _draw_full(part: nn.Module, draw: Callable[[], None]) -> None:
    """Gives an initialisation method full tensors on the CPU while it runs."""
    held = list(_scope(part))
    for owner, leaf, parameter in held:
        # A tensor that stays NaN was not drawn here and keeps its value.
        blank = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
        setattr(owner, leaf, nn.Parameter(blank, requires_grad=parameter.requires_grad))
    draw()
    for owner, leaf, parameter in held:
        full = getattr(owner, leaf).detach()
        setattr(owner, leaf, parameter)
        if not full.isnan().all():
            here, shape, start = local_rows(parameter)
            copy_rows(parameter, full[start : start + here.shape[0]] if shape else full)


def _scope(part: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that a module draws: its own, and those of parts that do not draw for themselves."""
    for name, parameter in part.named_parameters(recurse=False):
        yield part, name, parameter
    for child in part.children():
        if not callable(getattr(child, "initialise", None)):
            yield from _scope(child)

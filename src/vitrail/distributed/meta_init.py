"""Values for a module that was built without storage (`torch.device("meta")`), after it was sharded.

A network that fits in no single process is built on the meta device, sharded, given storage for the local rows alone,
and then filled: from a file, rows by rows, or by drawing fresh weights. Drawn weights are those that one process would
have had from the same seed: every process draws every tensor whole, on the CPU and in the same order, one module at a
time, and keeps its rows. The peak is one module, the price that all processes draw everything.

Who holds which rows of a tensor, and who writes them. A checkpoint is made of rows, whatever the world.

Whole tensors are held alike by every process and written by the first. Sharded ones (FSDP2) are cut along dimension 0
into runs of ceil(rows / shards), the last ones shorter or empty; where shards are replicated (HSDP), the first replica
writes.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vitrail.distributed.process_group import World


def local_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """The rows that this process holds, sharing storage; the whole tensor's shape; the first of these rows."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), shape, 0
    with torch.no_grad():
        rows = tensor.to_local()
    shards, place = _shard(tensor)
    return rows, shape, min(place * -(-shape[0] // shards), shape[0])


def is_writer(tensor: Tensor, world: World) -> bool:
    """Whether this process writes its rows: for each row of each tensor exactly one does."""
    if not isinstance(tensor, DTensor):
        return world.is_main
    replicas = [
        place
        for place, placement in zip(_coordinate(tensor), tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    ]
    _, place = _shard(tensor)
    return not any(replicas) and (place == 0 or local_rows(tensor)[0].shape[0] > 0)


@torch.no_grad()
def copy_rows(target: Tensor, rows: Tensor) -> None:
    """Fills the rows that this process holds."""
    here = local_rows(target)[0]
    if here.shape != rows.shape:
        raise ValueError(f"rows of {tuple(rows.shape)} do not fit the {tuple(here.shape)} that are held here")
    here.copy_(rows)


@torch.no_grad()
def gather_tensor(tensor: Tensor, world: World) -> Tensor:
    """The tensor with all its rows on the CPU, in the first process; elsewhere its shape without storage. Every process
    must call it, tensor by tensor."""
    world.count_collective()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if world.is_main else torch.empty_like(full, device="meta")


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


Rows: TypeAlias = Callable[[str, tuple[int, ...], int, int], Tensor]  # (name, whole shape, first row, rows) -> rows
DRAWING = ("reset_parameters", "initialise")  # what torch's modules and ours call the drawing of their own part


@torch.no_grad()
def give_storage(module: nn.Module, device: torch.device) -> None:
    """Uninitialised memory in place of what has none; what has values keeps them."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kept = {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}
    if len(kept) == len(tensors):
        if device.type == "mps":
            module.float()  # it has no float64, and what is trained holds nothing narrower than float32
        module.to(device)
        return
    module.to_empty(device=device)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in kept:
            tensor.copy_(kept[name])


def fill_parameters(module: nn.Module, rows: Rows) -> None:
    """Every parameter from `rows`, which is asked for the local rows only. Fixed tables make themselves."""
    for name, parameter in module.named_parameters():
        here, shape, start = local_rows(parameter)
        copy_rows(parameter, rows(name, shape, start, here.shape[0] if shape else 1))


def draw_parameters(module: nn.Module, initialise: Callable[[Any], None]) -> None:
    """Fresh weights from torch's current seed, the same as if the module had been built with storage and then given to
    `initialise`. Modules draw in methods of their own: torch's in `reset_parameters`, when they are built; ours in
    `initialise`, when told to."""
    with ExitStack() as stack:
        for part in module.modules():
            for name in DRAWING:
                if callable(getattr(part, name, None)):
                    stack.enter_context(_with_full_tensors(part, name))
        for part in module.modules():
            if callable(drawn := getattr(part, "reset_parameters", None)):
                drawn()
        initialise(module)


@contextmanager
def _with_full_tensors(part: nn.Module, name: str) -> Generator[None]:
    """Lets a drawing method see whole tensors on the CPU, for as long as it runs."""
    method = getattr(part, name)

    def drawn() -> None:
        held = [(owner, leaf, parameter) for owner, leaf, parameter in _scope(part)]
        for owner, leaf, parameter in held:
            # What stays at NaN was not drawn here, and keeps its value.
            blank = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            setattr(owner, leaf, nn.Parameter(blank, requires_grad=parameter.requires_grad))
        method()
        for owner, leaf, parameter in held:
            full = getattr(owner, leaf).detach()
            setattr(owner, leaf, parameter)
            if not full.isnan().all():
                here, shape, start = local_rows(parameter)
                copy_rows(parameter, full[start : start + here.shape[0]] if shape else full)

    setattr(part, name, drawn)
    try:
        yield
    finally:
        delattr(part, name)


def _scope(part: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that a module draws: its own, and those of parts that do not draw for themselves."""
    for name, parameter in part.named_parameters(recurse=False):
        yield part, name, parameter
    for child in part.children():
        if not callable(getattr(child, "initialise", None)):
            yield from _scope(child)

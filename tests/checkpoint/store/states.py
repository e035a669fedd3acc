"""Small training states to save, and how two processes would share one."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint.store.layout import TensorPiece
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.checkpoint.store.writer import CheckpointWriter


def state(seed: int) -> dict[str, Tensor]:
    """Weights, moments and a counter: several types, no axis, no rows, and more than a write buffer holds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/blocks.0.weight": torch.randn(37, 61, generator=generator),
        "model/blocks.0.bias": torch.randn(61, generator=generator),
        "optim/first": torch.randn(37, 61, generator=generator).to(torch.bfloat16),
        "optim/steps": torch.tensor(float(seed)),
        "seen": torch.tensor([seed, seed + 1]),
        "nothing": torch.zeros(0, 3),
    }


def whole(tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
    return {name: TensorPiece(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}


def shared(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[str, TensorPiece]:
    """Rows as FSDP deals them: as many to each as the ceiling, so that the last may get fewer or none; what has no
    rows belongs to the first."""
    pieces: dict[str, TensorPiece] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            if rank == 0:
                pieces[name] = TensorPiece(tensor, tuple(tensor.shape))
            continue
        each = -(-len(tensor) // world)
        start = min(rank * each, len(tensor))
        pieces[name] = TensorPiece(tensor[start : start + each], tuple(tensor.shape), start)
    return pieces


def same(saved: SavedCheckpoint, tensors: Mapping[str, Tensor]) -> bool:
    return saved.names.keys() == tensors.keys() and all(
        torch.equal(saved.read(name), tensor) and saved.read(name).dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


def saved_once(folder: Path, step: int, *, world: int = 1, keep: int = 9, facts: dict[str, Any] | None = None) -> None:
    """A checkpoint of state(step), written by so many stores at once."""
    said: list[str] = []
    stores = [
        CheckpointWriter(folder, rank=rank, world=world, token="a1", keep=keep, tell=said.append, patience=20)
        for rank in range(world)
    ]
    for store in stores:
        pieces = whole(state(step)) if world == 1 else shared(state(step), store.rank, world)
        store.save(step, pieces, facts or {"step": step})
    assert closed(stores), said


def closed(stores: Iterable[CheckpointWriter]) -> bool:
    """Close all of them; whether all succeeded."""
    return sum(not store.close() for store in stores) == 0


def no_message(text: str) -> None:
    raise AssertionError(text)


def collected() -> tuple[list[str], Callable[[str], None]]:
    said: list[str] = []
    return said, said.append

"""What a process gives to a checkpoint: its rows of each tensor, copied to the host without holding up the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.core.errors import MismatchedWeights


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of a tensor that a process holds: `tensor` is rows `start` onward of a whole one of shape `shape`, cut
    along its first axis."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @staticmethod
    def whole(tensor: Tensor) -> "Piece":
        """A tensor that one process holds alone."""
        return Piece(tensor, tuple(tensor.shape))


@dataclass(slots=True)
class Snapshot:
    """Host copies of pieces, which hold their values once `settle` has returned."""

    tensors: dict[str, Tensor]
    where: dict[str, tuple[tuple[int, ...], int]]  # shape and start
    copied: list[torch.cuda.Event]

    def settle(self) -> None:
        """Wait until the device has finished the copies. Called where waiting harms nobody."""
        for event in self.copied:
            event.synchronize()

    def description(self) -> dict[str, object]:
        return {name: {"shape": list(shape), "start": start} for name, (shape, start) in self.where.items()}


def check_piece(name: str, piece: Piece) -> None:
    """A piece must be rows of the whole that it names."""
    shape, start, local = piece.shape, piece.start, tuple(piece.tensor.shape)
    fits = local == shape and start == 0
    if shape and len(local) == len(shape) and start >= 0:
        fits = local[1:] == shape[1:] and start + local[0] <= shape[0]
    if not fits:
        raise MismatchedWeights(f"piece {name!r} of shape {local} at row {start} does not lie in a tensor of {shape}")


def take(pieces: Mapping[str, Piece]) -> Snapshot:
    """Copy what the pieces hold now. Copies from a GPU join the current stream, so whatever is launched afterwards may
    overwrite the tensors at once, and nobody waits here."""
    tensors: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, piece in pieces.items():
        check_piece(name, piece)
        tensor = piece.tensor.detach()
        if tensor.is_cuda:
            devices.add(tensor.device)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensors[name] = host.copy_(tensor, non_blocking=True)
        else:
            tensors[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    copied: list[torch.cuda.Event] = []
    for device in devices:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        copied.append(event)
    return Snapshot(tensors, {name: (piece.shape, piece.start) for name, piece in pieces.items()}, copied)

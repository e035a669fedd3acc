"""Small arrays that go to a device together: one piece of memory, one copy, and views of it on the other side."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


class Run(NamedTuple):
    """Neighbours of one kind: where they lie, how many numbers each has, its place among the arrays and its shape."""

    dtype: torch.dtype
    start: int
    stop: int
    counts: list[int]
    places: list[int]
    shapes: list[tuple[int, ...]]


class Parcel:
    """Arrays of int64, float32, uint8 or bool, packed. Packing needs no device, and may be done in any thread."""

    __slots__ = ("bytes", "count", "runs")

    def __init__(self, arrays: "Sequence[NDArray[Any]]") -> None:
        if strange := [str(array.dtype) for array in arrays if array.dtype not in DTYPES]:
            raise TypeError(f"{', '.join(strange)} has no place in a parcel")
        self.count, self.runs, stop = len(arrays), list[Run](), 0
        self.bytes: NDArray[np.uint8] = np.empty(sum(array.nbytes for array in arrays), np.uint8)
        for kind, dtype in DTYPES.items():  # the widest first, so that all lie at multiples of their width
            places = [place for place, array in enumerate(arrays) if array.dtype == kind]
            if places:
                some = [arrays[place] for place in places]
                counts, shapes = [array.size for array in some], [array.shape for array in some]
                start, stop = stop, stop + sum(counts) * kind.itemsize
                self.runs.append(Run(dtype, start, stop, counts, places, shapes))
                np.concatenate([array.reshape(-1) for array in some], out=self.bytes[start:stop].view(kind))

    def sent(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors on the device, in the order they were given, without waiting for them."""
        there = send(self.bytes, device)
        out = [there] * self.count
        for run in self.runs:
            pieces = there[run.start : run.stop].view(run.dtype).split_with_sizes(run.counts)
            for place, shape, piece in zip(run.places, run.shapes, pieces, strict=True):
                out[place] = piece if len(shape) == 1 else piece.view(shape)
        return out


def send(array: "NDArray[Any]", device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

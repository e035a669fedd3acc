"""Prefetching in one thread, in order; and small arrays packed into one copy to a device.

    with closing(Prefetcher(map(prepare, steps), depth=4)) as prepared:
        for step in prepared: ...

The items and errors are those of the iterator itself. The thread ends when the iterator ends, when `close` is called,
when the `Prefetcher` is garbage collected, and when Python exits.
"""

import weakref
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError

Item = TypeVar("Item")


class _Channel(Generic[Item]):
    """Connects both sides. SimpleQueue may be used from a finaliser, which ordinary locks do not allow."""

    def __init__(self, depth: int) -> None:
        self.room: SimpleQueue[None] = SimpleQueue()  # one entry per item that may be produced
        self.made: SimpleQueue[tuple[Item] | BaseException] = SimpleQueue()
        self.open = True
        for _ in range(depth):
            self.room.put(None)


class Prefetcher(Iterator[Item]):
    """The items of an iterator, up to `depth` of them computed in advance."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth} must be at least 1")
        self.channel = _Channel[Item](depth)
        # The thread must not refer to this object, or it would keep it alive.
        self.thread = Thread(target=_produce, args=(self.channel, items), name="prefetch", daemon=True)
        self.thread.start()
        self.finish = weakref.finalize(self, _stop, self.channel, self.thread)  # also called when Python exits

    def __next__(self) -> Item:
        if not self.finish.alive:
            raise StopIteration
        made = self.channel.made.get()
        if isinstance(made, tuple):
            self.channel.room.put(None)
            return made[0]
        self.close()
        raise made

    def close(self) -> None:
        """Ends the thread; items not yet taken are lost."""
        self.finish()


def _produce(channel: _Channel[Item], items: Iterator[Item]) -> None:
    """The body of the thread."""
    try:
        while True:
            channel.room.get()
            if not channel.open:
                return
            channel.made.put((next(items),))
    except BaseException as error:  # StopIteration included; raised again by __next__
        channel.made.put(error)


def _stop(channel: "_Channel[Item]", thread: Thread) -> None:
    """Lets the thread finish its current item and waits for it."""
    channel.open = False
    channel.room.put(None)
    if thread is not current_thread():
        thread.join()


DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


class Segment(NamedTuple):
    """Packed arrays of one dtype: their byte range, sizes, indices among all arrays and shapes."""

    dtype: torch.dtype
    start: int
    stop: int
    counts: list[int]
    places: list[int]
    shapes: list[tuple[int, ...]]


class PackedArrays:
    """Arrays of int64, float32, uint8 or bool in one buffer. Packing needs no device and works in any thread."""

    __slots__ = ("bytes", "count", "runs")

    def __init__(self, arrays: "Sequence[NDArray[Any]]") -> None:
        if strange := [str(array.dtype) for array in arrays if array.dtype not in DTYPES]:
            raise TypeError(f"{', '.join(strange)} cannot be packed")
        self.count, self.runs, stop = len(arrays), list[Segment](), 0
        self.bytes: NDArray[np.uint8] = np.empty(sum(array.nbytes for array in arrays), np.uint8)
        for kind, dtype in DTYPES.items():  # widest first, so that all are aligned
            places = [place for place, array in enumerate(arrays) if array.dtype == kind]
            if places:
                some = [arrays[place] for place in places]
                counts, shapes = [array.size for array in some], [array.shape for array in some]
                start, stop = stop, stop + sum(counts) * kind.itemsize
                self.runs.append(Segment(dtype, start, stop, counts, places, shapes))
                np.concatenate([array.reshape(-1) for array in some], out=self.bytes[start:stop].view(kind))

    def to_device(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors on the device, in their original order, without waiting for the copy."""
        there = copy_to_device(self.bytes, device)
        out = [there] * self.count
        for run in self.runs:
            pieces = there[run.start : run.stop].view(run.dtype).split_with_sizes(run.counts)
            for place, shape, piece in zip(run.places, run.shapes, pieces, strict=True):
                out[place] = piece if len(shape) == 1 else piece.view(shape)
        return out


def copy_to_device(array: "NDArray[Any]", device: torch.device) -> Tensor:
    """Copies an array to the device without waiting."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

"""Work that is done before it is asked for, in one thread, in order.

    with closing(Prefetcher(map(prepare, steps), depth=4)) as prepared:
        for step in prepared: ...

What comes out is what the iterator alone would give, errors included. The thread ends when the iterator does, when
`close` is called, when nobody holds the `Prefetcher` any longer, and when Python exits.

Small arrays that go to a device together: one piece of memory, one copy, and views of it on the other side.
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
    """What lies between the two sides. Both queues may be put into from anywhere, a finaliser included, which locks
    of the usual kind do not allow."""

    def __init__(self, depth: int) -> None:
        self.room: SimpleQueue[None] = SimpleQueue()  # one entry for each item that may be made
        self.made: SimpleQueue[tuple[Item] | BaseException] = SimpleQueue()
        self.open = True
        for _ in range(depth):
            self.room.put(None)


class Prefetcher(Iterator[Item]):
    """The items of an iterator, up to `depth` of them made in advance."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth} must be at least 1")
        self.table = _Channel[Item](depth)
        # The thread knows the table but not this object, or it would keep it alive.
        self.thread = Thread(target=_produce, args=(self.table, items), name="ahead", daemon=True)
        self.thread.start()
        self.finish = weakref.finalize(self, _stop, self.table, self.thread)  # also called when Python exits

    def __next__(self) -> Item:
        if not self.finish.alive:
            raise StopIteration
        made = self.table.made.get()
        if isinstance(made, tuple):
            self.table.room.put(None)
            return made[0]
        self.close()
        raise made

    def close(self) -> None:
        """Ends the thread; what it made and nobody took is lost."""
        self.finish()


def _produce(table: _Channel[Item], items: Iterator[Item]) -> None:
    """What the thread runs."""
    try:
        while True:
            table.room.get()
            if not table.open:
                return
            table.made.put((next(items),))
    except BaseException as error:  # raised again where an item is asked for; the end is one of them
        table.made.put(error)


def _stop(table: "_Channel[Item]", thread: Thread) -> None:
    """Lets the thread finish the item it is at, and waits for that. A forked process has no such thread."""
    table.open = False
    table.room.put(None)
    if thread is not current_thread():
        thread.join()


DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


class Segment(NamedTuple):
    """Neighbours of one kind: where they lie, how many numbers each has, its place among the arrays and its shape."""

    dtype: torch.dtype
    start: int
    stop: int
    counts: list[int]
    places: list[int]
    shapes: list[tuple[int, ...]]


class PackedArrays:
    """Arrays of int64, float32, uint8 or bool, packed. Packing needs no device, and may be done in any thread."""

    __slots__ = ("bytes", "count", "runs")

    def __init__(self, arrays: "Sequence[NDArray[Any]]") -> None:
        if strange := [str(array.dtype) for array in arrays if array.dtype not in DTYPES]:
            raise TypeError(f"{', '.join(strange)} has no place in a parcel")
        self.count, self.runs, stop = len(arrays), list[Segment](), 0
        self.bytes: NDArray[np.uint8] = np.empty(sum(array.nbytes for array in arrays), np.uint8)
        for kind, dtype in DTYPES.items():  # the widest first, so that all lie at multiples of their width
            places = [place for place, array in enumerate(arrays) if array.dtype == kind]
            if places:
                some = [arrays[place] for place in places]
                counts, shapes = [array.size for array in some], [array.shape for array in some]
                start, stop = stop, stop + sum(counts) * kind.itemsize
                self.runs.append(Segment(dtype, start, stop, counts, places, shapes))
                np.concatenate([array.reshape(-1) for array in some], out=self.bytes[start:stop].view(kind))

    def to_device(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors on the device, in the order they were given, without waiting for them."""
        there = copy_to_device(self.bytes, device)
        out = [there] * self.count
        for run in self.runs:
            pieces = there[run.start : run.stop].view(run.dtype).split_with_sizes(run.counts)
            for place, shape, piece in zip(run.places, run.shapes, pieces, strict=True):
                out[place] = piece if len(shape) == 1 else piece.view(shape)
        return out


def copy_to_device(array: "NDArray[Any]", device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

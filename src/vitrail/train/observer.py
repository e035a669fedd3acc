"""Who watches a run (a terminal, a program or nobody), and how a signal stops it.

The first SIGTERM or SIGINT ends the run after its current step, a second SIGINT at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Any, Final, Protocol

from vitrail.data.loader import Batch

STEP: Final = "step"  # the activity that advances while the network trains
Advance = Callable[[str, int, int | None], None]  # the activity, how much of it is done, how much there is


class Observer(Protocol):
    """Receives notes and rows of metrics."""

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


class NullObserver:
    """Ignores everything."""

    def log(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


def ignore_advance(what: str, done: int, total: int | None) -> None: ...


def get_advance(observer: object) -> Advance:
    """The observer's `advance`, which is called after every step, and after every batch of the work between steps. The
    method is optional."""
    return getattr(observer, "advance", ignore_advance)


def count_batches(
    batches: Iterable[Batch], what: str, total: int, advance: Advance, *, processes: int = 1
) -> Iterator[Batch]:
    """Yields the batches, and reports after each how many of `total` images are done."""
    done = 0
    advance(what, 0, total)
    for batch in batches:
        yield batch
        done = min(done + len(batch) * processes, total)
        advance(what, done, total)


class Stop:
    """A signal handler that remembers which signal came."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def listen_for_signals() -> Generator[Stop]:
    """Handles signals while a run is in progress. Outside the main thread this is impossible, and nothing changes. If a
    `Stop` is already installed, as for several runs in turn, it is shared: a signal stops all of them."""
    current = signal.getsignal(signal.SIGINT)
    if isinstance(current, Stop) or threading.current_thread() is not threading.main_thread():
        yield current if isinstance(current, Stop) else Stop()
        return
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

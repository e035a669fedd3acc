"""Who hears how a run goes: a terminal, a program, or nobody.

Being asked to stop: the first SIGTERM or SIGINT ends the run after its step, a second SIGINT at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Any, Final, Protocol, runtime_checkable

from vitrail.data.loader import Batch

STEP: Final = "step"  # what is advanced while the network trains
Advance = Callable[[str, int, int | None], None]  # what is being done, how much of it is done, how much there is


class Observer(Protocol):
    """Hears notes, and rows of metrics."""

    def told(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


@runtime_checkable
class Advancing(Protocol):
    """An observer that also hears of every step, and of every batch of what comes between steps."""

    def advance(self, what: str, done: int, total: int | None) -> None: ...


class Silent:
    def told(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


def ignore(what: str, done: int, total: int | None) -> None:
    """Hears nothing."""


def advance_of(observer: object) -> Advance:
    """How the observer is told what is done; those of older programs do not ask for it."""
    return observer.advance if isinstance(observer, Advancing) else ignore


def count_batches(
    batches: Iterable[Batch], what: str, total: int, advance: Advance, *, processes: int = 1
) -> Iterator[Batch]:
    """The batches as they are. After each the observer hears of how many of `total` images it was the last."""
    done = 0
    advance(what, 0, total)
    for batch in batches:
        yield batch
        done = min(done + len(batch) * processes, total)
        advance(what, done, total)


class Stop:
    """Whether a signal has come, and which."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """What listens."""
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def heard() -> Generator[Stop]:
    """Listens while a run goes on. Outside the main thread nobody can listen, and nothing changes. Where somebody
    listens already, as for several runs in turn, both hear the same: a signal is for all of them."""
    listening = signal.getsignal(signal.SIGINT)
    if isinstance(listening, Stop) or threading.current_thread() is not threading.main_thread():
        yield listening if isinstance(listening, Stop) else Stop()
        return
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

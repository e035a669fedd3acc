"""Being asked to stop: the first SIGTERM or SIGINT ends the run after its step, a second SIGINT at once."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType


class Stop:
    """Whether a signal has come, and which."""

    def __init__(self) -> None:
        self.signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)


@contextlib.contextmanager
def heard() -> Generator[Stop]:
    """Listens while a run goes on. Outside the main thread nobody can listen, and nothing changes."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number).name

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

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

"""Progress on stderr for every wait: bars and spinners on a terminal, elsewhere an occasional plain line.

    with bars() as advance:
        advance("features", done, total)
    with waiting("reading the weights"):
        ...

A wait inside another one adds a line to the same display. Short waits show nothing.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

from vitrail.core.console import make_console

Advance = Callable[[str, int, int | None], None]  # the task, how much of it is done, and the total

PATIENCE_S: Final = 1.0  # shorter waits are not shown
PLAIN_S: Final = 10.0  # seconds between plain lines
SPINNER: Final = "line"  # a spinner of rich's with ASCII characters only


class Bars:
    """One bar per task on a terminal, redrawn by a thread of rich's. They appear after a moment and are erased at the
    end."""

    def __init__(self, *, bytes_: bool, console: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.filesize import decimal
        from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.text import Text

        begun = clock()

        class Late(Progress):
            def get_renderable(self) -> Any:
                return super().get_renderable() if clock() - begun >= PATIENCE_S else Text()

        class Count(ProgressColumn):
            def render(self, task: Task) -> Text:
                done, total = (decimal(int(n)) if bytes_ else f"{int(n):,}" for n in (task.completed, task.total or 0))
                return Text(f"{done}/{total}" if task.total else done if task.completed else "")

        self.tasks: dict[str, Any] = {}
        what = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(SPINNER), what, BarColumn(), Count(), Elapsed(), Remaining())
        self.progress = Late(*columns, console=console or make_console(stderr=True), transient=True)

    def advance(self, what: str, done: int, total: int | None) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total)
        self.progress.update(self.tasks[what], completed=done, total=total)

    def remove(self, what: str) -> None:
        if what in self.tasks:
            self.progress.remove_task(self.tasks.pop(what))


class Lines:
    """Prints a plain line if nothing has been printed for a while."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        self.last = clock()

    def advance(self, what: str, done: int, total: int | None) -> None:
        if self.clock() - self.last >= PLAIN_S:
            self.last = self.clock()
            self.write(amount(what, done, total))

    def remove(self, what: str) -> None: ...


def amount(what: str, done: int, total: int | None) -> str:
    """ "features: 128 of 1,000"."""
    return f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}" if done else what


_shown: list[Bars | Lines] = []  # the display of this process, while one is open


@contextlib.contextmanager
def bars(*, bytes_: bool = False) -> Generator[Advance]:
    """Yields a function of (task, done, total) that draws one bar per task."""
    if _shown:
        names: set[str] = set()

        def advance(what: str, done: int, total: int | None) -> None:
            names.add(what)
            _shown[0].advance(what, done, total)

        try:
            yield advance
        finally:
            for name in names:
                _shown[0].remove(name)
        return
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            made = Bars(bytes_=bytes_)
            stack.enter_context(made.progress)
        else:
            made = Lines(lambda text: print(text, file=sys.stderr, flush=True))
        _shown.append(made)
        try:
            yield made.advance
        finally:
            _shown.clear()


@contextlib.contextmanager
def waiting(what: str) -> Generator[None]:
    """Shows a spinner with the elapsed time, for a wait of unknown length."""
    with bars() as advance:
        advance(what, 0, None)
        yield


def reading(weights: str) -> contextlib.AbstractContextManager[None]:
    """Shows a spinner while a weight file is read. Weights by name may be downloaded, which has its own bar."""
    return waiting(f"reading {Path(weights).name}") if Path(weights).exists() else contextlib.nullcontext()


@contextlib.contextmanager
def on_interrupt(text: str) -> Generator[None]:
    """Prints on an interrupt what was saved and how to resume; the interrupt then ends the command."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; {text}", file=sys.stderr, flush=True)
        raise


def exit_after(work: Callable[[], int], stopped: str) -> int:
    """Runs a training and returns its status. An interrupt prints `stopped` and exits without waiting for a checkpoint
    that is being written, which is then either complete or absent. With several processes, each exits without shutting
    down the interpreter: everything is written and the process group is left, but a device mesh keeps threads of the
    group alive, and their teardown occasionally aborts a finished run."""
    try:
        status = work()
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr, flush=True)
        os._exit(130)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status

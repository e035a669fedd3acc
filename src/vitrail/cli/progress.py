"""Progress bars on stderr, where it is a terminal; elsewhere nothing is said."""

import contextlib
import sys
from collections.abc import Callable, Generator


@contextlib.contextmanager
def bars(*, bytes_: bool = False) -> "Generator[Callable[[str, int, int | None], None]]":
    """A function of (what, done, of how much) that draws a bar for each thing that is being done."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    count = DownloadColumn() if bytes_ else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, Remaining())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def advance(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield advance

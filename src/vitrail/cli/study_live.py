"""How a study looks while it goes on: a line when a cell starts and when it ends, and on a terminal one bar for all."""

import sys
from collections.abc import Callable

from vitrail.cli.live import PlainDisplay, duration
from vitrail.core.console import make_console
from vitrail.train.grid.plan import Cell, CellOutcome
from vitrail.train.observer import NullObserver, Observer


def describe_cell(outcome: CellOutcome) -> str:
    """What came of a cell, in a few words."""
    if outcome.fault:
        return f"failed: {outcome.fault}"
    names = [name for name in outcome.values if name == "accuracy" or name.startswith("fewshot-")]
    return ", ".join(f"{name} {outcome.values[name]:.2%}" for name in names) or "done"


class StudyLines:
    """Plain text: a line a start and a line an end, with how much time is left."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write, self.left_s = PlainDisplay(write), float("nan")

    def __enter__(self) -> "StudyLines":
        return self

    def __exit__(self, *error: object) -> None: ...

    def log(self, text: str) -> None:
        self.write.log(text)

    def started(self, cell: Cell) -> None:
        self.log(f"start {cell.name}")

    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        left = f", about {duration(self.left_s)} left" if self.left_s > 0 else ""
        self.log(f"end   {cell.name}: {describe_cell(outcome)}; {duration(seconds)}{left}")

    def progress(self, share: float, left_s: float) -> None:
        self.left_s = left_s

    def listen(self, cell: Cell) -> Observer:
        return NullObserver()


class StudyBar(StudyLines):
    """The same lines above a bar of the whole study."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        console = make_console()
        super().__init__(lambda text: console.print(text, highlight=False, markup=False))
        columns = (BarColumn(), TextColumn("{task.percentage:.0f}% of the work, {task.fields[left]} left"))
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("", total=1.0, left="?")

    def __enter__(self) -> "StudyBar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def progress(self, share: float, left_s: float) -> None:
        self.bar.update(self.task, completed=share, left=duration(left_s))


def make_watcher() -> StudyLines:
    """The one that fits the output."""
    return StudyBar() if sys.stdout.isatty() else StudyLines(lambda text: print(text, flush=True))

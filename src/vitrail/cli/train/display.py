"""The display of a run or a study in progress: a panel redrawn in place on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from vitrail.cli.app import silence_stdout
from vitrail.cli.progress import PLAIN_S as WAIT_S
from vitrail.cli.progress import SPINNER, amount
from vitrail.core.console import make_console
from vitrail.core.text import format_clock
from vitrail.train.grid.plan import Cell, CellOutcome, Watcher
from vitrail.train.observer import STEP, NullObserver, Observer
from vitrail.train.run_folder.metric_rows import LOSS, describe_score, headline, known_measures, title_of

PLAIN_S = 5.0  # seconds between plain lines of metrics; scores and notes are always printed


def describe_row(row: dict[str, Any]) -> str:
    """Formats a row of training metrics."""
    if row["kind"] != "train":
        return describe_score(row)
    numbers = "  ".join(f"{name} {value}" for name, value in format_numbers(row).items())
    speed = f"{row['images_per_s']:,.0f} img/s"
    speed += f"  MFU {row['mfu']:.0%}  {row['memory_gb']:.1f} GB" if "memory_gb" in row else ""  # on a GPU
    return f"step {row['step']:,}/{row['steps']:,}  {numbers}  {speed}  left {format_clock(row['left_s'])}"


def format_numbers(row: dict[str, Any]) -> dict[str, str]:
    """Epoch, loss, the objective's other metrics and the learning rate of a training row, by name."""
    tallies = {
        title_of(known): f"{row[name]:.1%}" if known.share else f"{row[name]:.3f}"
        for name, known in known_measures().items()
        if name in row and name != LOSS
    }
    lr = f"{row['lr']:.2e}".replace("e-0", "e-").replace("e+00", "")
    return {"epoch": f"{row['epoch']:.2f}", "loss": f"{row['loss']:.4f}", **tallies, "lr": lr}


def describe_briefly(row: dict[str, Any]) -> str:
    """The one number of a score that the panel keeps showing."""
    if (first := headline(row)) is not None:
        name = row.get("measure", "") if first.is_accuracy else first.name
        return " ".join(word for word in (row["split"], name, first.text) if word)
    return f"{row['split']} loss {row['loss']:.4f}" if "loss" in row else f"{row['split']} rank {row['rank']:.1f}"


class PlainDisplay:
    """Prints lines on stdout, with a limited rate for progress."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        self.last, self.spoke = -PLAIN_S, clock()

    def log(self, text: str) -> None:
        self.spoke = self.clock()
        try:
            self.write(text)
        except BrokenPipeError:  # the reader has gone; the run continues
            silence_stdout()
            self.write = lambda text: None

    def progress(self, row: dict[str, Any]) -> None:
        now = self.clock()
        if row["kind"] == "train" and now - self.last < PLAIN_S and row["step"] != row["steps"]:
            return
        if row["kind"] == "train":
            self.last = now
        self.log(describe_row(row))

    def advance(self, what: str, done: int, total: int | None) -> None:
        """Prints a line if nothing has been printed for a while, since steps may be slow."""
        if self.clock() - self.spoke >= WAIT_S:
            self.log(amount(what, done, total))


class TrainingPanel:
    """A panel with the progress of the run, its latest metrics and current activity, redrawn in place; log lines scroll
    past above it. A thread of rich's does the drawing, so updates cost a step next to nothing."""

    def __init__(self, console: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console or make_console(), clock
        self.spinner = Spinner(SPINNER)
        self.row: dict[str, Any] | None = None  # the latest training row
        self.score = ""
        self.step, self.steps = 0, 0
        self.doing, self.since = ("preparing", 0, None), clock()
        self.first: tuple[int, float] | None = None  # the first step seen, and when
        self.live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self.render)

    def __enter__(self) -> "TrainingPanel":
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def log(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.row = row
            return
        if row["kind"] not in ("fewshot", "baseline"):
            self.score = f"{describe_briefly(row)} at step {row['step']:,}"
        self.log(describe_row(row))

    def advance(self, what: str, done: int, total: int | None) -> None:
        if what != self.doing[0]:
            self.since = self.clock()
        self.doing = (what, done, total)
        if what != STEP:
            return
        if self.first is None or done < self.step or total != self.steps:  # another run of a search starts over
            self.first, self.row, self.score = (done, self.clock()), None, ""
        self.step, self.steps = done, total or 0

    @property
    def left_s(self) -> float:
        """Seconds left, estimated from the latest metrics, or from the steps so far until there are any."""
        row, to_do = self.row, self.steps - self.step
        if row is not None and row["step"] < row["steps"]:
            return row["left_s"] * to_do / (row["steps"] - row["step"])
        if self.first is None or self.step <= self.first[0]:
            return float("nan") if to_do else 0.0
        return (self.clock() - self.first[1]) / (self.step - self.first[0]) * to_do

    def render(self) -> Any:
        lines = list[Any]()
        if self.steps:
            columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
            head = Table.grid(*columns, padding=(0, 1), expand=True)
            done = Text(f"{self.step / self.steps:.0%}, {format_clock(self.left_s)} left")
            bar = ProgressBar(total=self.steps, completed=self.step)
            head.add_row(Text(f"step {self.step:,}/{self.steps:,}", style="bold"), bar, done)
            lines.append(head)
        if (row := self.row) is not None:  # it may be some steps old
            numbers = {"at step": f"{row['step']:,}", **format_numbers(row), "img/s": f"{row['images_per_s']:,.0f}"}
            if "memory_gb" in row:
                numbers |= {"MFU": f"{row['mfu']:.0%}", "memory": f"{row['memory_gb']:.1f} GB"}
            pairs = [part for name, value in numbers.items() for part in ((f"{name} ", "dim"), f"{value}   ")]
            lines.append(Text.assemble(*pairs))
        if self.score:
            lines.append(Text(self.score, style="bold green"))
        what, done, total = self.doing
        text = amount(what, done, total) if what != STEP else "the first step"
        if what != STEP or (done == (self.first or (0,))[0] and done < self.steps):
            self.spinner.update(text=Text(f"{text}, {format_clock(self.clock() - self.since)}"))
            lines.append(self.spinner.render(self.clock()))
        return Group(*lines)


def make_observer(rank: int) -> AbstractContextManager[Observer]:
    """The display for this output; processes other than the main one get a silent one."""
    if rank:
        return nullcontext(NullObserver())
    return TrainingPanel() if sys.stdout.isatty() else nullcontext(PlainDisplay(lambda text: print(text, flush=True)))


class StudyLines(Watcher):
    """Plain text: one line when a cell starts and one when it ends, with the time left."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(observer=PlainDisplay(write))
        self.left_s = float("nan")

    def started(self, cell: Cell) -> None:
        self.log(f"start {cell.name}")

    def ended(self, cell: Cell, outcome: CellOutcome, seconds: float) -> None:
        names = [name for name in outcome.values if name == "accuracy" or name.startswith("fewshot-")]
        scores = ", ".join(f"{name} {outcome.values[name]:.2%}" for name in names) or "done"
        left = f", about {format_clock(self.left_s)} left" if self.left_s > 0 else ""
        result = f"failed: {outcome.fault}" if outcome.fault else scores
        self.log(f"end   {cell.name}: {result}; {format_clock(seconds)}{left}")

    def progress(self, share: float, left_s: float) -> None:
        self.left_s = left_s

    def listen(self, cell: Cell) -> Observer:
        return NullObserver()


class StudyBar(StudyLines):
    """The same lines above a progress bar of the whole study."""

    def __init__(self) -> None:
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
        self.bar.update(self.task, completed=share, left=format_clock(left_s))


def make_watcher() -> AbstractContextManager[StudyLines]:
    """The display of a study for this output."""
    return StudyBar() if sys.stdout.isatty() else nullcontext(StudyLines(lambda text: print(text, flush=True)))

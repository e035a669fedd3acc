"""How a run looks while it goes on: one panel that is redrawn on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from vitrail.cli.app import silence
from vitrail.train.rows import TALLIES, called

PLAIN_S = 5.0  # between two plain lines of progress; scores and notes always come


def duration(seconds: float) -> str:
    """ "1:02:03" or "2:03"."""
    if not seconds < 1e8:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def rate(lr: float) -> str:
    return f"{lr:.2e}".replace("e-0", "e-").replace("e+00", "")


def line(row: dict[str, Any]) -> str:
    """A row of metrics as text."""
    if row["kind"] == "train":
        parts = [
            f"step {row['step']:,}/{row['steps']:,}",
            f"epoch {row['epoch']:.2f}",
            f"loss {row['loss']:.4f}",
            *(f"{name} {value}" for name, value in tallies(row).items()),
            f"lr {rate(row['lr'])}",
            f"{row['images_per_s']:,.0f} img/s",
            f"MFU {row['mfu']:.0%}",
            *([f"{row['memory_gb']:.1f} GB"] if "memory_gb" in row else []),
            f"left {duration(row['left_s'])}",
        ]
        return "  ".join(parts)
    if row["kind"] == "fewshot":
        return (
            f"step {row['step']:,}: {row['shots']}-shot on {row['source']} {row['accuracy']:.2%} ± {row['spread']:.2%}"
        )
    if row["kind"] == "baseline":
        score = f"{row['accuracy']:.2%} of {row['count']:,} {row['split']} pictures right"
        return f"closed form on the frozen features, the number to beat: {score} (l2 {row['penalty']:g})"
    return f"step {row['step']:,}: {scored(row)} ({row['count']:,} pictures)"


def tallies(row: dict[str, Any]) -> dict[str, str]:
    """What an objective counts beside its loss, by the names that people know."""
    return {
        known.name: f"{row[name]:.1%}" if known.percent else f"{row[name]:.3f}"
        for name, known in TALLIES.items()
        if name in row
    }


def scored(row: dict[str, Any]) -> str:
    """What was found on a split: of features without a classifier, their k-NN accuracy and rank; the rank alone where
    there are no labels."""
    width = f" of {row['width']}" if "width" in row else ""
    parts = [
        *([f"{called(row)} {row['accuracy']:.2%}"] if "accuracy" in row else []),
        *([f"top-5 {row['top5']:.2%}"] if row.get("top5") is not None else []),
        *([f"loss {row['loss']:.4f}"] if "loss" in row else []),
        *([f"feature rank {row['rank']:.1f}{width}"] if "rank" in row else []),
    ]
    return f"{row['split']} {', '.join(parts)}"


def briefly(row: dict[str, Any]) -> str:
    """The one number of a score that stays in sight."""
    if "accuracy" in row:
        measure = f"{row['measure']} " if row.get("measure") else ""
        return f"{row['split']} {measure}{row['accuracy']:.2%}"
    return f"{row['split']} loss {row['loss']:.4f}" if "loss" in row else f"{row['split']} rank {row['rank']:.1f}"


class Plain:
    """Lines on stdout; those of progress not too many."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.last = -PLAIN_S

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *error: object) -> None: ...

    def told(self, text: str) -> None:
        try:
            self.write(text)
        except BrokenPipeError:  # whoever read has left; the run goes on
            silence()
            self.write = lambda text: None

    def progress(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if row["kind"] == "train" and now - self.last < PLAIN_S and row["step"] != row["steps"]:
            return
        if row["kind"] == "train":
            self.last = now
        self.told(line(row))


class Quiet:
    """For the processes that nobody reads."""

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *error: object) -> None: ...
    def told(self, text: str) -> None: ...
    def progress(self, row: dict[str, Any]) -> None: ...


class Panel:
    """One line of progress and one of numbers, redrawn in place; what is told scrolls past above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console()
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.score = ""

    def __enter__(self) -> "Panel":
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def told(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] != "train":
            if row["kind"] not in ("fewshot", "baseline"):
                self.score = briefly(row)
            self.told(line(row))
            return
        self.live.update(self.drawn(row))

    def drawn(self, row: dict[str, Any]) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_row(
            Text(f"step {row['step']:,}/{row['steps']:,}", style="bold"),
            ProgressBar(total=row["steps"], completed=row["step"]),
            Text(f"{row['step'] / row['steps']:.0%}, {duration(row['left_s'])} left"),
        )
        numbers = {
            "epoch": f"{row['epoch']:.2f}",
            "loss": f"{row['loss']:.4f}",
            **tallies(row),
            "lr": rate(row["lr"]),
            "img/s": f"{row['images_per_s']:,.0f}",
            "MFU": f"{row['mfu']:.0%}",
            **({"memory": f"{row['memory_gb']:.1f} GB"} if "memory_gb" in row else {}),
        }
        text = Text()
        for name, value in numbers.items():
            text.append(f"{name} ", style="dim").append(f"{value}   ")
        if self.score:
            text.append(self.score, style="bold green")
        return Group(head, text)


def observer(rank: int) -> Plain | Panel | Quiet:
    """The one that fits the output."""
    if rank:
        return Quiet()
    if sys.stdout.isatty():
        return Panel()
    return Plain(lambda text: print(text, flush=True))

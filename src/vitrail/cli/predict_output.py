"""The answers of `vitrail predict`: for a person at a terminal, for a person behind a pipe, as JSON Lines, as CSV."""

import csv
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from vitrail.core.console import make_console, wrap
from vitrail.report.page import printable

if TYPE_CHECKING:
    from vitrail.predict.predictor import Predictor
    from vitrail.tasks.task import Task, TaskPrediction

BAR_WIDTH = 24  # signs of a full bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


class PredictionWriter(Protocol):
    """Takes one image at a time; `made` are the files that were written for it, by what they are."""

    def answer(self, path: str, prediction: "TaskPrediction", made: Mapping[str, str]) -> None: ...
    def failed(self, path: str, reason: str) -> None: ...


class JsonWriter:
    """JSON Lines: an object for every image, in ASCII, so that any name can be written."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def answer(self, path: str, prediction: "TaskPrediction", made: Mapping[str, str]) -> None:
        self.write({"path": path, **prediction.to_dict(), **made})

    def failed(self, path: str, reason: str) -> None:
        self.write({"path": path, "error": reason})

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")


class CsvWriter:
    """CSV: a row for every answer, and for an image that could not be read one with the reason."""

    def __init__(self, file: TextIO, task: "Task", *, multi_label: bool = False) -> None:
        self.table, self.task = csv.writer(file, lineterminator="\n"), task
        self.columns = task.columns(multi_label=multi_label)
        self.table.writerow(["path", *self.columns, "error"])

    def answer(self, path: str, prediction: "TaskPrediction", made: Mapping[str, str]) -> None:
        self.table.writerows([path, *row, ""] for row in self.task.rows(prediction))

    def failed(self, path: str, reason: str) -> None:
        self.table.writerow([path, *("" for _ in self.columns), reason])


class LineWriter:
    """A line for every image."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def answer(self, path: str, prediction: "TaskPrediction", made: Mapping[str, str]) -> None:
        files = ", ".join(printable(made[kind]) for kind in ("file", "overlay") if kind in made)
        self.file.write(f"{printable(path)}: {prediction}{f' -> {files}' if files else ''}\n")

    def failed(self, path: str, reason: str) -> None:
        """Said on stderr."""


class TerminalWriter:
    """A block for every image, with bars where the task has some."""

    def __init__(self, file: TextIO, task: "Task") -> None:
        self.console, self.task = make_console(file=file, highlight=False), task

    def answer(self, path: str, prediction: "TaskPrediction", made: Mapping[str, str]) -> None:
        from rich.text import Text

        block = Text(printable(path), style="bold")
        for written in made.values():
            block.append(f"  {printable(written)}", style="not bold dim")
        bars = self.task.bars(prediction)
        if not bars:
            block.append(f"\n  {prediction}", style="not bold")
        room = max(min(self.console.width - BAR_WIDTH - 12, 40), 8)
        wide = min(max((len(one.label) for one in bars), default=0), room)
        for one in bars:
            label, *more = wrap(printable(one.label), wide) or [""]
            strong = "bold" if one.chosen else "not bold"
            block.append(f"\n  {label:<{wide}}  ", style=strong)
            block.append(f"{draw_bar(one.share):<{BAR_WIDTH}}", style="not bold green" if one.chosen else "not bold dim")
            block.append(f" {100 * one.share:5.1f} %", style="not bold")
            for line in more:
                block.append(f"\n    {line}", style=strong)
        self.console.print(block, soft_wrap=True)

    def failed(self, path: str, reason: str) -> None:
        """Said on stderr."""


def make_writer(asker: "Predictor[Any]", *, as_json: bool, as_csv: bool) -> PredictionWriter:
    """To stdout, in which names that it cannot write are spelt out."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    if as_json:
        return JsonWriter(sys.stdout)
    if as_csv:
        return CsvWriter(sys.stdout, asker.task, multi_label=asker.multi_label)
    return TerminalWriter(sys.stdout, asker.task) if sys.stdout.isatty() else LineWriter(sys.stdout)


def draw_bar(share: float) -> str:
    """As long as its share, to an eighth of a sign."""
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + (EIGHTHS[eighths] if eighths else "")

"""The answers of `vitrail predict`: for a person at a terminal, for a person behind a pipe, as JSON Lines, as CSV."""

import csv
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from vitrail.core.console import wrap
from vitrail.core.terminal import make_console
from vitrail.report.page import printable

if TYPE_CHECKING:
    from vitrail.tasks.classification.prediction import Prediction

BAR = 24  # signs of a full bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Output(Protocol):
    """Takes one picture at a time; `made` is the file that was drawn of it."""

    def answer(self, path: str, prediction: "Prediction", made: str | None) -> None: ...
    def failed(self, path: str, reason: str) -> None: ...


class Lines:
    """JSON Lines: an object for every picture, in ASCII, so that any name can be written."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def answer(self, path: str, prediction: "Prediction", made: str | None) -> None:
        self.write({"path": path, **prediction.to_dict(), **({} if made is None else {"attention": made})})

    def failed(self, path: str, reason: str) -> None:
        self.write({"path": path, "error": reason})

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")


class Table:
    """CSV: a row for every answer, and for a picture that could not be read one with the reason."""

    def __init__(self, file: TextIO, *, multi_label: bool = False) -> None:
        self.rows, self.multi_label = csv.writer(file, lineterminator="\n"), multi_label
        self.rows.writerow(
            ["path", "rank", "label", "index", "probability", *(["chosen"] if multi_label else []), "error"]
        )

    def answer(self, path: str, prediction: "Prediction", made: str | None) -> None:
        chosen = prediction.chosen or ()
        shown = prediction.top if len(prediction.top) > len(chosen) else chosen
        for rank, answer in enumerate(shown, start=1):
            mark = [int(rank <= len(chosen))] if self.multi_label else []
            self.rows.writerow([path, rank, answer.label, answer.index, f"{answer.probability:.6g}", *mark, ""])

    def failed(self, path: str, reason: str) -> None:
        self.rows.writerow([path, "", "", "", "", *([""] if self.multi_label else []), reason])


class Plain:
    """A line for every picture."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def answer(self, path: str, prediction: "Prediction", made: str | None) -> None:
        self.file.write(f"{printable(path)}: {prediction}\n")

    def failed(self, path: str, reason: str) -> None:
        """Said on stderr."""


class Terminal:
    """A block for every picture, with bars."""

    def __init__(self, file: TextIO) -> None:
        self.console = make_console(file=file, highlight=False)

    def answer(self, path: str, prediction: "Prediction", made: str | None) -> None:
        from rich.text import Text

        block = Text(printable(path), style="bold")
        if made is not None:
            block.append(f"  {printable(made)}", style="not bold dim")
        room = max(min(self.console.width - BAR - 12, 40), 8)
        chosen = len(prediction.labels)
        shown = prediction.top if prediction.chosen is None or len(prediction.top) > chosen else prediction.chosen
        wide = min(max(len(answer.label) for answer in shown), room)
        for rank, answer in enumerate(shown):
            label, *more = wrap(printable(answer.label), wide) or [""]
            strong = "bold" if rank < chosen else "not bold"
            block.append(f"\n  {label:<{wide}}  ", style=strong)
            colour = "not bold green" if rank < chosen else "not bold dim"
            block.append(f"{bar(answer.probability):<{BAR}}", style=colour)
            block.append(f" {100 * answer.probability:5.1f} %", style="not bold")
            for line in more:
                block.append(f"\n    {line}", style=strong)
        self.console.print(block, soft_wrap=True)

    def failed(self, path: str, reason: str) -> None:
        """Said on stderr."""


def output(*, as_json: bool, as_csv: bool, multi_label: bool = False) -> Output:
    """To stdout, in which names that it cannot write are spelt out."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    if as_json:
        return Lines(sys.stdout)
    if as_csv:
        return Table(sys.stdout, multi_label=multi_label)
    return Terminal(sys.stdout) if sys.stdout.isatty() else Plain(sys.stdout)


def bar(share: float) -> str:
    """As long as its share, to an eighth of a sign."""
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return "█" * whole + (EIGHTHS[eighths] if eighths else "")

"""What `vitrail evaluate` prints and writes of multi-label weights."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from vitrail.core.console import print_table
from vitrail.core.storage import write_file
from vitrail.evaluation.multi_label import MultiLabel
from vitrail.evaluation.multi_label_page import COLUMNS, class_rows

LISTED = 5  # classes that are printed


def show_classes(found: MultiLabel) -> None:
    """The classes of the lowest average precision."""
    rows = class_rows(found)
    title = "Each class" if len(rows) <= LISTED else "Hardest classes"
    print_table(["class", "images", "AP", *COLUMNS[3:]], rows[:LISTED], title=title)


def write_scores(path: Path, found: MultiLabel, names: Sequence[str]) -> None:
    """A row for each image: what it shows, what was chosen, and the score of every class; blanks where it was not
    read or has no label."""
    rows: list[list[str]] = [[name, "", "", *([""] * len(found.names))] for name in names]
    for at, place in enumerate(found.sample.tolist()):
        true, chosen = (joined(found.names, flags[at]) for flags in (found.truth, found.chosen))
        rows[place][1:] = [true, chosen, *(f"{score:.6f}" for score in found.scores[at])]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["picture", "true", "chosen", *found.names])
    writer.writerows(rows)
    write_file(path, text.getvalue().encode("utf-8", "surrogateescape"))


def joined(names: Sequence[str], flags: Sequence[bool]) -> str:
    return "|".join(name for name, flag in zip(names, flags, strict=True) if flag)

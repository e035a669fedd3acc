"""Rows of metrics: read from disk, as columns and as text, and what their numbers are called.

A row of a score names its main number as "score"; if it does not, that is the accuracy. The tasks know what a number is
called, whether it is a share, and whether larger or smaller is better.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.evaluation.metrics import Criterion
from vitrail.report.axis import Floats
from vitrail.tasks.registry import TASKS
from vitrail.train.run_folder.files import parse_rows

Row = dict[str, Any]

ACCURACY: Final = "accuracy"
LOSS: Final = "loss"

# Numbers that objectives report next to their loss. The tasks have criteria of their own.
TALLIES: Final = {
    ACCURACY: Criterion(name=ACCURACY, share=True),
    "hits": Criterion(name="hits", share=True),  # of masked patches
    "agreement": Criterion(name="agreement", share=True),  # the other view of an image is the most similar of a batch
    "spread": Criterion(name="spread"),  # of features of length 1
    "teacher_entropy": Criterion(name="teacher_entropy", title="teacher entropy"),
    "kl": Criterion(name="kl", title="KL", larger=False),  # of the student from the teacher
}


def read_metrics(path: Path) -> tuple[list[Row], int]:
    """The rows of metrics.jsonl, and how many lines are not rows. A killed run resumes from its last checkpoint and
    writes the rows after it again: the later ones count. A truncated last line is ignored."""
    kept: dict[tuple[Any, ...], list[Row]] = {}
    lost = 0
    for row in parse_rows(path):
        if row is None or not isinstance(row.get("step"), int):
            lost += 1
            continue
        mine = kept.setdefault(tuple(row.get(name) for name in ("kind", "split", "source", "shots")), [])
        while mine and mine[-1]["step"] >= row["step"]:
            mine.pop()
        mine.append(row)
    return [row for several in kept.values() for row in several], lost


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.get("kind") == kind]


def scores(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of a kind that have their main number."""
    return [row for row in of_kind(rows, kind) if headline(row) is not None]


def column(rows: Sequence[Row], name: str) -> tuple[Floats, Floats]:
    """Steps and values, NaN where one is missing."""
    values = [number(row.get(name)) for row in rows]
    steps = np.array([row["step"] for row in rows], np.float64)
    return steps, np.array([math.nan if value is None else value for value in values], np.float64)


def last(rows: Sequence[Row], name: str) -> float | None:
    """The last value that is a number."""
    return next((value for row in reversed(rows) if (value := number(row.get(name))) is not None), None)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def middle(values: Floats) -> float | None:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


@dataclass(frozen=True, slots=True)
class Headline:
    """The main number of a row and its name: "accuracy", "k-NN accuracy", "mIoU"."""

    criterion: Criterion
    name: str
    value: float

    @property
    def text(self) -> str:
        return write_value(self.criterion, self.value)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the share of correct predictions, so that it has a count and an interval."""
        return self.criterion.name == ACCURACY


def headline(row: Row) -> Headline | None:
    """The main number of a score; None if it is missing, as without labels."""
    criterion = criteria_of(row)[0]
    value = number(row.get(criterion.name))
    measure = f"{row['measure']} " if row.get("measure") else ""  # of neighbours, by its name
    return None if value is None else Headline(criterion, f"{measure}{title_of(criterion)}", value)


def criteria_of(row: Row) -> tuple[Criterion, ...]:
    """The numbers by which scores of the row's task are compared; the first is the main one."""
    name = str(row.get("score", ACCURACY))
    known = (task.criteria for task in TASKS.values() if task.criteria[0].name == name)
    return next(known, (Criterion(name=name),))  # of an unregistered task only the name is known


def known_measures() -> dict[str, Criterion]:
    """All numbers of training rows and scores, by their name in rows."""
    scored = {criterion.name: criterion for task in TASKS.values() for criterion in task.criteria}
    return TALLIES | scored | TALLIES


def known_titles() -> dict[str, str]:
    """Display names of all numbers of rows, also of those by which scores are not compared."""
    further = {criterion.name: criterion for task in TASKS.values() for criterion in task.extras}
    return {name: title_of(criterion) for name, criterion in (further | known_measures()).items()}


def title_of(criterion: Criterion) -> str:
    """Its display name."""
    return criterion.title or criterion.name.replace("_", " ")


def write_value(criterion: Criterion, value: float) -> str:
    """For the terminal and the log."""
    if criterion.share:
        return f"{value:.2%}"
    if criterion.name == LOSS:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def best_of(rows: Sequence[Row]) -> Row:
    """The best score by the criteria of its task; of equal ones the first."""

    def is_better(new: Row, old: Row) -> bool:
        """If a number is equal, the next one decides; a missing one is worst."""
        for criterion in criteria_of(new):
            value, before = number(new.get(criterion.name)), number(old.get(criterion.name))
            if value != before:
                return before is None or (value is not None and criterion.is_better(value, before))
        return False

    return functools.reduce(lambda best, row: row if is_better(row, best) else best, rows)


def describe_score(row: Row) -> str:
    """A row other than a training step as text, for the terminal and the log."""
    if row["kind"] == "fewshot":
        spread = f"{row['accuracy']:.2%} ± {row['spread']:.2%}"
        return f"step {row['step']:,}: {row['shots']}-shot accuracy on {row['source']} {spread}"
    if row["kind"] == "baseline":
        main, images = headline(row), f"{row['count']:,} {row['split']} images"
        if main is None or main.is_accuracy:
            score = f"{row['accuracy']:.2%} of {images} right"
            return f"a linear classifier on the frozen features, without training: {score}"
        return f"a linear classifier on the frozen patches, without training: {main.name} {main.text} on {images}"
    count = f" ({row['count']:,} images)" if "count" in row else ""  # a task's own row may lack it
    return f"step {row['step']:,}: {describe_split(row)}{count}"


def describe_split(row: Row) -> str:
    """The score of a split; for features without a classifier their k-NN accuracy and rank, or only the rank without
    labels."""
    width = f" of {row['width']}" if "width" in row else ""
    parts = describe_numbers(row)
    if row.get("top5") is not None:
        parts.append(f"top-5 {row['top5']:.2%}")
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4f}")
    if "rank" in row:
        parts.append(f"feature rank {row['rank']:.1f}{width}")
    return f"{row['split']} {', '.join(parts)}"


def describe_numbers(row: Row) -> list[str]:
    """The numbers of a row's task, main one first, without the loss: ["mIoU 81.20%", ...]."""
    first = headline(row)
    texts = [] if first is None else [f"{first.name} {first.text}"]
    others = [(one, number(row.get(one.name))) for one in criteria_of(row)[1:] if one.name != LOSS]
    return texts + [f"{title_of(one)} {write_value(one, value)}" for one, value in others if value is not None]

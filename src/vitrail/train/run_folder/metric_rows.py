"""Rows of metrics as columns and as text, and the names by which people know what is counted and scored.

A row of a score names the number that stands for it, as "score"; where it names none, that is the accuracy. What the
number is called, whether it is a share, and whether larger or smaller is better, is known from the tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vitrail.evaluation.metrics import Criterion
from vitrail.report.axis import Floats
from vitrail.tasks.registry import TASKS

Row = dict[str, Any]

ACCURACY: Final = "accuracy"
LOSS: Final = "loss"

# What objectives count next to their loss. Those of the tasks are known from their criteria.
TALLIES: Final = {
    tally.name: tally
    for tally in (
        Criterion(name=ACCURACY, share=True),
        Criterion(name="hits", share=True),  # of masked patches
        Criterion(name="agreement", share=True),  # the other view of an image is the most similar of a batch
        Criterion(name="spread"),  # of features of length 1
        Criterion(name="teacher_entropy", title="teacher entropy"),
        Criterion(name="kl", title="KL", larger=False),  # of the student from the teacher
    )
}


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.get("kind") == kind]


def scores(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of a kind that have the number that stands for them."""
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
    """A finite number, or none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def middle(values: Floats) -> float | None:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


@dataclass(frozen=True, slots=True)
class Headline:
    """The number that stands for a row, and what it is called: "accuracy", "k-NN accuracy", "mIoU"."""

    criterion: Criterion
    name: str
    value: float

    @property
    def text(self) -> str:
        return write_value(self.criterion, self.value)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the share of images with a right answer, so that it has a count and an interval."""
        return self.criterion.name == ACCURACY


def headline(row: Row) -> Headline | None:
    """The number that stands for a row of a score; none where it lacks it, as without labels."""
    criterion = criteria_of(row)[0]
    value = number(row.get(criterion.name))
    measure = f"{row['measure']} " if row.get("measure") else ""  # of neighbours, by its name
    return None if value is None else Headline(criterion, f"{measure}{title_of(criterion)}", value)


def criteria_of(row: Row) -> tuple[Criterion, ...]:
    """The numbers by which the scores of a row's task are compared; the first one stands for the row."""
    name = str(row.get("score", ACCURACY))
    known = (task.criteria for task in TASKS.values() if task.criteria[0].name == name)
    return next(known, (Criterion(name=name),))  # of a task that is not registered here, its name is all


def is_comparable(row: Row) -> bool:
    """Whether it is known which of two such scores is the better one: not of a task that is not registered here."""
    return any(criteria_of(row) is task.criteria for task in TASKS.values())


def known_measures() -> dict[str, Criterion]:
    """All that is counted in training or scored, by its name in rows."""
    scored = {criterion.name: criterion for task in TASKS.values() for criterion in task.criteria}
    return {**TALLIES, **{name: one for name, one in scored.items() if name not in TALLIES}}


def title_of(criterion: Criterion) -> str:
    """What people call it."""
    return criterion.title or criterion.name.replace("_", " ")


def write_value(criterion: Criterion, value: float) -> str:
    """For the terminal and the log."""
    if criterion.share:
        return f"{value:.2%}"
    if criterion.name == LOSS:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def best_of(rows: Sequence[Row]) -> Row:
    """The best of scores by the criteria of their task; of equal ones the first."""
    best = rows[0]
    for row in rows[1:]:
        if is_better_score(row, best):
            best = row
    return best


def is_better_score(new: Row, old: Row) -> bool:
    """Whether a row is the better one. Where a number is equal, the next one decides; a missing one is the worst."""
    for criterion in criteria_of(new):
        value, before = number(new.get(criterion.name)), number(old.get(criterion.name))
        if value != before:
            return before is None or (value is not None and criterion.is_better(value, before))
    return False


def describe_score(row: Row) -> str:
    """A row other than a training step as text, for the terminal and the log."""
    if row["kind"] == "fewshot":
        spread = f"{row['accuracy']:.2%} ± {row['spread']:.2%}"
        return f"step {row['step']:,}: {row['shots']}-shot accuracy on {row['source']} {spread}"
    if row["kind"] == "baseline":
        score = f"{row['accuracy']:.2%} of {row['count']:,} {row['split']} images right"
        return f"a linear classifier on the frozen features, without training: {score}"
    count = f" ({row['count']:,} images)" if "count" in row else ""  # a task's own row may do without
    return f"step {row['step']:,}: {describe_split(row)}{count}"


def describe_split(row: Row) -> str:
    """What was found on a split: of features without a classifier, their k-NN accuracy and rank; the rank alone where
    there are no labels."""
    width = f" of {row['width']}" if "width" in row else ""
    parts = [
        *describe_numbers(row),
        *([f"top-5 {row['top5']:.2%}"] if row.get("top5") is not None else []),
        *([f"loss {row['loss']:.4f}"] if "loss" in row else []),
        *([f"feature rank {row['rank']:.1f}{width}"] if "rank" in row else []),
    ]
    return f"{row['split']} {', '.join(parts)}"


def describe_numbers(row: Row) -> list[str]:
    """The number that stands for a row and the others of its task, without the loss: ["mIoU 81.20%", ...]."""
    first = headline(row)
    others = [criterion for criterion in criteria_of(row)[1:] if criterion.name != LOSS]
    return [
        *([] if first is None else [f"{first.name} {first.text}"]),
        *(
            f"{title_of(criterion)} {write_value(criterion, value)}"
            for criterion in others
            if (value := number(row.get(criterion.name))) is not None
        ),
    ]

"""Rows of metrics as columns, and the names by which people know what is counted in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vitrail.report.axis import Floats, share, short

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """What an objective counts beside its loss: what it is called, and whether it is a share."""

    name: str
    percent: bool = False

    def said(self, value: float) -> str:
        return share(value) if self.percent else short(value)


TALLIES: Final = {
    "accuracy": Tally("accuracy", percent=True),
    "hits": Tally("hits", percent=True),  # of masked patches
    "agreement": Tally("agreement", percent=True),  # the other view of a picture is the most similar of a batch
    "spread": Tally("spread"),  # of features of length 1
    "teacher_entropy": Tally("teacher entropy"),
    "kl": Tally("KL"),  # of the student from the teacher
}


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.get("kind") == kind]


def scores(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in of_kind(rows, kind) if number(row.get("accuracy")) is not None]


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


def called(row: Row) -> str:
    """What the accuracy of a row is: "accuracy", or that of neighbours by its name."""
    return f"{row['measure']} accuracy" if row.get("measure") else "accuracy"


def describe_score(row: Row) -> str:
    """A row other than a training step as text, for the terminal and the log."""
    if row["kind"] == "fewshot":
        spread = f"{row['accuracy']:.2%} ± {row['spread']:.2%}"
        return f"step {row['step']:,}: {row['shots']}-shot accuracy on {row['source']} {spread}"
    if row["kind"] == "baseline":
        score = f"{row['accuracy']:.2%} of {row['count']:,} {row['split']} images right"
        return f"a linear classifier on the frozen features, without training: {score}"
    return f"step {row['step']:,}: {describe_split(row)} ({row['count']:,} images)"


def describe_split(row: Row) -> str:
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

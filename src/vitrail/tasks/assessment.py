"""What turns the score of any task's metric into an evaluation: whether the outputs are those of the data, and which
numbers are measures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.checkpoint.bundle import Card
from vitrail.core.errors import DataError
from vitrail.evaluation.intervals import Interval
from vitrail.evaluation.metric import Criterion
from vitrail.evaluation.result import Measure, measured

COUNT = "count"  # in the row of a score: how many images it is of


def check_outputs(card: Card, num_outputs: int, names: Sequence[str], outputs: str, where: str) -> None:
    """DataError where the outputs of a network are not the `names` that the data in `where` have; `outputs` says what
    these are, in words."""
    if num_outputs != len(names):
        raise DataError(f"{where} has {outputs}, and the network {num_outputs:,}; fine-tune it on these data")
    different = [at for at, name in enumerate(card.labels or names) if name != names[at]]
    if card.labels is not None and different:
        at = different[0]
        raise DataError(
            f"output {at} of the network is {card.labels[at]!r}, and in {where} it is {names[at]!r}; give data with "
            "the same names in the same order, or fine-tune it on these"
        )


def measure_row(
    row: Mapping[str, Any], criteria: Sequence[Criterion], intervals: Mapping[str, Interval | None], count: int
) -> tuple[Measure, ...]:
    """The finite numbers of a score's row: first those of the criteria, called by their titles."""
    known = {criterion.name: criterion for criterion in criteria}
    found: list[Measure] = []
    for name in (*known, *(name for name in row if name not in known and name != COUNT)):
        criterion, value = known.get(name, Criterion(name=name)), row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            title = criterion.title or name.replace("_", " ")
            unit = "share" if criterion.share else "number"
            found.append(measured(title, float(value), intervals.get(name), count, unit))
    return tuple(found)


def note_missing(row: Mapping[str, Any], left: int) -> list[str]:
    """Images that were read and have no target, and numbers that are none."""
    notes: list[str] = []
    if left:
        have = "image has no target and counts" if left == 1 else "images have no target and count"
        notes.append(f"{left:,} {have} for nothing")
    unsound = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    return notes + [f"{name} is {row[name]} and is left out" for name in unsound]

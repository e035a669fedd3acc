"""Matches a network's outputs to the classes of the data, and computes measures from predictions.

Classes of a data set are matched to outputs by name if both have names, else by number. A silent mistake here would
look like a bad network, so any contradiction is an error.

An assessment holds accuracy with intervals, numbers per class, calibration, and confusions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import read_text
from vitrail.core.errors import BadLabels, DataError
from vitrail.core.text import join_words
from vitrail.data.class_names import read_class_names
from vitrail.data.dataset import NONE, Labels
from vitrail.evaluation.intervals import Calibration, Floats, Reliability, bootstrap
from vitrail.evaluation.metrics import TOP, ClassPredictions
from vitrail.evaluation.result import ROUNDED, Measure, Unit, make_measure, measure_share
from vitrail.report.confusion_matrix import ClassCount, Confusion, rank_confusions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMatching:
    """Maps the classes of the data to outputs of the network: `table` has the output for each class; `names` are the
    names of all outputs."""

    table: NDArray[np.int64]
    names: tuple[str, ...]
    how: str  # "by name", "by number"
    notes: tuple[str, ...] = ()

    def relabel(self, labels: Labels) -> Labels:
        """Converts a data set's labels to outputs of the network."""
        table = np.append(self.table, NONE)  # -1 finds the last
        return Labels(table[np.asarray(labels.values, np.int64)], labels.starts)

    def usual(self, rows: Sequence[tuple[int, ...]], where: str) -> Labels:
        """Converts rows of class numbers of the full data set (ReaL's) to outputs of the network."""
        labels = Labels.several(rows)
        labels.check(len(self.names), where)
        if np.array_equal(self.table, np.arange(len(self.table))):
            return labels
        if len(self.table) != len(self.names):
            partly = f"the data have {len(self.table)} of them by name; score the whole set"
            raise BadLabels(f"{where} has numbers of {len(self.names)} classes, but {partly}")
        return self.relabel(labels)


def match_classes(
    outputs: int,
    labels: Sequence[str] | None,
    classes: Sequence[str],
    where: str,
    *,
    by_number: bool = False,
    also: Sequence[Sequence[str]] = (),
) -> ClassMatching:
    """Matches the classes of the data in `where` to a network's outputs. The card's `labels` name the outputs, and
    `also` holds alternative names that the data may use. Numeric names are not treated as names. With `by_number` class
    7 is output 7, regardless of names."""
    if not outputs:
        remedy = "score its features with vitrail fewshot, probe or knn, or fine-tune it"
        raise DataError(f"the network has no classifier, so it gives no classes; {remedy}")
    theirs = tuple(labels) if labels is not None and not is_numeric(labels) else None
    numbers = is_numeric(classes)
    if by_number or theirs is None or numbers:
        if labels is not None and not by_number and numbers and set(classes) <= set(labels):
            return match_by_name(tuple(labels), classes, outputs)
        return match_by_number(outputs, theirs, classes, where, by_number=by_number)
    strange = [name for name in classes if name not in set(theirs)]
    if strange:
        for names in also:
            if set(classes) <= set(names):
                return replace(match_by_name(tuple(names), classes, outputs), names=theirs)
        if len(classes) == outputs and theirs == read_class_names("imagenet"):
            known = f"{where} has other names than ImageNet's ({join_words(strange, limit=3)})"
            found = match_by_number(outputs, theirs, classes, where, by_number=False)
            return replace(found, notes=(*found.notes, f"{known}, so its classes are matched in order"))
        unknown, known = "is not a class" if len(strange) == 1 else "are not classes", join_words(theirs, limit=3)
        names = "give its names in the data with --labels FILE, or add --by-number if the order is the same"
        wrong = f"{where} has {join_words(strange, limit=3)}, which {unknown} of the network ({known})"
        raise BadLabels(f"{wrong}; fine-tune it on these classes, {names}")
    if tuple(classes) != theirs and len(set(theirs)) < len(theirs):
        twice = sorted({name for name in theirs if theirs.count(name) > 1})
        same = f"two classes of the network are called {join_words(twice, limit=3)}"
        remedy = "add --by-number if the order is the same"
        raise BadLabels(f"{same}, so those of {where} cannot be found by name; {remedy}")
    return match_by_name(theirs, classes, outputs)


def match_by_name(labels: tuple[str, ...], classes: Sequence[str], outputs: int) -> ClassMatching:
    """Matches by name. There may be fewer classes than outputs; the network may still predict any of its own."""
    if tuple(classes) == labels:
        return ClassMatching(table=np.arange(outputs), names=labels, how="by name")
    place = {name: at for at, name in enumerate(labels)}
    notes = [f"the data have {len(classes):,} of the network's {outputs:,} classes"] if len(classes) < outputs else []
    table = np.array([place[name] for name in classes], np.int64)
    return ClassMatching(table=table, names=labels, how="by name", notes=tuple(notes))


def match_by_number(
    outputs: int, labels: tuple[str, ...] | None, classes: Sequence[str], where: str, *, by_number: bool
) -> ClassMatching:
    """Matches by number: a class with a numeric name has that number, and any other class has its index."""
    if len(classes) > outputs or (len(classes) < outputs and not by_number):
        remedy = "fine-tune it on these classes"
        remedy += "" if len(classes) > outputs or by_number else ", or add --by-number if these are its first ones"
        remedy += "" if labels is not None or is_numeric(classes) else ", or name its classes with --labels FILE"
        raise BadLabels(f"{where} has {len(classes):,} classes and the network {outputs:,}; {remedy}")
    table = np.array([int(name) for name in classes] if is_numeric(classes) else np.arange(len(classes)), np.int64)
    if table.size and (int(table.max()) >= outputs or len(set(table.tolist())) < len(table)):
        raise BadLabels(f"{where} has a class {classes[int(table.argmax())]}, but the network's are 0 to {outputs - 1}")
    notes: list[str] = []
    if not np.array_equal(table, np.arange(len(table))):
        notes.append(f"the classes of {where} are matched by the numbers in their names, not by their order")
    if len(classes) < outputs:
        notes.append(f"the data have {len(classes):,} of the network's {outputs:,} classes")
    names = list(labels or map(str, range(outputs)))
    if labels is None:
        for at, name in zip(table.tolist(), classes, strict=True):
            names[at] = name
    return ClassMatching(table=table, names=tuple(names), how="by number", notes=tuple(notes))


def is_numeric(names: Sequence[str]) -> bool:
    """Whether all names are numbers."""
    return all(name.isascii() and name.isdecimal() for name in names)


def read_names(path: Path, outputs: int) -> tuple[str, ...]:
    """Reads the names of a network's classes, one per line. WordNet ids before them are ignored."""
    lines = read_text(path).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) != outputs:
        raise BadLabels(f"{path} has {len(lines):,} lines, but the network has {outputs:,} classes; give one per line")
    if all(re.match(r"n\d{8}\s+\S", line) for line in lines):
        lines = [line.split(maxsplit=1)[1] for line in lines]
    return tuple(line.strip().replace("_", " ") for line in lines)


# Measures that are not plain shares, in the order of `Assessment.statistics`.
STATISTICS: Final[dict[str, Unit]] = {
    "mean per class": "share",
    "ECE": "share",
    "adaptive ECE": "share",
    "loss": "number",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Assessment:
    """The measures of all predictions with a label. `names` are the network's classes; `real` uses ReaL's labels."""

    judged: ClassPredictions
    names: Sequence[str]
    real: ClassPredictions | None = None
    seed: int = 0

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Images of each class [K]."""
        return np.bincount(self.judged.truth, minlength=len(self.names))

    @cached_property
    def hits(self) -> NDArray[np.int64]:
        """Correctly classified images of each class [K]."""
        return np.bincount(self.judged.truth[self.judged.right], minlength=len(self.names))

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration(self.judged.confidence, self.judged.right)

    @cached_property
    def reliability(self) -> Reliability:
        return self.calibration.reliability()

    @property
    def classes(self) -> list[ClassCount]:
        """The classes with images, in order."""
        there = np.flatnonzero(self.counts)
        return [ClassCount(self.names[at], int(self.hits[at]), int(self.counts[at])) for at in there.tolist()]

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        return self.judged.count_confusions()

    def rank_confusions(self, most: int) -> list[Confusion]:
        """The most frequent mistakes."""
        return rank_confusions(self.cells, self.counts, self.names, most)

    def statistics(self, weights: Floats) -> Floats:
        """Computes STATISTICS with weights [M]."""
        # Every class has equal weight, whatever its number of images. The weights per image are fixed, so that a class
        # whose only image is missing from a resample does not raise the others.
        each = weights / self.counts[self.judged.truth]
        mean = (each * self.judged.right).sum() / each.sum()
        errors = [self.calibration.reliability(kind, weights).error for kind in ("width", "count")]
        loss = (self.judged.loss.astype(np.float64) * weights).sum() / weights.sum()
        return np.array([mean, *errors, loss])

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The measures of the result, without the loss if it is not finite."""
        count = len(self.judged)
        found = [measure_share("top-1", int(self.judged.right.sum()), count)]
        if len(self.names) > TOP:
            found.append(measure_share("top-5", int(self.judged.among.sum()), count))
        if self.real is not None and len(self.real):
            found.append(measure_share("ReaL", int(self.real.right.sum()), len(self.real)))
        values = self.statistics(np.ones(count)).tolist()
        intervals = bootstrap(self.statistics, count, seed=self.seed)
        found += [
            make_measure(name, value, interval, count, unit)
            for (name, unit), value, interval in zip(STATISTICS.items(), values, intervals, strict=True)
            if np.isfinite(value)
        ]
        return tuple(found)

    def details(self) -> dict[str, Any]:
        """Plain data for the result: numbers per class, the bins, and the cells of the confusion matrix."""
        counts = [(at, int(self.hits[at]), int(self.counts[at])) for at in np.flatnonzero(self.counts).tolist()]
        bins = [{name: round(value, ROUNDED) for name, value in row.items()} for row in self.reliability.rows()]
        return {
            "classes": list(self.names),
            "per_class": [{"class": at, "right": right, "count": count} for at, right, count in counts],
            "reliability": bins,
            "confusion": self.cells.tolist(),  # true class, predicted class, count
        }

"""Which output of a network is which class of a data set: by name where both have names, else by number.

A silent mistake here would give a number that looks like a bad network, so whatever contradicts itself is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, DataError
from vitrail.core.storage import read_text
from vitrail.data.class_names import bundled_names
from vitrail.data.labels import NONE, Labels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matching:
    """`table` [K of the data] holds the network's output of each class; `names` are those of all its outputs."""

    table: NDArray[np.int64]
    names: tuple[str, ...]
    how: str  # "by name", "by number"
    notes: tuple[str, ...] = ()

    def relabelled(self, labels: Labels) -> Labels:
        """A data set's labels as outputs of the network."""
        table = np.append(self.table, NONE)  # -1 finds the last
        return Labels(table[np.asarray(labels.values, np.int64)], labels.starts)

    def usual(self, rows: Sequence[tuple[int, ...]], where: str) -> Labels:
        """Rows of class numbers that stand for the data set's classes, in full (ReaL's), as outputs of the network."""
        labels = Labels.several(rows)
        labels.check(len(self.names), where)
        if np.array_equal(self.table, np.arange(len(self.table))):
            return labels
        if len(self.table) != len(self.names):
            raise BadLabels(
                f"{where} has numbers of {len(self.names)} classes, but the data have {len(self.table)} of them by "
                "name; score the whole set"
            )
        return self.relabelled(labels)


def match(
    outputs: int,
    labels: Sequence[str] | None,
    classes: Sequence[str],
    where: str,
    *,
    by_number: bool = False,
    also: Sequence[Sequence[str]] = (),
) -> Matching:
    """The classes of the data in `where` among a network's outputs, which the card's `labels` name; `also` are other
    names of all outputs that the data may use. Names that are numbers are none. With `by_number` class 7 is output 7,
    whatever the two are called."""
    if not outputs:
        raise DataError(
            "the network has no classifier, so it gives no classes; score its features with vitrail fewshot, probe or "
            "knn, or fine-tune it"
        )
    theirs = tuple(labels) if labels is not None and not numbered(labels) else None
    numbers = numbered(classes)
    if by_number or theirs is None or numbers:
        if labels is not None and not by_number and numbers and set(classes) <= set(labels):
            return named(tuple(labels), classes, outputs)
        return counted(outputs, theirs, classes, where, by_number=by_number)
    strange = [name for name in classes if name not in set(theirs)]
    if strange:
        for names in also:
            if set(classes) <= set(names):
                return replace(named(tuple(names), classes, outputs), names=theirs)
        if len(classes) == outputs and theirs == bundled_names("imagenet"):
            note = (
                f"{where} has other names than ImageNet's ({brief(strange)}), so its classes are taken in their order"
            )
            found = counted(outputs, theirs, classes, where, by_number=False)
            return replace(found, notes=(*found.notes, note))
        raise BadLabels(
            f"{where} has {brief(strange)}, which {'is no class' if len(strange) == 1 else 'are no classes'} of the "
            f"network ({brief(theirs)}); fine-tune it on these classes, or give its names as the data have them with "
            "--labels FILE, or say --by-number where the order is the same"
        )
    if tuple(classes) != theirs and len(set(theirs)) < len(theirs):
        twice = sorted({name for name in theirs if theirs.count(name) > 1})
        raise BadLabels(
            f"two classes of the network are called {brief(twice)}, so those of {where} cannot be found by name; "
            "say --by-number where the order is the same"
        )
    return named(theirs, classes, outputs)


def named(labels: tuple[str, ...], classes: Sequence[str], outputs: int) -> Matching:
    """By name. Fewer classes than outputs are no contradiction: the network may still say any of its own."""
    if tuple(classes) == labels:
        return Matching(table=np.arange(outputs), names=labels, how="by name")
    place = {name: at for at, name in enumerate(labels)}
    notes = [f"the data have {len(classes):,} of the network's {outputs:,} classes"] if len(classes) < outputs else []
    return Matching(
        table=np.array([place[name] for name in classes], np.int64), names=labels, how="by name", notes=tuple(notes)
    )


def counted(
    outputs: int, labels: tuple[str, ...] | None, classes: Sequence[str], where: str, *, by_number: bool
) -> Matching:
    """By number: a class that is called by a number has that one, any other its place."""
    if len(classes) > outputs or (len(classes) < outputs and not by_number):
        remedy = "fine-tune it on these classes"
        remedy += "" if len(classes) > outputs or by_number else ", or say --by-number where these are its first ones"
        remedy += "" if labels is not None or numbered(classes) else ", or name its classes with --labels FILE"
        raise BadLabels(f"{where} has {len(classes):,} classes and the network {outputs:,}; {remedy}")
    table = np.array([int(name) for name in classes] if numbered(classes) else np.arange(len(classes)), np.int64)
    if table.size and (int(table.max()) >= outputs or len(set(table.tolist())) < len(table)):
        raise BadLabels(f"{where} has a class {classes[int(table.argmax())]}, but the network's are 0 to {outputs - 1}")
    notes: list[str] = []
    if not np.array_equal(table, np.arange(len(table))):
        notes.append(f"the classes of {where} are taken by the numbers that they are called, not by their order")
    if len(classes) < outputs:
        notes.append(f"the data have {len(classes):,} of the network's {outputs:,} classes")
    names = list(labels or map(str, range(outputs)))
    if labels is None:
        for at, name in zip(table.tolist(), classes, strict=True):
            names[at] = name
    return Matching(table=table, names=tuple(names), how="by number", notes=tuple(notes))


def numbered(names: Sequence[str]) -> bool:
    """Whether these are numbers and no names."""
    return all(name.isascii() and name.isdecimal() for name in names)


def read_names(path: Path, outputs: int) -> tuple[str, ...]:
    """The names of a network's classes, one a line; WordNet's ids before them are passed over."""
    lines = read_text(path).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) != outputs:
        raise BadLabels(f"{path} has {len(lines):,} lines, but the network has {outputs:,} classes; give one a line")
    if all(re.match(r"n\d{8}\s+\S", line) for line in lines):
        lines = [line.split(maxsplit=1)[1] for line in lines]
    return tuple(line.strip().replace("_", " ") for line in lines)


def brief(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")

"""A list of pictures as CSV or JSON lines: path, label or labels, and perhaps the split.

    path,label                      {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat                     {"path": "a/2.jpg", "labels": ["cat", "indoors"], "split": "val"}

Paths are relative to the list's own folder. Labels are names, or class numbers where all of them are whole numbers. A
file classes.txt beside the list, one name a line, fixes the classes and their order.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data.labels import NONE, Labels, refuse_sparse
from vitrail.data.readers.folder import Files, split_name
from vitrail.data.source import Source

PATHS: Final = ("path", "file_name")  # the second is what Hugging Face calls it
CLASSES: Final = "classes.txt"
TRIED: Final = 8  # files that are looked for when a list is opened; the rest are met when they are read
DIGITS: Final = 18  # of a number; longer ones count as 10^18


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the list: its number, and what it says."""

    line: int
    path: str
    labels: tuple[str, ...] | None  # none where the cell is empty or the column is not there
    split: str


@dataclass(frozen=True, slots=True)
class Header:
    """Where things stand in a CSV."""

    separator: str
    path: int
    label: int | None
    several: bool
    split: int | None
    columns: int


def read(path: Path | str) -> dict[str, Source]:
    """The splits of a manifest; without a column that says otherwise all of it is train."""
    path = Path(path)
    try:
        several, rows = read_jsonl(path) if path.suffix.lower() == ".jsonl" else read_csv(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{path}: not a table: {error}") from None
    if not rows:
        raise DataError(f"{path}: no images: the list has no rows")
    refuse_elsewhere(path, rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    classes, number = numbering(path, rows)
    splits: dict[str, Source] = {}
    for name, group in groups.items():
        source = Files(str(path.parent), (row.path for row in group), labels_of(path, group, number, several))
        source.classes = classes if any(row.labels is not None for row in group) else ()
        splits[name] = source
    return splits


def has_paths(path: Path) -> bool:
    """Whether a file starts like a manifest."""
    try:
        with open_text(path) as file:
            first = file.readline(65536)
        if path.suffix.lower() == ".jsonl":
            found = json.loads(first)
            return isinstance(found, dict) and any(key in found for key in PATHS)
        return header(path, first) is not None
    except (OSError, ValueError, DataError):
        return False


def open_text(path: Path) -> Any:
    """Names that are not UTF-8 survive, as file systems hand them out."""
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="")


def header(path: Path, line: str) -> Header | None:
    """The columns, by the one separator that makes `path` a column of its own."""
    for separator in (",", ";", "\t"):
        names = [name.strip().lower() for name in next(csv.reader([line], delimiter=separator), [])]
        places = [names.index(name) for name in PATHS if name in names]
        if not places:
            continue
        known = [*PATHS, "label", "labels", "split"]
        twice = [name for name in known if names.count(name) > 1]
        if twice or len(places) > 1 or ("label" in names and "labels" in names):
            raise DataError(f"{path}: two columns for one thing: {', '.join(names)}")
        column = next((name for name in ("labels", "label") if name in names), None)
        return Header(
            separator=separator,
            path=places[0],
            label=None if column is None else names.index(column),
            several=column == "labels",
            split=names.index("split") if "split" in names else None,
            columns=len(names),
        )
    return None


def read_csv(path: Path) -> tuple[bool, list[Row]]:
    with open_text(path) as file:
        first = file.readline()
        head = header(path, first)
        if head is None:
            raise DataError(
                f"{path}: the first line must name the columns: path,label or path,labels, perhaps split; it is "
                f"{first.strip()[:80]!r}"
            )
        lines = csv.reader(file, delimiter=head.separator, strict=True)
        rows: list[Row] = []
        for cells in lines:
            at = lines.line_num + 1
            if not cells:
                continue
            if len(cells) != head.columns:
                raise DataError(
                    f"{path}, line {at}: {len(cells)} cells, but the first line names {head.columns} columns"
                )
            if not cells[head.path]:
                raise DataError(f"{path}, line {at}: the path is empty")
            text = "" if head.label is None else cells[head.label].strip()
            labels: tuple[str, ...] | None = (text,) if text else None
            if head.several:
                labels = tuple(part.strip() for part in text.replace(";", "|").split("|") if part.strip())
            rows.append(Row(at, cells[head.path], labels, split_of("" if head.split is None else cells[head.split])))
        return head.several, rows


def read_jsonl(path: Path) -> tuple[bool, list[Row]]:
    several = False
    rows: list[Row] = []
    with open_text(path) as file:
        for at, line in enumerate(file, 1):
            if not line.strip():
                continue
            row, more = json_row(f"{path}, line {at}", at, line)
            several |= more
            rows.append(row)
    return several, rows


def json_row(where: str, at: int, line: str) -> tuple[Row, bool]:
    """One object, and whether it may have several labels."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: an object is expected, as in {{'path': 'a/1.jpg', 'label': 'cat'}}")
    names: list[Any] = [found[key] for key in PATHS if key in found]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise DataError(f'{where}: "path" must be there once, as a text')
    split = found.get("split") or ""
    if not isinstance(split, str):
        raise DataError(f"{where}: the split is {split!r}, not a text")
    if "labels" in found:
        many: Any = found["labels"]
        if not isinstance(many, list) or "label" in found:
            raise DataError(f'{where}: "labels" is a list, and there is no "label" beside it')
        return Row(at, names[0], tuple(json_label(where, value) for value in many), split_of(split)), True
    one = found.get("label")
    return Row(at, names[0], None if one is None else (json_label(where, one),), split_of(split)), False


def json_label(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{where}: a label is a name or a whole number, not {value!r}")
    return str(value)


def split_of(text: str) -> str:
    text = text.strip()
    return split_name(text) or text or "train"


def refuse_elsewhere(path: Path, rows: Sequence[Row]) -> None:
    """Addresses are not fetched; and if none of the first files is there, the whole list is of somewhere else."""
    for row in rows[:TRIED]:
        if "://" in row.path:
            raise DataError(f"{path}, line {row.line}: {row.path[:80]} is an address; only files are read")
    if not any(os.path.lexists(path.parent / row.path) for row in rows[:TRIED]):
        raise SourceNotFound(
            f"{path}, line {rows[0].line}: no file {path.parent / rows[0].path}, nor any of the next ones; "
            f"paths are relative to the folder of the list"
        )


def numbering(path: Path, rows: Sequence[Row]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes, and the number of each label as it is written."""
    first: dict[str, int] = {}  # each label, and the line it is first met in
    for row in rows:
        for label in row.labels or ():
            first.setdefault(label, row.line)
    given = class_names(path.parent / CLASSES)
    if given is not None:
        return given, numbers_given(path, first, given)
    if not all(is_number(label) for label in first):
        classes = tuple(sorted(first))
        return classes, {name: i for i, name in enumerate(classes)}
    number = {label: class_number(path, label, line) for label, line in first.items()}
    highest = max(number.values(), default=NONE)
    remedy = f"A file {CLASSES} beside the list, one code a line, makes them names"
    refuse_sparse(str(path), highest, len(set(number.values())), remedy)
    return tuple(str(i) for i in range(highest + 1)), number


def is_number(text: str) -> bool:
    """Whether a label is written as a number of any kind, NaN too."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def class_number(path: Path, label: str, line: int) -> int:
    """A class number from text: 3, or 3.0 as tables with gaps are saved. Other numbers are no classes."""
    value = float(label)
    if not value.is_integer():
        raise BadLabels(
            f"{path}, line {line}: label {label[:40]} is not a whole number, while the others are numbers; "
            f"a file {CLASSES} beside the list, one label a line, makes them names"
        )
    if value < 0:
        raise BadLabels(f"{path}, line {line}: label {label[:40]} is below 0; classes count from 0")
    return 10**DIGITS if value > 10**DIGITS else int(label) if whole(label) else int(value)


def whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def class_names(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    with open_text(path) as file:
        names = tuple(line.strip() for line in file)
    while names and not names[-1]:
        names = names[:-1]
    if not names or len(set(names)) < len(names) or not all(names):
        raise BadLabels(f"{path}: one class a line, each once, no empty lines; found {len(names)} lines")
    return names


def numbers_given(path: Path, first: dict[str, int], classes: tuple[str, ...]) -> dict[str, int]:
    """Labels as names of the given classes, or all of them as numbers."""
    places = {name: i for i, name in enumerate(classes)}
    if all(label in places for label in first):
        return {label: places[label] for label in first}
    if not all(is_number(label) for label in first):
        label = next(label for label in first if label not in places)
        raise BadLabels(f"{path}, line {first[label]}: {label!r} is not in {path.parent / CLASSES}")
    number = {label: class_number(path, label, line) for label, line in first.items()}
    for label, line in first.items():
        if number[label] >= len(classes):
            raise BadLabels(
                f"{path}, line {line}: label {label[:40]}, but {path.parent / CLASSES} has {len(classes)} classes, "
                f"0 to {len(classes) - 1}"
            )
    return number


def labels_of(path: Path, rows: Sequence[Row], number: dict[str, int], several: bool) -> Labels | None:
    """Those of one split. Either all of its rows have a label or none."""
    if several:
        return Labels.several([number[label] for label in row.labels or ()] for row in rows)
    if all(row.labels is None for row in rows):
        return None
    for row in rows:
        if row.labels is None:
            raise BadLabels(f"{path}, line {row.line}: no label for {row.path}, while other rows have one")
    return Labels(np.fromiter(single(rows, number), np.int32, len(rows)))


def single(rows: Iterable[Row], number: dict[str, int]) -> Iterator[int]:
    return (number[row.labels[0]] if row.labels else NONE for row in rows)

"""A list of images as CSV or JSON lines: path, label or labels, and perhaps the split.

    path,label                      {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat                     {"path": "a/2.jpg", "labels": ["cat", "indoors"], "split": "val"}

Columns may have other names (filename, id; class, breed, tags; a 0 or 1 for each class): see table_columns.py.

Paths are relative to the list's own folder. Labels are names, or class numbers where all of them are whole numbers. A
file classes.txt next to the list, one name a line, fixes the classes and their order.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data.dataset import NONE, ImageDataset, Labels, refuse_sparse
from vitrail.data.readers.folder import TRIED, Files, Locator, split_name
from vitrail.data.readers.parquet import IMAGES, PATHS, YES, Columns, choose_columns, has_images, plain, split_labels

SEPARATORS: Final = (",", ";", "\t")
CLASSES: Final = "classes.txt"
DIGITS: Final = 18  # of a number; longer ones count as 10^18


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the list: its number, and what it says."""

    line: int
    path: str
    labels: tuple[str, ...] | None  # none where the cell is empty or the column is not there
    split: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All of a list: its rows, whether a row may have several labels, which columns were read where that is not plain,
    and the classes where the columns themselves are classes."""

    rows: list[Row]
    several: bool
    note: str = ""
    classes: tuple[str, ...] | None = None


def read(path: Path | str, choice: Mapping[str, str] | None = None) -> dict[str, ImageDataset]:
    """The splits of a manifest; without a column that says otherwise all of it is train. `choice` names the columns
    (image, label, split) where that is not plain."""
    path = Path(path)
    locator = Locator(path)
    try:
        read_list = read_jsonl if path.suffix.lower() == ".jsonl" else read_csv
        listing = read_list(path, choice or {}, locator)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{path}: not a table: {error}") from None
    if not listing.rows:
        raise DataError(f"{path}: no images: the list has no rows")
    refuse_addresses(path, listing.rows)
    names = locator.find_all([row.path for row in listing.rows])
    rows = [replace(row, path=name) for row, name in zip(listing.rows, names, strict=True)]
    refuse_elsewhere(path, rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    classes, number = numbering(path, rows, listing.classes)
    splits: dict[str, ImageDataset] = {}
    for name, group in groups.items():
        source = Files(str(path.parent), (row.path for row in group), labels_of(path, group, number, listing.several))
        source.classes = classes if any(row.labels is not None for row in group) else ()
        source.note = listing.note
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
        return any(name.strip().lower() in PATHS for separator in SEPARATORS for name in cut(first, separator))
    except (OSError, ValueError, csv.Error):
        return False


def open_text(path: Path) -> Any:
    """Names that are not UTF-8 survive, as file systems hand them out."""
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="")


def cut(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])


def header(first: str, choice: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """The separator that makes a column of images, or those that were asked for, and the names of all columns."""
    for separator in SEPARATORS:
        names = cut(first, separator)
        asked = {name for key in choice for name in choice[key].split("+")}
        if has_images(names) or (asked and asked <= {name.strip() for name in names}):
            return separator, names
    return None


def read_csv(path: Path, choice: Mapping[str, str], locator: Locator) -> Listing:
    with open_text(path) as file:
        first = file.readline()
        head = header(first, choice)
        if head is None:
            raise DataError(
                f"{path}: the first line must name the columns: path,label or path,labels, perhaps split; it is "
                f"{first.strip()[:80]!r}; choose the columns as {path}:image=COLUMN,label=COLUMN"
            )
        separator, names = head
        lines = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
        cells: list[list[str]] = []
        numbers: list[int] = []
        for row in lines:
            if not row:
                continue
            at = lines.line_num + 1
            if len(row) != len(names):
                raise DataError(f"{path}, line {at}: {len(row)} cells, but the first line names {len(names)} columns")
            cells.append(row)
            numbers.append(at)
    columns = choose_columns(path, names, cells, choice, locator.finds)
    for row, at in zip(cells, numbers, strict=True):
        if not row[columns.image].strip():
            raise DataError(f"{path}, line {at}: the path is empty")
    labels = [labels_in(row, columns) for row in cells]
    several = columns.kind in ("several", "flags")
    if columns.kind == "flags" and all(row is not None and len(row) == 1 for row in labels):
        several = False  # one class each, written as columns
    return Listing(
        rows=[
            Row(at, row[columns.image], found, split_of("" if columns.split is None else row[columns.split]))
            for at, row, found in zip(numbers, cells, labels, strict=True)
        ],
        several=several,
        note="" if columns.usual else columns.describe(),
        classes=tuple(names[at].strip() for at in columns.labels) if columns.kind == "flags" else None,
    )


def labels_in(row: Sequence[str], columns: Columns) -> tuple[str, ...] | None:
    """The labels of a row; none where it has none, unless it may have several."""
    match columns.kind:
        case "none":
            return None
        case "flags":
            return tuple(columns.names[at].strip() for at in columns.labels if row[at].strip().lower() in YES)
        case "several":
            return split_labels(row[columns.labels[0]], columns.separator)
        case "one":
            text = row[columns.labels[0]].strip()
            return (text,) if text else None


def read_jsonl(path: Path, choice: Mapping[str, str], locator: Locator) -> Listing:
    several = False
    rows: list[Row] = []
    with open_text(path) as file:
        for at, line in enumerate(file, 1):
            if not line.strip():
                continue
            row, more = json_row(f"{path}, line {at}", at, line, choice)
            several |= more
            rows.append(row)
    return Listing(rows=rows, several=several)


def json_row(where: str, at: int, line: str, choice: Mapping[str, str]) -> tuple[Row, bool]:
    """One object, and whether it may have several labels."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: an object is expected, as in {{'path': 'a/1.jpg', 'label': 'cat'}}")
    asked = choice.get("image")
    keys = [asked] if asked else [key for key in found if key in PATHS] or [k for k in found if plain(k) in IMAGES]
    names: list[Any] = [found[key] for key in keys if key in found]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise DataError(f'{where}: "path" must be there once, as a text')
    split = found.get(choice.get("split", "split")) or ""
    if not isinstance(split, str):
        raise DataError(f"{where}: the split is {split!r}, not a text")
    if "labels" in found and "label" not in choice:
        many: Any = found["labels"]
        if not isinstance(many, list) or "label" in found:
            raise DataError(f'{where}: "labels" is a list, and there is no "label" next to it')
        return Row(at, names[0], tuple(json_label(where, value) for value in many), split_of(split)), True
    one = found.get(choice.get("label", "label"))
    if isinstance(one, list):
        return Row(at, names[0], tuple(json_label(where, value) for value in one), split_of(split)), True
    return Row(at, names[0], None if one is None else (json_label(where, one),), split_of(split)), False


def json_label(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{where}: a label is a name or a whole number, not {value!r}")
    return str(value)


def split_of(text: str) -> str:
    text = text.strip()
    return split_name(text) or text or "train"


def refuse_addresses(path: Path, rows: Sequence[Row]) -> None:
    for row in rows[:TRIED]:
        if "://" in row.path:
            raise DataError(f"{path}, line {row.line}: {row.path[:80]} is an address; only files are read")


def refuse_elsewhere(path: Path, rows: Sequence[Row]) -> None:
    """If none of the first files is there, the whole list is of somewhere else."""
    if not any(os.path.lexists(path.parent / row.path) for row in rows[:TRIED]):
        raise SourceNotFound(
            f"{path}, line {rows[0].line}: no file {path.parent / rows[0].path}, nor any of the next ones; "
            f"paths are relative to the folder of the list, and images in folders below it are found by name"
        )


def numbering(
    path: Path, rows: Sequence[Row], columns: tuple[str, ...] | None = None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes, and the number of each label as it is written. Columns that are classes are so in their order."""
    if columns is not None:
        return columns, {name: at for at, name in enumerate(columns)}
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
    remedy = f"A file {CLASSES} next to the list, one code a line, makes them names"
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
            f"a file {CLASSES} next to the list, one label a line, makes them names"
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

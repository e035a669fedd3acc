"""A list of images as CSV or JSON lines: path, label or labels, and optionally the split.

    path,label                      {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat                     {"path": "a/2.jpg", "labels": ["cat", "indoors"], "split": "val"}

Columns may have the other names that people give them; `path` or `file_name`, and `label` or `labels`, have priority.
Where two columns are possible, the error shows how to choose: list.csv:image=COLUMN,label=COLUMN.

    filename,breed      id,label      image_name,tags      img;cat;dog;indoors (0 or 1 each)

Paths are relative to the list's own folder. Labels are names, or class numbers where all of them are integers. A file
classes.txt next to the list, one name per line, fixes the classes and their order.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.core.text import join_words
from vitrail.data.dataset import NONE, ImageDataset, Labels, refuse_sparse
from vitrail.data.readers.folder import TRIED, FileDataset, ImageLocator, find_split_word, parse_split

PATHS: Final = ("path", "file_name")  # the second is Hugging Face's name
FILES: Final = {"path", "filename", "filepath", "file", "photo", "picture", "img", "imgpath", "imgname", "imgfile"}
IMAGES: Final = FILES | {"image", "imagepath", "imagename", "imagefile", "imagefilename"}
IDS: Final = {"id", "imageid", "imgid", "photoid", "pictureid", "fileid", "uuid"}
PLURAL: Final = {"labels", "classes", "breeds", "categories", "targets", "tags"}
SINGULAR: Final = {"label", "labelname", "labelid", "class", "classname", "classid", "classlabel", "target", "tag", "y"}
LABELS: Final = PLURAL | SINGULAR | {"category", "categoryname", "categoryid", "breed", "species", "variety"}
SPLITS: Final = ("split", "subset", "partition", "set")
FLAGS: Final = ({"0", "1"}, {"-1", "1"}, {"0.0", "1.0"}, {"true", "false"})
YES: Final = ("1", "1.0", "true")
KEYS: Final = ("image", "label", "split")  # of a choice
SEPARATORS: Final = (",", ";", "\t")
CLASSES: Final = "classes.txt"
Names: TypeAlias = tuple[str, ...]
DIGITS: Final = 18  # of a number; longer ones count as 10^18


Kind = Literal["none", "one", "several", "flags"]
Rows = Sequence[Sequence[str]]


class ListColumns(NamedTuple):
    """Their indices. `kind` says whether a row has one label, several in a cell, or a 0 or 1 for each class."""

    names: tuple[str, ...]
    image: int
    labels: tuple[int, ...]
    kind: Kind
    split: int | None
    separator: str  # of several labels in a cell

    @property
    def is_standard(self) -> bool:
        """Whether all have the names that this package writes."""
        chosen = {self.names[at].strip().lower() for at in (self.image, *self.labels)}
        return chosen <= {*PATHS, "label", "labels"} and self.separator in ("|", "") and self.kind != "flags"

    def describe(self) -> str:
        """columns used: id (images), breed (labels)"""
        shown = [self.names[at].strip() for at in self.labels]
        labels = f"{join_words(shown, limit=4)} (labels{', 0 or 1 each' if self.kind == 'flags' else ''})"
        apart = {" ": ", split at spaces", ",": ", split at commas"}.get(self.separator, "")
        return f"columns used: {self.names[self.image].strip()} (images), {labels if shown else 'no labels'}{apart}"


class ListRow(NamedTuple):
    """A line of the list: its number and its contents."""

    line: int
    path: str
    labels: tuple[str, ...] | None  # None where the cell is empty or the column does not exist
    split: str


class ImageList(NamedTuple):
    """The rows of a list, whether a row may have several labels, a note on the columns where they are not the standard
    ones, and the classes where the columns themselves are classes."""

    rows: list[ListRow]
    several: bool
    note: str = ""
    classes: tuple[str, ...] | None = None


def read(path: Path | str, choice: Mapping[str, str] | None = None) -> dict[str, ImageDataset]:
    """The splits of a manifest; without a column of splits all of it is train. `choice` has the columns (image, label,
    split) where they are ambiguous."""
    path = Path(path)
    locator = ImageLocator(path)
    try:
        if path.suffix.lower() == ".jsonl":
            with open_text(path) as file:
                lines = [(at, line) for at, line in enumerate(file, 1) if line.strip()]
            parsed = [parse_json_row(f"{path}, line {at}", at, line, choice or {}) for at, line in lines]
            listing = ImageList([row for row, _ in parsed], any(several for _, several in parsed))
        else:
            listing = read_csv(path, choice or {}, locator)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{path}: not a table: {error}") from None
    if not listing.rows:
        raise DataError(f"{path}: no images: the list has no rows")
    for row in listing.rows[:TRIED]:
        if "://" in row.path:
            raise DataError(f"{path}, line {row.line}: {row.path[:80]} is a URL; only files are read")
    names = locator.find_all([row.path for row in listing.rows])
    rows = [row._replace(path=name) for row, name in zip(listing.rows, names, strict=True)]
    if not any(os.path.lexists(path.parent / row.path) for row in rows[:TRIED]):  # it belongs to another folder
        rule = "paths are relative to the folder of the list, and images in folders below it are found by name"
        first = f"no file {path.parent / rows[0].path}, nor any of the next ones"
        raise SourceNotFound(f"{path}, line {rows[0].line}: {first}; {rule}")
    classes, number = number_labels(path, rows, listing.classes)
    groups, splits = dict[str, list[ListRow]](), dict[str, ImageDataset]()
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    for name, group in groups.items():
        labels = make_labels(path, group, number, listing.several)
        splits[name] = source = FileDataset(str(path.parent), (row.path for row in group), labels)
        source.classes = classes if any(row.labels is not None for row in group) else ()
        source.note = listing.note
    return splits


def has_paths(path: Path) -> bool:
    """Whether a file starts like a manifest."""
    try:
        with open_text(path) as file:
            first = file.readline(65536)
        if path.suffix.lower() == ".jsonl":
            found = json.loads(first)
            return isinstance(found, dict) and any(key in found for key in PATHS)
        return any(name.strip().lower() in PATHS for separator in SEPARATORS for name in split_cells(first, separator))
    except (OSError, ValueError, csv.Error):
        return False


def open_text(path: Path) -> Any:
    """Names that are not UTF-8 survive, as they do in file systems."""
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline="")


def split_cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])


def read_csv(path: Path, choice: Mapping[str, str], locator: ImageLocator) -> ImageList:
    asked = {name for chosen in choice.values() for name in chosen.split("+")}

    def has_images(names: Sequence[str]) -> bool:
        """Whether these are the chosen columns, or one has a usual name for images."""
        usual = any(normalise_name(name) in IMAGES | IDS for name in names)
        return usual or (bool(asked) and asked <= {name.strip() for name in names})

    with open_text(path) as file:
        first = file.readline()
        separator = next((sign for sign in SEPARATORS if has_images(split_cells(first, sign))), None)
        if separator is None:
            rule = "the first line must name the columns: path,label or path,labels, perhaps split"
            remedy = f"choose the columns as {path}:image=COLUMN,label=COLUMN"
            raise DataError(f"{path}: {rule}; it is {first.strip()[:80]!r}; {remedy}")
        names = split_cells(first, separator)
        lines = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
        cells = [(lines.line_num + 1, row) for row in lines if row]
    for at, row in cells:
        if len(row) != len(names):
            raise DataError(f"{path}, line {at}: {len(row)} cells, but the first line names {len(names)} columns")
    columns = choose_columns(path, names, [row for _, row in cells], choice, locator.finds_any)
    rows: list[ListRow] = []
    for at, row in cells:
        if not row[columns.image].strip():
            raise DataError(f"{path}, line {at}: the path is empty")
        split = normalise_split("" if columns.split is None else row[columns.split])
        rows.append(ListRow(at, row[columns.image], read_labels(row, columns), split))
    flags = columns.kind == "flags"
    # Flags of which each row has exactly one are one class each, written as columns.
    single = flags and all(row.labels is not None and len(row.labels) == 1 for row in rows)
    several = columns.kind in ("several", "flags") and not single
    classes = tuple(names[at].strip() for at in columns.labels) if flags else None
    return ImageList(rows, several, "" if columns.is_standard else columns.describe(), classes)


def read_labels(row: Sequence[str], columns: ListColumns) -> tuple[str, ...] | None:
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


def parse_json_row(where: str, at: int, line: str, choice: Mapping[str, str]) -> tuple[ListRow, bool]:
    """One object, and whether it may have several labels."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: an object is expected, as in {{'path': 'a/1.jpg', 'label': 'cat'}}")
    usual = [key for key in found if key in PATHS] or [key for key in found if normalise_name(key) in IMAGES]
    keys = [choice["image"]] if choice.get("image") else usual
    names: list[Any] = [found[key] for key in keys if key in found]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise DataError(f'{where}: "path" must be there once, as a text')
    split = found.get(choice.get("split", "split")) or ""
    if not isinstance(split, str):
        raise DataError(f"{where}: the split is {split!r}, not a text")
    value: Any = found.get(choice.get("label", "label"))
    if "labels" in found and "label" not in choice:
        value = found["labels"]
        if not isinstance(value, list) or "label" in found:
            raise DataError(f'{where}: "labels" must be a list, without a "label" next to it')
    several = isinstance(value, list)
    labels = value if several else [] if value is None else [value]
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
            raise DataError(f"{where}: a label is a name or an integer, not {label!r}")
    parsed = tuple(map(str, labels)) if several or labels else None
    return ListRow(at, names[0], parsed, normalise_split(split)), several


def normalise_split(text: str) -> str:
    text = text.strip()
    return parse_split(text) or text or "train"


def number_labels(path: Path, rows: Sequence[ListRow], columns: Names | None) -> tuple[Names, dict[str, int]]:
    """The classes, and the number of each label as written. Columns that are classes keep their order."""
    if columns is not None:
        return columns, {name: at for at, name in enumerate(columns)}
    first: dict[str, int] = {}  # each label, and the first line that has it
    for row in rows:
        for label in row.labels or ():
            first.setdefault(label, row.line)
    given, whole = read_class_names(path.parent / CLASSES), all(is_number(label) for label in first)
    if given is None and not whole:
        given = tuple(sorted(first))
    places = {name: at for at, name in enumerate(given or ())}
    if given is not None and first.keys() <= places.keys():
        return given, places
    if not whole:
        label = next(label for label in first if label not in places)
        raise BadLabels(f"{path}, line {first[label]}: {label!r} is not in {path.parent / CLASSES}")
    number = {label: parse_class_number(path, label, line) for label, line in first.items()}
    if given is None:
        highest = max(number.values(), default=NONE)
        remedy = f"A file {CLASSES} next to the list, one code per line, makes them names"
        refuse_sparse(str(path), highest, len(set(number.values())), remedy)
        return tuple(str(i) for i in range(highest + 1)), number
    for label, line in first.items():
        if number[label] >= len(given):
            rule = f"{path.parent / CLASSES} has {len(given)} classes, 0 to {len(given) - 1}"
            raise BadLabels(f"{path}, line {line}: label {label[:40]}, but {rule}")
    return given, number


def is_number(text: str) -> bool:
    """Whether a label is written as a number of any kind, NaN included."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def parse_class_number(path: Path, label: str, line: int) -> int:
    """A class number from text: 3, or 3.0 as tables with gaps are saved. Other numbers are not classes."""
    value = float(label)
    if not value.is_integer():
        remedy = f"a file {CLASSES} next to the list, one label per line, makes them names"
        raise BadLabels(f"{path}, line {line}: label {label[:40]} is not an integer, while the others are; {remedy}")
    if value < 0:
        raise BadLabels(f"{path}, line {line}: label {label[:40]} is below 0; classes count from 0")
    return 10**DIGITS if value > 10**DIGITS else int(label) if label.isdecimal() else int(value)


def read_class_names(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    with open_text(path) as file:
        names = tuple(line.strip() for line in file)
    while names and not names[-1]:
        names = names[:-1]
    if not names or len(set(names)) < len(names) or not all(names):
        raise BadLabels(f"{path}: one class per line, each once, no empty lines; found {len(names)} lines")
    return names


def make_labels(path: Path, rows: Sequence[ListRow], number: dict[str, int], several: bool) -> Labels | None:
    """The labels of one split. Either all of its rows have one or none."""
    if several:
        return Labels.several([number[label] for label in row.labels or ()] for row in rows)
    if all(row.labels is None for row in rows):
        return None
    for row in rows:
        if row.labels is None:
            raise BadLabels(f"{path}, line {row.line}: no label for {row.path}, while other rows have one")
    return Labels(np.array([number[row.labels[0]] if row.labels else NONE for row in rows], np.int32))


def parse_choice(where: str, text: str) -> dict[str, str]:
    """image=COLUMN,label=COLUMN+COLUMN,split=COLUMN"""
    choice: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = {"path": "image", "labels": "label"}.get(key.strip(), key.strip())
        if not equals or not value or key not in KEYS or key in choice:
            raise DataError(f"{where}:{text}: columns are chosen as {where}:image=COLUMN,label=COLUMN,split=COLUMN")
        choice[key] = value.strip()
    return choice


def choose_columns(
    path: Path, names: Sequence[str], rows: Rows, choice: Mapping[str, str], find: Callable[[Sequence[str]], bool]
) -> ListColumns:
    """The columns of a list. `find` tells whether any of some names is a file."""
    known = [name.strip().lower() for name in names]
    chosen = {key: index_of(path, names, name) for key, name in choice.items() if key != "label"}
    image = chosen["image"] if "image" in chosen else find_image_column(path, names, rows, find)
    similar = [known.index(name) for name in SPLITS if name in known]
    # The column called `split`, or one of a similar name whose values all are names of splits.
    usual = (at for at in similar if known[at] == "split" or all(parse_split(row[at].strip()) for row in rows))
    split = chosen["split"] if "split" in chosen else next(usual, None)
    if "label" in choice:
        labels = [index_of(path, names, part) for part in choice["label"].split("+")]
    else:
        rest = [at for at in range(len(names)) if at not in (image, split)]
        labels = find_label_columns(path, names, rows, rest)
    kind, separator = detect_label_kind(names, rows, labels)
    return ListColumns(tuple(names), image, tuple(labels), kind, split, separator)


def normalise_name(name: str) -> str:
    """ "Image Path" and "image_path" are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def index_of(path: Path, names: Sequence[str], name: str) -> int:
    known = [one.strip() for one in names]
    if name not in known:
        raise DataError(f"{path} has no column {name!r}; it has {', '.join(known)}")
    return known.index(name)


def find_image_column(path: Path, names: Sequence[str], rows: Rows, find: Callable[[Sequence[str]], bool]) -> int:
    known = [name.strip().lower() for name in names]
    if first := [at for at, name in enumerate(known) if name in PATHS]:
        return only_column(path, names, first, "image")
    found = [at for at, name in enumerate(names) if normalise_name(name) in IMAGES]
    found = found or [at for at, name in enumerate(names) if normalise_name(name) in IDS]
    if len(found) > 1:
        found = [at for at in found if find([row[at] for row in rows])] or found
    return only_column(path, names, found, "image")


def find_label_columns(path: Path, names: Sequence[str], rows: Rows, rest: Sequence[int]) -> list[int]:
    """The column of labels, or those that have 0 or 1 for each class; empty where there is none."""
    known = {at: names[at].strip().lower() for at in rest}
    if first := [at for at in rest if known[at] in ("label", "labels")]:
        return [only_column(path, names, first, "label")]
    found = [at for at in rest if normalise_name(names[at]) in LABELS]
    if len(found) > 1:  # of equivalent columns, class_id and class_name, the one with names
        pairs = {tuple(row[at] for at in found) for row in rows}
        if all(len({row[at] for row in rows}) == len(pairs) for at in found):
            texts = [at for at in found if not all(row[at].strip().isdecimal() for row in rows)]
            found = (texts or found)[:1]
    if found:
        return [only_column(path, names, found, "label")]
    cells = {at: {row[at].strip().lower() for row in rows} for at in rest}
    flags = [at for at in rest if cells[at] and any(cells[at] <= values for values in FLAGS)]
    flags = [at for at in flags if names[at].strip() and not find_split_word(names[at])]
    return flags if len(flags) > 1 else []


def detect_label_kind(names: Sequence[str], rows: Rows, labels: Sequence[int]) -> tuple[Kind, str]:
    """How labels are written in their cells, and what separates several."""
    if not labels:
        return "none", "|"
    if len(labels) > 1:
        return "flags", "|"
    name, cells = normalise_name(names[labels[0]]), [row[labels[0]].strip() for row in rows]
    if name in PLURAL or any(cell.startswith("[") and cell.endswith("]") for cell in cells):
        return "several", detect_separator(name, cells)
    numbers = all(re.fullmatch(r"\d+( \d+)*", cell) for cell in cells if cell)
    if numbers and any(" " in cell for cell in cells):
        return "several", " "
    return "one", "|"


def detect_separator(name: str, cells: Sequence[str]) -> str:
    """The separator of labels: | or ; where one occurs, else a comma; else a space, where the words are labels too."""
    if any("|" in cell or ";" in cell for cell in cells):
        return "|"
    if any("," in cell for cell in cells):
        return ","
    alone = {cell for cell in cells if " " not in cell}
    words = {word for cell in cells if " " in cell for word in cell.split()}
    return " " if words and (name == "tags" or words <= alone) else "|"


def split_labels(text: str, separator: str) -> tuple[str, ...]:
    """The labels of a cell: a|b, a;b, or by the separator; also ['a', 'b'] as lists are saved."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text, separator = text[1:-1], ","
    if separator == "|":
        text = text.replace(";", "|")
    parts = text.split() if separator == " " else text.split(separator)
    return tuple(part for piece in parts if (part := piece.strip().strip("'\"").strip()))


def only_column(path: Path, names: Sequence[str], places: Sequence[int], what: str) -> int:
    """The only candidate; DataError where there are none or several."""
    if len(places) == 1:
        return places[0]
    shown, columns = [names[at].strip() for at in places], ", ".join(name.strip() for name in names)
    if not shown:
        raise DataError(f"{path}: no column has images; it has {columns}; choose one as {path}:image=COLUMN")
    may = f"of the columns {columns} the {what} may be {' or '.join(shown)}"
    raise DataError(f"{path}: {may}; choose one as {path}:{what}={shown[0]}")

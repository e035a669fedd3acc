"""Finds the columns of a list of images, labels and splits, under the names that people give them.

    filename,breed      id,label      image_name,tags      img;cat;dog;indoors (0 or 1 each)

`path` or `file_name`, and `label` or `labels`, have priority. Where two columns are possible, the error shows how to
choose: list.csv:image=COLUMN,label=COLUMN.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from vitrail.core.errors import DataError
from vitrail.core.text import join_words
from vitrail.data.readers.folder import find_split_word, parse_split

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
    split = chosen["split"] if "split" in chosen else find_split_column(known, rows)
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


def find_split_column(known: Sequence[str], rows: Rows) -> int | None:
    """The column called `split`, or one of a similar name whose values all are names of splits."""
    for at in (known.index(name) for name in SPLITS if name in known):
        if known[at] == "split" or all(parse_split(row[at].strip()) for row in rows):
            return at
    return None


def find_label_columns(path: Path, names: Sequence[str], rows: Rows, rest: Sequence[int]) -> list[int]:
    """The column of labels, or those that have 0 or 1 for each class; empty where there is none."""
    known = {at: names[at].strip().lower() for at in rest}
    if first := [at for at in rest if known[at] in ("label", "labels")]:
        return [only_column(path, names, first, "label")]
    found = [at for at in rest if normalise_name(names[at]) in LABELS]
    if len(found) > 1:
        found = choose_of_equals(rows, found)
    if found:
        return [only_column(path, names, found, "label")]
    cells = {at: {row[at].strip().lower() for row in rows} for at in rest}
    flags = [at for at in rest if cells[at] and any(cells[at] <= values for values in FLAGS)]
    flags = [at for at in flags if names[at].strip() and not find_split_word(names[at])]
    return flags if len(flags) > 1 else []


def choose_of_equals(rows: Rows, places: list[int]) -> list[int]:
    """Of equivalent columns, class_id and class_name, the one with names."""
    pairs = {tuple(row[at] for at in places) for row in rows}
    if any(len({row[at] for row in rows}) != len(pairs) for at in places):
        return places
    named = [at for at in places if not all(row[at].strip().isdecimal() for row in rows)]
    return (named or places)[:1]


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

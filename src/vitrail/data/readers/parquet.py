"""Parquet files, saved Hugging Face datasets and tables in memory, all by way of pyarrow (the extra `data`).

Images are a column of encoded bytes, plain or as Hugging Face's {bytes, path}; labels are numbers, lists of them or
names. A saved dataset or a table is random access. A Parquet file is decoded a row group at a time, of which each
process keeps 256 MB: a shuffled pass over a bigger set decodes a group for nearly every sample, so pack it first
(`vitrail data pack`); reading in order costs nothing extra.

Which columns of a list are what: images, labels, split, under the names that people give them.

    filename,breed      id,label      image_name,tags      img;cat;dog;indoors (0 or 1 each)

`path` or `file_name`, and `label` or `labels`, go before all others. What could be two things is refused with the way
to choose: list.csv:image=COLUMN,label=COLUMN.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vitrail.core.errors import DataError, SourceNotFound
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.readers.arrow_columns import (
    ArrowFiles,
    Blocks,
    ParquetFiles,
    TableDataset,
    Tables,
    arrow,
    choose,
    class_names,
)
from vitrail.data.readers.arrow_columns import labels as labels_of
from vitrail.data.readers.detect_format import by_split
from vitrail.data.readers.folder import look, split_in_name, split_name


def read(path: Path | str, *, image: str | None = None, label: str | None = None) -> dict[str, ImageDataset]:
    """The splits of a .parquet file or of a folder of them, as the Hugging Face hub lays them out
    (train-00000-of-00005.parquet, also below data/). `image` and `label` name the columns where that is not plain."""
    arrow()
    path = Path(path)
    files = parquet_files(path)
    if not files:
        raise SourceNotFound(f"{path}: no .parquet files here")
    blocks = {split: ParquetFiles([str(name) for name in names]) for split, names in files.items()}
    return built(str(path), blocks, image, label, None)


def read_saved(path: Path | str, *, image: str | None = None, label: str | None = None) -> dict[str, ImageDataset]:
    """The splits of a folder that `save_to_disk` of Hugging Face's datasets wrote; that library is not needed."""
    arrow()
    path = Path(path)
    parts = {"train": path}
    if (path / "dataset_dict.json").is_file():
        names: Any = described(path / "dataset_dict.json", "splits")
        parts = {split_name(name) or name: path / os.path.basename(name) for name in names}
    blocks: dict[str, Blocks] = {}
    features: Any = None
    for split, folder in parts.items():
        rows: Any = described(folder / "state.json", "_data_files")
        blocks[split] = ArrowFiles([str(folder / os.path.basename(row["filename"])) for row in rows])
        features = described(folder / "dataset_info.json", "features") or features
    return built(str(path), blocks, image, label, features)


def from_table(
    table: Any, *, image: str | None = None, label: str | None = None, called: str = "table"
) -> dict[str, ImageDataset]:
    """A pyarrow Table, a Hugging Face Dataset, or a DatasetDict with its splits, as sources. Nothing is copied."""
    arrow()
    tables: dict[str, Any] = {split_name(n) or n: t for n, t in table.items()} if hasattr(table, "items") else {}
    tables = tables or {"train": table}
    plain = {split: t.data.table if hasattr(t, "features") else t for split, t in tables.items()}
    blocks = {split: Tables(t, called) for split, t in plain.items()}
    sources = built(called, blocks, image, label, None)
    for split, t in tables.items():
        chosen: Any = getattr(t, "_indices", None)  # a Dataset that was shuffled, filtered or selected from
        if chosen is not None:
            sources[split] = SubsetDataset(sources[split], chosen.column(0).to_numpy())
    return sources


def built(
    where: str, blocks: Mapping[str, Blocks], image: str | None, label: str | None, features: Any
) -> dict[str, ImageDataset]:
    """One source a split, all with the same classes."""
    schema = next(iter(blocks.values())).schema()
    features = features or metadata(schema)
    picture, labelled = choose(where, schema, features, image, label)
    columns = {split: None if labelled is None else part.column(labelled) for split, part in blocks.items()}
    classes = class_names(where, features.get(labelled), [column for column in columns.values() if column is not None])
    sources: dict[str, ImageDataset] = {}
    for split, part in blocks.items():
        part.picture = picture
        if not len(part):
            raise DataError(f"{where}: the split {split} has no rows")
        sources[split] = TableDataset(
            part, labels_of(f"{where} ({split})", columns[split], len(part), classes), classes
        )
    return sources


def metadata(schema: Any) -> dict[str, Any]:
    """What Hugging Face's datasets notes of its columns in a schema."""
    try:
        found: Any = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (KeyError, TypeError, ValueError):
        return {}


def described(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))[field]
    except OSError as error:
        raise SourceNotFound(f"{path}: {error.strerror}; save_to_disk writes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no description of a saved dataset: {error!r}") from None


def parquet_files(path: Path) -> dict[str, Sequence[Path]]:
    """The files by split."""
    if path.is_file():
        return {split: [path] for split in by_split(str(path), [path.name])}
    if not path.is_dir():
        raise SourceNotFound(f"{path}: no such file or folder")
    contents = look(str(path))
    if names := contents.with_suffix(".parquet"):
        return {split: [path / name for name in files] for split, files in by_split(str(path), names).items()}
    if "data" in contents.folders:
        return parquet_files(path / "data")
    inner = {name: split for name in contents.folders if (split := split_name(name))}
    if len(set(inner.values())) < len(inner):
        raise DataError(f"{path} holds {', '.join(inner)}: two names for one split; keep one of them")
    found = {
        split: [path / name / file for file in look(str(path / name)).with_suffix(".parquet")]
        for name, split in inner.items()
    }
    return {split: files for split, files in found.items() if files}


PATHS: Final = ("path", "file_name")  # the second is what Hugging Face calls it
IMAGES: Final = frozenset(
    (
        *("path", "filename", "filepath", "file", "photo", "picture"),
        *("image", "imagepath", "imagename", "imagefile", "imagefilename"),
        *("img", "imgpath", "imgname", "imgfile"),
    )
)
IDS: Final = frozenset(("id", "imageid", "imgid", "photoid", "pictureid", "fileid", "uuid"))
LABELS: Final = frozenset(
    (
        *("label", "labels", "labelname", "labelid", "class", "classes", "classname", "classid", "classlabel"),
        *("category", "categories", "categoryname", "categoryid", "breed", "breeds", "species", "variety"),
        *("target", "targets", "tag", "tags", "y"),
    )
)
PLURAL: Final = frozenset(["labels", "classes", "breeds", "categories", "targets", "tags"])
SPLITS: Final = ("split", "subset", "partition", "set")
FLAGS: Final = ({"0", "1"}, {"-1", "1"}, {"0.0", "1.0"}, {"true", "false"})
YES: Final = ("1", "1.0", "true")
KEYS: Final = ("image", "label", "split")  # of a choice

Kind = Literal["none", "one", "several", "flags"]
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Their places. `kind` says whether a row has one label, several in a cell, or a 0 or 1 for each class."""

    names: tuple[str, ...]
    image: int
    labels: tuple[int, ...]
    kind: Kind
    split: int | None
    separator: str = "|"  # of several labels in a cell

    @property
    def usual(self) -> bool:
        """Whether all have the names that this package writes."""
        chosen = {self.names[at].strip().lower() for at in (self.image, *self.labels)}
        return chosen <= {*PATHS, "label", "labels"} and self.separator in ("|", "") and self.kind != "flags"

    def describe(self) -> str:
        """columns used: id (images), breed (labels)"""
        shown = [self.names[at].strip() for at in self.labels]
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        labels = f"{', '.join(shown[:4])}{more} (labels{', 0 or 1 each' if self.kind == 'flags' else ''})"
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
) -> Columns:
    """The columns of a list. `find` says whether some names are files."""
    known = [name.strip().lower() for name in names]
    image = chosen_one(path, names, choice, "image")
    if image is None:
        image = image_column(path, names, rows, find)
    split = chosen_one(path, names, choice, "split")
    if split is None:
        split = split_column(known, rows)
    labels = [place(path, names, part) for part in choice["label"].split("+")] if "label" in choice else None
    rest = [at for at in range(len(names)) if at not in (image, split)]
    if labels is None:
        labels = label_columns(path, names, rows, rest)
    kind, separator = kind_of(names, rows, labels)
    return Columns(names=tuple(names), image=image, labels=tuple(labels), kind=kind, split=split, separator=separator)


def plain(name: str) -> str:
    """ "Image Path" and "image_path" are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def place(path: Path, names: Sequence[str], name: str) -> int:
    known = [one.strip() for one in names]
    if name not in known:
        raise DataError(f"{path} has no column {name!r}; it has {', '.join(known)}")
    return known.index(name)


def chosen_one(path: Path, names: Sequence[str], choice: Mapping[str, str], key: str) -> int | None:
    return place(path, names, choice[key]) if key in choice else None


def has_images(names: Sequence[str]) -> bool:
    """Whether a column is called as if it named images."""
    return any(plain(name) in IMAGES | IDS for name in names)


def image_column(path: Path, names: Sequence[str], rows: Rows, find: Callable[[Sequence[str]], bool]) -> int:
    known = [name.strip().lower() for name in names]
    if first := [at for at, name in enumerate(known) if name in PATHS]:
        return only(path, names, first, "image")
    found = [at for at, name in enumerate(names) if plain(name) in IMAGES]
    found = found or [at for at, name in enumerate(names) if plain(name) in IDS]
    if len(found) > 1:
        there = [at for at in found if find([row[at] for row in rows])]
        found = there or found
    return only(path, names, found, "image")


def split_column(known: Sequence[str], rows: Rows) -> int | None:
    """A column that is called so; under other names than `split` only where all of it are names of splits."""
    if "split" in known:
        return known.index("split")
    for name in SPLITS[1:]:
        if name in known and all(split_name(row[known.index(name)].strip()) for row in rows):
            return known.index(name)
    return None


def label_columns(path: Path, names: Sequence[str], rows: Rows, rest: Sequence[int]) -> list[int]:
    """The column of labels, or those that have 0 or 1 for each class; none where nothing is called so."""
    known = {at: names[at].strip().lower() for at in rest}
    if first := [at for at in rest if known[at] in ("label", "labels")]:
        return [only(path, names, first, "label")]
    found = [at for at in rest if plain(names[at]) in LABELS]
    if len(found) > 1:
        found = one_of_equals(rows, found)
    if found:
        return [only(path, names, found, "label")]
    flags = [at for at in rest if is_flag(rows, at) and names[at].strip() and not split_in_name(names[at])]
    return flags if len(flags) > 1 else []


def one_of_equals(rows: Rows, places: list[int]) -> list[int]:
    """Of columns that say the same, class_id and class_name, the one of names."""
    pairs = {tuple(row[at] for at in places) for row in rows}
    if any(len({row[at] for row in rows}) != len(pairs) for at in places):
        return places
    named = [at for at in places if not all(row[at].strip().isdecimal() for row in rows)]
    return (named or places)[:1]


def is_flag(rows: Rows, at: int) -> bool:
    cells = {row[at].strip().lower() for row in rows}
    return bool(cells) and any(cells <= flags for flags in FLAGS)


def kind_of(names: Sequence[str], rows: Rows, labels: Sequence[int]) -> tuple[Kind, str]:
    """How the labels stand in their cells, and what is between several."""
    if not labels:
        return "none", "|"
    if len(labels) > 1:
        return "flags", "|"
    name, cells = plain(names[labels[0]]), [row[labels[0]].strip() for row in rows]
    if name in PLURAL or any(cell.startswith("[") and cell.endswith("]") for cell in cells):
        return "several", separator_of(name, cells)
    numbers = all(re.fullmatch(r"\d+( \d+)*", cell) for cell in cells if cell)
    if numbers and any(" " in cell for cell in cells):
        return "several", " "
    return "one", "|"


def separator_of(name: str, cells: Sequence[str]) -> str:
    """Between labels: | or ; where one occurs, else a comma; else a space, where the words are labels by themselves."""
    if any("|" in cell or ";" in cell for cell in cells):
        return "|"
    if any("," in cell for cell in cells):
        return ","
    alone = {cell for cell in cells if " " not in cell}
    words = {word for cell in cells if " " in cell for word in cell.split()}
    return " " if words and (name == "tags" or words <= alone) else "|"


def split_labels(text: str, separator: str) -> tuple[str, ...]:
    """The labels of a cell: a|b, a;b, or as the separator says; also ['a', 'b'] as lists are saved."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text, separator = text[1:-1], ","
    if separator == "|":
        text = text.replace(";", "|")
    parts = text.split() if separator == " " else text.split(separator)
    return tuple(part for piece in parts if (part := piece.strip().strip("'\"").strip()))


def only(path: Path, names: Sequence[str], places: Sequence[int], what: str) -> int:
    """The one column that it can be."""
    if len(places) == 1:
        return places[0]
    shown = [names[at].strip() for at in places]
    if not shown:
        columns = ", ".join(name.strip() for name in names)
        raise DataError(f"{path}: no column names images; it has {columns}; choose one as {path}:image=COLUMN")
    what_else = f"two columns for one thing: {', '.join(name.strip() for name in names)}; the {what} may be"
    raise DataError(f"{path}: {what_else} {' or '.join(shown)}; choose one as {path}:{what}={shown[0]}")

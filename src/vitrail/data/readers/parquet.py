"""Parquet files and saved Hugging Face datasets, read with pyarrow (the extra `data`), which is imported on first use.

Images are a column of encoded bytes, plain or as Hugging Face's {bytes, path}; labels are numbers, lists of them or
names. A saved dataset is random access. A Parquet file is decoded one row group at a time, and each process caches
256 MB of them: a shuffled pass over a larger set decodes a group for nearly every sample, so pack it first (`vitrail
data pack`); reading in order costs nothing extra.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError, SourceNotFound
from vitrail.data.dataset import NONE, ImageDataset, Labels, number_classes, pixel_class_words, refuse_negative
from vitrail.data.readers.detect_format import find_files, group_by_split
from vitrail.data.readers.folder import list_folder, parse_split

REMEDY: Final = "A column of names (text) instead of numbers makes each of them a class"
BUDGET: Final = 256 << 20  # bytes of decoded row groups that a process caches
LABELS: Final = ("label", "labels", "cls", "class", "class_id", "target", "targets", "y", "category", "fine_label")


def import_extra(module: str, need: str) -> Any:
    """A library of the extra `data`, imported when it is needed."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{need} needs {module.partition('.')[0]}: pip install 'vitrail[data]'") from None


def import_arrow() -> Any:
    """pyarrow; DataError where it is not installed."""
    for part in ("compute", "parquet"):
        import_extra(f"pyarrow.{part}", "Reading Parquet or Arrow")
    return import_module("pyarrow")


class ArrowBlocks:
    """Rows in blocks that are loaded one at a time, from files that each process opens itself: the row groups of
    Parquet files or, with `stream`, the record batches of Arrow streams that are mapped into memory."""

    def __init__(self, paths: Sequence[str], *, stream: bool = False) -> None:
        self.paths, self.stream, self.image = tuple(paths), stream, ""  # image: the column of the images
        self.files: dict[int, Any] = {}
        self.cache: OrderedDict[int, Any] = OrderedDict()
        counts = [self.count(file) for file in range(len(self.paths))]
        self.blocks = [(file, number) for file, rows in enumerate(counts) for number in range(len(rows))]
        self.starts: NDArray[np.int64] = np.cumsum([0, *chain(*counts)], dtype=np.int64)  # [blocks + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": OrderedDict(), "files": {}}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def open(self, file: int) -> Any:
        """A ParquetFile, or the batches of a stream."""
        if file not in self.files:
            pa, path = import_arrow(), self.paths[file]
            try:
                if self.stream:
                    self.files[file] = pa.ipc.open_stream(pa.memory_map(path)).read_all().to_batches()
                else:
                    opened = pa.parquet.ParquetFile(path, pre_buffer=False)
                    self.files = {**dict(list(self.files.items())[-63:]), file: opened}
            except (OSError, pa.ArrowException) as error:
                kind = "an Arrow stream" if self.stream else "a Parquet file"
                raise DataError(f"{path} cannot be read as {kind}: {error}") from None
        return self.files[file]

    def count(self, file: int) -> list[int]:
        """The rows of each block of a file."""
        opened = self.open(file)
        if self.stream:
            return [batch.num_rows for batch in opened]
        return [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]

    def schema(self) -> Any:
        if self.stream:
            return import_arrow().ipc.open_stream(import_arrow().memory_map(self.paths[0])).schema
        return self.open(0).schema_arrow

    def column(self, name: str) -> Any:
        """A small column, complete."""
        if self.stream:
            return import_arrow().chunked_array([self.open(file)[number].column(name) for file, number in self.blocks])
        files = range(len(self.paths))
        parts = [self.open(file).read(columns=[name], use_threads=False).column(name) for file in files]
        return import_arrow().chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)

    def load(self, block: int) -> Any:
        """The images of a block."""
        file, number = self.blocks[block]
        if self.stream:
            return self.open(file)[number].column(self.image)
        try:
            column = self.open(file).read_row_group(number, columns=[self.image], use_threads=False).column(self.image)
        except (OSError, import_arrow().ArrowException) as error:
            raise BadImage(f"row group {number} cannot be read: {error}") from None
        return column.combine_chunks() if len(column) else column

    def block_of(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def cell(self, index: int) -> Any:
        block = self.block_of(index)
        if block not in self.cache:
            self.cache[block] = self.load(block)
            while len(self.cache) > 1 and sum(held.nbytes for held in self.cache.values()) > BUDGET:
                self.cache.popitem(last=False)
        self.cache.move_to_end(block)
        return self.cache[block][index - int(self.starts[block])]


class TableDataset(ImageDataset):
    """Images in the cells of a column."""

    def __init__(self, blocks: ArrowBlocks, labels: Labels, classes: tuple[str, ...]) -> None:
        self.blocks, self.labels, self.classes = blocks, labels, classes

    def read(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        value: Any = self.blocks.cell(index).as_py()
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):
                raise BadImage(f"the row has the path {value['path']!r} and not the bytes; embed them when saving")
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise BadImage("the row has no image")
        return value

    def name(self, index: int) -> str:
        blocks = self.blocks
        file, _ = blocks.blocks[blocks.block_of(index)]
        return f"{PurePath(blocks.paths[file]).name}:{index - int(blocks.starts[blocks.blocks.index((file, 0))])}"

    @cached_property
    def fingerprint(self) -> str:
        """As for every data set, with the sizes of blocks instead of those of samples."""
        digest = sha256("\0".join(["rows", str(len(self)), *self.classes, *pixel_class_words(self)]).encode())
        blocks = self.blocks  # numbers that change with the contents and are quick to read
        if blocks.stream:
            sizes = [blocks.load(block).nbytes for block in range(len(blocks.blocks))]
        else:
            sizes = [blocks.open(file).metadata.row_group(group).total_byte_size for file, group in blocks.blocks]
        for array in (self.labels.values, self.labels.starts, np.asarray(sizes, np.int64)):
            digest.update(b"|" if array is None else np.ascontiguousarray(array, np.int64).tobytes())
        return digest.hexdigest()


def choose_columns(
    where: str, schema: Any, features: dict[str, Any], choice: Mapping[str, str]
) -> tuple[str, str | None]:
    """The column of images, and that of labels if there is one; DataError where there are several candidates."""
    image, label = choice.get("image"), choice.get("label")
    for name in (image, label):
        if name is not None and name not in schema.names:
            raise DataError(f"{where} has no column {name!r}; it has {', '.join(schema.names)}")
    types = import_arrow().types
    binary = {f.name for f in schema if types.is_binary(f.type) or types.is_large_binary(f.type)}
    struct = {f.name for f in schema if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0}
    declared = {name for name, feature in features.items() if feature_type(feature) == "Image"} & set(schema.names)
    candidates = declared or struct or binary
    image = image or only_column(where, "image", sorted(candidates))
    if image is None:
        raise DataError(f"{where} has no column of images (encoded bytes); it has {', '.join(schema.names)}")
    classes = {name for name, feature in features.items() if feature_names(feature)} & set(schema.names)
    usual = [name for name in schema.names if name.lower() in LABELS]
    return image, label or only_column(where, "label", sorted(classes) or usual)


def only_column(where: str, what: str, names: Sequence[str]) -> str | None:
    if len(names) > 1:
        raise DataError(f"{where}: {what} may be {' or '.join(names)}; choose one: {where}:{what}={names[0]}")
    return names[0] if names else None


def feature_type(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def feature_names(feature: Any) -> list[str] | None:
    """The class names that a feature of Hugging Face's datasets has; it may be a list of such a feature."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature["feature"] if isinstance(feature, dict) else (feature[0] if feature else None)
    if feature_type(feature) != "ClassLabel":
        return None
    names: Any = feature.get("names")
    return [str(name) for name in names.values()] if isinstance(names, dict) else [str(name) for name in names or []]


def find_class_names(where: str, feature: Any, columns: Sequence[Any]) -> tuple[str, ...]:
    """From the description; or the names that occur, sorted; or the numbers."""
    if listed := feature_names(feature):
        return tuple(listed)
    pa, flat = import_arrow(), [flatten(column)[0] for column in columns]
    if not flat or not any(len(values) for values in flat):
        return ()
    if all(is_text(values.type) for values in flat):
        return tuple(sorted({name for values in flat for name in pa.compute.unique(values.drop_null()).to_pylist()}))
    for values in flat:
        if not any(known(values.type) for known in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)):
            raise BadLabels(f"{where}: labels are {values.type}; whole numbers, names or lists of these are expected")
    return number_classes(where, [to_numbers(where, values) for values in flat], REMEDY)


def is_text(of: Any) -> bool:
    types = import_arrow().types
    return bool(types.is_string(of) or types.is_large_string(of))


def flatten(column: Any) -> tuple[Any, "NDArray[np.int64] | None"]:
    """All values, and where each row's begin if rows are lists."""
    pa = import_arrow()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column, None
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    return pa.compute.list_flatten(column), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def to_numbers(where: str, values: Any) -> NDArray[np.int64]:
    """Class numbers, -1 where there is none."""
    pa = import_arrow()
    try:
        whole = values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise BadLabels(f"{where}: labels are {values.type}, and not all are class numbers from 0: {error}") from None
    refuse_negative(where, whole.drop_null().to_numpy())
    return pa.compute.fill_null(whole, NONE).to_numpy()


def read_labels(where: str, column: Any, count: int, classes: tuple[str, ...]) -> Labels:
    """The labels of all rows, checked against the classes. A row without one counts as unlabelled."""
    if column is None:
        return Labels.none(count)
    values, starts = flatten(column)
    if is_text(values.type):
        values = import_arrow().compute.index_in(values, value_set=import_arrow().array(classes))
    found = Labels(to_numbers(where, values), starts)
    found.check(len(classes), where)
    return Labels(found.values.astype(np.int32), starts)


def read(path: Path | str, choice: Mapping[str, str] | None = None) -> dict[str, ImageDataset]:
    """The splits of a .parquet file or of a folder of them, as the Hugging Face hub lays them out
    (train-00000-of-00005.parquet, also below data/). `choice` has the columns (image, label) if that is ambiguous."""
    path = Path(path)
    files = parquet_files(path)
    if not files:
        raise SourceNotFound(f"{path}: no .parquet files here")
    blocks = {split: ArrowBlocks(names) for split, names in files.items()}
    return build_splits(str(path), blocks, choice or {}, None)


def read_saved(path: Path | str) -> dict[str, ImageDataset]:
    """The splits of a folder that `save_to_disk` of Hugging Face's datasets wrote; that library is not needed."""
    path = Path(path)
    parts = {"train": path}
    if (path / "dataset_dict.json").is_file():
        names: Any = read_field(path / "dataset_dict.json", "splits")
        parts = {parse_split(name) or name: path / os.path.basename(name) for name in names}
    blocks: dict[str, ArrowBlocks] = {}
    features: Any = None
    for split, folder in parts.items():
        rows: Any = read_field(folder / "state.json", "_data_files")
        blocks[split] = ArrowBlocks([str(folder / os.path.basename(row["filename"])) for row in rows], stream=True)
        features = read_field(folder / "dataset_info.json", "features") or features
    return build_splits(str(path), blocks, {}, features)


def build_splits(
    where: str, blocks: Mapping[str, ArrowBlocks], choice: Mapping[str, str], features: Any
) -> dict[str, ImageDataset]:
    """One data set per split, all with the same classes."""
    schema = next(iter(blocks.values())).schema()
    features = features or read_features(schema)
    image_column, labelled = choose_columns(where, schema, features, choice)
    columns = {} if labelled is None else {split: part.column(labelled) for split, part in blocks.items()}
    classes = find_class_names(where, features.get(labelled), list(columns.values()))
    sources: dict[str, ImageDataset] = {}
    for split, part in blocks.items():
        part.image = image_column
        if not len(part):
            raise DataError(f"{where}: the split {split} has no rows")
        labels = read_labels(f"{where} ({split})", columns.get(split), len(part), classes)
        sources[split] = TableDataset(part, labels, classes)
    return sources


def read_features(schema: Any) -> dict[str, Any]:
    """Hugging Face's description of the columns, from a schema."""
    try:
        found: Any = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (KeyError, TypeError, ValueError):
        return {}


def read_field(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))[field]
    except OSError as error:
        raise SourceNotFound(f"{path}: {error.strerror}; save_to_disk writes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the description of a saved dataset: {error!r}") from None


def parquet_files(path: Path) -> dict[str, list[str]]:
    """The files by split."""
    if path.is_file():
        return {split: [str(path)] for split in group_by_split(str(path), [path.name])}
    if not path.is_dir():
        raise SourceNotFound(f"{path}: no such file or folder")
    contents = list_folder(str(path))
    if not contents.with_suffix(".parquet") and "data" in contents.folders:
        return parquet_files(path / "data")
    return {split: [str(path / name) for name in names] for split, names in find_files(path, ".parquet").items()}

"""Columns of Arrow data as a source: images by row, labels as a whole. pyarrow is loaded when something is opened."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import PurePath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.dataset import NONE, ImageDataset, Labels, number_classes, pixel_class_words, refuse_negative

REMEDY: Final = "A column of names (text) instead of numbers makes each of them a class"
BUDGET: Final = 256 << 20  # bytes of decoded row groups that a process keeps
LABELS: Final = ("label", "labels", "cls", "class", "class_id", "target", "targets", "y", "category", "fine_label")


def arrow() -> Any:
    """pyarrow, where it is installed."""
    try:
        for part in ("compute", "parquet"):
            import_module(f"pyarrow.{part}")
        return import_module("pyarrow")
    except ImportError:
        raise DataError("Parquet and Arrow need pyarrow: pip install 'vitrail[data]'") from None


class Blocks(ABC):
    """Rows in blocks that are loaded one at a time, from files that are opened by the process that reads them."""

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = np.asarray(starts, np.int64)  # [blocks + 1]
        self.picture = ""  # the column of the images
        self.cache: OrderedDict[int, Any] = OrderedDict()
        self.files: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": OrderedDict(), "files": {}}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @abstractmethod
    def schema(self) -> Any: ...

    @abstractmethod
    def column(self, name: str) -> Any:
        """A small column whole."""

    @abstractmethod
    def load(self, block: int) -> Any:
        """The images of a block."""

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def marks(self) -> Sequence[int]:
        """Numbers that change with what is stored, and are quick to know."""

    def cell(self, index: int) -> Any:
        block = int(np.searchsorted(self.starts, index, side="right")) - 1
        found = self.cache.get(block)
        if found is None:
            found = self.cache[block] = self.load(block)
            while len(self.cache) > 1 and sum(held.nbytes for held in self.cache.values()) > BUDGET:
                self.cache.popitem(last=False)
        else:
            self.cache.move_to_end(block)
        return found[index - int(self.starts[block])]


class ParquetFiles(Blocks):
    """Parquet files; a block is a row group."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        counts: list[int] = []
        self.groups: list[tuple[int, int]] = []  # file and number in it
        self.weights: list[int] = []
        for number, path in enumerate(self.paths):
            footer = opened_parquet(path).metadata
            for group in range(footer.num_row_groups):
                rows = footer.row_group(group)
                counts.append(rows.num_rows)
                self.weights.append(rows.total_byte_size)
                self.groups.append((number, group))
        super().__init__([0, *np.cumsum(counts, dtype=np.int64)])
        first = [at for at, (_, group) in enumerate(self.groups) if group == 0]
        self.firsts = {self.groups[at][0]: int(self.starts[at]) for at in first}

    def schema(self) -> Any:
        return opened_parquet(self.paths[0]).schema_arrow

    def column(self, name: str) -> Any:
        pa = arrow()
        parts = [opened_parquet(path).read(columns=[name], use_threads=False).column(name) for path in self.paths]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)

    def load(self, block: int) -> Any:
        number, group = self.groups[block]
        if number not in self.files:
            self.files = {**dict(list(self.files.items())[-63:]), number: opened_parquet(self.paths[number])}
        try:
            table = self.files[number].read_row_group(group, columns=[self.picture], use_threads=False)
        except (OSError, arrow().ArrowException) as error:
            raise BadImage(f"row group {group} cannot be read: {error}") from None
        return table.column(self.picture).combine_chunks() if table.num_rows else table.column(self.picture)

    def name(self, index: int) -> str:
        number, _ = self.groups[int(np.searchsorted(self.starts, index, side="right")) - 1]
        return f"{PurePath(self.paths[number]).name}:{index - self.firsts[number]}"

    def marks(self) -> Sequence[int]:
        return self.weights


class ArrowFiles(Blocks):
    """Arrow streams, mapped into memory; a block is a record batch."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.places: list[tuple[int, int]] = []
        counts: list[int] = []
        self.files = {}
        for number in range(len(self.paths)):
            for at, batch in enumerate(self.batches(number)):
                self.places.append((number, at))
                counts.append(batch.num_rows)
        held = self.files
        super().__init__([0, *np.cumsum(counts, dtype=np.int64)])
        self.files = held

    def batches(self, number: int) -> list[Any]:
        if number not in self.files:
            pa = arrow()
            try:
                self.files[number] = pa.ipc.open_stream(pa.memory_map(self.paths[number])).read_all().to_batches()
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{self.paths[number]} cannot be read as an Arrow stream: {error}") from None
        return self.files[number]

    def schema(self) -> Any:
        pa = arrow()
        return pa.ipc.open_stream(pa.memory_map(self.paths[0])).schema

    def column(self, name: str) -> Any:
        return arrow().chunked_array([self.batches(number)[at].column(name) for number, at in self.places])

    def load(self, block: int) -> Any:
        number, at = self.places[block]
        return self.batches(number)[at].column(self.picture)

    def name(self, index: int) -> str:
        number, _ = self.places[int(np.searchsorted(self.starts, index, side="right")) - 1]
        first = next(at for at, place in enumerate(self.places) if place[0] == number)
        return f"{PurePath(self.paths[number]).name}:{index - int(self.starts[first])}"

    def marks(self) -> Sequence[int]:
        return [self.load(block).nbytes for block in range(len(self.places))]


class Tables(Blocks):
    """A table in memory; a block is a chunk."""

    def __init__(self, table: Any, called: str) -> None:
        self.batches, self.called, self.described = table.to_batches(), called, table.schema
        super().__init__([0, *np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64)])

    def schema(self) -> Any:
        return self.described

    def column(self, name: str) -> Any:
        return arrow().chunked_array([batch.column(name) for batch in self.batches], self.described.field(name).type)

    def load(self, block: int) -> Any:
        return self.batches[block].column(self.picture)

    def name(self, index: int) -> str:
        return f"{self.called}:{index}"

    def marks(self) -> Sequence[int]:
        return [batch.nbytes for batch in self.batches]


class TableDataset(ImageDataset):
    """Images that are cells of a column."""

    def __init__(self, blocks: Blocks, labels: Labels, classes: tuple[str, ...]) -> None:
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
        return self.blocks.name(index)

    @cached_property
    def fingerprint(self) -> str:
        """As every source's; the sizes of blocks stand for those of samples."""
        digest = sha256("\0".join(["rows", str(len(self)), *self.classes, *pixel_class_words(self)]).encode())
        for array in (self.labels.values, self.labels.starts, np.asarray(self.blocks.marks(), np.int64)):
            digest.update(b"|" if array is None else np.ascontiguousarray(array, np.int64).tobytes())
        return digest.hexdigest()


def opened_parquet(path: str) -> Any:
    pa = arrow()
    try:
        return pa.parquet.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a Parquet file: {error}") from None


def choose(
    where: str, schema: Any, features: dict[str, Any], image: str | None, label: str | None
) -> tuple[str, str | None]:
    """The column of images, and that of labels if there is one. More than one that could be: an error names them."""
    for name in (image, label):
        if name is not None and name not in schema.names:
            raise DataError(f"{where} has no column {name!r}; it has {', '.join(schema.names)}")
    types = arrow().types
    binary = {f.name for f in schema if types.is_binary(f.type) or types.is_large_binary(f.type)}
    struct = {f.name for f in schema if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0}
    declared = {name for name, feature in features.items() if kind(feature) == "Image"} & set(schema.names)
    pictures = declared or struct or binary
    image = image or one(where, "image", sorted(pictures))
    if image is None:
        raise DataError(f"{where} has no column of images (encoded bytes); it has {', '.join(schema.names)}")
    classes = {name for name, feature in features.items() if names_in(feature)} & set(schema.names)
    usual = [name for name in schema.names if name.lower() in LABELS]
    return image, label or one(where, "label", sorted(classes) or usual)


def one(where: str, what: str, names: Sequence[str]) -> str | None:
    if len(names) > 1:
        raise DataError(f"{where}: {what} may be {' or '.join(names)}; say which: {where}:{what}={names[0]}")
    return names[0] if names else None


def kind(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def names_in(feature: Any) -> list[str] | None:
    """The class names that a feature of Hugging Face's datasets has; it may be a list of such a feature."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature["feature"] if isinstance(feature, dict) else (feature[0] if feature else None)
    if kind(feature) != "ClassLabel":
        return None
    names: Any = feature.get("names")
    return [str(name) for name in names.values()] if isinstance(names, dict) else [str(name) for name in names or []]


def class_names(where: str, feature: Any, columns: Sequence[Any]) -> tuple[str, ...]:
    """From the description; or the names that occur, sorted; or the numbers."""
    if named := names_in(feature):
        return tuple(named)
    pa, flat = arrow(), [flattened(column)[0] for column in columns]
    if not flat or not any(len(values) for values in flat):
        return ()
    if all(is_text(values.type) for values in flat):
        return tuple(
            sorted({name for values in flat for name in pa.compute.unique(values).to_pylist() if name is not None})
        )
    for values in flat:
        if not any(known(values.type) for known in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)):
            raise BadLabels(f"{where}: labels are {values.type}; whole numbers, names or lists of these are expected")
    return number_classes(where, [numbers(where, values) for values in flat], REMEDY)


def is_text(of: Any) -> bool:
    types = arrow().types
    return bool(types.is_string(of) or types.is_large_string(of))


def flattened(column: Any) -> tuple[Any, "NDArray[np.int64] | None"]:
    """All values, and where each row's begin if rows are lists."""
    pa = arrow()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column, None
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    return pa.compute.list_flatten(column), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def numbers(where: str, values: Any) -> NDArray[np.int64]:
    """Class numbers, -1 where there is none."""
    pa = arrow()
    try:
        whole = values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise BadLabels(f"{where}: labels are {values.type}, and not all are class numbers from 0: {error}") from None
    refuse_negative(where, whole.drop_null().to_numpy())
    return pa.compute.fill_null(whole, NONE).to_numpy()


def labels(where: str, column: Any, count: int, classes: tuple[str, ...]) -> Labels:
    """The labels of all rows, checked against the classes. A row without one counts as unlabelled."""
    if column is None:
        return Labels.none(count)
    values, starts = flattened(column)
    if is_text(values.type):
        values = arrow().compute.index_in(values, value_set=arrow().array(classes))
    found = Labels(numbers(where, values), starts)
    found.check(len(classes), where)
    return Labels(found.values.astype(np.int32), starts)

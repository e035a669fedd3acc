"""File formats that the data sets share.

Image files inside larger files are read by byte range, through an index that is built once and cached. A folder and a
zip file of it have the same interface (`FileTree`). TFRecord and MATLAB files are supported as far as the data sets
need. Lengths are checked at every level, so that a damaged file raises DataError and nothing else.
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import BadImage, BadLabels, DataError, describe_error
from vitrail.data.dataset import ImageDataset, Labels, StringArray
from vitrail.data.datasets.open_by_name import find_file, refuse_damaged
from vitrail.data.readers.folder import MAX_BYTES, FileDataset, list_below
from vitrail.data.readers.parquet import import_extra

IndexTable = dict[str, NDArray[Any]]
LARGEST_RECORD: Final = 256 * 2**20  # bytes of a TFRecord
RECORD_HEADER: Final = struct.Struct("<QI")
ZIP_HEADER: Final = struct.Struct("<4s22xHH")  # signature, and the lengths of the name and of the extra field


def make_labels(values: "Sequence[int] | NDArray[Any]", num_classes: int, where: object) -> Labels:
    """One label per sample, checked against the number of classes."""
    labels = Labels(np.asarray(values, np.int64))
    labels.check(num_classes, str(where))
    return labels


def read_range(path: str, start: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(length)
    if len(data) < length:
        raise BadImage(f"{path} is cut short")
    return data


class ByteRangeDataset(ImageDataset):
    """Image files inside larger files: members of tar files, values in records. See `build_index` for the table."""

    def __init__(
        self, paths: Sequence[Path], table: IndexTable, classes: Sequence[str], labels: Labels | None = None
    ) -> None:
        self.paths, self.classes = StringArray(map(str, paths)), tuple(classes)
        self.archive, self.offset = table["archive"].astype(np.int32), table["offset"].astype(np.int64)
        self.length: NDArray[np.int64] = table["length"].astype(np.int64)
        self.names = StringArray.from_arrays(table["names"].astype(np.uint8), table["starts"].astype(np.int64))
        self.labels = labels or Labels(table["label"].astype(np.int32))

    def read(self, index: int) -> bytes:
        return read_range(self.paths[int(self.archive[index])], int(self.offset[index]), int(self.length[index]))

    def sizes(self) -> NDArray[np.int64]:
        return self.length


def build_index(rows: Sequence[tuple[int, int, int, int]], names: Iterable[str]) -> IndexTable:
    """One row per image: number of its file, offset and length in it, label; and its name."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    packed = StringArray(names)
    columns = {name: table[:, i] for i, name in enumerate(("archive", "offset", "length", "label"))}
    return {"names": packed.bytes, "starts": packed.starts, **columns}


def cached_index(kind: str, files: Sequence[Path], build: Callable[[], IndexTable]) -> IndexTable:
    """The arrays that `build` returns, from the cache as long as no file changes its name, size or time."""
    digest = sha256(f"{kind} 2".encode())
    for file in files:
        status = file.stat()
        digest.update(os.fsencode(file.absolute()) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    path = cache_folder("index") / f"{kind}-{digest.hexdigest()[:32]}.npz"
    with suppress(Exception), np.load(path, allow_pickle=False) as opened:  # missing or damaged: built again
        return {name: opened[name] for name in opened.files}
    tables = build()
    with suppress(OSError):  # a read-only cache only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(path) as file:
            np.savez(file, allow_pickle=False, **tables)
    return tables


class FixedRecordDataset(ImageDataset):
    """Images of one size at equal distances in a file, read one by one, so that gigabytes take no memory."""

    def __init__(
        self, path: Path, start: int, stride: int, shape: tuple[int, ...], labels: Labels, classes: Sequence[str]
    ) -> None:
        self.path, self.labels, self.classes = str(path), labels, tuple(classes)
        self.start, self.stride, self.shape = start, stride, shape
        self.called = path.name

    def read(self, index: int) -> NDArray[np.uint8]:
        data = read_range(self.path, self.start + index * self.stride, int(np.prod(self.shape)))
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def name(self, index: int) -> str:
        return f"{self.called}[{index}]"


class BitmapDataset(FixedRecordDataset):
    """Records of one bit per pixel: black 0, white 255."""

    def read(self, index: int) -> NDArray[np.uint8]:
        data = np.frombuffer(read_range(self.path, self.start + index * self.stride, self.stride), np.uint8)
        return (np.unpackbits(data, count=int(np.prod(self.shape))) * np.uint8(255)).reshape(self.shape)


class FileTree:
    """The files of a folder by name; `ZipTree` is the same for a zip file."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def names(self) -> list[str]:
        """All of them, sorted, with / between folders."""
        images, others = list_below(self.where, "")
        return sorted(images + others)

    def read(self, name: str) -> bytes:
        with refuse_damaged(self.path / name):
            return (self.path / name).read_bytes()

    def select(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> ImageDataset:
        """Some of the files as samples."""
        source = FileDataset(self.where, names, labels)
        source.classes = tuple(classes)
        return source

    def label(self, rows: Sequence[tuple[str, int]], classes: Sequence[str], where: object = "") -> ImageDataset:
        """Files with their labels as samples."""
        labels = make_labels([label for _, label in rows], len(classes), where or self.where)
        return self.select([name for name, _ in rows], labels, classes)

    def label_splits(
        self, splits: Mapping[str, Sequence[str]], classes: Sequence[str], class_of: Callable[[str], str], where: object
    ) -> dict[str, ImageDataset]:
        """Files by split, each with the class in its name; `where` lists the classes."""
        index = {name: i for i, name in enumerate(classes)}
        if strange := sorted({class_of(name) for names in splits.values() for name in names} - index.keys()):
            raise BadLabels(f"{self.where}: {strange[0]!r} is not a class of {where}")
        rows = {split: [(name, index[class_of(name)]) for name in names] for split, names in splits.items()}
        return {split: self.label(found, classes) for split, found in rows.items()}


class ZipTree(FileTree):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with refuse_damaged(path, "a zip file"), zipfile.ZipFile(path) as opened:
            self.members = {info.filename: info for info in opened.infolist() if not info.is_dir()}

    def names(self) -> list[str]:
        return sorted(self.members)

    def read(self, name: str) -> bytes:
        if name not in self.members:
            raise DataError(f"{self.path} has no member {name}")
        return self.select([name], Labels.none(1), ()).read(0)

    def select(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> "ZipDataset":
        return ZipDataset(self.path, [self.members[name] for name in names], labels, classes)


class ZipDataset(ImageDataset):
    """Members of a zip file, stored or deflated. The table of contents becomes an array, so that a loader process
    reaches a member with one read and does not hold a million Python objects."""

    def __init__(self, path: Path, members: Sequence[zipfile.ZipInfo], labels: Labels, classes: Sequence[str]) -> None:
        self.path, self.labels, self.classes = str(path), labels, tuple(classes)
        self.names = StringArray(member.filename for member in members)
        fields = [(m.header_offset, m.compress_size, m.file_size, m.compress_type, m.CRC) for m in members]
        self.table: NDArray[np.int64] = np.array(fields, np.int64).reshape(-1, 5)

    def read(self, index: int) -> bytes:
        start, packed, size, method, checksum = (int(value) for value in self.table[index])
        if size > MAX_BYTES:
            raise BadImage(f"has {size:,} bytes; the limit for one image is {MAX_BYTES:,}")
        with open(self.path, "rb") as file:
            file.seek(start)
            header = file.read(ZIP_HEADER.size)
            if len(header) < ZIP_HEADER.size or header[:4] != b"PK\x03\x04":
                raise BadImage(f"{self.path} is damaged at byte {start:,}")
            file.seek(sum(ZIP_HEADER.unpack(header)[1:]), 1)
            data = file.read(packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, size + 1)
            except zlib.error as error:
                raise BadImage(f"{self.path} is damaged: {error}") from None
        elif method != zipfile.ZIP_STORED:
            raise BadImage(f"is compressed by method {method}, which is not supported; unpack {self.path}")
        if len(data) != size or zlib.crc32(data) != checksum:
            raise BadImage(f"{self.path} is damaged: the checksum of this member does not match")
        return data

    def sizes(self) -> NDArray[np.int64]:
        return self.table[:, 2].copy()


def open_tree(root: Path, folder: str, *archives: str) -> tuple[FileTree, str]:
    """The folder, or the zip file that holds it; and the prefix of the names inside, such as "2750/"."""
    path = find_file(root, folder, *archives)
    if path.is_dir():
        return FileTree(path), ""
    opened, prefix = ZipTree(path), f"{folder}/"
    return opened, prefix if any(name.startswith(prefix) for name in opened.members) else ""


def read_mat(file: "Path | bytes", where: object, *names: str) -> dict[str, Any]:
    """Reads variables by name from a MATLAB file, with scipy. DataError if one is missing or the file is damaged."""
    loadmat = import_extra("scipy.io", "A MATLAB file").loadmat
    try:
        data = file if isinstance(file, bytes) else file.read_bytes()
        found: dict[str, Any] = loadmat(io.BytesIO(data), variable_names=names)
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or error}") from None
    except Exception as error:  # scipy raises anything at all on a damaged file
        reason = f"is damaged or not a MATLAB file ({describe_error(error)})"
        raise DataError(f"{where} {reason}; download it again") from None
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{where} has no variable {missing[0]!r}; download it again")
    return found


@cache
def crc_table() -> list[int]:
    """CRC-32C of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ 0x82F63B78, table >> 1)
    return table.tolist()


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord files store it."""
    crc, table = 0xFFFFFFFF, crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """The records of a TFRecord file: where their bytes begin, and the bytes. A record is its length in eight bytes,
    a checksum of these, the bytes and their checksum. Only the first checksum is compared: images have their own."""
    with path.open("rb") as file:
        at = 0
        while head := file.read(RECORD_HEADER.size):
            length, checksum = RECORD_HEADER.unpack(head) if len(head) == RECORD_HEADER.size else (0, None)
            if checksum is not None and (checksum != masked_crc(head[:8]) or length > LARGEST_RECORD):
                raise DataError(f"{path} is damaged at byte {at:,} or not a TFRecord file: a checksum does not match")
            data = file.read(length)
            if checksum is None or len(data) < length or len(file.read(4)) < 4:
                raise DataError(f"{path} is cut short at byte {at:,}; download it again")
            yield at + RECORD_HEADER.size, data
            at += RECORD_HEADER.size + length + 4


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A protobuf varint, with seven bits per byte, and where it ends. ValueError if it does not end."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("a number has no end")


def read_fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each protobuf field with a length. An integer is (number, value, -1); others are
    skipped. ValueError where the bytes are malformed."""
    at = start
    while at < end:
        key, at = read_varint(data, at, end)
        match key & 7:
            case 0:
                value, at = read_varint(data, at, end)
                yield key >> 3, value, -1
            case 1 | 5 as kind:
                at += 8 if kind == 1 else 4
            case 2:
                length, at = read_varint(data, at, end)
                if length > end - at:
                    raise ValueError("a field ends beyond its record")
                yield key >> 3, at, at + length
                at += length
            case other:
                raise ValueError(f"a field has the unknown type {other}")
    if at > end:
        raise ValueError("a field ends beyond its record")


def parse_example(data: bytes) -> dict[str, tuple[int, int] | int]:
    """The first value of each feature of a TensorFlow Example, a map from names to lists: a byte string as (start, end)
    in `data`, an integer as itself; floats are skipped. ValueError where the bytes are malformed."""
    found: dict[str, tuple[int, int] | int] = {}
    for features in (part for part in read_fields(data, 0, len(data)) if part[0] == 1):
        for _, start, end in (part for part in read_fields(data, features[1], features[2]) if part[0] == 1):
            name, value = "", None
            for number, first, last in read_fields(data, start, end):
                if number == 1:
                    name = data[first:last].decode("utf-8", "replace")
                elif number == 2:
                    value = first_value(data, first, last)
            if value is not None:
                found[name] = value
    return found


def first_value(data: bytes, start: int, end: int) -> tuple[int, int] | int | None:
    """The first value of a Feature's list of byte strings (1) or of integers (3), packed or not."""
    for kind, first, last in read_fields(data, start, end):
        if last < 0:
            raise ValueError("a list is a number")
        for number, begin, stop in read_fields(data, first, last):
            if number != 1:
                continue
            if kind == 1 and stop >= 0:
                return begin, stop
            if kind == 3:
                return begin if stop < 0 else read_varint(data, begin, stop)[0]
    return None

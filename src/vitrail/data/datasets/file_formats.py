"""TensorFlow's record files of `Example`s, read without TensorFlow: the framing and as much protobuf as that takes.

A record is its length in eight bytes, a checksum of these, the bytes and a checksum of those. An Example is a map from
names to lists of byte strings, floats or integers. Lengths are checked at every level, so that a damaged file gives
DataError and nothing else.

Samples that are pieces of larger files: at some place with some length, or one behind the other at a fixed one.

What it takes long to find out about large files, kept in the cache until one of the files changes.

Files by name, in a folder or inside a zip file: a reader need not know which.

A zip file is read where it lies. Its table of contents becomes arrays, so that a loader process gets at a member with
one read and does not keep a million Python objects.
"""

import os
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replacing
from vitrail.core.errors import BadImage, DataError, reason_of
from vitrail.data.dataset import ImageDataset, Labels, Strings
from vitrail.data.datasets.open_by_name import Absent
from vitrail.data.readers.folder import Files, below

LARGEST_RECORD: Final = 256 * 2**20  # bytes of a record
HEAD: Final = struct.Struct("<QI")


class Malformed(Exception):
    """Bytes that are no Example."""


@cache
def crc_table() -> tuple[int, ...]:
    """Of CRC-32C, a byte at a time."""
    out: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        out.append(value)
    return tuple(out)


def masked_crc(data: bytes) -> int:
    """CRC-32C as record files keep it."""
    crc, rows = 0xFFFFFFFF, crc_table()
    for byte in data:
        crc = rows[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each record's bytes begin, and the bytes. The checksum of each length is checked: images check theirs."""
    with path.open("rb") as file:
        at = 0
        while head := file.read(HEAD.size):
            if len(head) < HEAD.size:
                raise DataError(f"{path} is cut short at byte {at:,}; download it again")
            length, checksum = HEAD.unpack(head)
            if checksum != masked_crc(head[:8]) or length > LARGEST_RECORD:
                raise DataError(
                    f"{path} is damaged at byte {at:,}, or no record file: a length does not fit its checksum"
                )
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                raise DataError(f"{path} is cut short at byte {at:,}; download it again")
            yield at + HEAD.size, data
            at += HEAD.size + length + 4


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise Malformed("a number without an end")


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field with a length; others are passed over, except that a single integer comes
    as (number, value, -1)."""
    at = start
    while at < end:
        key, at = varint(data, at, end)
        match key & 7:
            case 0:
                value, at = varint(data, at, end)
                yield key >> 3, value, -1
            case 1:
                at += 8
            case 2:
                length, at = varint(data, at, end)
                if length > end - at:
                    raise Malformed("a field beyond the end")
                yield key >> 3, at, at + length
                at += length
            case 5:
                at += 4
            case other:
                raise Malformed(f"a field of type {other}")
    if at > end:
        raise Malformed("a field beyond the end")


def example(data: bytes) -> dict[str, tuple[int, int] | int]:
    """The first value of each feature: a byte string as (start, end) in `data`, an integer as itself; floats are not
    needed here and left out."""
    found: dict[str, tuple[int, int] | int] = {}
    for features in (part for part in fields(data, 0, len(data)) if part[0] == 1):
        for _, start, end in (part for part in fields(data, features[1], features[2]) if part[0] == 1):
            name, value = "", None
            for number, first, last in fields(data, start, end):
                if number == 1:
                    name = data[first:last].decode("utf-8", "replace")
                elif number == 2:
                    value = first_value(data, first, last)
            if value is not None:
                found[name] = value
    return found


def first_value(data: bytes, start: int, end: int) -> tuple[int, int] | int | None:
    """Of a Feature: its list of byte strings (1) or of integers (3), packed or not."""
    for kind, first, last in fields(data, start, end):
        if last < 0:
            raise Malformed("a list that is a number")
        for number, begin, stop in fields(data, first, last):
            if number != 1:
                continue
            if kind == 1 and stop >= 0:
                return begin, stop
            if kind == 3:
                return begin if stop < 0 else varint(data, begin, stop)[0]
    return None


class Pieces(ImageDataset):
    """Image files inside larger files: members of tar files, values in records."""

    def __init__(
        self,
        paths: Sequence[str],
        file: NDArray[np.int32],
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
        names: Strings,
        labels: Labels,
        classes: Sequence[str],
    ) -> None:
        self.paths, self.names, self.labels, self.classes = Strings(paths), names, labels, tuple(classes)
        self.file, self.offset, self.length = file, offset, length

    def read(self, index: int) -> bytes:
        length = int(self.length[index])
        with open(self.paths[int(self.file[index])], "rb") as file:
            file.seek(int(self.offset[index]))
            data = file.read(length)
        if len(data) < length:
            raise BadImage(f"{self.paths[int(self.file[index])]} is cut short")
        return data

    def name(self, index: int) -> str:
        return self.names[index]

    def sizes(self) -> NDArray[np.int64]:
        return self.length


class Records(ImageDataset):
    """Pixels of one size, at equal distances in a file; read one by one, so that gigabytes cost no memory."""

    def __init__(
        self, path: Path, *, start: int, stride: int, shape: tuple[int, ...], labels: Labels, classes: Sequence[str]
    ) -> None:
        self.path, self.labels, self.classes = str(path), labels, tuple(classes)
        self.start, self.stride, self.shape = start, stride, shape
        self.called = path.name

    def piece(self, index: int, length: int) -> NDArray[np.uint8]:
        with open(self.path, "rb") as file:
            file.seek(self.start + index * self.stride)
            data = file.read(length)
        if len(data) < length:
            raise BadImage(f"{self.path} is cut short")
        return np.frombuffer(data, np.uint8)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self.piece(index, int(np.prod(self.shape))).reshape(self.shape)

    def name(self, index: int) -> str:
        return f"{self.called}[{index}]"


class Bits(Records):
    """Records of one bit a pixel: black 0, white 255."""

    def read(self, index: int) -> NDArray[np.uint8]:
        return (np.unpackbits(self.piece(index, self.stride), count=int(np.prod(self.shape))) * np.uint8(255)).reshape(
            self.shape
        )


Tables = dict[str, NDArray[np.generic]]


def kept(kind: str, files: Sequence[Path], make: Callable[[], Tables]) -> Tables:
    """The arrays that `make` gives, from the cache where the files have the names, sizes and times that they had."""
    digest = sha256(f"{kind} 1".encode())
    for file in files:
        status = file.stat()
        digest.update(os.fsencode(file.absolute()) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    path = cache_folder("index") / f"{kind}-{digest.hexdigest()[:32]}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except Exception:  # not there, or damaged: made again, and nothing is lost but time
        tables = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **tables)
    except OSError:
        pass  # a cache that cannot be written costs time, too
    return tables


LOCAL: Final = struct.Struct("<4s22xHH")  # signature, and the lengths of the name and of the extra field
MOST_MEMBERS: Final = 512 * 2**20  # bytes of one member


class Tree(ABC):
    """Named files."""

    where: str

    @abstractmethod
    def names(self) -> list[str]:
        """All of them, in order, with / between folders."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> ImageDataset:
        """Some of them as samples."""


class Folder(Tree):
    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def names(self) -> list[str]:
        pictures, others = below(self.where, "")
        return sorted(pictures + others)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path / name}: {error.strerror or error}") from None

    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> ImageDataset:
        made = Files(self.where, names, labels)
        made.classes = tuple(classes)
        return made


class Zip(Tree):
    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        try:
            with zipfile.ZipFile(path) as opened:
                infos = [info for info in opened.infolist() if not info.is_dir()]
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(
                f"{path} is not a zip file, or is damaged or cut short ({reason_of(error)}); download it again"
            ) from None
        self.members = {info.filename: info for info in infos}

    def names(self) -> list[str]:
        return sorted(self.members)

    def read(self, name: str) -> bytes:
        if name not in self.members:
            raise DataError(f"{self.path} has no member {name}")
        return self.source([name], Labels.none(1), ()).read(0)  # type: ignore[return-value]

    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> ImageDataset:
        return Zipped(self.path, [self.members[name] for name in names], labels, classes)


class Zipped(ImageDataset):
    """Members of a zip file, stored or deflated."""

    def __init__(
        self, path: Path, members: Sequence[zipfile.ZipInfo], labels: Labels, classes: Sequence[str] = ()
    ) -> None:
        self.path, self.labels, self.classes = str(path), labels, tuple(classes)
        self.names = Strings(member.filename for member in members)
        fields = [(m.header_offset, m.compress_size, m.file_size, m.compress_type, m.CRC) for m in members]
        self.table: NDArray[np.int64] = np.array(fields, np.int64).reshape(-1, 5)

    def read(self, index: int) -> bytes:
        start, packed, size, method, checksum = (int(value) for value in self.table[index])
        if size > MOST_MEMBERS:
            raise BadImage(f"has {size:,} bytes; more than {MOST_MEMBERS:,} are not read as one image")
        with open(self.path, "rb") as file:
            file.seek(start)
            header = file.read(LOCAL.size)
            if len(header) < LOCAL.size or header[:4] != b"PK\x03\x04":
                raise BadImage(f"{self.path} is damaged at byte {start:,}")
            _, name, extra = LOCAL.unpack(header)
            file.seek(name + extra, 1)
            data = file.read(packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, size + 1)
            except zlib.error as error:
                raise BadImage(f"{self.path} is damaged: {error}") from None
        elif method != zipfile.ZIP_STORED:
            raise BadImage(f"compressed by method {method}; unpack {self.path}")
        if len(data) != size or zlib.crc32(data) != checksum:
            raise BadImage(f"{self.path} is damaged: the member's checksum does not fit")
        return data

    def name(self, index: int) -> str:
        return self.names[index]

    def sizes(self) -> NDArray[np.int64]:
        return self.table[:, 2].copy()


def tree(root: Path, folder: str, *archives: str) -> tuple[Tree, str]:
    """The folder, or the zip file that holds it; and what stands before the names inside, "2750/" say."""
    if (root / folder).is_dir():
        return Folder(root / folder), ""
    for archive in archives:
        if (root / archive).is_file():
            opened = Zip(root / archive)
            prefix = f"{folder}/"
            return opened, prefix if any(name.startswith(prefix) for name in opened.members) else ""
    raise Absent(root, (folder, *archives))

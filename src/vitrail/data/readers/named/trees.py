"""Files by name, in a folder or inside a zip file: a reader need not know which.

A zip file is read where it lies. Its table of contents becomes arrays, so that a loader process gets at a member with
one read and does not keep a million Python objects.
"""

import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadPicture, DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.folder import Files, below
from vitrail.data.readers.named.places import Absent
from vitrail.data.source import Source
from vitrail.data.strings import Strings

LOCAL: Final = struct.Struct("<4s22xHH")  # signature, and the lengths of the name and of the extra field
MOST: Final = 512 * 2**20  # bytes of one member


class Tree(ABC):
    """Named files."""

    where: str

    @abstractmethod
    def names(self) -> list[str]:
        """All of them, in order, with / between folders."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> Source:
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

    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> Source:
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

    def source(self, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> Source:
        return Zipped(self.path, [self.members[name] for name in names], labels, classes)


class Zipped(Source):
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
        if size > MOST:
            raise BadPicture(f"has {size:,} bytes; more than {MOST:,} are not read as one picture")
        with open(self.path, "rb") as file:
            file.seek(start)
            header = file.read(LOCAL.size)
            if len(header) < LOCAL.size or header[:4] != b"PK\x03\x04":
                raise BadPicture(f"{self.path} is damaged at byte {start:,}")
            _, name, extra = LOCAL.unpack(header)
            file.seek(name + extra, 1)
            data = file.read(packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, size + 1)
            except zlib.error as error:
                raise BadPicture(f"{self.path} is damaged: {error}") from None
        elif method != zipfile.ZIP_STORED:
            raise BadPicture(f"compressed by method {method}; unpack {self.path}")
        if len(data) != size or zlib.crc32(data) != checksum:
            raise BadPicture(f"{self.path} is damaged: the member's checksum does not fit")
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

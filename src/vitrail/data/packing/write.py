"""Writing one shard: the same bytes for the same samples, and read back before it gets its name."""

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, TypeVar

from vitrail.core.errors import DataError
from vitrail.core.storage import replacing
from vitrail.data.packing.encode import Left, Packed
from vitrail.data.readers.shards.scan import scan
from vitrail.data.readers.shards.tar import BLOCK

END: Final = bytes(2 * BLOCK)
T = TypeVar("T")


class Peek(Generic[T]):
    """An iterator whose next item can be looked at before it is taken."""

    def __init__(self, items: Iterator[T]) -> None:
        self.items = items
        self.head: T | None = next(items, None)

    def take(self) -> T:
        assert self.head is not None
        taken, self.head = self.head, next(self.items, None)
        return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A finished shard: samples `first` to `next` of a split, less the unreadable ones."""

    split: str
    name: str
    first: int
    next: int
    samples: int
    reencoded: int
    bytes: int
    sha256: str
    unreadable: tuple[Left, ...] = field(default=())

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Written":
        made: Any = {**row, "unreadable": tuple(Left(**left) for left in row["unreadable"])}
        return cls(**made)

    def intact(self, folder: Path) -> bool:
        """Whether the file is there with the bytes that were written."""
        try:
            return (folder / self.name).stat().st_size == self.bytes and hashed(folder / self.name) == self.sha256
        except OSError:
            return False


class TarFile:
    """The plainest of tar files: time 0, owner 0, mode 0644, and a running checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, sha256()
        self.pictures: list[str] = []
        self.reencoded = 0

    def room(self, sample: Packed) -> int:
        """The size of the file if it ended after this sample."""
        return self.size + sum(BLOCK + padded(len(data)) for _, data in sample.members) + len(END)

    def add(self, sample: Packed) -> None:
        for suffix, data in sample.members:
            info = tarfile.TarInfo(f"{sample.key}.{suffix}")
            info.size = len(data)
            self.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
            self.write(data)
            self.write(bytes(padded(len(data)) - len(data)))
        self.pictures.append(f"{sample.key}.{sample.members[0][0]}")
        self.reencoded += sample.reencoded

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def finish(self) -> str:
        """Ends the file, puts it on disk and reads it back: the same bytes, and the same pictures by its headers."""
        self.write(END)
        self.file.flush()
        os.fsync(self.file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is the disk that answers
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = Path(self.file.name)
        rows = scan(path)
        names = "".join(self.pictures).encode("utf-8", "surrogateescape")
        if hashed(path) != self.digest.hexdigest() or len(rows) != len(self.pictures) or rows.names.tobytes() != names:
            raise DataError(f"{path}: what was read back is not what was written; is the disk failing?")
        return self.digest.hexdigest()


def write_shard(
    folder: Path, split: str, number: int, first: int, stop: int, stream: Peek[Packed | Left], shard_size: int
) -> Written:
    """Takes samples from the stream until the next one would make the file too big, or there are none."""
    name = f"{split}-{number:05d}.tar"
    left: list[Left] = []
    with replacing(folder / name) as file:
        tar = TarFile(file)
        while stream.head is not None:
            if isinstance(stream.head, Packed):
                if tar.pictures and tar.room(stream.head) > shard_size:
                    break
                tar.add(stream.head)
            else:
                left.append(stream.head)
            stream.take()
        if not tar.pictures:
            reason = f"; {left[0].name}: {left[0].reason}" if left else ""
            raise DataError(f"no picture of the split {split} can be read{reason}")
        digest = tar.finish()
    return Written(
        split=split,
        name=name,
        first=first,
        next=stop if stream.head is None else stream.head.index,
        samples=len(tar.pictures),
        reencoded=tar.reencoded,
        bytes=tar.size,
        sha256=digest,
        unreadable=tuple(left),
    )


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def hashed(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

"""Pictures in folders: class folders, or all pictures below a folder without labels.

What lies directly in a folder is looked at in `look`; which reading that calls for is decided in `recognise`. Only
names are read here, so a million files take seconds; a file is opened when its sample is asked for.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadLabels, BadPicture, DataError
from vitrail.data.decode.support import is_unsupported, remedy, suffixes
from vitrail.data.labels import Labels
from vitrail.data.source import Source
from vitrail.data.strings import Strings

MAX_BYTES: Final = 512 * 2**20
LEFTOVERS: Final = ("__MACOSX", "lost+found")  # what unpacking and file systems leave behind
SPLITS: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_name(name: str) -> str | None:
    """train, val or test, where a folder or a column says so in one of the usual words."""
    return SPLITS.get(name.lower())


def read_file(path: str, first: int | None = None) -> bytes:
    """A file whole, or its first bytes. Pipes, devices and folders are refused without waiting for them; so is one
    beyond all measure."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadPicture("is not a regular file")
        if status.st_size > MAX_BYTES:
            raise BadPicture(f"has {status.st_size:,} bytes; more than {MAX_BYTES:,} are not read as one picture")
        return file.read(
            status.st_size if first is None else first
        )  # not the limit: that many bytes would be set aside first


class Files(Source):
    """Files by their names, relative to `root`: the names stay the same when the folder moves, and so does the hash."""

    def __init__(self, root: str, names: Iterable[str], labels: Labels | None = None) -> None:
        self.root, self.names = root, names if isinstance(names, Strings) else Strings(names)
        self.labels = Labels.none(len(self.names)) if labels is None else labels
        self.note = ""  # how it was read, where that is not plain
        self.ignored: tuple[int, tuple[str, ...]] = (0, ())  # files that are no pictures: how many, and a few of them
        self.unsupported: tuple[str, ...] = ()  # image files of formats that are not read

    def leave_out(self, others: Iterable[str]) -> None:
        """Notes the files that were passed over."""
        names = list(others)
        self.unsupported = tuple(name for name in names if is_unsupported(name))
        rest = [name for name in names if not is_unsupported(name)] if self.unsupported else names
        self.ignored = (len(rest), tuple(rest[:3]))

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def name(self, index: int) -> str:
        return self.names[index]

    def sizes(self) -> NDArray[np.int64]:
        """By asking the file system for each: about a microsecond a file on a local disk. A missing file counts -1."""
        return np.fromiter((size_of(self.path(i)) for i in range(len(self))), np.int64, len(self))


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What lies directly in a folder, by kind and name. Hidden files are left out."""

    folders: tuple[str, ...]
    pictures: tuple[str, ...]
    others: tuple[str, ...]

    def with_suffix(self, *suffixes: str) -> tuple[str, ...]:
        """Those files that are no pictures and end so."""
        return tuple(name for name in self.others if name.lower().endswith(suffixes))


def look(folder: str) -> Contents:
    folders: list[str] = []
    pictures: list[str] = []
    others: list[str] = []
    for entry in listed(folder):
        (folders if is_folder(entry) else pictures if is_picture(entry.name) else others).append(entry.name)
    return Contents(folders=tuple(folders), pictures=tuple(pictures), others=tuple(others))


def listed(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder by name, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in LEFTOVERS]
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read: {error.strerror}") from None
    return sorted(shown, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are followed; one that leads round in a circle is no folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_picture(name: str) -> bool:
    return name.lower().endswith(suffixes())


def below(root: str, start: str) -> tuple[list[str], list[str]]:
    """The pictures below root/start at any depth and the other files, as names relative to root. A folder that links
    lead to more than once, a loop above all, is entered once."""
    pictures: list[str] = []
    others: list[str] = []
    waiting, seen = [start], set[tuple[int, int]]()
    while waiting:
        inside = waiting.pop()
        where = os.path.join(root, inside) if inside else root
        entries = listed(where)
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders: list[str] = []
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            (folders if is_folder(entry) else pictures if is_picture(entry.name) else others).append(name)
        waiting += reversed(folders)
    return pictures, others


def read_flat(path: Path | str, inside: str = "") -> Files:
    """All pictures below path/inside, without labels."""
    pictures, others = below(str(path), inside)
    source = Files(str(path), pictures)
    source.leave_out(others)
    return source


def read_classes(path: Path | str, inside: str = "") -> Files:
    """The folders directly in path/inside are the classes, by name; what is below one, at any depth, belongs to it."""
    start = os.path.join(path, inside) if inside else str(path)
    classes = look(start).folders
    names: list[str] = []
    counts: list[int] = []
    ignored: list[str] = []
    for folder in classes:
        pictures, others = below(str(path), f"{inside}/{folder}" if inside else folder)
        names += pictures
        counts.append(len(pictures))
        ignored += others
    refuse_empty(start, classes, counts, ignored)
    source = Files(str(path), names, Labels(np.repeat(np.arange(len(classes), dtype=np.int32), counts)))
    source.classes = classes
    source.leave_out(ignored)
    return source


def refuse_empty(where: str, classes: tuple[str, ...], counts: list[int], others: Iterable[str]) -> None:
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        unread = [name for name in others if is_unsupported(name)]
        raise BadLabels(
            f"{where}: no pictures in the class folder {', '.join(empty[:5])}{more} (of {len(classes)}); "
            + (
                unread_files(unread)
                if unread
                else f"remove it or put pictures there ({', '.join(suffixes()[:5])}, ...)"
            )
        )


def unread_files(names: Sequence[str]) -> str:
    """3 image files of formats that are not read (a.heic, ...): what to do"""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    files = "image file of a format that is" if len(names) == 1 else "image files of formats that are"
    return f"{len(names):,} {files} not read ({some}); {remedy(names)}"

"""A data set by its name: finds its files, fetches them where that is asked for and allowed, and reads them.

    splits = open_named("pets", download=True)

The folder is the one that is given, else $VITRAIL_DATA/<set>, else data/<set> in the cache. Files may lie in it as they
were downloaded, unpacked, or as torchvision keeps them.

Where the files of a set lie: as they were downloaded, or unpacked in the layout that people have on disk.
"""

import gzip
import os
import secrets
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from vitrail.core.atomic_files import cache_folder, replacing
from vitrail.core.errors import DataError, SourceNotFound, reason_of, unknown
from vitrail.data.dataset import ImageDataset
from vitrail.data.datasets.catalogue import SETS, NamedSet
from vitrail.data.datasets.download import Progress, fetch
from vitrail.data.datasets.download_list import File

PIECE: Final = 1 << 20


class Absent(Exception):
    """None of these is in the folder. Whoever opens a set by name turns it into what to get and where to put it."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        super().__init__(f"none of {', '.join(names)} in {root}")
        self.root, self.names = root, names


def present(root: Path, *names: str) -> Path:
    """The first of these names that is there."""
    for name in names:
        if (root / name).exists():
            return root / name
    raise Absent(root, names)


def unpacked(root: Path, folder: str, *archives: str) -> Path:
    """The folder; where only one of its archives is there, that is unpacked next to it first, whole or not at all.

    An archive may hold the folder or its contents.
    """
    target = root / folder
    if target.exists():
        return target
    archive = present(root, *archives) if archives else None
    if archive is None:
        raise Absent(root, (folder,))
    temporary = root / f".vitrail-{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir()
        extract(archive, temporary)
        held = temporary / folder
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():  # another process may have been quicker
            os.replace(held if held.exists() else temporary, target)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked in {root} ({error.strerror or error}); unpack it to {target} yourself, "
            "or give a folder that can be written"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def extract(archive: Path, into: Path) -> None:
    """A tar or zip file. Names that lead out of the folder, links to elsewhere and devices are refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(into)  # drops .. and leading slashes by itself
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(into, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{archive} is damaged or cut short ({reason_of(error)}); download it again") from None


def inflated(root: Path, name: str) -> Path:
    """The file; where only name.gz is there, that is unpacked next to it first, whole or not at all."""
    path = root / name
    if path.exists():
        return path
    packed = present(root, f"{name}.gz")
    try:
        with gzip.open(packed) as source, replacing(path) as file:
            shutil.copyfileobj(source, file, PIECE)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{packed} is damaged or cut short ({reason_of(error)}); download it again") from None
    except OSError as error:
        raise DataError(
            f"{packed} cannot be unpacked ({error.strerror or error}); unpack it to {path} yourself, "
            "or give a folder that can be written"
        ) from None
    return path


def read_text(path: Path) -> str:
    """A small text file; what is no UTF-8 in it survives as a file name would."""
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


Reader = Callable[[Path], dict[str, ImageDataset]]


def find_set(name: str) -> NamedSet:
    """The entry of a name; UnknownName, with the nearest ones, where there is none."""
    if name not in SETS:
        raise unknown("data set", name, SETS)
    return SETS[name]


def open_named(
    name: str, root: Path | None = None, *, download: bool = False, progress: Progress | None = None
) -> dict[str, ImageDataset]:
    """The splits of a data set, by their names: train, val, test.

    SourceNotFound, where files are missing, says which file goes where and where it comes from. With `download` what is
    missing is fetched first; `progress` is told (file, bytes done, bytes in all).
    """
    entry = find_set(name)
    home = folder_of(entry, root)
    try:
        return read(entry, home, root is None)
    except Absent as missing:
        if not download:
            raise SourceNotFound(absent(entry, home, missing)) from None
    if not entry.fetchable:
        raise SourceNotFound(absent(entry, home, Absent(home, (name,))))
    for file in entry.files:
        if not file.optional:
            fetch(file, home, progress)
    try:
        return read(entry, home, anywhere=False)
    except Absent as missing:
        raise SourceNotFound(absent(entry, home, missing)) from None


def folder_of(entry: NamedSet, root: Path | None = None) -> Path:
    """Where the files of a set belong."""
    if root is not None:
        return root.expanduser()
    kept = os.environ.get("VITRAIL_DATA")
    return (Path(kept).expanduser() if kept else cache_folder("data")) / entry.folder


def read(entry: NamedSet, home: Path, anywhere: bool) -> dict[str, ImageDataset]:
    """From the first place where the files are. Of several that lack some, the first complaint stands."""
    module, _, function = entry.reader.partition(":")
    reader = cast(Reader, getattr(import_module(module), function))
    complaint: Absent | None = None
    for place in places(entry, home, anywhere):
        try:
            return reader(place)
        except Absent as missing:
            complaint = complaint or missing
    raise complaint or Absent(home, tuple(file.path for file in entry.files))


def places(entry: NamedSet, home: Path, anywhere: bool) -> Iterator[Path]:
    """The folder, the folders that torchvision makes in or next to it, and where a distribution puts the files."""
    candidates = [home, *(home / folder for folder in entry.folders)]
    if anywhere:
        candidates += [home.parent / folder for folder in entry.folders]
        candidates += [Path(path) for path in entry.elsewhere]
    return (place for place in dict.fromkeys(candidates) if place.is_dir())


def absent(entry: NamedSet, home: Path, missing: Absent) -> str:
    """What is not there, what to get, and where to put it."""
    lines = [f"{entry.title}: {' or '.join(missing.names)} is not in {missing.root}."]
    lines += [where_to_put(file, home) for file in entry.files if not file.optional]
    if entry.terms:
        lines.append(f"It {entry.terms}: {entry.page}")
    elif entry.fetchable:
        lines.append("--download fetches what is missing.")
    else:
        lines.append(f"About the set: {entry.page}")
    return "\n".join(lines)


def where_to_put(file: File, home: Path) -> str:
    size = f", {readable(file.size)}" if file.size else ""
    origin = f"from {file.url}{size}" if file.url else f"by hand{size}"
    return f"Put {home / file.path} there, {origin}{f' ({file.note})' if file.note else ''}."


def readable(count: int) -> str:
    """170498071 -> "170 MB" """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def differences(entry: NamedSet, splits: dict[str, ImageDataset]) -> list[str]:
    """Where what was opened differs from the official sizes: an incomplete copy, most often."""
    found = [
        f"{split}: {len(splits[split]):,} of {count:,} samples" if split in splits else f"{split}: not there"
        for split, count in entry.splits.items()
        if split not in splits or len(splits[split]) != count
    ]
    classes = {len(source.classes) for source in splits.values()}
    return found + [f"{count} classes, not {entry.classes}" for count in sorted(classes - {entry.classes})]


def only_split(splits: dict[str, ImageDataset], split: str, name: str) -> ImageDataset:
    """One split of a set that was opened; DataError where it is not there."""
    if split not in splits:
        raise DataError(f"{name} has no split {split!r} here; it has {', '.join(splits)}")
    return splits[split]

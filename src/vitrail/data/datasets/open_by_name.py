"""Opens a data set by its name: finds its files, downloads them on request, and reads them.

    splits = open_named("pets", download=True)

The folder is the one given, else $VITRAIL_DATA/<set>, else data/<set> in the cache. Files may lie in it as they were
downloaded, unpacked, or in torchvision's layout. A download can be resumed, is verified, and gets its name only once it
is complete; until then it is `<file>.part`. VITRAIL_OFFLINE=1 forbids all requests.

VTAB: 19 tasks, each with a train, val and test split, and VTAB-1k's thousand images for training.

VTAB-1k is the first 800 images of train and the first 200 of val, in the order in which TensorFlow Datasets stores
them. The original files do not contain that order. Ours is a fixed pseudo-random order that depends only on the set's
name, so the thousand images differ from the published ones, but are drawn in the same way and are the same everywhere.
The same holds for splits that VTAB cuts from an official one. Flowers, DTD, PatchCamelyon, Retinopathy and DMLab have
the official splits, and KITTI has VTAB's own. The sizes are VTAB's throughout.
"""

import gzip
import os
import secrets
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success, sync_folder
from vitrail.core.errors import DataError, SourceNotFound, describe_error, unknown_name
from vitrail.core.http import ChecksumError, HttpError, Reply, UnsafeRequest, is_offline, split_address
from vitrail.core.http import download as http_download
from vitrail.core.text import Pair, format_bytes
from vitrail.data.dataset import ConcatDataset, ImageDataset, SubsetDataset
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS, DataFile, NamedSet, VtabTask
from vitrail.data.randomness import EpochOrder, hash_word

LARGEST: Final = 2**40  # bytes of a file of unknown size
Progress: TypeAlias = Callable[[str, int, int | None], None] | None  # the file's name, bytes done, bytes in all
DAMAGED: Final = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, struct.error, EOFError, RecursionError),
    *(KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError),
)


class FilesMissing(Exception):
    """None of these names is in the folder. `open_named` turns it into what to download and where to put it."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        super().__init__(f"none of {', '.join(names)} in {root}")
        self.root, self.names = root, names


@contextmanager
def refuse_damaged(where: object, what: str = "", *, target: Path | None = None) -> Generator[None]:
    """Turns errors from reading a damaged file, or unpacking it to `target`, into DataError. `what` is the expected
    kind of file."""
    try:
        yield
    except DAMAGED as error:
        kind = f", or is not {what}" if what else ""
        raise DataError(f"{where} is damaged or cut short{kind} ({describe_error(error)}); download it again") from None
    except OSError as error:
        if target is None:
            raise DataError(f"{where}: {error.strerror or error}") from None
        remedy = f"unpack it to {target} yourself, or give a folder that can be written"
        raise DataError(f"{where} cannot be unpacked ({error.strerror or error}); {remedy}") from None


def find_file(root: Path, *names: str) -> Path:
    """The first of these names that exists."""
    for name in names:
        if (root / name).exists():
            return root / name
    raise FilesMissing(root, names)


def unpack(root: Path, folder: str, *archives: str) -> Path:
    """The folder. If only one of its archives exists, it is unpacked first, atomically; an archive may hold the folder
    or its contents."""
    target = root / folder
    if target.exists():
        return target
    archive = find_file(root, *archives)
    temporary = root / f".vitrail-{secrets.token_hex(8)}.tmp"
    try:
        with refuse_damaged(archive, target=target):
            temporary.mkdir()
            extract(archive, temporary)
            held = temporary / folder
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():  # another process may have been faster
                os.replace(held if held.exists() else temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def extract(archive: Path, into: Path) -> None:
    """Unpacks a tar or zip file. Names that lead out of the folder, links to elsewhere and devices are refused."""
    with refuse_damaged(archive, target=into):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(into)  # drops .. and leading slashes by itself
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(into, filter="data")


def decompress(root: Path, name: str) -> Path:
    """The file. If only name.gz exists, it is decompressed next to it first, atomically."""
    path = root / name
    if not path.exists():
        packed = find_file(root, f"{name}.gz")
        with refuse_damaged(packed, target=path), gzip.open(packed) as source, replace_on_success(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return path


def read_text(path: Path) -> str:
    """A small text file; bytes that are not UTF-8 survive as they do in file names."""
    with refuse_damaged(path):
        return path.read_text("utf-8", errors="surrogateescape")


def fetch(file: DataFile, root: Path, progress: Progress = None) -> Path:
    """Downloads a file into its place, unless it exists."""
    path = root / file.path
    if path.exists():
        return path
    if file.url is None:
        raise SourceNotFound(f"{path} cannot be downloaded: {file.note or 'it has no address for programs'}")
    if is_offline():
        raise SourceNotFound(f"{path} is missing and vitrail is offline (VITRAIL_OFFLINE); put {file.url} there")
    if split_address(file.url) is None:
        raise DataError(f"{file.url} is not an http(s) address")
    part = path.with_name(f"{path.name}.part")
    checksum = f"sha256:{file.sha256}" if file.sha256 else f"md5:{file.md5}" if file.md5 else None

    def expect(reply: Reply) -> str | None:
        if file.size is not None and reply.total is not None and reply.total != file.size and not reply.is_at_end:
            raise DataError(f"{file.url} has {reply.total:,} bytes, not {file.size:,}: is it a page about the file?")
        return checksum

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = partial(progress, path.name) if progress else None
        most = file.size or LARGEST
        http_download(file.url, part, expect=expect, max_bytes=most, progress=report, resume_unverified=True)
        os.replace(part, path)
        sync_folder(path.parent)
    except (ChecksumError, UnsafeRequest) as error:
        raise DataError(str(error)) from None
    except HttpError as error:
        remedy = f"run the command again to resume, or put the file at {path}"
        raise SourceNotFound(f"cannot download {file.url} ({error}); {remedy}") from None
    except OSError as error:
        raise DataError(f"{part} cannot be written ({error.strerror or error}); give another folder") from None
    return path


def find_set(name: str) -> NamedSet:
    """The catalogue's entry; UnknownName, with the nearest names, where there is none."""
    if name not in SETS:
        raise unknown_name("data set", name, SETS)
    return SETS[name]


def open_named(
    name: str, root: Path | None = None, *, download: bool = False, progress: Progress = None
) -> dict[str, ImageDataset]:
    """The splits of a data set by name: train, val, test.

    If files are missing, SourceNotFound says which file goes where and where it comes from. With `download`, missing
    files are downloaded first; `progress` is called with (file, bytes done, bytes in total).
    """
    entry = find_set(name)
    home = folder_of(entry, root)
    if download and entry.is_downloadable:
        with suppress(FilesMissing):
            return read_set(entry, home, search=root is None)
        for file in entry.files:
            if not file.optional:
                fetch(file, home, progress)
    try:
        return read_set(entry, home, search=root is None)
    except FilesMissing as missing:  # what is missing, what to download, and where to put it
        lines = [f"{entry.title}: {' or '.join(missing.names)} is not in {missing.root}."]
        for file in (file for file in entry.files if not file.optional):
            origin = f"from {file.url}" if file.url else "by hand"
            size, note = f", {format_bytes(file.size)}" if file.size else "", f" ({file.note})" if file.note else ""
            lines.append(f"Put {home / file.path} there, {origin}{size}{note}.")
        remedy = "--download fetches what is missing." if entry.is_downloadable else f"About the set: {entry.page}"
        lines.append(f"It {entry.terms}: {entry.page}" if entry.terms else remedy)
        raise SourceNotFound("\n".join(lines)) from None


def folder_of(entry: NamedSet, root: Path | None = None) -> Path:
    """The folder for the files of a set."""
    if root is not None:
        return root.expanduser()
    base = os.environ.get("VITRAIL_DATA")
    return (Path(base).expanduser() if base else cache_folder("data")) / entry.folder


def read_set(entry: NamedSet, home: Path, *, search: bool) -> dict[str, ImageDataset]:
    """Reads the first place that has the files. If all lack some, the first place's error is raised."""
    module, _, function = entry.reader.partition(":")
    reader: Callable[[Path], dict[str, ImageDataset]] = getattr(import_module(f"{__package__}.{module}"), function)
    complaint: FilesMissing | None = None
    for place in find_places(entry, home, search=search):
        try:
            return reader(place)
        except FilesMissing as missing:
            complaint = complaint or missing
    raise complaint or FilesMissing(home, tuple(file.path for file in entry.files))


def find_places(entry: NamedSet, home: Path, *, search: bool) -> Iterator[Path]:
    """The folder and torchvision's folders in it; with `search` also those next to it and a distribution's."""
    candidates = [home, *(home / folder for folder in entry.folders)]
    if search:
        candidates += [home.parent / folder for folder in entry.folders]
        candidates += [Path(path) for path in entry.elsewhere]
    return (place for place in dict.fromkeys(candidates) if place.is_dir())


def find_differences(entry: NamedSet, splits: dict[str, ImageDataset]) -> list[str]:
    """Where the splits differ from the official sizes, usually because the copy is incomplete."""
    found = [
        f"{split}: {len(splits[split]):,} of {count:,} samples" if split in splits else f"{split}: missing"
        for split, count in entry.splits.items()
        if split not in splits or len(splits[split]) != count
    ]
    classes = {len(source.classes) for source in splits.values()}
    return found + [f"{count} classes, not {entry.classes}" for count in sorted(classes - {entry.classes})]


def find_vtab_task(name: str) -> VtabTask:
    """The task of a name, with or without a leading "vtab/"."""
    short = name.removeprefix("vtab/")
    if short not in VTAB_TASKS:
        raise unknown_name("VTAB task", name, (f"vtab/{task}" for task in VTAB_TASKS))
    return VTAB_TASKS[short]


def choose_samples(task: VtabTask, split: str, count: int) -> NDArray[np.int64]:
    """The samples of a task's split, in order, as indices into the `count` samples of its official split.

    The order depends only on the data set's files: both tasks of CLEVR see the same images. A complete official test
    split keeps its order.
    """
    official, start, end = task.plan[split]
    places = np.arange(count * start // 100, count * end // 100)  # adjacent parts do not overlap
    if not count or (split == "test" and (start, end) == (0, 100)):
        return places
    return EpochOrder(count, hash_word(f"vtab {SETS[task.source].folder} {official}"))(0, places)


def open_vtab(
    name: str, root: Path | None = None, *, first: Pair = (800, 200), download: bool = False, progress: Progress = None
) -> dict[str, ImageDataset]:
    """The splits of a task: the full train, val and test, and VTAB-1k's train800, val200 and trainval1000, which are
    the first samples of train, those of val, and both. DataError where there are too few."""
    task = find_vtab_task(name)
    sets = open_named(task.source, root, download=download, progress=progress)
    splits: dict[str, ImageDataset] = {}
    for split, (official, _, _) in task.plan.items():
        if official not in sets:
            raise DataError(f"{task.source} has no split {official!r} here; it has {', '.join(sets)}")
        splits[split] = SubsetDataset(sets[official], choose_samples(task, split, len(sets[official])))
    for split, count in zip(("train", "val"), first, strict=True):
        if len(splits[split]) < count:
            rule = f"VTAB-1k takes {count}; the copy of {SETS[task.source].title} is not complete"
            raise DataError(f"vtab/{task.name}: {split} has {len(splits[split])} samples, {rule}")
    train, val = SubsetDataset(splits["train"], np.arange(first[0])), SubsetDataset(splits["val"], np.arange(first[1]))
    names = f"train{first[0]}", f"val{first[1]}", f"trainval{sum(first)}"
    return {**splits, **dict(zip(names, (train, val, ConcatDataset([train, val])), strict=True))}

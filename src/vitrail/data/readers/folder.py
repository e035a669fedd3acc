"""Images in folders: class folders, or all images below a folder without labels.

Only names are read here, so a million files take seconds; a file is opened when its sample is read. `detect_format`
decides how a folder is read. Folders are splits or classes by their names and contents:

    Training Set/cat  Test Set/cat      splits: the names contain train, val or test as a word
    cat/1.jpg  train/1.jpg  car/1.jpg   classes: the vehicle among others
    A/cat  A/dog  B/cat  B/dog          either: refused, with the way to choose

`ImageLocator` finds the files of a list that was written elsewhere: by Windows paths, by paths of another machine,
without the folder or without the suffix.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import filterfalse
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.core.text import join_words
from vitrail.data.dataset import ImageDataset, Labels, StringArray
from vitrail.data.decode.image import describe_remedy, is_unsupported, readable_suffixes

Item = TypeVar("Item")
Answer = TypeVar("Answer")
MAX_BYTES: Final = 512 * 2**20
LEFTOVERS: Final = ("__MACOSX", "lost+found")  # left by archives and file systems
SPLITS: Final = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS.update(dict.fromkeys(("val", "valid", "validation", "dev"), "val"))


def parse_split(name: str) -> str | None:
    """train, val or test, from one of the usual words for it."""
    return SPLITS.get(name.lower())


def read_file(path: str, first: int | None = None) -> bytes:
    """A file, or its first bytes. Pipes, devices, folders and files beyond MAX_BYTES are refused at once."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("is not a regular file")
        if status.st_size > MAX_BYTES:
            raise BadImage(f"has {status.st_size:,} bytes; the limit for one image is {MAX_BYTES:,}")
        return file.read(status.st_size if first is None else first)  # MAX_BYTES would be allocated first


def read_names(path: Path) -> tuple[str, ...]:
    """Class names in order: one per line, a JSON list, or a JSON object from numbers to names."""
    try:
        text = path.read_text("utf-8-sig", "surrogatepass")
        if path.suffix == ".txt":
            names = tuple(line.rstrip() for line in text.rstrip().splitlines())
            if "" in names:
                raise DataError(f"{path}: line {names.index('') + 1} is empty; the lines name the classes 0, 1, 2, ...")
            return names
        content: Any = json.loads(text)
        if isinstance(content, dict):
            content = [content[str(number)] for number in range(len(content))]
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise TypeError("a list of names is expected")
        return tuple(content)
    except UnicodeDecodeError:
        raise DataError(f"{path}: the class names are not in UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a list of class names: {error!r}") from None


class FileDataset(ImageDataset):
    """Files by name, relative to `root`: names and fingerprint stay the same when the folder moves."""

    def __init__(self, root: str, names: Iterable[str], labels: Labels | None = None) -> None:
        self.root, self.names = root, names if isinstance(names, StringArray) else StringArray(names)
        self.labels = Labels.none(len(self.names)) if labels is None else labels
        self.note = ""  # how it was read, where that is not obvious
        self.ignored: tuple[int, tuple[str, ...]] = (0, ())  # files that are not images: their number, and a few names
        self.unsupported: tuple[str, ...] = ()  # image files of unsupported formats

    def note_skipped(self, others: Iterable[str]) -> None:
        """Records the files that were skipped."""
        names = list(others)
        self.unsupported = tuple(name for name in names if is_unsupported(name))
        rest = [name for name in names if not is_unsupported(name)] if self.unsupported else names
        self.ignored = (len(rest), tuple(rest[:3]))

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def sizes(self) -> NDArray[np.int64]:
        """From the file system, about a microsecond per file on a local disk. A missing file counts as -1."""
        return np.fromiter((file_size(self.path(i)) for i in range(len(self))), np.int64, len(self))


def file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def map_threads(function: Callable[[Item], Answer], items: Sequence[Item], block: int = 4096) -> Iterator[Answer]:
    """The function of each item, in order, eight at once; at most a block of answers is held."""
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(items), block):
            yield from pool.map(function, items[start : start + block])


class Contents(NamedTuple):
    """The entries of a folder, by kind and name, without hidden ones."""

    folders: tuple[str, ...]
    images: tuple[str, ...]
    others: tuple[str, ...]

    def with_suffix(self, *suffixes: str) -> tuple[str, ...]:
        """The files other than images with one of these suffixes."""
        return tuple(name for name in self.others if name.lower().endswith(suffixes))


def list_folder(folder: str) -> Contents:
    entries = list_entries(folder)
    files = [entry.name for entry in entries if not is_folder(entry)]
    folders, images = [entry.name for entry in entries if is_folder(entry)], list(filter(has_image_suffix, files))
    return Contents(tuple(folders), tuple(images), tuple(filterfalse(has_image_suffix, files)))


def list_entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder in order of name, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in LEFTOVERS]
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read: {error.strerror}") from None
    return sorted(shown, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are followed; a circular one is not a folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def has_image_suffix(name: str) -> bool:
    return name.lower().endswith(readable_suffixes())


def list_below(root: str, start: str) -> tuple[list[str], list[str]]:
    """The images below root/start at any depth and the other files, as names relative to root. A folder that several
    links lead to is entered once, so that loops end."""
    images: list[str] = []
    others: list[str] = []
    waiting, seen = [start], set[tuple[int, int]]()
    while waiting:
        inside = waiting.pop()
        where = os.path.join(root, inside) if inside else root
        entries = list_entries(where)
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders: list[str] = []
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            (folders if is_folder(entry) else images if has_image_suffix(entry.name) else others).append(name)
        waiting += reversed(folders)
    return images, others


def read_flat(path: Path | str, inside: str = "") -> FileDataset:
    """All images below path/inside, without labels."""
    images, others = list_below(str(path), inside)
    source = FileDataset(str(path), images)
    source.note_skipped(others)
    return source


def read_classes(path: Path | str, inside: str = "") -> FileDataset:
    """The folders directly in path/inside are the classes; every image below one, at any depth, belongs to it."""
    start = os.path.join(path, inside) if inside else str(path)
    classes = list_folder(start).folders
    found = [list_below(str(path), f"{inside}/{folder}" if inside else folder) for folder in classes]
    names, counts = [name for images, _ in found for name in images], [len(images) for images, _ in found]
    ignored = [name for _, others in found for name in others]
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        unread = [name for name in ignored if is_unsupported(name)]
        remedy = f"remove it or put images there ({', '.join(readable_suffixes()[:5])}, ...)"
        what = f"no images in the class folder {join_words(empty, limit=5)} (of {len(classes)})"
        raise BadLabels(f"{start}: {what}; {describe_unread(unread) if unread else remedy}")
    source = FileDataset(str(path), names, Labels(np.repeat(np.arange(len(classes), dtype=np.int32), counts)))
    source.classes = classes
    source.note_skipped(ignored)
    return source


def describe_unread(names: Sequence[str]) -> str:
    """3 image files of formats that are not read (a.heic, ...): the remedy"""
    files = "image file of a format that is" if len(names) == 1 else "image files of formats that are"
    return f"{len(names):,} {files} not read ({join_words(names, limit=3)}); {describe_remedy(names)}"


WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")  # "trainingSet2" -> training, Set
ENDINGS: Final = ("set", "data", "images", "imgs")  # trainset, testdata
CONTAINERS: Final = {"images", "image", "imgs", "img", "photos", "jpg", "jpeg", "png", "jpegimages", "data"}
VEHICLE: Final = "train"  # the one usual word for a split that is also a usual class


def find_split_word(name: str) -> str | None:
    """The split that a folder's name contains as a word: "Training Set", "seg_train", "test-images", "TRAIN 2".
    "train_val" is train; any other two splits in one name are none."""
    if exact := parse_split(name):
        return exact
    if name.lower() == "trainval":
        return "train"
    words = [word.lower() for word in WORD.findall(name)]
    words += [word.removesuffix(end) for word in words for end in ENDINGS if word.endswith(end)]
    found = {split for word in words if (split := parse_split(word))}
    if found == {"train", "val"}:
        return "train"
    return found.pop() if len(found) == 1 else None


def find_splits(path: Path, folders: Sequence[str]) -> dict[str, str | None] | None:
    """Each folder with its split, None for others; or None where all are classes."""
    splits = {name: find_split_word(name) for name in folders}
    named = [name for name, split in splits.items() if split]
    if not named:
        return None
    distinct = {split for split in splits.values() if split}
    if len(named) == len(folders):
        alone = len(folders) == 1 or all(parse_split(name) for name in folders)
        return splits if len(distinct) > 1 or alone else None
    if any(parse_split(name) for name in named):
        # A folder called train may be a class like the others: three or more folders, each with images in it.
        alone = [name.lower() for name in folders if parse_split(name)] == [VEHICLE] and len(folders) >= 3
        inside = [list_folder(str(path / name)) for name in folders] if alone else []
        return None if alone and all(found.images and not found.folders for found in inside) else splits
    if len(distinct) < 2:
        return None
    subfolders = [set(list_folder(str(path / name)).folders) for name in named]
    alike = all(subfolders) and bool(set.intersection(*subfolders))
    flat = not any(subfolders) and 2 * len(named) >= len(folders)
    return splits if alike or flat else None


def refuse_same_subfolders(path: Path, folders: Sequence[str], as_classes: str) -> None:
    """Refuses to guess which of two levels are the classes: folders that all hold the same subfolders, unless all of
    them hold images as well, or their only subfolder is a container such as images/. `as_classes` is what to write if
    the upper level has the classes."""
    inside: list[Contents] = []
    for name in folders:
        inside.append(list_folder(str(path / name)))
        if not inside[-1].folders or inside[-1].folders != inside[0].folders:
            return
    shared = inside[0].folders if len(folders) > 1 else ()
    contained = len(shared) == 1 and shared[0].lower() in CONTAINERS
    if not shared or contained or all(contents.images for contents in inside):
        return
    inner, outer = join_words(shared, limit=3), join_words(folders, limit=3)
    what = f"all {len(folders)} folders ({outer}) hold the same subfolders ({inner})"
    lower = f"if {inner} are the classes, write {path / folders[0]}, or name the folders train, val and test"
    raise DataError(f"{path}: {what}; {lower}; if {outer} are the classes, write {as_classes}")


def refuse_nested_splits(path: Path, contents: Contents, as_classes: str) -> None:
    """A folder called like a split that itself holds splits is one level too high."""
    inner = {split for name in contents.folders if (split := find_split_word(name))}
    if len(inner) > 1 and all(find_split_word(name) for name in contents.folders):
        what = f"is called like a split and holds splits itself ({join_words(contents.folders, limit=3)})"
        raise DataError(f"{path} {what}; write {path} to read those, or {as_classes} if they are classes")


def unwrap_split(path: Path, name: str, classes: Set[str]) -> str:
    """The folder inside a split that holds its classes or images: training_set/training_set/cats, train/images/cats.
    A lone folder counts as a wrapper where it repeats the split's name or holds only folders, unless it is one of the
    `classes` that other splits have."""
    inside = name
    while True:
        contents = list_folder(str(path / inside))
        if len(contents.folders) != 1 or contents.images or contents.folders[0] in classes:
            return inside
        deeper = f"{inside}/{contents.folders[0]}"
        within = list_folder(str(path / deeper))
        repeated = find_split_word(contents.folders[0]) == find_split_word(name)
        if not (within.folders and not within.images) and not (repeated and within.images):
            return inside
        inside = deeper


TRIED: Final = 8  # names that are looked up unchanged; where all exist, the others are taken to exist as well
DEPTH: Final = 4  # of folders below that of the list
MOST_FILES: Final = 5_000_000  # that are searched


class ImageLocator:
    """Finds the images near a list by name; searches the folders when a name does not exist unchanged."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder, self.paths = path, path.parent, set[str]()
        self.tails: dict[str, list[str]] = {}  # by the last part of the name, with and without its suffix
        self.searched, self.distinct = False, True  # distinct: whether all names of the list end differently

    def find_all(self, names: Sequence[str]) -> list[str]:
        """Every name as a path from the folder of the list; one that is not found stays unchanged."""
        if all(self.exists(name) for name in names[:TRIED]):
            return list(names)
        self.distinct = len({name.replace("\\", "/").rpartition("/")[2] for name in names}) == len(names)
        return [self.find(name) or name for name in names]

    def finds_any(self, names: Sequence[str]) -> bool:
        """Whether any of the first names is a file."""
        return any(self.find(name) for name in names[:TRIED])

    def exists(self, name: str) -> bool:
        return bool(name) and os.path.isfile(self.folder / name)

    def find(self, name: str) -> str | None:
        """The file that a name means. The folders of a relative path must match; of another machine's path the last
        ones count, and the name alone only where all names of the list end differently."""
        if self.exists(name):
            return name
        self.search()
        parts = [part for part in name.strip().replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts:
            return None
        if (same := "/".join(parts)) in self.paths:
            return same
        found = self.tails.get(parts[-1], [])
        # How many folders two names have in common, counted from the last.
        agreeing = [len(os.path.commonprefix([parts[-2::-1], one.split("/")[-2::-1]])) for one in found]  # noqa: RUF071
        foreign = re.match(r"[/\\]|[A-Za-z]:", name.strip()) is not None
        least = len(parts) - 1 if not foreign else 0 if self.distinct else 1
        most = max(agreeing, default=0)
        found = [one for one, count in zip(found, agreeing, strict=True) if count == most >= least]
        if len(found) > 1:
            found = [one for one in found if self.is_named_like(one)] or found
        if len(found) > 1:
            remedy = "add the folder to the list, or move the list into the folder of its images"
            raise DataError(f"{self.path}: {name} may be {found[0]} or {found[1]}; {remedy}")
        return found[0] if found else None

    def is_named_like(self, name: str) -> bool:
        """train.csv and train_images/1.jpg: whether a file is in a folder named like the list, or like its split."""
        stem = self.path.stem.lower()
        folders = [part.lower() for part in PurePosixPath(name).parts[:-1]]
        split = find_split_word(stem)
        return any(folder == stem or (split and find_split_word(folder) == split) for folder in folders)

    def search(self) -> None:
        if self.searched:
            return
        self.searched = True
        waiting = [("", 0)]
        while waiting:
            inside, depth = waiting.pop()
            for entry in list_entries(str(self.folder / inside) if inside else str(self.folder)):
                name = f"{inside}/{entry.name}" if inside else entry.name
                if is_folder(entry):
                    waiting += [(name, depth + 1)] if depth < DEPTH else []
                elif has_image_suffix(entry.name):
                    self.paths.add(name)
                    for tail in {entry.name, os.path.splitext(entry.name)[0]}:
                        self.tails.setdefault(tail, []).append(name)
            if len(self.paths) > MOST_FILES:
                raise DataError(f"{self.folder} has more than {MOST_FILES:,} images; add paths to {self.path.name}")

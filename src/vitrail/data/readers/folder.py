"""Images in folders: class folders, or all images below a folder without labels.

What lies directly in a folder is looked at in `look`; which reading that calls for is decided in `recognise`. Only
names are read here, so a million files take seconds; a file is opened when its sample is asked for.

Whether folders are splits or classes, from their names and from what lies in them.

Training Set/cat  Test Set/cat      splits: the names contain train, val or test as a word
cat/1.jpg  train/1.jpg  car/1.jpg   classes: the vehicle among others
A/cat  A/dog  B/cat  B/dog          either: refused with the way to choose

Where the files of a list are: as it says, or as it is meant. Lists are written elsewhere, and name their images by
Windows paths, by paths of another machine, without the folder or without the suffix.
"""

import os
import re
import stat
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.dataset import ImageDataset, Labels, StringArray
from vitrail.data.decode.image import describe_remedy, is_unsupported, readable_suffixes

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
            raise BadImage("is not a regular file")
        if status.st_size > MAX_BYTES:
            raise BadImage(f"has {status.st_size:,} bytes; more than {MAX_BYTES:,} are not read as one image")
        return file.read(
            status.st_size if first is None else first
        )  # not the limit: that many bytes would be set aside first


class Files(ImageDataset):
    """Files by their names, relative to `root`: the names stay the same when the folder moves, and so does the hash."""

    def __init__(self, root: str, names: Iterable[str], labels: Labels | None = None) -> None:
        self.root, self.names = root, names if isinstance(names, StringArray) else StringArray(names)
        self.labels = Labels.none(len(self.names)) if labels is None else labels
        self.note = ""  # how it was read, where that is not plain
        self.ignored: tuple[int, tuple[str, ...]] = (0, ())  # files that are not images: how many, and a few of them
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
        """Those files that are not images and end so."""
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
    """Links are followed; one that leads round in a circle is not a folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_picture(name: str) -> bool:
    return name.lower().endswith(readable_suffixes())


def below(root: str, start: str) -> tuple[list[str], list[str]]:
    """The images below root/start at any depth and the other files, as names relative to root. A folder that links
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
    """All images below path/inside, without labels."""
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
            f"{where}: no images in the class folder {', '.join(empty[:5])}{more} (of {len(classes)}); "
            + (
                unread_files(unread)
                if unread
                else f"remove it or put images there ({', '.join(readable_suffixes()[:5])}, ...)"
            )
        )


def unread_files(names: Sequence[str]) -> str:
    """3 image files of formats that are not read (a.heic, ...): what to do"""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    files = "image file of a format that is" if len(names) == 1 else "image files of formats that are"
    return f"{len(names):,} {files} not read ({some}); {describe_remedy(names)}"


WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")  # "trainingSet2" -> training, Set
ENDINGS: Final = ("set", "data", "images", "imgs")  # trainset, testdata
CONTAINERS: Final = {"images", "image", "imgs", "img", "photos", "pictures", "jpg", "jpeg", "png", "jpegimages", "data"}
VEHICLE: Final = "train"  # the one usual word for a split that is also a usual class


def split_in_name(name: str) -> str | None:
    """The split that a folder's name contains as a word: "Training Set", "seg_train", "test-images", "TRAIN 2".
    "train_val" is what one may train on; any other two splits in one name are none."""
    if exact := split_name(name):
        return exact
    if name.lower() == "trainval":
        return "train"
    words = [word.lower() for word in WORD.findall(name)]
    stems = [next((word.removesuffix(end) for end in ENDINGS if word.endswith(end)), word) for word in words]
    found = {split for word, stem in zip(words, stems, strict=True) if (split := split_name(word) or split_name(stem))}
    if found == {"train", "val"}:
        return "train"
    return found.pop() if len(found) == 1 else None


def find_splits(path: Path, folders: Sequence[str]) -> dict[str, str | None] | None:
    """Each folder with its split, or none where they are classes. Folders that belong to no split are left to the
    caller to refuse."""
    splits = {name: split_in_name(name) for name in folders}
    named = [name for name, split in splits.items() if split]
    if not named:
        return None
    distinct = {split for split in splits.values() if split}
    if len(named) == len(folders):
        alone = len(folders) == 1 or all(split_name(name) for name in folders)
        return splits if len(distinct) > 1 or alone else None
    if any(split_name(name) for name in named):
        return None if is_vehicle(path, folders) else splits
    if len(distinct) < 2:
        return None
    inside = [set(look(str(path / name)).folders) for name in named]
    alike = all(inside) and bool(set.intersection(*inside))
    flat = not any(inside) and 2 * len(named) >= len(folders)
    return splits if alike or flat else None


def is_vehicle(path: Path, folders: Sequence[str]) -> bool:
    """Whether a folder called train is a class like the others: three or more folders, each with images in it."""
    if [name.lower() for name in folders if split_name(name)] != [VEHICLE] or len(folders) < 3:
        return False
    return all(contents.pictures and not contents.folders for name in folders if (contents := look(str(path / name))))


def refuse_same_subfolders(path: Path, folders: Sequence[str], as_classes: str) -> None:
    """Refuses to guess which of two levels are the classes: folders that all hold the same subfolders, unless all of
    them hold images as well, or their only subfolder is a usual container such as images/. `as_classes` is what to
    write where the upper level is meant."""
    shared: set[str] | None = None
    direct = True
    for name in folders:
        contents = look(str(path / name))
        if not contents.folders or (shared is not None and shared != set(contents.folders)):
            return
        shared, direct = set(contents.folders), direct and bool(contents.pictures)
    if len(folders) < 2 or not shared or direct or (len(shared) == 1 and next(iter(shared)).lower() in CONTAINERS):
        return
    inner = sorted(shared)
    raise DataError(
        f"{path}: all {len(folders)} folders ({brief(folders)}) hold the same subfolders ({brief(inner)}); "
        f"if {brief(inner)} are the classes, write {path / folders[0]}, or name the folders train, val and test; "
        f"if {brief(folders)} are the classes, write {as_classes}"
    )


def refuse_nested_splits(path: Path, contents: Contents, as_classes: str) -> None:
    """A folder called like a split that itself holds splits is one level too high."""
    inner = {split for name in contents.folders if (split := split_in_name(name))}
    if len(inner) > 1 and all(split_in_name(name) for name in contents.folders):
        raise DataError(
            f"{path} is called like a split and holds splits itself ({brief(contents.folders)}); "
            f"write {path} to read those, or {as_classes} if they are classes"
        )


def unwrap(path: Path, name: str, classes: Set[str]) -> str:
    """The folder inside a split that holds its classes or images: training_set/training_set/cats, train/images/cats.
    A lone folder counts as a wrapper where it repeats the split's name or holds only folders, unless it is one of the
    `classes` that other splits have."""
    inside = name
    while True:
        contents = look(str(path / inside))
        if len(contents.folders) != 1 or contents.pictures or contents.folders[0] in classes:
            return inside
        deeper = f"{inside}/{contents.folders[0]}"
        within = look(str(path / deeper))
        repeated = split_in_name(contents.folders[0]) == split_in_name(name)
        if not (within.folders and not within.pictures) and not (repeated and within.pictures):
            return inside
        inside = deeper


def brief(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


TRIED: Final = 8  # names that are looked for as they are; where all are there, so are the rest, or they are missing
DEEP: Final = 4  # folders below that of the list
MOST: Final = 5_000_000  # files that are looked through


class Locator:
    """The images near a list, by their names; looked through when the first name is not there as it is."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        self.whole: set[str] = set()
        self.tails: dict[str, list[str]] = {}  # by the last part of the name, with and without its suffix
        self.looked = False
        self.distinct = True  # whether no two names of the list end alike

    def find_all(self, names: Sequence[str]) -> list[str]:
        """Every name as a path from the folder of the list; one that is not found stays as it is."""
        if all(self.is_there(name) for name in names[:TRIED]):
            return list(names)
        self.distinct = len({name.replace("\\", "/").rpartition("/")[2] for name in names}) == len(names)
        return [self.find(name) or name for name in names]

    def finds(self, names: Sequence[str]) -> bool:
        """Whether any of the first names is a file."""
        return any(self.find(name) for name in names[:TRIED])

    def is_there(self, name: str) -> bool:
        return bool(name) and os.path.isfile(self.folder / name)

    def find(self, name: str) -> str | None:
        """The file that a name means. The folders of a relative path must agree; of another machine's path the last
        ones count, and the name alone only where no two names of the list end alike."""
        if self.is_there(name):
            return name
        self.look()
        parts = [part for part in name.strip().replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts:
            return None
        if (same := "/".join(parts)) in self.whole:
            return same
        found = self.tails.get(parts[-1], [])
        agreeing = [shared(parts, one) for one in found]
        foreign = re.match(r"[/\\]|[A-Za-z]:", name.strip()) is not None
        least = len(parts) - 1 if not foreign else 0 if self.distinct else 1
        most = max(agreeing, default=0)
        found = [one for one, count in zip(found, agreeing, strict=True) if count == most >= least]
        if len(found) > 1:
            named = [one for one in found if self.is_named_like(one)]
            found = named or found
        if len(found) > 1:
            raise DataError(
                f"{self.path}: {name} may be {found[0]} or {found[1]}; write the folder in the list, or put the list "
                "into the folder of its images"
            )
        return found[0] if found else None

    def is_named_like(self, name: str) -> bool:
        """train.csv and train_images/1.jpg: whether a file is in a folder called like the list, or its split."""
        stem = self.path.stem.lower()
        folders = [part.lower() for part in PurePosixPath(name).parts[:-1]]
        split = split_in_name(stem)
        return any(folder == stem or (split and split_in_name(folder) == split) for folder in folders)

    def look(self) -> None:
        if self.looked:
            return
        self.looked = True
        waiting = [("", 0)]
        while waiting:
            inside, depth = waiting.pop()
            for entry in listed(str(self.folder / inside) if inside else str(self.folder)):
                name = f"{inside}/{entry.name}" if inside else entry.name
                if is_folder(entry):
                    waiting += [(name, depth + 1)] if depth < DEEP else []
                elif is_picture(entry.name):
                    self.add(name, entry.name)

    def add(self, name: str, last: str) -> None:
        self.whole.add(name)
        if len(self.whole) > MOST:
            raise DataError(f"{self.folder} holds more than {MOST:,} images; write the paths into {self.path.name}")
        for tail in {last, os.path.splitext(last)[0]}:
            self.tails.setdefault(tail, []).append(name)


def shared(parts: Sequence[str], name: str) -> int:
    """How many folders two names have in common, from the last one on."""
    count = 0
    for one, other in zip(reversed(parts[:-1]), reversed(name.split("/")[:-1]), strict=False):
        if one != other:
            break
        count += 1
    return count

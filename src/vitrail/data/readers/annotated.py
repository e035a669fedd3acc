"""Shared parts of the annotation readers: image files whose segments are described by another file.

Faults are reported per image. An annotation that cannot be used makes its image unreadable: `segments` raises BadImage,
and the image is counted and listed like a damaged file, because an object that silently goes missing would be learnt as
background. Annotations that affect no image (of images that the file does not list, or wholly outside their image) are
skipped and counted in a note.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.core.text import Pair, join_words
from vitrail.data.annotations.segments import MOST_CLASSES, SegmentClass, paint_objects, paint_panoptic
from vitrail.data.dataset import StringArray, hash_parts
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.folder import FileDataset, find_split_word, list_folder, read_file

BACKGROUND: Final = "background"
LARGEST: Final = 4 << 30  # most bytes of an annotation file
MOST_BYTES: Final = 16 << 20  # most bytes of the annotations of one image
PROBED: Final = 8  # image names that are tried to recognise a folder
ABOVE: Final = 2  # how many levels above the annotations images are searched
IMAGE_WORDS: Final = ("images", "image", "imgs", "img", "jpegimages")


class AnnotatedFiles(FileDataset):
    """Image files with segments. A reader implements `segments` and calls `set_classes`."""

    def __init__(self, root: str, names: Iterable[str]) -> None:
        super().__init__(root, names)
        self.faults: dict[int, str] = {}  # annotation faults by image

    def set_classes(self, classes: Sequence[SegmentClass], *, overlap: bool, boxes_only: bool = False) -> None:
        """Sets the segment classes, and the pixel classes that follow from them."""
        self.segment_classes = tuple(classes)
        self.segments_overlap, self.boxes_only = overlap, boxes_only
        names = ((BACKGROUND,) if overlap else ()) + tuple(one.name for one in classes)
        self.pixel_classes = () if boxes_only or len(names) > MOST_CLASSES else names

    def mask(self, index: int) -> NDArray[np.uint8]:
        """Paints the segments into a class map [H, W]."""
        if not self.pixel_classes:
            raise DataError(f"{self.name(index)} has no mask: its annotations are boxes, or have too many classes")
        return (paint_objects if self.segments_overlap else paint_panoptic)(self.segments(index))

    def refuse_fault(self, index: int) -> None:
        """Raises BadImage if the annotations of an image cannot be used."""
        if reason := self.faults.get(index):
            raise BadImage(reason)

    def read_size(self, index: int) -> Pair:
        """Reads the height and width of an upright image from its header."""
        return EncodedImage(self.read(index)).size

    def annotation_arrays(self) -> "Sequence[NDArray[Any]]":
        """The annotations as arrays, for the fingerprint."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """Covers the annotations as well, and which images have none that can be used."""
        words = [super().fingerprint, *map(str, sorted(self.faults))]
        return hash_parts("annotated", words, self.annotation_arrays())


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Reads an annotation file. DataError for pipes, devices and files of more than `most` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; annotations are read from regular files only")
        if status.st_size > most:
            raise DataError(f"{path} has {status.st_size:,} bytes; the limit is {most:,}; split the file")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; the annotations cannot be read") from None


def read_small(path: str) -> bytes:
    """Reads the annotation file of one image. BadImage if it is too large."""
    if os.path.getsize(path) > MOST_BYTES:
        raise BadImage(f"{os.path.basename(path)} has {os.path.getsize(path):,} bytes; at most {MOST_BYTES:,} are read")
    return read_file(path)


def clean_name(name: object, where: str) -> str:
    """Normalises a class name from a file to one line of text. DataError if that is not possible."""
    text = " ".join(name.split()) if isinstance(name, str) else ""
    if not text or not text.isprintable():
        shown = repr(name) if len(repr(name)) < 60 else f"{repr(name)[:60]}..."
        raise DataError(f"{where}: {shown} is not a class name; use printable characters")
    return text


def refuse_repeated(names: Sequence[str], where: str) -> None:
    """Raises DataError if two classes have the same name."""
    if repeated := [name for at, name in enumerate(names) if name in names[:at]]:
        raise DataError(f"{where}: two classes are called {repeated[0]!r}; class names must be unique")


def check_file_name(name: object, where: str) -> str:
    """Checks an image's file name from an annotation file. DataError if it cannot be one."""
    if not isinstance(name, str) or not name.strip() or "\0" in name or len(name) > 4096:
        raise DataError(f"{where}: file_name is {repr(name)[:80]}; it must be the path of an image, as text")
    try:
        StringArray([name])
    except UnicodeError:
        raise DataError(f"{where}: file_name {ascii(name)[:80]} cannot be the name of a file") from None
    return name.replace("\\", "/")


def find_image_folder(near: Path, names: Sequence[str], words: Sequence[str] = ()) -> Path | None:
    """Finds the folder to which image names are relative: that of the annotations, one above it, or a folder inside
    these. Folders named like the annotations come first; `words` are those names, best first."""
    some = [names[int(at)] for at in np.linspace(0, len(names) - 1, min(len(names), PROBED))]
    for base in [near, *near.absolute().parents[:ABOVE]]:
        try:
            folders = list_folder(str(base)).folders
            inner = [f"{name}/{one}" for name in folders if name.lower() in IMAGE_WORDS
                     for one in list_folder(str(base / name)).folders]  # fmt: skip
        except DataError:
            continue
        places = sorted([*folders, *inner], key=lambda place: rank_folder(place, words))
        for place in ["", *places] if base == near else [*places, ""]:
            if any(os.path.isfile(base / place / name) for name in some):
                return base / place
    return None


def rank_folder(place: str, words: Sequence[str]) -> tuple[int, int, str]:
    """The sort key of folders: first those named like the annotations, then those of the same split, then those called
    images."""
    last = place.rpartition("/")[2].lower()
    if last in words:
        return (0, words.index(last), place)
    split = next((split for word in words if (split := find_split_word(word))), None)
    if split and find_split_word(last) == split:
        return (1, 0, place)
    return (2 if last in IMAGE_WORDS else 3, 0, place)


def relate_names(root: Path, folder: Path, names: Iterable[str]) -> list[str]:
    """Turns names relative to a folder into names relative to the root of the set."""
    inside = os.path.relpath(folder, root).replace(os.sep, "/")
    return list(names) if inside == "." else [f"{inside}/{name}" for name in names]


def agree_on_classes(
    where: str, found: Mapping[str, tuple[SegmentClass, ...]]
) -> tuple[tuple[SegmentClass, ...], dict[str, NDArray[np.int64]]]:
    """Returns the classes of train, or of the first split if there is no train, and for every split a table from its
    class indices to these. BadLabels for a class that they lack."""
    first = "train" if "train" in found else next(iter(found))
    numbers = {one: at for at, one in enumerate(found[first])}
    for split, classes in found.items():
        if strange := [one.name for one in classes if one not in numbers]:
            fact = f"{where}: {split} has classes that {first} lacks: {join_words(strange, limit=10)}"
            raise BadLabels(f"{fact}; give all splits the same classes")
    tables = {split: np.array([numbers[one] for one in classes], np.int64) for split, classes in found.items()}
    return found[first], tables


def count_faults(what: str, count: int, example: str, rest: str) -> str:
    """A note that counts faults, with an example; empty if there are none."""
    return f"{count:,} {what}{'' if count == 1 else 's'} {rest} ({example})" if count else ""

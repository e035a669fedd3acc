"""Reads YOLO labels: a text file per image, a line per object, and coordinates as fractions of the image size.

    images/train/a.jpg  labels/train/a.txt      one folder of images and one of labels, with the same folders inside
    train/images/a.jpg  train/labels/a.txt      the same in each split
    images/a.jpg  labels/a.txt                  no splits
    a.jpg  a.txt                                next to each other, in one folder or one per split

    2 0.5 0.5 0.2 0.3                           class, centre x, centre y, width, height: a box
    2 0.1 0.1 0.4 0.1 0.4 0.5                   class, then x and y of at least three points: a polygon

An object of several polygons is one line, in which they are joined by lines there and back. Two lines are two objects;
a repeated line counts once. If any line has a polygon, the set has masks, else boxes; at most a thousand files are
examined for this. Class names come from data.yaml, classes.txt, names.txt, obj.names or names.json (`yolo_names`);
without them all labels are read to find the highest class. An image without a text file, or with an empty one, has no
objects. However, if the images are in a folder above the labels, where other labels share them, only images with a
text file are used.

An image is unreadable if a line is not numeric, a class has no name, a coordinate is far outside (beyond 2 in absolute
value), an object is wholly outside the image, a box has no area, or there is a box although others have polygons.
Polygons that extend a little beyond the image are cut off. Text files without an image are counted.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, DataError
from vitrail.core.text import join_words
from vitrail.data.annotations.polygons import fill, upsample
from vitrail.data.annotations.segments import SegmentClass, Segments, clip_boxes
from vitrail.data.dataset import ImageDataset, StringArray, hash_parts, number_classes
from vitrail.data.readers import folder
from vitrail.data.readers.annotated import ABOVE, IMAGE_WORDS, AnnotatedFiles, count_faults, read_small, relate_names
from vitrail.data.readers.find_annotations import LABEL_FOLDER
from vitrail.data.readers.folder import find_split_word, list_below, list_folder, map_threads
from vitrail.data.readers.yolo_names import find_names

LOOKED_INTO: Final = 1000  # most text files that are examined if the classes have names
BOX: Final = 5  # numbers in the line of a box
FURTHEST: Final = 2.0  # largest fraction; larger numbers are probably pixels
NOT_LABELS: Final = ("classes.txt", "names.txt", "labels.txt", "train.txt", "val.txt", "test.txt")


class LabelFolders(NamedTuple):
    """The folders of images and labels of one split, and whether other labels share the images."""

    images: Path
    labels: Path
    shared: bool = False


class LabelledObject(NamedTuple):
    """One line: the class, and a box [4] or points [n, 2]."""

    kind: int
    numbers: NDArray[np.float64]


class YoloFiles(AnnotatedFiles):
    """Images, each with a text file of objects or without one."""

    def __init__(self, root: str, names: Sequence[str], labels: Sequence[str]) -> None:
        super().__init__(root, names)
        self.label_files = StringArray(labels)  # "" if an image has none

    def label_path(self, index: int) -> str:
        name = self.label_files[index]
        return os.path.join(self.root, name) if name else ""

    @cached_property
    def fingerprint(self) -> str:
        """Covers the sizes of the label files as well."""
        sizes = [folder.file_size(path) if (path := self.label_path(at)) else 0 for at in range(len(self))]
        return hash_parts("labels", [super().fingerprint], [np.array(sizes, np.int64)])

    def objects(self, index: int) -> list[LabelledObject]:
        """Reads the objects of an image. BadImage if a line cannot be used."""
        path = self.label_path(index)
        return parse_labels(os.path.basename(path), read_small(path), len(self.segment_classes)) if path else []

    def segments(self, index: int) -> Segments:
        found, (height, width) = self.objects(index), self.read_size(index)
        scale, name = np.array([width, height], np.float64), os.path.basename(self.label_path(index))
        boxes = np.zeros((len(found), 4))
        for at, one in enumerate(found):
            if one.numbers.ndim == 1 and not self.boxes_only:
                raise BadImage(f"{name}: a box, while others have polygons; use polygons for all objects, or for none")
            boxes[at] = bound(one.numbers) * np.tile(scale, 2)
        boxes = clip_boxes(boxes, (height, width))
        if not bool((boxes[:, 2:] > boxes[:, :2]).all()):
            raise BadImage(f"{name}: an object is outside the image or has no area; remove its line")
        masks = None
        if not self.boxes_only:
            masks = tuple(fill(upsample(one.numbers * scale), (height, width)) for one in found)
        classes = np.array([one.kind for one in found], np.int64)
        crowd = np.zeros(len(found), np.bool_)
        return Segments(size=(height, width), classes=classes, boxes=boxes, crowd=crowd, masks=masks)


def bound(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """The bounds (left, top, right, bottom) of a box or of points."""
    if numbers.ndim == 2:
        return np.concatenate([numbers.min(0), numbers.max(0)])
    return np.concatenate([numbers[:2] - numbers[2:] / 2, numbers[:2] + numbers[2:] / 2])


def parse_labels(name: str, data: bytes, classes: int) -> list[LabelledObject]:
    """Parses the objects of a text file, without repeated lines. BadImage, with the line number, if one cannot be
    used."""
    found: dict[bytes, LabelledObject] = {}
    for at, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        parts = line.split()
        if not parts or b" ".join(parts) in found:
            continue
        where = f"{name}, line {at}"
        try:
            numbers = np.array(parts, np.bytes_).astype(np.float64)
        except ValueError:
            raise BadImage(f"{where}: {line[:40].decode('ascii', 'replace')!r} is not a line of numbers") from None
        kind = numbers[0]
        if not 0 <= kind < classes or kind != int(kind):
            raise BadImage(f"{where}: class {kind:g}, but there are {classes} classes, 0 to {classes - 1}")
        if len(numbers) != BOX and (len(numbers) < 7 or len(numbers) % 2 == 0):
            rule = "a box needs a class and 4 numbers, a polygon a class and x, y of at least 3 points"
            raise BadImage(f"{where}: {len(numbers)} numbers; {rule}")
        rest = numbers[1:]
        if not bool((np.abs(rest) <= FURTHEST).all()):
            wrong = rest[~(np.abs(rest) <= FURTHEST)][0]
            raise BadImage(f"{where}: coordinate {wrong:g}; coordinates are fractions of the image size, 0 to 1")
        if len(numbers) == BOX and not (rest[2] > 0 and rest[3] > 0):
            raise BadImage(f"{where}: a box of {rest[2]:g} x {rest[3]:g}, which has no area")
        found[b" ".join(parts)] = LabelledObject(int(kind), rest if len(numbers) == BOX else rest.reshape(-1, 2))
    return list(found.values())


def read(path: Path) -> dict[str, ImageDataset]:
    """Reads the splits of a folder in any of the layouts, all with the same classes."""
    if not path.is_dir():
        raise DataError(f"yolo:{path} is a file; give the folder that holds images and labels")
    places = find_places(path)
    sources = {split: pair_labels(path, place) for split, place in places.items()}
    if not any(len(source) and any(map(len, source.label_files)) for source in sources.values()):
        where = next(iter(places.values()))
        raise DataError(f"yolo:{path}: no text file in {where.labels} has the name of an image in {where.images}")
    above = path.absolute().parents[: ABOVE if any(place.shared for place in places.values()) else 1]
    inside = [place.labels for place in places.values()]
    paths = [file for source in sources.values() for at in range(len(source)) if (file := source.label_path(at))]
    surveyed = [survey_labels(data) for data in map_threads(read_or_nothing, paths[:: -(-len(paths) // LOOKED_INTO)])]
    own = [path / LABEL_FOLDER] if (path / LABEL_FOLDER).is_dir() else []
    names = find_names([path, *own, *inside, *above], max(kind for kind, _ in surveyed))
    note = ""
    if names is None:
        if len(surveyed) < len(paths):
            surveyed = [survey_labels(data) for data in map_threads(read_or_nothing, paths)]
        names, note = number_names(path, [kind for kind, _ in surveyed])
    boxes_only = not any(polygon for _, polygon in surveyed)
    for source in sources.values():
        source.set_classes([SegmentClass(name) for name in names], overlap=True, boxes_only=boxes_only)
        source.note = "; ".join(part for part in (note, source.note) if part)
    return dict(sources)


def number_names(path: Path, kinds: Sequence[int]) -> tuple[tuple[str, ...], str]:
    """Names classes that are known by number only; returns a note about it as well."""
    file = path / "classes.txt"
    count = len(
        number_classes(f"yolo:{path}", [np.array(kinds, np.int64)], f"Name the classes in {file}, one per line")
    )
    if not count:
        fact = f"yolo:{path}: none of its {len(kinds):,} text files has an object"
        raise DataError(f"{fact}; check them, or name the classes in {file}, one per line")
    note = f'"class 0" to "class {count - 1}" are the numbers in the labels; name them in {file}, one per line'
    return tuple(f"class {number}" for number in range(count)), note


def read_or_nothing(path: str) -> bytes:
    """Reads a text file; empty if it cannot be read, which is reported when its image is read."""
    try:
        return read_small(path)
    except (BadImage, OSError):
        return b""


def survey_labels(data: bytes) -> tuple[int, bool]:
    """Finds the highest class in a text file (-1 if it has none), and whether it has a polygon."""
    highest, polygon = -1, False
    for line in data.splitlines():
        parts = line.split(None, BOX + 1)
        try:
            kind = float(parts[0]) if parts else -1.0
        except ValueError:
            continue
        if len(parts) >= BOX and 0 <= kind < 1e15:
            highest, polygon = max(highest, int(kind)), polygon or len(parts) > BOX + 1
    return highest, polygon


def pair_labels(path: Path, place: LabelFolders) -> YoloFiles:
    """Pairs the images of a split with their text files."""
    images, others = list_below(str(place.images), "")
    files = others if place.labels == place.images else list_below(str(place.labels), "")[1]
    texts = {os.path.splitext(name)[0]: name for name in files if is_label(name)}
    if place.shared:
        left = [name for name in images if os.path.splitext(name)[0] not in texts]
        images = [name for name in images if os.path.splitext(name)[0] in texts]
    else:
        left = []
    found = [texts.get(os.path.splitext(name)[0], "") for name in images]
    labels = [relate_names(path, place.labels, [name])[0] if name else "" for name in found]
    source = YoloFiles(str(path), relate_names(path, place.images, images), labels)
    alone = sorted(set(texts.values()).difference(found))
    notes = [
        count_faults("image", len(left), join_words(left, limit=3), f"of {place.images} without labels left out"),
        count_faults("text file", len(alone), join_words(alone, limit=3), "without an image ignored"),
    ]
    source.note = "; ".join(note for note in notes if note)
    source.note_skipped([] if place.shared else [name for name in others if not is_label(name) and not is_text(name)])
    return source


def is_label(name: str) -> bool:
    return is_text(name) and os.path.basename(name).lower() not in NOT_LABELS


def is_text(name: str) -> bool:
    return name.lower().endswith(".txt")


def find_places(path: Path) -> dict[str, LabelFolders]:
    """Finds the folders of each split."""
    contents = list_folder(str(path))
    if labels := find_folder(contents.folders, (LABEL_FOLDER,)):
        return find_mirrored(path, labels)
    splits = {split: name for name in contents.folders if (split := find_split_word(name))}
    found: dict[str, LabelFolders] = {}
    for split, name in splits.items():
        inside = list_folder(str(path / name)).folders
        labels = find_folder(inside, (LABEL_FOLDER,))
        images = find_folder(inside, IMAGE_WORDS)
        if labels:
            if not images:
                raise DataError(
                    f"yolo:{path / name}: labels but no images; put the images into {path / name / 'images'}"
                )
            found[split] = LabelFolders(path / name / images, path / name / labels)
        else:
            found[split] = LabelFolders(path / name, path / name)
    if not found and not contents.images:
        rule = f"put images into {path / 'images'} and text files into {path / LABEL_FOLDER}"
        raise DataError(f"yolo:{path}: no labels folder, no images and no splits here; {rule}")
    return found or {"train": LabelFolders(path, path)}


def find_folder(folders: Sequence[str], words: Sequence[str]) -> str | None:
    return next((name for word in words for name in folders if name.lower() == word), None)


def find_mirrored(path: Path, labels: str) -> dict[str, LabelFolders]:
    """Finds the splits of a labels folder, and their images in a folder next to it or above."""
    inner = {split: name for name in list_folder(str(path / labels)).folders if (split := find_split_word(name))}
    for base in [path, *path.absolute().parents[:ABOVE]]:
        images = find_folder(list_folder(str(base)).folders, IMAGE_WORDS)
        if images is None:
            continue
        shared = base != path
        if not inner:
            return {"train": LabelFolders(base / images, path / labels, shared)}
        others = {split: name for name in list_folder(str(base / images)).folders if (split := find_split_word(name))}
        if not shared and (bare := [split for split in inner if split not in others]):
            fact = f"{path / labels / inner[bare[0]]}: labels of a split that {path / images} lacks"
            raise DataError(f"{fact}; put its images into {path / images / inner[bare[0]]}")
        found = {
            split: LabelFolders(base / images / name, path / labels / inner.get(split, name), shared)
            for split, name in others.items()
            if split in inner or not shared
        }
        if found:
            return {split: place for split, place in found.items() if place.labels.is_dir()}
    raise DataError(f"yolo:{path}: there are labels but no folder of images; put the images into {path / 'images'}")

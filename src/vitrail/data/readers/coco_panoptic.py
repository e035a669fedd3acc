"""Reads COCO's panoptic annotations: a json, and a folder of PNG files whose colours are ids (R + 256 G + 65536 B).

    annotations/panoptic_train2017.json  annotations/panoptic_train2017/a.png  train2017/a.jpg

Every pixel belongs to at most one segment; id 0 means none. Categories are things or stuff (`isthing`). Segments of the
same stuff class in one image are merged. The PNG files are searched in the folder named like the json, the images as
described in coco.py. Images that the json lists without an annotation are left out and counted.

An image is unreadable if its PNG is damaged, has another size or is not 8-bit RGB, if the ids in the PNG and in the
json differ, if a category is unknown, or if an id repeats. Annotations of images that the file does not list are
skipped and counted.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, DataError, SourceNotFound
from vitrail.core.text import join_words
from vitrail.data.annotations.rle import encode_runs, find_box, find_runs
from vitrail.data.annotations.segments import Segments
from vitrail.data.dataset import ImageDataset, StringArray
from vitrail.data.decode.headers import detect_format
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.annotated import (
    AnnotatedFiles,
    agree_on_classes,
    check_file_name,
    count_faults,
    find_image_folder,
    relate_names,
)
from vitrail.data.readers.coco import name_words
from vitrail.data.readers.coco_json import CocoImages, list_part, parse_id, parse_images, parse_json
from vitrail.data.readers.find_annotations import find_json
from vitrail.data.readers.folder import read_file

BIT_DEPTH: Final = 24  # offset of the bit depth in a PNG
HIGHEST: Final = 1 << 24  # ids are below this


class PanopticFiles(AnnotatedFiles):
    """Images, each with a PNG of segment ids."""

    def __init__(self, root: str, names: Sequence[str], maps: Sequence[str], segments: "SegmentTable") -> None:
        super().__init__(root, names)
        self.maps, self.table = StringArray(maps), segments

    def annotation_arrays(self) -> "Sequence[NDArray[Any]]":
        table = self.table
        return [table.starts, table.ids, table.classes, table.crowd]

    def segments(self, index: int) -> Segments:
        self.refuse_fault(index)
        some = slice(int(self.table.starts[index]), int(self.table.starts[index + 1]))
        ids, classes, crowd = self.table.ids[some], self.table.classes[some], self.table.crowd[some]
        try:
            runs = find_runs(read_ids(read_file(f"{self.root}/{self.maps[index]}")))
        except (BadImage, OSError) as error:
            raise BadImage(f"{self.maps[index]}: {getattr(error, 'strerror', None) or error}") from None
        found, order = runs.values, np.argsort(ids)
        at = np.searchsorted(ids[order], found).clip(0, max(len(ids) - 1, 0))
        known = ids[order][at] == found if len(ids) else np.zeros(found.shape, np.bool_)
        if (strange := found[~known & (found != 0)]).size:
            raise BadImage(f"{self.maps[index]}: the json lacks the id {int(strange[0])}")
        places, classes, crowd = self.join_stuff(classes, crowd)
        numbers = np.where(known, places[order][at] if len(ids) else 0, -1)
        present = np.bincount(at[known], minlength=len(ids)) > 0 if len(ids) else np.ones(0, np.bool_)
        if not present.all():
            lacking = int(ids[order][~present][0])
            raise BadImage(f"{self.maps[index]}: the json has the id {lacking}, but no pixel does")
        masks = tuple(encode_runs(runs._replace(values=numbers), len(classes)))
        boxes = np.array([find_box(mask) for mask in masks], np.float64).reshape(-1, 4)
        return Segments(size=runs.size, classes=classes, boxes=boxes, crowd=crowd, masks=masks)

    def join_stuff(
        self, classes: NDArray[np.int64], crowd: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Merges segments of the same stuff class: the new index of each segment, and the classes and crowd flags that
        remain."""
        places, kept, stuff = np.zeros(len(classes), np.int64), list[int](), dict[tuple[int, bool], int]()
        for at, (kind, many) in enumerate(zip(classes.tolist(), crowd.tolist(), strict=True)):
            key = (kind, many)
            if not self.segment_classes[kind].thing and key in stuff:
                places[at] = stuff[key]
                continue
            places[at] = stuff[key] = len(kept)
            kept.append(at)
        return places, classes[kept], crowd[kept]


class SegmentTable:
    """The segments of all images, in the order of the images."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, int, bool]]]) -> None:
        self.starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        flat = [segment for row in rows for segment in row]
        self.ids = np.array(array("q", [number for number, _, _ in flat]), np.int64)
        self.classes = np.array(array("q", [kind for _, kind, _ in flat]), np.int64)
        self.crowd = np.array([many for _, _, many in flat], np.bool_)


def read_ids(data: bytes) -> NDArray[np.int32]:
    """Reads the segment id of every pixel [H, W] from a panoptic PNG. BadImage if it is not one."""
    kind = detect_format(data)
    if kind != "PNG":
        raise BadImage(f"a {kind} file; segment ids are stored as colours of a PNG, which is lossless")
    encoded = EncodedImage(data)
    if encoded.image.mode != "RGB" or data[BIT_DEPTH] != 8:
        raise BadImage(f"a PNG in mode {encoded.image.mode}; segment ids are colours of an 8-bit RGB PNG")
    red, green, blue = np.moveaxis(np.asarray(encoded.rgb()).astype(np.int32), 2, 0)
    return red + (green << 8) + (blue << 16)


def read(path: Path) -> dict[str, ImageDataset]:
    """Reads the splits of a json, or of a folder of them, all with the same classes."""
    files = find_json(path, "panoptic")
    root = path if path.is_dir() else path.parent
    return open_splits(root, {split: (file, parse_json(file)) for split, file in files.items()})


def open_splits(root: Path, contents: dict[str, tuple[Path, Any]]) -> dict[str, ImageDataset]:
    """Opens the splits of files that are already parsed."""
    opened: dict[str, PanopticFiles] = {}
    parsed = {split: parse_images(file, content) for split, (file, content) in contents.items()}
    classes, tables = agree_on_classes(str(root), {split: tuple(found.classes) for split, found in parsed.items()})
    for split, (file, content) in contents.items():
        missing = [number for number, one in enumerate(list_part(file, content, "categories")) if "isthing" not in one]
        if missing:
            raise DataError(f"{file}: categories[{missing[0]}] has no isthing; set it to 1 for things and 0 for stuff")
        source = open_split(root, file, parsed[split])
        source.table.classes = tables[split][source.table.classes]
        source.set_classes(classes, overlap=False)
        opened[split] = source
    return dict(opened)


def open_split(root: Path, file: Path, found: CocoImages) -> PanopticFiles:
    """Opens the annotated images of one file."""
    rows: dict[int, list[tuple[int, int, bool]]] = {}
    maps, faults, strange = dict[int, str](), dict[int, str](), list[str]()
    for at, one in enumerate(found.annotations):
        place = found.places.get(cast(int, parse_id(one.get("image_id"))))
        if place is None:
            strange.append(f"annotations[{at}]")
            continue
        maps.setdefault(place, check_file_name(one.get("file_name"), f"{file}: annotations[{at}]"))
        if place in rows:
            faults[place] = f"annotations[{at}]: a second annotation of the image; keep one"
        rows[place], fault = parse_segments(found, one.get("segments_info"))
        if fault:
            faults.setdefault(place, f"annotations[{at}]: {fault}")
    order = sorted(rows)
    if not order:
        raise DataError(
            f"{file}: none of its {len(found.names):,} images has an annotation; is it the json of another set?"
        )
    names = [found.names[place] for place in order]
    folder = find_image_folder(file.parent, names, [word.removeprefix("panoptic_") for word in name_words(file)])
    if folder is None:
        fact = f"{file}: its first image, {names[0]}, is not next to it, above it or in a folder there"
        raise SourceNotFound(f"{fact}; put the images into {file.parent / 'images'}")
    colours = find_map_folder(file, [maps[place] for place in order])
    related = relate_names(root, folder, names), relate_names(root, colours, [maps[place] for place in order])
    source = PanopticFiles(str(root), *related, SegmentTable([rows[place] for place in order]))
    source.faults = {at: faults[place] for at, place in enumerate(order) if place in faults}
    left = [name for place, name in enumerate(found.names) if place not in rows]
    notes = [
        count_faults(
            "annotation", len(strange), strange[0] if strange else "", "of images that the file does not list skipped"
        ),
        count_faults("image", len(left), join_words(left, limit=3), "without an annotation left out"),
        count_faults("image", len(faults), next(iter(faults.values()), ""), "with damaged annotations"),
    ]
    source.note = "; ".join(note for note in notes if note)
    return source


def parse_segments(found: CocoImages, segments: Any) -> tuple[list[tuple[int, int, bool]], str]:
    """Parses the id, class and crowd flag of each segment of an image. Returns them with a fault, or an empty text."""
    if not isinstance(segments, list):
        return [], f"segments_info is {repr(segments)[:40]}, not a list"
    rows: dict[int, tuple[int, int, bool]] = {}
    for one in cast(list[Any], segments):
        number = parse_id(one.get("id")) if isinstance(one, dict) else None
        if not isinstance(number, int) or not 0 < number < HIGHEST or number in rows:
            return [], f"a segment {repr(one)[:60]}; every segment has an id of its own from 1 to {HIGHEST - 1:,}"
        kind, crowd = found.categories.get(cast(int, parse_id(one.get("category_id")))), one.get("iscrowd", 0)
        if kind is None:
            return [], f"segment {number}: no category has the id {repr(one.get('category_id'))[:40]}"
        if not isinstance(crowd, int) or crowd not in (0, 1):
            return [], f"segment {number}: iscrowd is {repr(crowd)[:40]}; it is 0 or 1"
        rows[number] = (number, kind, bool(crowd))
    return list(rows.values()), ""


def find_map_folder(file: Path, names: Sequence[str]) -> Path:
    """Finds the folder of the PNG files: the one named like the json, or another near it."""
    places = [
        file.with_suffix(""),
        file.parent,
        file.parent / "annotations",
        file.parent / file.stem.rpartition("_")[2],
    ]
    for place in [*places, find_image_folder(file.parent, names, [file.stem.lower()])]:
        if place is not None and any((place / name).is_file() for name in names[:8]):
            return place
    raise SourceNotFound(f"{file}: {places[0] / names[0]} is missing; put the PNG files of segment ids there")

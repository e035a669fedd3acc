"""Reads COCO's json: boxes, polygons and run-length encoded masks of objects.

    annotations/instances_train2017.json  train2017/  annotations/instances_val2017.json  val2017/
    train/_annotations.coco.json  train/a.jpg  valid/...      Roboflow's layout
    one.json  images/a.jpg                                    the json itself is the source

Images are searched next to the json, up to two folders above it, and in the folders there. Classes are ordered by
category id. If no annotation has a mask, the set has boxes only. The file is read once, when the set is opened;
polygons are stored in fifths of a pixel, the precision of rasterisation.

A fault of the file as a whole (not json, a missing part, repeated image ids, category ids or category names) is an
immediate error. An annotation makes its image unreadable if its category is unknown, a number is not finite, a polygon
has fewer than three points, runs do not add up, the mask has another size than the image, or it has no mask while
others do. Annotations of images that the file does not list, annotations wholly outside their image, and empty boxes
are skipped and counted. Annotations with a repeated id are counted but kept. A category without annotations that is
only the supercategory of others is left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, DataError, SourceNotFound
from vitrail.core.text import Pair
from vitrail.data.annotations.polygons import fill_polygons
from vitrail.data.annotations.rle import Rle, find_box, make_rle
from vitrail.data.annotations.segments import Segments, clip_boxes
from vitrail.data.dataset import ImageDataset
from vitrail.data.readers.annotated import AnnotatedFiles, agree_on_classes, find_image_folder, relate_names
from vitrail.data.readers.coco_json import parse_images, parse_json
from vitrail.data.readers.coco_objects import NOTHING, RUNS, ObjectTable, TableBuilder
from vitrail.data.readers.find_annotations import find_json


class CocoFiles(AnnotatedFiles):
    """Images with the objects of a COCO json."""

    def __init__(self, root: str, names: Sequence[str], image_sizes: NDArray[np.int64], objects: ObjectTable) -> None:
        super().__init__(root, names)
        self.image_sizes, self.objects = image_sizes, objects

    def annotation_arrays(self) -> "Sequence[NDArray[Any]]":
        table = self.objects
        boxes = np.ascontiguousarray(table.boxes).view(np.int64).ravel()
        return [self.image_sizes.ravel(), table.starts, table.classes, table.crowd, boxes, table.parts, table.values]

    def segments(self, index: int) -> Segments:
        self.refuse_fault(index)
        height, width = map(int, self.image_sizes[index])
        size = (height, width) if height else self.read_size(index)
        table, some = self.objects, slice(int(self.objects.starts[index]), int(self.objects.starts[index + 1]))
        boxes, masks = clip_boxes(table.boxes[some], size), None
        if not self.boxes_only:
            masks = tuple(self.read_mask(at, size) for at in range(some.start, some.stop))
            unknown = np.flatnonzero(~(boxes[:, 2:] > boxes[:, :2]).all(1))
            for at in unknown:
                boxes[at] = find_box(masks[at])
        classes, crowd = table.classes[some].copy(), table.crowd[some].copy()
        return Segments(size=size, classes=classes, boxes=boxes, crowd=crowd, masks=masks)

    def read_mask(self, at: int, size: Pair) -> Rle:
        """Builds the mask of an annotation."""
        table = self.objects
        first, end = map(int, table.pieces[at])
        parts = [table.values[table.parts[part] : table.parts[part + 1]] for part in range(first, end)]
        if table.kinds[at] == NOTHING:
            raise BadImage("an annotation has no segmentation, while others have one; add a polygon or a mask")
        if table.kinds[at] == RUNS:
            return make_rle(size, parts[0])
        return fill_polygons([part.reshape(-1, 2) for part in parts], size)


def read(path: Path) -> dict[str, ImageDataset]:
    """Reads the splits of a json, or of a folder of them, all with the same classes."""
    files = find_json(path, "coco")
    root = path if path.is_dir() else path.parent
    return open_splits(root, {split: (file, parse_json(file)) for split, file in files.items()})


def open_splits(root: Path, contents: Mapping[str, tuple[Path, Any]]) -> dict[str, ImageDataset]:
    """Opens the splits of files that are already parsed."""
    parsed = {split: parse_images(file, content) for split, (file, content) in contents.items()}
    opened: dict[str, CocoFiles] = {}
    for split, (file, _) in contents.items():
        found = parsed[split]
        if any("segments_info" in one for one in found.annotations[:1]):
            raise DataError(f"{file} has panoptic annotations; use panoptic:{root}")
        folder = find_image_folder(file.parent, found.names, name_words(file))
        if folder is None:
            fact = f"{file}: its first image, {found.names[0]}, is not next to it, above it or in a folder there"
            raise SourceNotFound(f"{fact}; put the images into {file.parent / 'images'}")
        builder = TableBuilder(found)
        source = CocoFiles(str(root), relate_names(root, folder, found.names), found.sizes, builder.build())
        source.faults, source.note = builder.faults, "; ".join(builder.notes())
        opened[split] = source
    classes, tables = agree_on_classes(str(root), {split: tuple(found.classes) for split, found in parsed.items()})
    kinds = [source.objects.kinds for source in opened.values()]
    if not any(map(len, kinds)):
        raise DataError(f"{next(iter(contents.values()))[0]} has no annotations: the list is empty")
    boxes_only = not any(bool(one.any()) for one in kinds)
    for split, source in opened.items():
        source.objects = source.objects._replace(classes=tables[split][source.objects.classes])
        source.set_classes(classes, overlap=True, boxes_only=boxes_only)
    return dict(opened)


def name_words(file: Path) -> list[str]:
    """Likely names of the image folder: instances_train2017.json -> train2017, instances_train2017."""
    stem = file.stem.lower()
    return [stem.rpartition("_")[2], stem]

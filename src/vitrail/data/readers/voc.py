"""Reads Pascal VOC: boxes in XML, or masks of objects, with lists of the images of each split.

    JPEGImages/a.jpg  Annotations/a.xml  ImageSets/Main/train.txt              boxes
    JPEGImages/a.jpg  SegmentationClass/a.png  SegmentationObject/a.png  ImageSets/Segmentation/train.txt

If both folders of masks exist, the images that have masks are read with them; voc:DIR/Annotations reads the boxes
instead. Without lists, all annotated images are train. In a mask 255 is ignored and 0 is the background. The class of
an object is the most frequent class of its pixels. Class names come from classes.txt or labels.txt; otherwise they are
VOC's twenty or, if XML files use other names, all names in them, sorted. Box coordinates are 1-based and inclusive, as
in VOC. Difficult and truncated objects are treated like all others.

An image is unreadable if its XML or PNG file is damaged, the XML has a DTD, an object has no class, an unknown class or
no box of four numbers, or its two masks differ in size. Objects wholly outside their image are skipped and counted.
"""

import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, DataError
from vitrail.core.text import Pair, format_size
from vitrail.data.annotations.rle import encode_values, find_box
from vitrail.data.annotations.segments import IGNORED, SegmentClass, Segments, clip_boxes
from vitrail.data.dataset import ImageDataset, StringArray, hash_parts
from vitrail.data.decode.image import read_mask
from vitrail.data.readers import folder
from vitrail.data.readers.annotated import (
    AnnotatedFiles,
    clean_name,
    count_faults,
    read_bytes,
    read_small,
    refuse_repeated,
    relate_names,
)
from vitrail.data.readers.folder import list_below, list_folder, map_threads, read_file

TWENTY_WORDS: Final = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor"
)
TWENTY: Final = tuple(TWENTY_WORDS.split())
IMAGES: Final = ("jpegimages", "images")
XML, CLASSES, OBJECTS, LISTS = "annotations", "segmentationclass", "segmentationobject", "imagesets"
SPLITS: Final = ("train", "val", "test", "trainval")
DEPTH: Final = 32  # most levels of nested elements
FURTHEST: Final = 1e8  # largest coordinate, in pixels
SIDES: Final = ("xmin", "ymin", "xmax", "ymax")


class ParsedXml(NamedTuple):
    """The content of an XML file: size of the image (0 if not stated), class names and boxes [N, 4] of its objects."""

    size: Pair
    names: tuple[str, ...]
    boxes: NDArray[np.float64]


class VocBoxes(AnnotatedFiles):
    """Images with boxes."""

    def __init__(self, root: str, names: Sequence[str], found: Sequence[ParsedXml], numbers: dict[str, int]) -> None:
        super().__init__(root, names)
        self.image_sizes = np.array([one.size for one in found], np.int64).reshape(-1, 2)
        self.starts = np.cumsum([0, *(len(one.names) for one in found)], dtype=np.int64)
        self.numbers = np.array([numbers[name] for one in found for name in one.names], np.int64)
        self.boxes = np.concatenate([np.zeros((0, 4)), *(one.boxes for one in found)])

    def annotation_arrays(self) -> "Sequence[NDArray[Any]]":
        return [self.image_sizes.ravel(), self.starts, self.numbers, self.boxes.view(np.int64).ravel()]

    def segments(self, index: int) -> Segments:
        self.refuse_fault(index)
        height, width = map(int, self.image_sizes[index])
        size = (height, width) if min(height, width) > 0 else self.read_size(index)
        some = slice(int(self.starts[index]), int(self.starts[index + 1]))
        boxes = clip_boxes(self.boxes[some], size)
        seen = (boxes[:, 2:] > boxes[:, :2]).all(1)
        classes, crowd = self.numbers[some][seen], np.zeros(int(seen.sum()), np.bool_)
        return Segments(size=size, classes=classes, boxes=boxes[seen], crowd=crowd, masks=None)


class VocMasks(AnnotatedFiles):
    """Images, each with a mask of classes and a mask of objects."""

    def __init__(self, root: str, names: Sequence[str], class_maps: Sequence[str], object_maps: Sequence[str]) -> None:
        super().__init__(root, names)
        self.class_maps, self.object_maps = StringArray(class_maps), StringArray(object_maps)

    @cached_property
    def fingerprint(self) -> str:
        """Covers the sizes of the mask files as well."""
        maps = [
            os.path.join(self.root, names[at])
            for names in (self.class_maps, self.object_maps)
            for at in range(len(self))
        ]
        return hash_parts(
            "masks", [super().fingerprint], [np.array([folder.file_size(path) for path in maps], np.int64)]
        )

    def mask(self, index: int) -> NDArray[np.uint8]:
        return self.read_map(self.class_maps[index])

    def read_map(self, name: str) -> NDArray[np.uint8]:
        try:
            return read_mask(read_file(os.path.join(self.root, name)))
        except (BadImage, OSError) as error:
            raise BadImage(f"{name}: {getattr(error, 'strerror', None) or error}") from None

    def segments(self, index: int) -> Segments:
        kinds, objects = self.mask(index), self.read_map(self.object_maps[index])
        if kinds.shape != objects.shape:
            one, other = (format_size((part.shape[0], part.shape[1])) for part in (kinds, objects))
            raise BadImage(f"{self.class_maps[index]}: the mask of classes has {one} pixels, that of objects {other}")
        known = len(self.segment_classes)
        votes = np.zeros((256, 256), np.int64)
        np.add.at(votes, (objects.ravel(), kinds.ravel()), 1)
        numbers = np.array([at for at in range(1, IGNORED) if votes[at].any()], np.int64)
        classes = votes[numbers].argmax(1) - 1
        if (wrong := np.flatnonzero((classes < 0) | (classes >= known))).size:
            fact = f"object {int(numbers[wrong[0]])} has the class {int(classes[wrong[0]]) + 1}"
            raise BadImage(f"{self.object_maps[index]}: {fact}; the classes of objects are 1 to {known}")
        places = np.full(256, -1)
        places[numbers] = np.arange(len(numbers))
        masks = tuple(encode_values(places[objects], len(numbers)))
        boxes = np.array([find_box(mask) for mask in masks], np.float64).reshape(-1, 4)
        size, crowd = (kinds.shape[0], kinds.shape[1]), np.zeros(len(numbers), np.bool_)
        return Segments(size=size, classes=classes.astype(np.int64), boxes=boxes, crowd=crowd, masks=masks)


def read(path: Path) -> dict[str, ImageDataset]:
    """Reads the splits of a folder: masks if it has them, else boxes."""
    boxes = path.name.lower() == XML
    path = path.absolute().parent if boxes else path
    folders = {name.lower(): name for name in list_folder(str(path)).folders}
    images = next((folders[name] for name in IMAGES if name in folders), None)
    if images is None or (XML not in folders and CLASSES not in folders):
        rule = f"expected images in {path / 'JPEGImages'} and XML files in {path / 'Annotations'}"
        raise DataError(f"voc:{path}: {rule}")
    names = {os.path.splitext(name)[0]: name for name in list_below(str(path / images), "")[0]}
    masked = CLASSES in folders and OBJECTS in folders and not boxes
    if masked:
        found = read_masks(path, images, names, folders)
    elif XML in folders:
        found = read_boxes(path, images, names, folders)
    else:
        raise DataError(
            f"voc:{path}: there are masks of classes but no {path / 'SegmentationObject'}; masks:{path} may read them"
        )
    if not found:
        raise DataError(f"voc:{path}: no image of {path / images} has annotations")
    return dict(found)


def read_masks(path: Path, images: str, names: dict[str, str], folders: dict[str, str]) -> dict[str, VocMasks]:
    """Reads the images that have both masks."""
    both = [
        {os.path.splitext(name)[0]: name for name in list_folder(str(path / folders[word])).images}
        for word in (CLASSES, OBJECTS)
    ]
    stems = [stem for stem in names if stem in both[0] and stem in both[1]]
    classes = [SegmentClass(name) for name in read_class_names(path) or TWENTY]
    out: dict[str, VocMasks] = {}
    for split, some in list_splits(path, folders.get(LISTS), "Segmentation", stems).items():
        maps = [
            [f"{folders[word]}/{found[stem]}" for stem in some]
            for word, found in zip((CLASSES, OBJECTS), both, strict=True)
        ]
        out[split] = VocMasks(str(path), relate_names(path, path / images, [names[stem] for stem in some]), *maps)
        out[split].set_classes(classes, overlap=True)
    return out


def read_boxes(path: Path, images: str, names: dict[str, str], folders: dict[str, str]) -> dict[str, VocBoxes]:
    """Reads the images that have an XML file."""
    files = {
        os.path.splitext(name)[0]: name
        for name in list_below(str(path / folders[XML]), "")[1]
        if name.lower().endswith(".xml")
    }
    stems = [stem for stem in names if stem in files]
    parsed = dict(
        zip(stems, map_threads(parse_safely, [str(path / folders[XML] / files[stem]) for stem in stems]), strict=True)
    )
    seen = sorted({name for one in parsed.values() if isinstance(one, ParsedXml) for name in one.names})
    given = read_class_names(path)
    classes = given or (TWENTY if set(seen) <= set(TWENTY) else tuple(seen))
    out: dict[str, VocBoxes] = {}
    for split, some in list_splits(path, folders.get(LISTS), "Main", stems).items():
        faults, found = dict[int, str](), list[ParsedXml]()
        for at, stem in enumerate(some):
            one = parsed[stem]
            if isinstance(one, ParsedXml) and (strange := [name for name in one.names if name not in classes]):
                one = f"{stem}.xml: the class {strange[0]!r} is not among the names of the classes"
            if isinstance(one, str):
                faults[at] = one
            found.append(one if isinstance(one, ParsedXml) else ParsedXml((0, 0), (), np.zeros((0, 4))))
        numbers = {name: at for at, name in enumerate(classes)}
        source = VocBoxes(str(path), relate_names(path, path / images, [names[stem] for stem in some]), found, numbers)
        source.faults = faults
        limits = np.array([one.size[::-1] if min(one.size) > 0 else (np.inf, np.inf) for one in found]).reshape(-1, 2)
        limits = np.repeat(limits, np.diff(source.starts), axis=0)
        outside = int(((source.boxes[:, 2:] <= 0) | (source.boxes[:, :2] >= limits)).any(1).sum())
        notes = [
            count_faults("object", outside, split, "outside the image skipped"),
            count_faults("image", len(faults), next(iter(faults.values()), ""), "with damaged annotations"),
        ]
        source.note = "; ".join(note for note in notes if note)
        source.set_classes([SegmentClass(name) for name in classes], overlap=True, boxes_only=True)
        out[split] = source
    if not classes and out:
        raise DataError(
            f"voc:{path}: no objects in {len(stems):,} XML files; name the classes in {path / 'classes.txt'}"
        )
    return out


def read_class_names(path: Path) -> tuple[str, ...]:
    """Reads the class names from classes.txt or labels.txt; empty if there is neither."""
    for name in ("classes.txt", "labels.txt"):
        if (path / name).is_file():
            found = [clean_name(one, str(path / name)) for one in folder.read_names(path / name)]
            refuse_repeated(found, str(path / name))
            return tuple(found)
    return ()


def list_splits(path: Path, lists: str | None, kind: str, stems: Sequence[str]) -> dict[str, list[str]]:
    """Reads the images of each split from the lists of one kind; all are train if there are no lists."""
    known, found = set(stems), dict[str, list[str]]()
    inside = list_folder(str(path / lists)).folders if lists else ()
    place = next((path / str(lists) / name for name in inside if name.lower() == kind.lower()), None)
    files = list_folder(str(place)).others if place else ()
    for split in SPLITS:
        if place is None or f"{split}.txt" not in files or (split == "trainval" and "train" in found):
            continue
        try:
            lines = read_bytes(place / f"{split}.txt").decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise DataError(f"{place / split}.txt is not UTF-8 text; save it as UTF-8") from None
        some = list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
        if some := [stem for stem in some if stem in known]:
            found["train" if split == "trainval" else split] = some
    return found or ({"train": list(stems)} if stems else {})


def parse_safely(path: str) -> ParsedXml | str:
    """Parses an XML file; returns its content, or its fault as text."""
    try:
        return parse_objects(read_xml(read_small(path)))
    except (BadImage, OSError) as error:
        return f"{os.path.basename(path)}: {getattr(error, 'strerror', None) or error}"


def parse_objects(root: Element) -> ParsedXml:
    """Parses the objects of an annotation. BadImage if one cannot be used."""
    if root.tag != "annotation":
        raise BadImage(f"its element is <{root.tag[:40]}>; VOC's is <annotation>")
    sides = [read_number(root.find(f"size/{word}"), 0.0) for word in ("height", "width")]
    if not all(0 <= side < 65536 and side == int(side) for side in sides):
        raise BadImage(f"a size of {sides[0]:g}x{sides[1]:g}; height and width are whole numbers")
    names: list[str] = []
    boxes: list[list[float]] = []
    for at, one in enumerate(root.findall("object")):
        name = " ".join((one.findtext("name") or "").split())
        if not name or not name.isprintable():
            raise BadImage(f"object {at + 1} has no name of a class")
        box = [read_number(one.find(f"bndbox/{side}"), math.nan) for side in SIDES]
        if not all(abs(side) <= FURTHEST for side in box):
            raise BadImage(f"object {at + 1} has no box of four numbers, {', '.join(SIDES)}")
        if box[2] < box[0] or box[3] < box[1]:
            raise BadImage(f"object {at + 1} has a box of {box}, which ends before it begins")
        names.append(name)
        boxes.append([box[0] - 1, box[1] - 1, box[2], box[3]])
    return ParsedXml((int(sides[0]), int(sides[1])), tuple(names), np.array(boxes, np.float64).reshape(-1, 4))


def read_number(element: Element | None, missing: float) -> float:
    """Reads the number in an element, or `missing` if it is absent or empty. BadImage for other text."""
    text = (element.text or "").strip() if element is not None else ""
    try:
        value = float(text) if text else missing
    except ValueError:
        raise BadImage(f"{text[:40]!r} is not a number") from None
    return value


def read_xml(data: bytes) -> Element:
    """Parses an XML file. BadImage if it is malformed or has a DTD, whose entities could expand without bound."""
    builder, depth = TreeBuilder(), [0]
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        depth[0] += 1
        if depth[0] > DEPTH:
            raise BadImage(f"elements in elements, more than {DEPTH} deep")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        depth[0] -= 1
        builder.end(tag)

    def refuse_dtd(*_: object) -> None:
        raise BadImage("it has a DTD, which annotations need not; remove <!DOCTYPE ...>")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse_dtd
    try:
        parser.Parse(data, True)
        return builder.close()
    except BadImage:
        raise
    except Exception:  # expat's errors, unknown encodings, invalid text
        raise BadImage("it is not XML, or cut; save it again") from None

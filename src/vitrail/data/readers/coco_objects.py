"""Stores the objects of a COCO json in arrays, which loader processes share."""

from array import array
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage, describe_error
from vitrail.data.annotations.polygons import FURTHEST, SCALE
from vitrail.data.annotations.rle import MOST_PIXELS, read_counts
from vitrail.data.readers.annotated import count_faults
from vitrail.data.readers.coco_json import CocoImages, parse_id

NOTHING: Final = 0  # how an annotation gives its mask
POLYGONS: Final = 1
RUNS: Final = 2


class ObjectTable(NamedTuple):
    """All annotations of a file, in the order of its images. An annotation consists of parts (polygons, or one list of
    runs), whose values are stored end to end."""

    starts: NDArray[np.int64]  # [N + 1]: the first annotation of each image
    classes: NDArray[np.int64]  # [A]
    crowd: NDArray[np.bool_]  # [A]
    boxes: NDArray[np.float64]  # [A, 4]: left, top, right, bottom
    kinds: NDArray[np.uint8]  # [A]: NOTHING, POLYGONS or RUNS
    pieces: NDArray[np.int64]  # [A, 2]: the first part of each annotation, and the end
    parts: NDArray[np.int64]  # [P + 1]: the first value of each part
    values: NDArray[np.int32]


class BadAnnotation(Exception):
    """An annotation that cannot be used; its image is unreadable."""


def refuse(text: str) -> NoReturn:
    raise BadAnnotation(text)


class Tally:
    """Counts how often something occurs, and remembers where it first did."""

    def __init__(self) -> None:
        self.number, self.first = 0, ""

    def add(self, where: str) -> None:
        self.number, self.first = self.number + 1, self.first or f"the first: {where}"

    def describe(self, what: str, rest: str) -> str:
        return count_faults(what, self.number, self.first, rest)


class TableBuilder:
    """Builds the arrays of a file's annotations, and collects their faults by image."""

    def __init__(self, found: CocoImages) -> None:
        self.found, self.faults = found, dict[int, str]()
        self.places, self.classes, self.kinds, self.crowd = array("q"), array("q"), array("B"), array("B")
        self.boxes, self.pieces = array("d"), array("q")
        self.parts, self.values = array("q", [0]), array("d")
        self.strange, self.outside, self.empty, self.repeated = Tally(), Tally(), Tally(), Tally()

    def build(self) -> ObjectTable:
        seen = set[int | str | None]()
        for at, one in enumerate(self.found.annotations):
            place = self.found.places.get(cast(int, parse_id(one.get("image_id"))))
            number = parse_id(one.get("id"))
            shown = f"annotation {str(number)[:40]}" if number is not None else f"annotations[{at}]"
            if place is None:
                self.strange.add(shown)
                continue
            if number is not None and number in seen:
                self.repeated.add(shown)
            seen.add(number)
            marks = (len(self.values), len(self.parts))
            try:
                self.add(one, place)
            except BadAnnotation as fault:
                self.faults.setdefault(place, f"{shown}: {fault}")
            except (BadImage, TypeError, ValueError, OverflowError) as error:
                self.faults.setdefault(place, f"{shown}: {describe_error(error)}")
            else:
                continue
            del self.values[marks[0] :], self.parts[marks[1] :]
        return self.finish()

    def add(self, one: Mapping[str, Any], place: int) -> None:
        """Adds one annotation. If it cannot be used, only `values` and `parts` may have grown, and `build` reverts
        them."""
        number = self.found.categories.get(cast(int, parse_id(one.get("category_id"))))
        if number is None:
            refuse(f"no category has the id {repr(one.get('category_id'))[:40]}")
        crowd = one.get("iscrowd", 0)
        if crowd not in (0, 1) or isinstance(crowd, float | str):
            refuse(f"iscrowd is {repr(crowd)[:40]}; it is 0 or 1")
        first, kind = len(self.parts) - 1, self.add_mask(one.get("segmentation"), place)
        box = read_box(one.get("bbox"), needed=kind == NOTHING)
        self.places.append(place)
        self.classes.append(number)
        self.crowd.append(int(crowd))
        self.kinds.append(kind)
        self.pieces.extend((first, len(self.parts) - 1))
        self.boxes.extend(box)

    def add_mask(self, found: Any, place: int) -> int:
        """Adds the polygons or runs of an annotation. Returns their kind."""
        if found is None or found in ([], {}):
            return NOTHING
        if isinstance(found, dict):
            height, width = map(int, self.found.sizes[place])
            size = cast(dict[str, Any], found).get("size")
            if not isinstance(size, list) or (height and size != [height, width]) or len(cast(list[Any], size)) != 2:
                refuse(f"a mask of the size {repr(size)[:40]}, while the image has {[height, width]}")
            if not all(isinstance(side, int) and 0 < side <= MOST_PIXELS for side in cast(list[Any], size)):
                refuse(f"a mask of the size {repr(size)[:40]}")
            counts = read_counts((int(size[0]), int(size[1])), cast(dict[str, Any], found).get("counts")).counts
            self.values.frombytes(counts.astype(np.float64).tobytes())
            self.parts.append(len(self.values))
            return RUNS
        if not isinstance(found, list):
            what = f"a segmentation of {type(found).__name__}"
            refuse(f"{what}; it is a list of polygons, or a mask of size and counts")
        polygons = cast(list[Any], found)
        if not isinstance(polygons[0], list):
            polygons = [polygons]
        for polygon in polygons:
            if not isinstance(polygon, list) or len(cast(list[Any], polygon)) < 6 or len(cast(list[Any], polygon)) % 2:
                length = len(cast(list[Any], polygon)) if isinstance(polygon, list) else 0
                refuse(f"a polygon of {length} numbers; it has x and y of at least three points")
            self.values.extend(cast(list[float], polygon))
            self.parts.append(len(self.values))
        some = np.frombuffer(self.values, np.float64)[-sum(map(len, polygons)) :]
        if not bool((np.abs(some) <= FURTHEST).all()):
            wrong = float(some[~(np.abs(some) <= FURTHEST)][0])
            del some  # it exports the buffer of `values`, which could not be resized
            refuse(f"a polygon with the coordinate {wrong:g}; they are pixels of the image")
        return POLYGONS

    def finish(self) -> ObjectTable:
        """Sorts the arrays by image, without annotations outside their image and without empty boxes."""
        place, kinds = np.array(self.places, np.int64), np.array(self.kinds, np.uint8)
        boxes = np.array(self.boxes, np.float64).reshape(-1, 4)
        pieces, parts = np.array(self.pieces, np.int64).reshape(-1, 2), np.array(self.parts, np.int64)
        owner = np.repeat(np.arange(len(kinds)), pieces[:, 1] - pieces[:, 0])
        values = np.frombuffer(self.values, np.float64) if len(self.values) else np.zeros(0)
        scaled = (SCALE * values + 0.5).astype(np.int32)
        for part in np.flatnonzero(kinds[owner] == RUNS):
            some = slice(int(parts[part]), int(parts[part + 1]))
            scaled[some] = values[some]
        # Whether an annotation lies outside is decided by the bounds of its polygons, or by its box if it has no mask.
        bounds = boxes.copy()
        bounds[kinds == POLYGONS] = polygon_bounds(scaled, parts, owner, len(kinds))[kinds == POLYGONS]
        limits = self.found.sizes[place][:, ::-1].astype(np.float64)
        limits[limits == 0] = np.inf
        outside = ((bounds[:, 2:] <= 0) | (bounds[:, :2] >= limits)).any(1) & (kinds != RUNS)
        empty = (kinds == NOTHING) & ~(boxes[:, 2:] > boxes[:, :2]).all(1)
        for found, tally in ((outside & ~empty, self.outside), (empty, self.empty)):
            for at in np.flatnonzero(found):
                tally.add(self.found.names[place[at]])
        keep = np.flatnonzero(~(outside | empty))
        order = keep[np.argsort(place[keep], kind="stable")]
        starts = np.searchsorted(place[order], np.arange(len(self.found.names) + 1))
        classes, crowd = np.array(self.classes, np.int64)[order], np.array(self.crowd, np.bool_)[order]
        return ObjectTable(starts, classes, crowd, boxes[order], kinds[order], pieces[order], parts, scaled)

    def notes(self) -> list[str]:
        notes = [
            self.strange.describe("annotation", "of images that the file does not list skipped"),
            self.outside.describe("annotation", "outside the image skipped"),
            self.empty.describe("empty box", "skipped"),
            self.repeated.describe("annotation", "with a repeated id kept"),
            count_faults("image", len(self.faults), next(iter(self.faults.values()), ""), "with damaged annotations"),
        ]
        return [note for note in notes if note]


def read_box(found: Any, *, needed: bool) -> tuple[float, float, float, float]:
    """Converts [x, y, width, height] to left, top, right, bottom. An invalid box is a fault if it is `needed`, else it
    becomes empty and is computed from the mask later."""
    numbers = cast(list[Any], found) if isinstance(found, list) and len(cast(list[Any], found)) == 4 else []
    valid = bool(numbers) and all(isinstance(one, int | float) and abs(one) <= FURTHEST for one in numbers)
    if valid and numbers[2] >= 0 and numbers[3] >= 0:
        x, y, width, height = map(float, numbers)
        return (x, y, x + width, y + height)
    if needed:
        refuse(f"bbox is {repr(found)[:60]}; it is [x, y, width, height] in pixels")
    return (0.0, 0.0, 0.0, 0.0)


def polygon_bounds(
    scaled: NDArray[np.int32], parts: NDArray[np.int64], owner: NDArray[np.int64], number: int
) -> NDArray[np.float64]:
    """The bounds [A, 4] (left, top, right, bottom) of the points of each annotation; infinite and inverted if it has
    none."""
    out = np.full((number, 4), np.inf)
    out[:, 2:] = -np.inf
    for axis in (0, 1) if len(owner) else ():
        low, high = axis_bounds(scaled, parts, axis)
        np.minimum.at(out[:, axis], owner, low / SCALE)
        np.maximum.at(out[:, axis + 2], owner, high / SCALE)
    return out


def axis_bounds(
    scaled: NDArray[np.int32], parts: NDArray[np.int64], axis: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lowest and highest x (axis 0) or y (axis 1) of each part."""
    odd = (np.arange(len(scaled)) - np.repeat(parts[:-1], np.diff(parts))) % 2 != axis
    values = scaled.astype(np.int64)
    low = np.minimum.reduceat(np.where(odd, np.iinfo(np.int64).max // 8, values), parts[:-1])
    high = np.maximum.reduceat(np.where(odd, np.iinfo(np.int64).min // 8, values), parts[:-1])
    return low, high

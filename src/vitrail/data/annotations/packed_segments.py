"""Reads and writes the segments of one image as JSON (KEY.segments.json in a tar shard), and their classes.

    {"size": [480, 640], "segments": [{"class": 3, "box": [10.5, 20, 300, 400.25], "counts": "eRZ3..."}]}

`counts` is a mask in COCO's compressed run-length encoding; it is absent in a set of boxes. A crowd has "crowd": true.
"""

import json
from typing import Any, NamedTuple, cast

import numpy as np

from vitrail.core.errors import BadImage, describe_error
from vitrail.data.annotations.rle import read_counts, write_counts
from vitrail.data.annotations.segments import SegmentClass, Segments

FAULTS = (ValueError, KeyError, TypeError, RecursionError, OverflowError, AttributeError)


class SegmentKinds(NamedTuple):
    """What holds for all segments of a data set."""

    classes: tuple[SegmentClass, ...]
    overlap: bool  # whether segments may overlap
    boxes_only: bool

    def to_dict(self) -> dict[str, Any]:
        classes = [one._asdict() for one in self.classes]
        return {"classes": classes, "overlap": self.overlap, "boxes_only": self.boxes_only}


def read_kinds(text: str) -> SegmentKinds:
    """Parses the JSON of `SegmentKinds.to_dict`. ValueError if it is malformed."""
    try:
        data = json.loads(text)
        classes = tuple(SegmentClass(str(one["name"]), bool(one["thing"])) for one in data["classes"])
        if not classes:
            raise ValueError("it lists no classes")
        return SegmentKinds(classes, bool(data["overlap"]), bool(data["boxes_only"]))
    except FAULTS as error:
        raise ValueError(describe_error(error)) from None


def format_segments(found: Segments) -> str:
    """Formats the segments of an image as JSON."""
    rows = list[dict[str, Any]]()
    for at, (number, box, crowd) in enumerate(zip(found.classes, found.boxes, found.crowd, strict=True)):
        row: dict[str, Any] = {"class": int(number), "box": [int(side) if side == int(side) else side for side in box]}
        row |= {"crowd": True} if crowd else {}
        rows.append(row if found.masks is None else {**row, "counts": write_counts(found.masks[at])})
    return json.dumps({"size": list(found.size), "segments": rows})


def parse_segments(text: bytes, kinds: SegmentKinds) -> Segments:
    """Parses the JSON of `format_segments`. BadImage if it is malformed."""
    try:
        data = json.loads(text)
        height, width = (int(side) for side in data["size"])
        rows = cast("list[dict[str, Any]]", data["segments"])
        classes = np.array([int(row["class"]) for row in rows], np.int64)
        boxes = np.array([[float(side) for side in row["box"]] for row in rows], np.float64).reshape(len(rows), 4)
        crowd = np.array([bool(row.get("crowd", False)) for row in rows], np.bool_)
        if classes.size and not 0 <= int(classes.min()) <= int(classes.max()) < len(kinds.classes):
            raise ValueError(f"class {int(classes.max())}, but there are {len(kinds.classes)} classes")
        masks = None if kinds.boxes_only else tuple(read_counts((height, width), row["counts"]) for row in rows)
    except FAULTS as error:
        raise BadImage(f"the segments are damaged ({describe_error(error)})") from None
    return Segments(size=(height, width), classes=classes, boxes=boxes, crowd=crowd, masks=masks)

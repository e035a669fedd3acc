"""Predicted segments of an image: as text, as JSON and as a drawing."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.text import Pair, plural_of, pluralise
from vitrail.data.annotations.rle import Rle, decode, find_box, write_counts
from vitrail.report.segment_drawing import choose_segment_colours, draw_segments

if TYPE_CHECKING:
    from PIL.Image import Image

NUMBER: Final = {"type": "number"}
RLE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["size", "counts"],
    "description": "the mask in COCO's run-length encoding, as pycocotools reads it",
    "properties": {"size": {"type": "array", "items": {"type": "integer"}}, "counts": {"type": "string"}},
}
SEGMENT: Final[dict[str, Any]] = {
    "label": {"type": "string"},
    "index": {"type": "integer"},
    "thing": {"type": "boolean", "description": "whether the class is countable; false for stuff such as sky or road"},
    "score": NUMBER,
    "box": {"type": "array", "items": NUMBER, "description": "left, top, right and bottom in pixels"},
    "area": {"type": "integer", "description": "pixels"},
    "rle": RLE,
}
SCHEMA: Final[dict[str, Any]] = {  # of PredictedSegments.to_dict
    "type": "object",
    "required": ["size", "segments"],
    "properties": {
        "size": {"type": "array", "items": {"type": "integer"}, "description": "height and width of the upright image"},
        "segments": {"type": "array", "items": {"type": "object", "required": list(SEGMENT), "properties": SEGMENT}},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedSegment:
    """One predicted segment: its class, its score, and its mask at the size of the image."""

    label: str
    index: int
    score: float
    rle: Rle
    thing: bool = True  # whether its class is a thing; false for stuff

    @property
    def area(self) -> int:
        return self.rle.area

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The bounding box: left, top, right, bottom in pixels of the image."""
        return find_box(self.rle)

    def mask(self) -> NDArray[np.bool_]:
        """Decodes the mask [H, W]."""
        return decode(self.rle)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the mask in COCO's run-length encoding."""
        facts = {"label": self.label, "index": self.index, "thing": self.thing, "score": float(f"{self.score:.6g}")}
        return {**facts, "box": list(self.box), "area": self.area, "rle": describe_rle(self.rle)}


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSegments:
    """The predicted segments of one image of `size` (height, width)."""

    size: Pair
    segments: tuple[PredictedSegment, ...]

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def colours(self) -> list[str]:
        """The colour of each segment in a drawing, such as "#2c5aa0"."""
        found = choose_segment_colours(one.index for one in self.segments)
        return ["#{:02x}{:02x}{:02x}".format(*colour) for colour in found]

    def draw(self, image: "Image", *, scores: bool = True) -> "Image":
        """Draws the segments over their image, or over a smaller copy of it."""
        colours = choose_segment_colours(one.index for one in self.segments)
        masks, names = (one.mask() for one in self.segments), [one.label for one in self.segments]
        return draw_segments(image, masks, colours, names, [one.score for one in self.segments] if scores else None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"size": [H, W], "segments": [{"label", "index", "thing", "score", "box", "area", "rle"}]}."""
        return {"size": list(self.size), "segments": [one.to_dict() for one in self.segments]}

    def __str__(self) -> str:
        """Counts of things, then stuff: "3 cats, 1 dog; sky"."""
        counts = Counter(one.label for one in self.segments if one.thing)
        things = ", ".join(pluralise(count, label, plural_of(label)) for label, count in counts.most_common())
        stuff = ", ".join(dict.fromkeys(one.label for one in self.segments if not one.thing))
        return "; ".join(part for part in (things, stuff) if part) or "nothing found"


def describe_rle(rle: Rle) -> dict[str, Any]:
    """A mask as an object in COCO's format."""
    return {"size": list(rle.size), "counts": write_counts(rle)}

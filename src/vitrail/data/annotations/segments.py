"""The annotated segments of an image, whatever their file format: class, mask and bounding box of each."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.text import Pair
from vitrail.data.annotations.rle import Rle, decode


class SegmentClass(NamedTuple):
    """A class of segments. Things are countable: each object is a segment. Stuff (sky, road) has at most one segment in
    an image."""

    name: str
    thing: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """The N segments of an image of `size` (height, width), in file order.

    `masks` is None if the annotations are boxes only. Masks may overlap unless the format rules it out (panoptic). A
    `crowd` segment covers a group of objects that are not annotated one by one; it is neither a training target nor a
    miss in evaluation."""

    size: Pair
    classes: NDArray[np.int64]  # [N], indices into `segment_classes`
    boxes: NDArray[np.float64]  # [N, 4]: left, top, right, bottom, in pixels from the top left corner
    crowd: NDArray[np.bool_]  # [N]
    masks: tuple[Rle, ...] | None

    def __len__(self) -> int:
        return len(self.classes)

    def decode(self) -> NDArray[np.bool_]:
        """Decodes the masks to [N, H, W]."""
        assert self.masks is not None
        return np.stack([decode(mask) for mask in self.masks]) if self.masks else np.zeros((0, *self.size), np.bool_)


IGNORED: Final = 255  # the ignore index of a class map
MOST_CLASSES: Final = 255  # that a uint8 class map can hold


def paint_objects(segments: Segments) -> NDArray[np.uint8]:
    """Paints objects into a class map [H, W]: class + 1, or 0 for background. Smaller objects cover larger ones. Crowd
    pixels that no object covers are ignored."""
    canvas = np.zeros(segments.size, np.uint8)
    areas = [mask.area for mask in segments.masks or ()]
    for crowd in (True, False):
        for at in sorted(range(len(areas)), key=lambda at: -areas[at]):
            if segments.crowd[at] == crowd and segments.masks is not None:
                canvas[decode(segments.masks[at])] = IGNORED if crowd else int(segments.classes[at]) + 1
    return canvas


def paint_panoptic(segments: Segments) -> NDArray[np.uint8]:
    """Paints panoptic segments into a class map [H, W]. Pixels without a segment and crowd pixels are ignored."""
    canvas = np.full(segments.size, IGNORED, np.uint8)
    for at, mask in enumerate(segments.masks or ()):
        if not segments.crowd[at]:
            canvas[decode(mask)] = int(segments.classes[at])
    return canvas


def clip_boxes(boxes: NDArray[np.float64], size: Pair) -> NDArray[np.float64]:
    """Clips boxes [N, 4] (left, top, right, bottom) to the image. A box wholly outside becomes empty."""
    height, width = size
    return np.clip(boxes, 0.0, np.array([width, height, width, height], np.float64))

"""The annotated segments of an image: the class, the mask and the box of each, whatever format they were read from."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.text import Pair
from vitrail.data.annotations.rle import Rle, decode


class SegmentClass(NamedTuple):
    """A class of segments. Things are counted one by one; of stuff (sky, road) an image has one segment at most."""

    name: str
    thing: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """The N segments of an image of `size` (height, width), in the order of their file. `masks` is None where there
    are boxes alone. Masks may overlap unless the format rules it out (panoptic). A `crowd` segment marks many objects
    that are not told apart: it neither is learnt nor counts as missed."""

    size: Pair
    classes: NDArray[np.int64]  # [N], numbers of `segment_classes`
    boxes: NDArray[np.float64]  # [N, 4]: left, top, right, bottom, in pixels from the image's corner
    crowd: NDArray[np.bool_]  # [N]
    masks: tuple[Rle, ...] | None

    def __len__(self) -> int:
        return len(self.classes)

    def decode(self) -> NDArray[np.bool_]:
        """The masks [N, H, W]."""
        assert self.masks is not None
        return np.stack([decode(mask) for mask in self.masks]) if self.masks else np.zeros((0, *self.size), np.bool_)


IGNORED: Final = 255  # of a map of classes: a pixel that counts for nothing
MOST_CLASSES: Final = 255  # that a map of bytes can tell apart


def paint_objects(segments: Segments) -> NDArray[np.uint8]:
    """The class of every pixel [H, W] plus one, 0 where no object is. Smaller objects cover larger ones; pixels of a
    crowd that no object covers are ignored."""
    canvas = np.zeros(segments.size, np.uint8)
    areas = [mask.area for mask in segments.masks or ()]
    for crowd in (True, False):
        for at in sorted(range(len(areas)), key=lambda at: -areas[at]):
            if segments.crowd[at] == crowd and segments.masks is not None:
                canvas[decode(segments.masks[at])] = IGNORED if crowd else int(segments.classes[at]) + 1
    return canvas


def paint_panoptic(segments: Segments) -> NDArray[np.uint8]:
    """The class of every pixel [H, W]; those without a segment, and those of a crowd, are ignored."""
    canvas = np.full(segments.size, IGNORED, np.uint8)
    for at, mask in enumerate(segments.masks or ()):
        if not segments.crowd[at]:
            canvas[decode(mask)] = int(segments.classes[at])
    return canvas


def clip_boxes(boxes: NDArray[np.float64], size: Pair) -> NDArray[np.float64]:
    """Left, top, right, bottom [N, 4], with what lies outside of the image cut off; such a box comes out empty."""
    height, width = size
    return np.clip(boxes, 0.0, np.array([width, height, width, height], np.float64))

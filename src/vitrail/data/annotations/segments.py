"""The annotated segments of an image: the class, the mask and the box of each, whatever format they were read from."""

from dataclasses import dataclass
from typing import NamedTuple

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

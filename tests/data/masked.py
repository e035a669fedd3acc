"""Images with masks for tests."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.data.pictures import Listed, encoded
from vitrail.core.text import Pair
from vitrail.data.dataset import Labels

PIXEL_CLASSES = ("background", *(f"part {number}" for number in range(1, 200)))


def painted(number: int, size: Pair = (12, 10)) -> NDArray[np.uint8]:
    """Class indices [H, W], other ones for every number."""
    return np.random.default_rng(number).integers(0, len(PIXEL_CLASSES), size, dtype=np.uint8)


def palette(indices: NDArray[np.uint8]) -> bytes:
    """A PNG with a palette, as segmentation sets have them."""
    image = Image.fromarray(indices).convert("L")
    coloured = Image.frombytes("P", image.size, image.tobytes())
    coloured.putpalette(bytes(255 - value // 3 for value in range(768)))
    out = io.BytesIO()
    coloured.save(out, "PNG")
    return out.getvalue()


class Masked(Listed):
    """Images that show their masks: the class indices are their grey levels. What is not a mask is raised instead."""

    def __init__(self, masks: Sequence["bytes | NDArray[np.uint8] | Exception"], sizes: Sequence[Pair] = ()) -> None:
        grey = [painted(number, size) for number, size in enumerate(sizes or [(12, 10)] * len(masks))]
        super().__init__([encoded(np.stack([one] * 3, -1)) for one in grey])
        self.masks, self.pixel_classes = list(masks), PIXEL_CLASSES

    def mask(self, index: int) -> "bytes | NDArray[np.uint8]":
        mask = self.masks[index]
        if isinstance(mask, Exception):
            raise mask
        return mask


def masked(sizes: Sequence[Pair]) -> Masked:
    """Images of these sizes with their masks, every other one as an array."""
    masks = [painted(number, size) for number, size in enumerate(sizes)]
    return Masked([palette(mask) if number % 2 else mask for number, mask in enumerate(masks)], sizes)


class Unlabelled(Masked):
    """Masks, and no classes of whole images."""

    def __init__(self, masks: Sequence["bytes | NDArray[np.uint8] | Exception"]) -> None:
        super().__init__(masks)
        self.classes, self.labels = (), Labels.none(len(masks))

"""Colours for class indices: far apart from their neighbours, the same wherever a class is drawn."""

import colorsys
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.targets import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

GROUND: Final = (36, 38, 48)  # of class 0, which is most often the background
UNSEEN: Final = (250, 250, 250)  # of pixels that count for nothing
GOLDEN: Final = 0.61803398875  # of a turn, between the hues of two classes
COVER: Final = 0.55  # how much of a pixel an overlay covers


@cache
def palette() -> NDArray[np.uint8]:
    """A colour for each of 256 indices [256, 3]."""
    colours: list[tuple[int, int, int]] = [GROUND]
    for index in range(1, 256):
        value, saturation = (0.92, 0.72) if index % 2 else (0.74, 0.85)
        red, green, blue = colorsys.hsv_to_rgb((0.02 + index * GOLDEN) % 1, saturation, value)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    colours[IGNORED] = UNSEEN
    return np.array(colours, np.uint8)


def class_colours(classes: int) -> list[str]:
    """The colours of classes in a drawing, as "#2c5aa0"; that of class 0, which is left as it is, is empty."""
    return ["", *("#{:02x}{:02x}{:02x}".format(*colour) for colour in palette()[1:classes].tolist())]


def colour_mask(mask: NDArray[np.uint8]) -> "PillowImage":
    """A mask [H, W] as a PNG-ready image of class indices that shows their colours."""
    image = Image.fromarray(mask)
    image.putpalette(palette().tobytes())
    return image


def lay_over(mask: NDArray[np.uint8], image: "PillowImage") -> "PillowImage":
    """The colours of a mask over its image, or a smaller copy of it; class 0 and pixels that count for nothing stay as
    they are."""
    if mask.shape != (image.height, image.width):
        mask = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shown = ((mask != 0) & (mask != IGNORED))[..., None]
    mixed = (1 - COVER) * pixels + COVER * palette()[mask]
    return Image.fromarray(np.where(shown, mixed, pixels).round().astype(np.uint8))

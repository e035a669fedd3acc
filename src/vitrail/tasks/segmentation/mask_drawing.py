"""Masks of classes as people see them: coloured, and over their image. A class has the colour that it has wherever
segments are drawn; those that stand for nothing in particular, such as "background", are not painted."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.targets import IGNORED
from vitrail.data.tools.annotated_sheet import PLAIN
from vitrail.report.segment_drawing import pick_class_colour

GROUND: Final = (36, 38, 48)  # of classes that are not painted, in a mask by itself
UNSEEN: Final = (250, 250, 250)  # of ignored pixels
COVER: Final = 0.5  # how much of a pixel an overlay covers


def is_painted(name: str) -> bool:
    """Whether a class of this name is something to be seen."""
    return name.casefold() not in PLAIN


def make_palette(names: Sequence[str]) -> NDArray[np.uint8]:
    """A colour for each of 256 indices [256, 3]."""
    colours = np.array([pick_class_colour(index) for index in range(256)], np.uint8)
    colours[[index for index, name in enumerate(names) if not is_painted(name)]] = GROUND
    colours[IGNORED] = UNSEEN
    return colours


def list_colours(names: Sequence[str]) -> list[str]:
    """The colours of classes in a drawing, as "#2c5aa0"; empty for those that are not painted."""
    written = ("#{:02x}{:02x}{:02x}".format(*pick_class_colour(index)) for index in range(len(names)))
    return [colour if is_painted(name) else "" for name, colour in zip(names, written, strict=True)]


def colour_mask(mask: NDArray[np.uint8], names: Sequence[str]) -> Image.Image:
    """A mask [H, W] as a PNG-ready image of class indices that shows their colours."""
    image = Image.fromarray(mask)
    image.putpalette(make_palette(names).tobytes())
    return image


def blend_mask(mask: NDArray[np.uint8], image: Image.Image, names: Sequence[str]) -> Image.Image:
    """The colours of a mask over its image, or over a smaller copy of it; ignored pixels are not painted."""
    if mask.shape != (image.height, image.width):
        mask = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image.convert("RGB"), np.float32)
    painted = np.zeros(256, np.bool_)
    painted[: len(names)] = [is_painted(name) for name in names]
    painted[IGNORED] = False
    mixed = (1 - COVER) * pixels + COVER * make_palette(names)[mask]
    return Image.fromarray(np.where(painted[mask][..., None], mixed, pixels).round().astype(np.uint8))

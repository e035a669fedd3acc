"""Draws semantic masks in colour, alone or over their image. A class has the same colour wherever segments are drawn;
classes such as "background" are not painted."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.targets import IGNORED
from vitrail.data.tools.annotated_sheet import PLAIN
from vitrail.report.segment_drawing import pick_class_colour

GROUND: Final = (36, 38, 48)  # colour of unpainted classes in a mask on its own
UNSEEN: Final = (250, 250, 250)  # colour of ignored pixels
COVER: Final = 0.5  # opacity of an overlay


def is_painted(name: str) -> bool:
    """Whether a class is painted; "background" and the like are not."""
    return name.casefold() not in PLAIN


def make_palette(names: Sequence[str]) -> NDArray[np.uint8]:
    """A colour for each of 256 indices [256, 3]."""
    colours = np.array([pick_class_colour(index) for index in range(256)], np.uint8)
    colours[[index for index, name in enumerate(names) if not is_painted(name)]] = GROUND
    colours[IGNORED] = UNSEEN
    return colours


def list_colours(names: Sequence[str]) -> list[str]:
    """The colours of the classes in a drawing, such as "#2c5aa0"; empty for those that are not painted."""
    written = ("#{:02x}{:02x}{:02x}".format(*pick_class_colour(index)) for index in range(len(names)))
    return [colour if is_painted(name) else "" for name, colour in zip(names, written, strict=True)]


def colour_mask(mask: NDArray[np.uint8], names: Sequence[str]) -> Image.Image:
    """Converts a mask [H, W] to a palette image, ready to be saved as PNG: its pixels are class indices and show the
    colours of the classes."""
    image = Image.fromarray(mask)
    image.putpalette(make_palette(names).tobytes())
    return image


def blend_mask(mask: NDArray[np.uint8], image: Image.Image, names: Sequence[str]) -> Image.Image:
    """Blends the colours of a mask with its image, or with a smaller copy of it. Ignored pixels are not painted."""
    if mask.shape != (image.height, image.width):
        mask = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image.convert("RGB"), np.float32)
    painted = np.zeros(256, np.bool_)
    painted[: len(names)] = [is_painted(name) for name in names]
    painted[IGNORED] = False
    mixed = (1 - COVER) * pixels + COVER * make_palette(names)[mask]
    return Image.fromarray(np.where(painted[mask][..., None], mixed, pixels).round().astype(np.uint8))

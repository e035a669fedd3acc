"""Masks and segments of samples, checked against the size of the image. Without torch, which takes long to load."""

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair, format_size
from vitrail.data.annotations.segments import IGNORED, Segments
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_mask


def read_sized_mask(source: ImageDataset, sample: int, size: Pair) -> NDArray[np.uint8]:
    """Reads the class indices [H, W] of a sample. BadImage if their size differs, or if they are not classes."""
    try:
        indices = read_mask(source.mask(sample))
    except (BadImage, OSError) as error:
        raise BadImage(f"mask: {getattr(error, 'strerror', None) or error}") from None
    height, width = indices.shape
    if (height, width) != size:
        raise BadImage(f"mask: its size is {compare_sizes((height, width), size)}")
    known = len(source.pixel_classes)
    if (wrong := indices[(indices >= known) & (indices != IGNORED)]).size:
        among = "is 1 class, 0" if known == 1 else f"are {known} classes, 0 to {known - 1}"
        fact = f"mask: class {wrong.max()} of pixels, but there {among}"
        raise BadImage(f"{fact}, and {IGNORED} for ignored pixels")
    return indices


def read_sized_segments(source: ImageDataset, sample: int, size: Pair) -> Segments:
    """Reads the segments of a sample. BadImage if their size differs."""
    try:
        found = source.segments(sample)
    except (BadImage, OSError) as error:
        raise BadImage(f"segments: {getattr(error, 'strerror', None) or error}") from None
    if found.size != size:
        raise BadImage(f"segments: their size is {compare_sizes(found.size, size)}")
    return found


def compare_sizes(found: Pair, image: Pair) -> str:
    """Describes two sizes that differ, and the usual cause if one is the other transposed."""
    turned = "; images are rotated upright by their EXIF tag, so annotate them upright" if found == image[::-1] else ""
    return f"{format_size(found)}, that of the image {format_size(image)}{turned}"

"""What a network sees of an image, for a person: the same part of it, at the image's own resolution."""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.decode.picture import upright_rgb
from vitrail.data.preprocessing import Preprocessing

LARGEST: Final = 640  # pixels of the longer side


def prepare(image: Image.Image, preprocessing: Preprocessing) -> tuple[Tensor, NDArray[np.uint8]]:
    """An image for the network, uint8 [3, H, W], and the same part of it to look at, [H', W', 3]."""
    image = upright_rgb(image)
    pixels = preprocessing.pixels(image)
    return pixels, view(image, pixels, preprocessing)


def view(image: Image.Image, pixels: Tensor, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """The part that the network sees, in the shape that it sees. It has the image's own resolution, but is not larger
    than `LARGEST` and not smaller than the network's input."""
    height, width = preprocessing.image
    box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.resize is not None:
        box = preprocessing.centre(image)
    if min(box) < 0:  # what the crop adds around an image is in the network's input alone
        box = (0.0, 0.0, 0.0, 0.0)
    scale = min(max((box[2] - box[0]) / width, (box[3] - box[1]) / height), LARGEST / max(width, height))
    if scale <= 1:
        return pixels.permute(1, 2, 0).contiguous().numpy()
    size = (round(width * scale), round(height * scale))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC, box))

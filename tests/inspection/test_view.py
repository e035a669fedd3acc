"""What a person is shown of an image: the part that the network sees, at the image's own resolution."""

import numpy as np
import pytest
from PIL import Image

from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.page import LARGEST, prepare_image


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downward."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, 0 * down], -1).astype(np.uint8))


@pytest.mark.parametrize(
    ("size", "preprocessing", "shape"),
    [
        ((400, 400), Preprocessing(image=(224, 224), resize=256), (350, 350)),
        ((1500, 1000), Preprocessing(image=(224, 224), resize=224), (LARGEST, LARGEST)),
        ((100, 100), Preprocessing(image=(224, 224), resize=256), (224, 224)),  # not enlarged beyond what is seen
        ((500, 300), Preprocessing(image=(32, 32)), (500, 500)),  # squashed, as the network sees it
        ((640, 480), Preprocessing(image=(64, 32), resize=64), (480, 240)),
        ((90, 90), Preprocessing(image=(64, 32), resize=32), (64, 32)),  # the crop is larger than the image
        ((400, 200), Preprocessing(image=(64, 64), fit="pad"), (64, 64)),  # with its borders
        ((400, 200), Preprocessing(image=(32, 64), fit="pad"), (200, 400)),  # it needs none
    ],
)
def test_its_size_is_that_of_the_image(
    size: tuple[int, int], preprocessing: Preprocessing, shape: tuple[int, int]
) -> None:
    pixels, view = prepare_image(gradient(*size), preprocessing)
    assert tuple(pixels.shape[1:]) == preprocessing.image
    assert view.shape == (*shape, 3)
    assert view.dtype == np.uint8


@pytest.mark.parametrize("preprocessing", [Preprocessing(image=(32, 32), resize=48), Preprocessing(fit="pad")])
def test_it_shows_the_same_part(preprocessing: Preprocessing) -> None:
    pixels, view = prepare_image(gradient(600, 300), preprocessing)
    small = np.asarray(Image.fromarray(view).resize(preprocessing.image, Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(small - pixels.permute(1, 2, 0).numpy()).max() <= 4

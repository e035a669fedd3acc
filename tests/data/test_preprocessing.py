"""Pictures to the pixels that a network was trained on."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing


def picture(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_pixels_go_to_minus_one_and_one() -> None:
    black_white = Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], dtype=np.uint8))
    pixels = Preprocessing(image=(1, 2))(black_white)
    assert torch.equal(pixels, torch.tensor([[[-1.0, 1.0]]] * 3))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_straight_to_the_size_as_pillow_does_it(interpolation: str) -> None:
    done = Preprocessing(image=(16, 24), interpolation=interpolation)(picture())  # type: ignore[arg-type]
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[interpolation]
    wanted = np.asarray(picture().resize((24, 16), resample), dtype=np.float32)
    np.testing.assert_allclose(done.permute(1, 2, 0).numpy(), wanted / 127.5 - 1, atol=1e-6)


def test_shorter_side_then_centre() -> None:
    mean, std = np.array(IMAGENET_MEAN), np.array(IMAGENET_STD)
    done = Preprocessing(image=(16, 16), resize=20, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    whole = picture().resize((26, 20), Image.Resampling.BICUBIC).crop((5, 2, 21, 18))
    wanted = (np.asarray(whole, dtype=np.float32) / 255 - mean) / std
    np.testing.assert_allclose(done(picture()).permute(1, 2, 0).numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert Preprocessing(image=(8, 8))(picture().convert(mode)).shape == (3, 8, 8)


def test_it_survives_a_file_and_bad_values_are_named() -> None:
    made = Preprocessing(image=(8, 12), resize=9, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert Preprocessing.from_dict(made.to_dict()) == made
    with pytest.raises(ConfigError, match="resize=7"):
        Preprocessing(image=(8, 8), resize=7)
    with pytest.raises(ConfigError, match="interpolation"):
        Preprocessing(interpolation="nearest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="std"):
        Preprocessing(std=(1.0, 0.0, 1.0))
    with pytest.raises(ConfigError, match="mean"):
        Preprocessing.from_dict({key: value for key, value in made.to_dict().items() if key != "mean"})

"""Images to the pixels that a network was trained on."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional as F

from tests.data.decode.hostile import exif, saved
from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import EncodedImage
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


@pytest.mark.parametrize("resize", [None, 20])
@pytest.mark.parametrize("interpolation", [F.InterpolationMode.BILINEAR, F.InterpolationMode.BICUBIC])
def test_bit_for_bit_torchvision(resize: int | None, interpolation: F.InterpolationMode) -> None:
    size = [16, 16] if resize is None else [resize]
    cropped = F.center_crop(F.resize(picture(), size, interpolation=interpolation), [16, 16])  # type: ignore[arg-type]
    wanted = F.normalize(F.pil_to_tensor(cropped).float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
    made = Preprocessing(
        image=(16, 16), resize=resize, interpolation=interpolation.value, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    assert torch.equal(made(picture()), wanted)


@pytest.mark.parametrize(("size", "inner"), [((30, 20), (11, 16)), ((20, 90), (16, 4)), ((16, 16), (16, 16))])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize("antialias", [True, False])
def test_a_whole_image_with_borders(
    size: tuple[int, int], inner: tuple[int, int], interpolation: Any, antialias: bool
) -> None:
    """What a squash to the inner size gives, at the upper left; black at the right and at the bottom."""
    image = picture().resize(size)
    how = {"interpolation": interpolation, "antialias": antialias}
    made = Preprocessing(image=(16, 16), fit="pad", **how)
    assert made.resized((size[1], size[0])) == inner
    wanted = torch.zeros(3, 16, 16, dtype=torch.uint8)
    wanted[:, : inner[0], : inner[1]] = Preprocessing(image=inner, **how).pixels(image)
    assert torch.equal(made.pixels(image), wanted)
    assert made.geometry((size[1], size[0])).pad == (0, 0, 16 - inner[1], 16 - inner[0])


def test_pixels_then_normalise() -> None:
    made = Preprocessing(image=(16, 24), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    pixels = made.pixels(picture())
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 16, 24))
    assert torch.equal(made.normalise(pixels), made(picture()))
    batch = torch.stack([pixels, 255 - pixels])
    assert torch.equal(made.normalise(batch)[1], made.normalise(255 - pixels))
    assert torch.equal(made.normalise(batch[None])[0, 0], made(picture()))


def test_files_and_pictures_that_others_opened_give_the_same_pixels() -> None:
    """Turned by EXIF, 16 bits deep: the same rules, whoever opened the file."""
    deep = np.asarray(picture().convert("L")).astype(np.uint16) * 257
    made = Preprocessing(image=(30, 40))
    grey = np.asarray(picture().convert("L"))
    for image, block, wanted in (
        (Image.fromarray(deep), None, grey),
        (picture(), exif(3), np.asarray(picture())[::-1, ::-1]),
        (Image.fromarray(deep), exif(2), grey[:, ::-1]),
    ):
        content = saved(image, "PNG", **({"exif": block} if block else {}))
        theirs = made.pixels(Image.open(io.BytesIO(content)))
        assert torch.equal(theirs, made.pixels(EncodedImage(content).rgb()))
        assert np.array_equal(theirs.permute(1, 2, 0), np.broadcast_to(wanted.reshape(30, 40, -1), (30, 40, 3)))


def tensorflow(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """Bilinear from half-pixel centres, without antialiasing, written out."""

    def weights(old: int, new: int) -> NDArray[np.float64]:
        centres = (np.arange(new) + 0.5) * old / new - 0.5
        low = np.floor(centres).astype(int)
        out = np.zeros((new, old))
        for i in range(new):
            share = centres[i] - low[i]
            out[i, np.clip(low[i], 0, old - 1)] += 1 - share
            out[i, np.clip(low[i] + 1, 0, old - 1)] += share
        return out

    rows, columns = weights(pixels.shape[0], height), weights(pixels.shape[1], width)
    return np.einsum("hy,yxc,wx->hwc", rows, pixels.astype(np.float64), columns)


@pytest.mark.parametrize("size", [(7, 9), (64, 48)])
def test_without_antialiasing_as_the_reference_resizes(size: tuple[int, int]) -> None:
    smooth, plain = (Preprocessing(image=size, antialias=which).pixels(picture()) for which in (True, False))
    assert plain.dtype == torch.uint8
    wanted = tensorflow(np.asarray(picture()), *size)
    assert np.abs(plain.permute(1, 2, 0).numpy() - wanted).max() < 0.501
    apart = np.abs(smooth.permute(1, 2, 0).numpy() - wanted).max()
    assert (apart > 20) == (size == (7, 9))  # it matters where an image shrinks


def averaged(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """The mean over the rectangle that becomes a pixel, on a grid fine enough that every fraction is a whole part."""
    fine = np.repeat(np.repeat(pixels.astype(np.float64), height, axis=0), width, axis=1)
    high, wide = pixels.shape[:2]
    return fine.reshape(height, high, width, wide, 3).mean((1, 3))


@pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 47), (12, 17)])
def test_area_is_big_visions_evaluation(width: int, height: int) -> None:
    """resize_small and central_crop: sides rounded, levels cut off, the odd pixel of the border behind."""
    made = Preprocessing(image=(16, 16), resize=19, interpolation="area", antialias=False)
    factor = 19 / min(width, height)
    high, wide = round(height * factor), round(width * factor)
    whole = np.floor(averaged(np.asarray(picture(width, height)), high, wide) + 1e-9)
    top, left = (high - 16) // 2, (wide - 16) // 2
    done = made.pixels(picture(width, height)).permute(1, 2, 0).numpy()
    assert np.array_equal(done, whole[top : top + 16, left : left + 16])
    white = Image.fromarray(np.full((height, width, 3), 255, np.uint8))
    assert int(made.pixels(white).min()) == 255
    assert Preprocessing.from_dict(made.to_dict()) == made


def test_without_antialiasing_bicubic_stays_in_range_and_is_cropped() -> None:
    made = Preprocessing(image=(16, 16), resize=20, interpolation="bicubic", antialias=False)
    sharp = Image.fromarray(np.kron(np.eye(20, dtype=np.uint8), np.full((2, 2), 255, np.uint8)))
    assert made.pixels(sharp).shape == (3, 16, 16)
    assert set(made.pixels(sharp).unique().tolist()) <= set(range(256))
    smooth = Image.fromarray(np.full((40, 50), 255, np.uint8))
    assert int(made.pixels(smooth).min()) == 255  # no overshoot that wraps round


def test_it_survives_a_file_and_bad_values_are_named() -> None:
    made = Preprocessing(image=(8, 12), resize=9, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert Preprocessing.from_dict(made.to_dict()) == made
    reference = Preprocessing(antialias=False)
    assert Preprocessing.from_dict(reference.to_dict()) == reference
    older = {key: value for key, value in made.to_dict().items() if key != "antialias"}
    assert Preprocessing.from_dict(older) == made
    padded = Preprocessing(fit="pad")
    assert Preprocessing.from_dict(padded.to_dict()) == padded
    assert "fit" not in made.to_dict()  # as in older files
    with pytest.raises(ConfigError, match="fit"):
        Preprocessing.from_dict(padded.to_dict() | {"fit": "crop"})
    with pytest.raises(ConfigError, match="resize=300"):
        Preprocessing(resize=300, fit="pad")
    with pytest.raises(ConfigError, match="antialias='no'"):
        Preprocessing.from_dict(older | {"antialias": "no"})
    with pytest.raises(ConfigError, match="resize=7"):
        Preprocessing(image=(8, 8), resize=7)
    with pytest.raises(ConfigError, match="interpolation"):
        Preprocessing(interpolation="nearest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="std"):
        Preprocessing(std=(1.0, 0.0, 1.0))
    with pytest.raises(ConfigError, match="mean"):
        Preprocessing.from_dict({key: value for key, value in made.to_dict().items() if key != "mean"})


@pytest.mark.parametrize(("width", "height"), [(1, 5000), (5000, 1), (3, 90_000)])
def test_a_strip_does_not_fill_the_memory(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shorter side at 256 would make it 256 times as long; only what the crop keeps is made."""
    made: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def watched(self: Image.Image, size: tuple[int, int], *rest: object) -> Image.Image:
        made.append(size)
        return resize(self, size, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", watched)
    levels = np.linspace(0, 255, max(width, height)).astype(np.uint8)
    strip = Image.fromarray(np.resize(levels, (min(width, height), len(levels)))).convert("RGB")
    strip = strip if width > height else strip.transpose(Image.Transpose.TRANSPOSE)
    pixels = Preprocessing(image=(224, 224), resize=256).pixels(strip)
    assert pixels.shape == (3, 224, 224)
    assert abs(float(pixels.float().mean()) - 127.5) < 2  # the middle of the strip
    assert made == [(224, 224)]


def test_the_box_of_a_strip_is_what_resizing_and_cropping_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessing = Preprocessing(image=(16, 16), resize=20, interpolation="bicubic")
    whole = preprocessing.pixels(picture(60, 30))
    monkeypatch.setattr("vitrail.data.preprocessing.LARGEST", 1)
    assert int((preprocessing.pixels(picture(60, 30)).int() - whole.int()).abs().max()) <= 1


@pytest.mark.parametrize(
    ("preprocessing", "box"),
    [
        (Preprocessing(image=(32, 32)), (0, 0, 90, 60)),
        (Preprocessing(image=(32, 32), resize=64), (30, 15, 60, 45)),
        (Preprocessing(image=(30, 30), fit="pad"), (0, 0, 90, 90)),
        (Preprocessing(image=(20, 60), fit="pad"), (0, 0, 180, 60)),
    ],
)
def test_what_the_network_sees_of_an_image(preprocessing: Preprocessing, box: tuple[float, ...]) -> None:
    assert preprocessing.view_box((60, 90)) == pytest.approx(box)

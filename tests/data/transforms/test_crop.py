"""Crops: drawn as torchvision draws, cut as Pillow cuts, always the size that was asked for."""

import io
from importlib import resources
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import EncodedImage
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.augmentation import Augmentation, bit, cifar, inception
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop, ScaleJitter, Squash
from vitrail.recipes.table4 import hyper_rule


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Smooth enough that a JPEG keeps it, with detail everywhere."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(array: np.ndarray[Any, np.dtype[np.uint8]], **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def drawn(count: int, seed: int = 0) -> CounterRng:
    return CounterRng.for_samples(seed=seed, epoch=0, sample=np.arange(count))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(400, 500), (60, 500)])
def test_boxes_are_distributed_as_torchvision_draws_them(size: tuple[int, int]) -> None:
    crop = InceptionCrop(size=(224, 224))
    ours = crop.boxes(drawn(6000), *size).astype(float)
    reference = v2.RandomResizedCrop(224, scale=(0.05, 1.0))
    torch.manual_seed(0)
    picture = torch.zeros(3, *size, dtype=torch.uint8)
    params = [reference.make_params([picture]) for _ in range(6000)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params], float)

    def facts(boxes: Any) -> dict[str, Any]:
        top, left, height, width = boxes.T
        room = np.maximum(size[0] - height, 1), np.maximum(size[1] - width, 1)
        return {"area": height * width, "aspect": width / height, "top": top / room[0], "left": left / room[1]}

    for name, values in facts(ours).items():
        assert stats.ks_2samp(values, facts(theirs)[name]).pvalue > 1e-3, name


def one_box(rng: np.random.Generator, height: int, width: int, area: tuple[float, float]) -> tuple[int, ...]:
    """sample_distorted_bounding_box as TensorFlow documents and does it, one number after the other: an aspect, then a
    height between the least and the largest that leave a box of the allowed area inside the image."""
    for _ in range(100):
        ratio = rng.uniform(0.75, 1.33)
        low, high = (round((share * height * width / ratio) ** 0.5) for share in area)
        while high and (round(high * ratio) > width or high > height):
            high -= 1
        tall = int(rng.integers(min(low, high), high + 1))
        tall += tall * round(tall * ratio) < area[0] * height * width
        tall -= tall * round(tall * ratio) > area[1] * height * width
        wide = round(tall * ratio)
        inside = 0 < tall <= height and 0 < wide <= width
        if inside and area[0] <= tall * wide / (height * width) <= area[1]:
            top = int(rng.integers(height - tall)) if tall < height else 0
            left = int(rng.integers(width - wide)) if wide < width else 0
            return top, left, tall, wide
    return 0, 0, height, width


@pytest.mark.parametrize(
    "size", [(375, 500), *(pytest.param(size, marks=pytest.mark.slow) for size in ((500, 375), (32, 32), (60, 90)))]
)
def test_boxes_are_distributed_as_tensorflow_draws_them(size: tuple[int, int]) -> None:
    crop = InceptionCrop(size=(224, 224), aspect=(0.75, 1.33), sampler="tensorflow")
    ours, rng = crop.boxes(drawn(4000), *size).astype(float), np.random.default_rng(0)
    theirs = np.array([one_box(rng, *size, crop.area) for _ in range(4000)], float)
    for name, column in {"top": 0, "left": 1, "height": 2, "width": 3}.items():
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3, name
    covered = ours[:, 2] * ours[:, 3] / (size[0] * size[1])
    assert covered.min() >= 0.05
    if size == (375, 500):
        assert abs(covered.mean() - 0.343) < 0.012
        plain = InceptionCrop(size=(224, 224)).boxes(drawn(4000), *size)
        assert abs((plain[:, 2] * plain[:, 3]).mean() / (375 * 500) - 0.419) < 0.012


def test_where_no_box_fits_tensorflow_takes_the_whole_picture() -> None:
    crop = InceptionCrop(size=(8, 8), aspect=(0.75, 1.33), sampler="tensorflow")
    assert crop.boxes(drawn(5), 2, 3000).tolist() == [[0, 0, 2, 3000]] * 5
    rare = InceptionCrop(size=(8, 8), area=(0.98, 1.0), aspect=(0.5, 2.0), sampler="tensorflow")
    boxes = rare.boxes(drawn(200), 100, 100)  # hardly an aspect leaves that much, so most are drawn again
    assert (boxes[:, 2] * boxes[:, 3] >= 9800).all()
    assert len({tuple(box) for box in boxes.tolist()}) > 5
    with pytest.raises(ConfigError, match="sampler"):
        InceptionCrop(size=(8, 8), sampler="numpy")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["torchvision", "tensorflow"])
def test_boxes_lie_inside_and_one_at_a_time_is_the_same(sampler: Any) -> None:
    crop = InceptionCrop(size=(8, 8), sampler=sampler)
    heights = np.array([1, 1, 5000, 300, 7, 32] * 50)
    widths = np.array([1, 5000, 1, 200, 9, 32] * 50)
    draws = drawn(300)
    boxes = crop.boxes(draws, heights, widths)
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (height > 0).all()
    assert (width > 0).all()
    assert (top + height <= heights).all()
    assert (left + width <= widths).all()
    single = [crop.boxes(draws.row(i), int(heights[i]), int(widths[i]))[0] for i in range(300)]
    np.testing.assert_array_equal(boxes, single)


def test_both_ends_of_the_room_are_reached() -> None:
    windows = ResizeCrop(size=(3, 3), resize=(4, 5)).windows(drawn(500), (9, 9))
    assert [set(windows[:, 0]), set(windows[:, 1])] == [{0, 1}, {0, 1, 2}]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_inception_crop_is_torchvisions_resized_crop(interpolation: Any) -> None:
    array = pixels(90, 130)
    augmentation = Augmentation(crop=InceptionCrop(size=(24, 32), interpolation=interpolation), flip=0.0)
    for sample in range(20):
        draws = CounterRng.for_samples(seed=0, epoch=0, sample=sample)
        box = InceptionCrop(size=(24, 32)).boxes(draws, 90, 130)[0].tolist()
        mode = F.InterpolationMode(interpolation)
        wanted = F.pil_to_tensor(F.resized_crop(Image.fromarray(array), *box, [24, 32], interpolation=mode))
        assert torch.equal(augmentation(EncodedImage(array), draws), wanted)


@pytest.mark.parametrize("resize", [(40, 44), 33])
def test_resize_crop_is_resize_and_then_crop(resize: Any) -> None:
    array, crop = pixels(90, 130), ResizeCrop(size=(24, 32), resize=resize)
    whole = Image.fromarray(array).resize((44, 40) if resize == (40, 44) else (47, 33), Image.Resampling.BILINEAR)
    for sample in range(20):
        draws = CounterRng.for_samples(seed=0, epoch=0, sample=sample)
        top, left = crop.windows(draws, (90, 130))[0].tolist()
        wanted = F.crop(F.pil_to_tensor(whole), top, left, 24, 32)
        got = Augmentation(crop=crop, flip=0.0)(EncodedImage(array), draws)
        assert (got.int() - wanted.int()).abs().max() <= 1  # the same filter, its weights rounded once more


@pytest.mark.parametrize("edge", ["zeros", "reflect"])
def test_cifar_crop_is_pad_and_crop(edge: Any) -> None:
    array = pixels(32, 32)
    crop = ResizeCrop(size=(32, 32), resize=(32, 32), padding=4, edge=edge)
    mode = "constant" if edge == "zeros" else "reflect"
    padded = F.pad(F.pil_to_tensor(Image.fromarray(array)), [4], padding_mode=mode)
    places = set()
    for sample in range(100):
        draws = CounterRng.for_samples(seed=0, epoch=0, sample=sample)
        top, left = crop.windows(draws, (32, 32))[0].tolist()
        places.add((top, left))
        wanted = padded[:, top : top + 32, left : left + 32]
        assert torch.equal(Augmentation(crop=crop, flip=0.0)(EncodedImage(array), draws), wanted)
    assert {0, 8} <= {top for top, _ in places}


@pytest.mark.parametrize("whole", [(60, 80), (90, 30)])
def test_scale_jitter_draws_scales_evenly_and_windows_inside(whole: tuple[int, int]) -> None:
    crop = ScaleJitter(size=(48, 64), scale=(0.5, 2.0))
    found = crop.windows(drawn(4000), whole)
    scale = found[:, 0] / whole[0] / min(48 / whole[0], 64 / whole[1])
    assert stats.kstest(scale, "uniform", args=(0.5, 1.5)).statistic < 0.05
    assert np.abs(found[:, 0] / found[:, 1] - whole[0] / whole[1]).max() < 0.15
    room = np.maximum(found[:, :2] - [48, 64], 0)
    assert (found[:, 2:] >= 0).all()
    assert (found[:, 2:] <= room).all()
    assert (found[:, 2:] == room)[room > 0].any()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_scale_jitter_is_resize_then_crop_and_pad(interpolation: Any) -> None:
    image, crop = pixels(30, 40), ScaleJitter(size=(24, 24), scale=(0.3, 2.5), interpolation=interpolation)
    mode = F.InterpolationMode(interpolation)
    for index in range(20):
        draws = drawn(1, seed=index)
        height, width, top, left = crop.windows(draws, (30, 40))[0].tolist()
        resized = F.pil_to_tensor(F.resize(Image.fromarray(image), [height, width], interpolation=mode))
        wanted = torch.zeros(3, 24, 24, dtype=torch.uint8)
        part = resized[:, top : top + 24, left : left + 24]
        wanted[:, : part.shape[1], : part.shape[2]] = part
        made = Augmentation(crop=crop, flip=0.0)(EncodedImage(image), draws)
        assert int((made.int() - wanted.int()).abs().max()) <= 2


def test_scale_jitter_of_one_scale_shows_the_whole_image_as_it_is_scored() -> None:
    for size in ((30, 40), (40, 30), (25, 25)):
        image = EncodedImage(pixels(*size))
        made = Augmentation(crop=ScaleJitter(size=(32, 20), scale=(1.0, 1.0)), flip=0.0)(image, drawn(1))
        assert torch.equal(made, Preprocessing(image=(32, 20), fit="pad").pixels(image.rgb()))
    with pytest.raises(ConfigError, match="scale"):
        ScaleJitter(size=(8, 8), scale=(0.0, 1.0))


def test_flip_mirrors_half() -> None:
    array, flat = pixels(16, 16), Augmentation(crop=Squash(size=(16, 16)))
    plain = torch.from_numpy(array.copy()).permute(2, 0, 1)
    turned = 0
    for sample in range(200):
        got = flat(EncodedImage(array), CounterRng.for_samples(seed=0, epoch=0, sample=sample))
        mirrored = torch.equal(got, plain.flip(-1))
        assert mirrored or torch.equal(got, plain)
        turned += mirrored
    assert 70 < turned < 130


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 1), (2, 3), (700, 500)])
@pytest.mark.parametrize(
    "crop",
    [
        InceptionCrop(size=(24, 32)),
        Squash(size=(24, 32)),
        ResizeCrop(size=(24, 32), resize=(30, 40)),
        ResizeCrop(size=(24, 32), resize=40),
        ResizeCrop(size=(24, 32), resize=32, padding=4, edge="reflect"),
    ],
)
def test_the_size_is_always_the_one_asked_for(height: int, width: int, crop: Any) -> None:
    for data in (pixels(height, width), jpeg(pixels(height, width))):
        for sample in range(4):
            got = Augmentation(crop=crop)(EncodedImage(data), CounterRng.for_samples(seed=0, epoch=0, sample=sample))
            assert (got.shape, got.dtype) == ((3, 24, 32), torch.uint8)


def test_a_large_jpeg_is_decoded_small_and_looks_the_same() -> None:
    with resources.files("vitrail").joinpath("assets", "window.png").open("rb") as file:
        array = np.asarray(Image.open(file).convert("RGB").resize((800, 600), Image.Resampling.BICUBIC))
    data = jpeg(array)
    augmentation = Augmentation(crop=InceptionCrop(size=(32, 32)))
    scales = set()
    for sample in range(40):
        draws = CounterRng.for_samples(seed=0, epoch=0, sample=sample)
        cut = augmentation.crop.cut((600, 800), draws)
        scales.add(cut.scale)
        assert min(cut.box[2:]) >= 32 * cut.scale
        small = augmentation(EncodedImage(data), draws)
        whole = augmentation.finish(EncodedImage(data).rgb(), (600, 800), cut, draws)
        neighbour = (whole.float() - whole.float().roll(1, -1)).abs().mean()
        assert (small.float() - whole.float()).abs().mean() < 0.4 * neighbour  # a shift by one pixel would make 1
    assert scales == {4, 8}


def test_a_turned_jpeg_is_cut_as_a_person_sees_it() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    array = pixels(200, 300)
    turned, upright = jpeg(array, exif=exif), jpeg(np.rot90(array, -1))
    draws = CounterRng.for_samples(seed=0, epoch=0, sample=1)
    assert EncodedImage(turned).size == (300, 200)
    one, other = (inception(16)(EncodedImage(data), draws) for data in (turned, upright))
    assert (one.float() - other.float()).abs().mean() < 3


def test_bad_values_are_named() -> None:
    for make, told in [
        (lambda: InceptionCrop(size=(0, 4)), "0x4"),
        (lambda: InceptionCrop(size=(4, 4), area=(0.5, 0.1)), "area"),
        (lambda: InceptionCrop(size=(4, 4), aspect=(0, 1)), "aspect"),
        (lambda: InceptionCrop(size=(4, 4), interpolation="nearest"), "interpolation"),  # type: ignore[arg-type]
        (lambda: ResizeCrop(size=(8, 8), resize=7), "resize=7"),
        (lambda: ResizeCrop(size=(8, 8), resize=8, padding=4), "padding=4"),
        (lambda: ResizeCrop(size=(8, 8), resize=8, edge="mirror"), "edge"),  # type: ignore[arg-type]
        (lambda: Augmentation(crop=Squash(size=(4, 4)), flip=2.0), "flip=2"),
    ]:
        with pytest.raises(ConfigError, match=told):
            make()


def test_named_ones() -> None:
    assert inception(224).crop == InceptionCrop(size=(224, 224), area=(0.05, 1.0), aspect=(3 / 4, 4 / 3))
    assert bit().crop == ResizeCrop(size=(384, 384), resize=(448, 448))
    assert cifar().size == (32, 32)


def test_hyper_rule() -> None:
    cifar10 = hyper_rule(32, 32, 50_000)
    assert (cifar10.resize, cifar10.crop, cifar10.steps, cifar10.mixup) == (160, 128, 10_000, 0.1)
    assert cifar10.decays == (3001, 6001, 9001)
    pets, imagenet = hyper_rule(400, 500, 3680), hyper_rule(400, 500, 1_281_167)
    assert (pets.resize, pets.crop, pets.steps, pets.warmup, pets.mixup) == (448, 384, 500, 100, 0.0)
    assert (imagenet.steps, imagenet.warmup, imagenet.mixup) == (20_000, 500, 0.1)
    assert hyper_rule(96, 96, 100).resize == 448
    released = hyper_rule(96, 96, 100, released=True)
    assert (released.resize, released.crop) == (512, 480)
    assert hyper_rule(32, 32, 100, released=True).crop == 128
    with pytest.raises(ConfigError, match="0 images"):
        hyper_rule(32, 32, 0)

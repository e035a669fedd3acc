"""Pixels, masks, boxes and points of a view move alike."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from tests.data.masked import masked, painted
from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.dataset import ArrayDataset
from vitrail.data.loader import BatchStream, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng
from vitrail.data.targets import IGNORED, Geometry, MaskTargets
from vitrail.data.transforms.augmentation import Augmentation, cifar
from vitrail.data.transforms.crop import Crop, InceptionCrop, ResizeCrop, ScaleJitter, Squash
from vitrail.data.transforms.policy import Distort, RandAugment, ThreeAugment

FUNCTIONAL: Any = F  # takes tv_tensors too, whatever its annotations say
SIDES = st.integers(5, 40)
SIZES = st.tuples(SIDES, SIDES)


@st.composite
def crops(draw: st.DrawFn) -> Crop:
    size = draw(st.tuples(st.integers(4, 24), st.integers(4, 24)))
    kind = draw(st.sampled_from(["inception", "tensorflow", "resize", "shorter", "pad", "squash", "jitter"]))
    if kind == "jitter":
        return ScaleJitter(size=size, scale=draw(st.sampled_from([(0.1, 2.0), (1.0, 1.0), (1.2, 3.0)])))
    if kind in ("inception", "tensorflow"):
        return InceptionCrop(size=size, sampler="tensorflow" if kind == "tensorflow" else "torchvision")
    if kind == "squash":
        return Squash(size=size)
    if kind == "shorter":
        return ResizeCrop(size=size, resize=max(size) + draw(st.integers(0, 9)))
    padding = draw(st.integers(1, 2)) if kind == "pad" and min(size) > 6 else 0
    return ResizeCrop(size=size, resize=(size[0] + draw(st.integers(0, 9)), size[1] + 3), padding=padding)


def drawn(seed: int, count: int = 1) -> CounterRng:
    return CounterRng.for_samples(seed=seed, epoch=np.zeros(count, np.int64), sample=np.arange(count))


def gradient(whole: Pair) -> Tensor:
    """Pixels that say where they are: x in the first channel, y in the second, as levels that leave room to resize."""
    height, width = whole
    x = torch.arange(width).expand(height, width) * 4 + 40
    y = torch.arange(height)[:, None].expand(height, width) * 4 + 40
    return torch.stack([x, y, torch.full((height, width), 255)]).byte()


@settings(deadline=None)
@given(whole=SIZES, crop=crops(), flip=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 10**6))
@example(whole=(40, 5), crop=InceptionCrop(size=(7, 9)), flip=1.0, seed=0)
def test_the_mask_shows_where_the_pixels_come_from(whole: Pair, crop: Crop, flip: float, seed: int) -> None:
    """A mask of coordinates next to an image of coordinates. Resized pixels lie between those of the image, so they
    agree to a pixel, or as many as become one; the border has neither."""
    augmentation = Augmentation(crop=crop, flip=flip)
    source = ArrayDataset(gradient(whole).permute(1, 2, 0).numpy()[None])
    pixels = augmentation(source.open_image(0), drawn(seed)).int()
    geometry = augmentation.geometry(whole, drawn(seed))
    assert geometry.size == augmentation.size == tuple(pixels.shape[1:])
    border = geometry.mask(torch.zeros(whole, dtype=torch.uint8), IGNORED) == IGNORED
    assert torch.equal(border, pixels[2] == 0)
    shrunk = max(1.0, geometry.box[2] / geometry.inner[0], geometry.box[3] / geometry.inner[1])
    for channel, places in (
        (0, torch.arange(whole[1]).expand(whole)),
        (1, torch.arange(whole[0])[:, None].expand(whole)),
    ):
        found = geometry.mask(places.byte(), IGNORED).float()
        far = ((pixels[channel] - 40) / 4 - found)[~border].abs()
        assert far.numel() == 0 or float(far.max()) <= shrunk + 0.51


@pytest.mark.slow
@settings(deadline=None)
@given(size=SIZES, seed=st.integers(0, 10**6), flip=st.sampled_from([0.0, 1.0]))
def test_without_resizing_masks_are_the_very_pixels(size: Pair, seed: int, flip: float) -> None:
    """A window of a padded image, as on CIFAR: every pixel is one of the image."""
    source = masked([size])
    augmentation = Augmentation(crop=ResizeCrop(size=size, resize=size, padding=1), flip=flip)
    pixels = augmentation(source.open_image(0), drawn(seed))
    seen = augmentation.geometry(size, drawn(seed)).mask(torch.from_numpy(painted(0, size)), 0)
    assert torch.equal(pixels, seen.expand(3, *seen.shape))


@pytest.mark.slow
@settings(deadline=None)
@given(whole=SIZES, crop=crops(), flip=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 10**6), data=st.data())
def test_boxes_and_points_move_with_masks(whole: Pair, crop: Crop, flip: float, seed: int, data: st.DataObject) -> None:
    """A painted rectangle, its box and the centres of its pixels: pixels of the view whose centres lie in the moved
    box are those that the mask paints."""
    geometry = Augmentation(crop=crop, flip=flip).geometry(whole, drawn(seed))
    top, left = data.draw(st.integers(0, whole[0] - 1)), data.draw(st.integers(0, whole[1] - 1))
    bottom, right = data.draw(st.integers(top + 1, whole[0])), data.draw(st.integers(left + 1, whole[1]))
    mask = torch.zeros(whole, dtype=torch.uint8)
    mask[top:bottom, left:right] = 1
    shown = geometry.mask(mask, 0)
    x0, y0, x1, y1 = geometry.boxes(torch.tensor([left, top, right, bottom], dtype=torch.float64)).tolist()
    assert 0 <= x0 <= x1 <= geometry.size[1]
    assert 0 <= y0 <= y1 <= geometry.size[0]
    rows, columns = (torch.arange(side) + 0.5 for side in geometry.size)
    for slack in (1e-4, -1e-4):  # a centre on the very edge may belong to either side
        inside = (rows > y0 - slack) & (rows < y1 + slack), (columns > x0 - slack) & (columns < x1 + slack)
        painted = inside[0][:, None] & inside[1]
        assert bool((painted >= shown.bool()).all() if slack > 0 else (painted <= shown.bool()).all())
    corners = geometry.points(torch.tensor([[left, top], [right, bottom]], dtype=torch.float64))
    inner = corners.clamp(torch.zeros(2), torch.tensor(geometry.size[::-1])).sort(0).values
    if not any(geometry.pad):
        assert torch.allclose(inner.flatten(), torch.tensor([x0, y0, x1, y1], dtype=torch.float64))


def ties(length: int, inner: int) -> bool:
    """Whether some centre falls on the very edge between two pixels, where float32 may take either."""
    return any((2 * place + 1) * length % (2 * inner) == 0 for place in range(inner))


@pytest.mark.slow
@settings(deadline=None)
@given(whole=SIZES, data=st.data(), inner=st.tuples(st.integers(1, 30), st.integers(1, 30)), flip=st.booleans())
def test_as_torchvision_moves_them(whole: Pair, data: st.DataObject, inner: Pair, flip: bool) -> None:
    """Crop, resize (nearest-exact, which torchvision has for images alone), pad and flip by its own kernels."""
    top, left = data.draw(st.integers(0, whole[0] - 1)), data.draw(st.integers(0, whole[1] - 1))
    height, width = data.draw(st.integers(1, whole[0] - top)), data.draw(st.integers(1, whole[1] - left))
    pad = data.draw(st.tuples(*[st.integers(0, 3)] * 4))
    geometry = Geometry(whole=whole, box=(top, left, height, width), inner=inner, pad=pad, flip=flip)
    low = data.draw(st.tuples(st.integers(0, whole[1] - 1), st.integers(0, whole[0] - 1)))
    high = (data.draw(st.integers(low[0] + 1, whole[1])), data.draw(st.integers(low[1] + 1, whole[0])))
    boxes = torch.tensor([[*low, *high]], dtype=torch.float32)
    mask = tv_tensors.Image(torch.from_numpy(painted(1, whole)))
    box = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=whole)  # pyright: ignore[reportCallIssue]
    moved: list[Tensor] = []
    for each in (mask, box):
        each = FUNCTIONAL.crop(each, top, left, height, width)
        if isinstance(each, tv_tensors.BoundingBoxes):
            each = FUNCTIONAL.clamp_bounding_boxes(each)
        each = FUNCTIONAL.resize(each, list(inner), interpolation=F.InterpolationMode.NEAREST_EXACT)
        each = FUNCTIONAL.pad(each, list(pad), fill=IGNORED)
        moved.append(FUNCTIONAL.horizontal_flip(each) if flip else each)
    if not (ties(height, inner[0]) or ties(width, inner[1])):
        assert torch.equal(geometry.mask(mask.as_subclass(Tensor), IGNORED), moved[0].as_subclass(Tensor))
    assert torch.allclose(geometry.boxes(boxes), moved[1].as_subclass(Tensor), atol=1e-4)


@settings(deadline=None)
@given(
    whole=SIZES,
    image=st.tuples(st.integers(3, 20), st.integers(3, 20)),
    more=st.none() | st.integers(0, 9),
    interpolation=st.sampled_from(["bilinear", "bicubic", "area"]),
    antialias=st.booleans(),
    fit=st.sampled_from(["squash", "pad"]),
)
def test_preprocessing_says_where_its_pixels_come_from(
    whole: Pair, image: Pair, more: int | None, interpolation: Any, antialias: bool, fit: Any
) -> None:
    fit = fit if more is None else "squash"
    if interpolation == "area" and more is not None:
        image = (min(image), min(image))
    resize = None if more is None else min(image) + more
    preparing = Preprocessing(image=image, resize=resize, interpolation=interpolation, antialias=antialias, fit=fit)
    source = ArrayDataset(gradient(whole).permute(1, 2, 0).numpy()[None])
    pixels = preparing.pixels(source.open_image(0).rgb()).int()
    geometry = preparing.geometry(whole)
    assert geometry.size == image == tuple(pixels.shape[1:])
    border = geometry.mask(torch.zeros(whole, dtype=torch.uint8), IGNORED) == IGNORED
    assert torch.equal(border, pixels[2] == 0)
    slack = 0.51 + max(1.0, geometry.box[2] / geometry.inner[0], geometry.box[3] / geometry.inner[1])
    for channel, places in (
        (0, torch.arange(whole[1]).expand(whole)),
        (1, torch.arange(whole[0])[:, None].expand(whole)),
    ):
        far = ((pixels[channel] - 40) / 4 - geometry.mask(places.byte(), IGNORED))[~border].abs()
        assert far.numel() == 0 or float(far.max()) <= slack


def test_the_centre_of_a_strip_has_its_geometry() -> None:
    """Of an image so long that only its centre is resized."""
    preparing = Preprocessing(image=(16, 16), resize=1024)
    geometry = preparing.geometry((2, 9000))
    assert geometry.size == (16, 16)
    assert geometry.box == pytest.approx((0.984375, 4499.984375, 0.03125, 0.03125))


def test_a_view_that_mirrors_and_pads_by_hand() -> None:
    mask = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    geometry = Geometry(whole=(2, 2), box=(0, 1, 2, 1), inner=(2, 2), pad=(1, 0, 0, 1), flip=True)
    assert geometry.mask(mask, 9).tolist() == [[2, 2, 9], [4, 4, 9], [9, 9, 9]]
    assert geometry.points(torch.tensor([[1.0, 0.0], [2.0, 2.0]])).tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert geometry.boxes(torch.tensor([[0.0, 0.0, 2.0, 1.0]])).tolist() == [[0.0, 0.0, 2.0, 1.0]]


REFLECTED = Augmentation(crop=ResizeCrop(size=(16, 16), resize=16, padding=4, edge="reflect"))


@pytest.mark.parametrize("crop", [cifar(8, padding=1), REFLECTED], ids=["zeros", "reflect"])
def test_borders_count_for_nothing(crop: Augmentation) -> None:
    """Reflected pixels are in the image twice; the mask has them once."""
    seen = next(train_batches(masked([(20, 20)] * 8), crop, BatchStream(batch=8), targets=MaskTargets()))
    assert set((seen.target == IGNORED).unique().tolist()) == {False, True}


def test_policies_that_move_pixels_are_refused() -> None:
    moving = Augmentation(crop=Squash(size=(4, 4)), policy=RandAugment())
    with pytest.raises(ConfigError, match=r"augmentation\.policy=none|or none"):
        train_batches(masked([(9, 9)]), (moving,), BatchStream(batch=1), targets=MaskTargets())
    for policy in (ThreeAugment(), Distort(), None):
        fine = Augmentation(crop=Squash(size=(4, 4)), policy=policy)
        assert len(next(train_batches(masked([(9, 9)]), fine, BatchStream(batch=1), targets=MaskTargets())))


@pytest.mark.parametrize("flip", [False, True])
def test_points_as_torchvision_moves_them(flip: bool) -> None:
    """Its flip takes points for numbers of pixels, from 0 to the width less 1; ours are places, from 0 to the width."""
    points = torch.tensor([[3.0, 4.0], [8.5, 1.25], [5.0, 6.0]])
    theirs: Any = tv_tensors.KeyPoints(points, canvas_size=(9, 11))  # pyright: ignore[reportCallIssue]
    theirs = FUNCTIONAL.crop(theirs, 1, 2, 6, 8)
    theirs = FUNCTIONAL.pad(FUNCTIONAL.resize(theirs, [15, 12]), [1, 2, 3, 4])
    if flip:
        theirs = FUNCTIONAL.horizontal_flip(theirs).as_subclass(Tensor) + torch.tensor([1.0, 0.0])
    geometry = Geometry(whole=(9, 11), box=(1, 2, 6, 8), inner=(15, 12), pad=(1, 2, 3, 4), flip=flip)
    assert torch.allclose(geometry.points(points), theirs.as_subclass(Tensor))

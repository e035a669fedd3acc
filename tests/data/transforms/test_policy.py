"""Policies draw what torchvision draws; operations are torchvision's; one sample at a time or all at once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from tests.data.transforms.test_crop import drawn, pixels
from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.augmentation import (
    Augmentation,
    TrainViews,
    inception,
)
from vitrail.data.transforms.crop import InceptionCrop, Squash
from vitrail.data.transforms.policy import NUMBER, OPERATIONS, Distort, RandAugment, ThreeAugment

THEIRS = {
    "identity": "Identity",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateX",
    "translate_y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "saturation": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "autocontrast": "AutoContrast",
    "equalise": "Equalize",
}


def picture(height: int = 32, width: int = 40, seed: int = 0) -> Tensor:
    return torch.from_numpy(pixels(height, width, seed).copy()).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("magnitude", [0, 5, 9, 30])
@pytest.mark.parametrize("name", THEIRS)
def test_each_operation_is_torchvisions(name: str, magnitude: int) -> None:
    image, reference = picture(), v2.RandAugment(magnitude=magnitude)
    levels, signed = reference._AUGMENTATION_SPACE[THEIRS[name]]
    table = levels(31, *image.shape[-2:])
    value = 0.0 if table is None else float(table[magnitude])
    for level, sign in zip(RandAugment(magnitude=magnitude).choices((32, 40))[name], (1, -1), strict=True):
        wanted = reference._apply_image_or_video_transform(
            image.clone(), THEIRS[name], value * (sign if signed else 1), F.InterpolationMode.NEAREST, {Tensor: None}
        )
        got = OPERATIONS[NUMBER[name]](image, level)
        assert (got.int() - wanted.int()).abs().max() <= 1  # their table is in float32
        assert (got != wanted).float().mean() < 0.01


def test_all_operations_are_as_likely_and_half_are_turned() -> None:
    policy = RandAugment(ops=3)
    which, level = policy.draw(drawn(4000), (32, 32))
    assert which.shape == level.shape == (4000, 3)
    counts = Counter(which.ravel().tolist())
    assert sorted(counts) == sorted(NUMBER[name] for name in THEIRS)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    turned = level[which == NUMBER["rotate"]] > 0
    assert 0.4 < turned.mean() < 0.6


@pytest.mark.parametrize(
    "policy", [RandAugment(), RandAugment(ops=4, magnitude=15), ThreeAugment(), Distort(solarise=0.2)]
)
def test_a_batch_draws_what_its_samples_draw(policy: Any) -> None:
    draws = drawn(200)
    which, level = policy.draw(draws, (32, 40))
    for i in range(200):
        one = policy.draw(draws.row(i), (32, 40))
        np.testing.assert_array_equal(which[i], one.which[0])
        np.testing.assert_array_equal(level[i], one.level[0])


def test_three_augment() -> None:
    which, level = ThreeAugment().draw(drawn(3000), (32, 32))
    first = Counter(which[:, 0].tolist())
    assert set(first) == {NUMBER[name] for name in ("grey", "solarise", "blur")}
    assert stats.chisquare(list(first.values())).pvalue > 1e-3
    sigma = level[which[:, 0] == NUMBER["blur"], 0]
    assert stats.kstest(sigma, "uniform", (0.1, 1.9)).pvalue > 1e-3
    assert set(level[which[:, 0] == NUMBER["solarise"], 0]) == {128.0}
    orders = Counter(map(tuple, which[:, 1:].tolist()))
    assert len(orders) == 6
    assert stats.chisquare(list(orders.values())).pvalue > 1e-3
    assert stats.kstest(level[:, 1:].ravel(), "uniform", (0.7, 0.6)).pvalue > 1e-3
    assert ThreeAugment(jitter=0.0).draw(drawn(10), (32, 32)).which.shape == (10, 1)


def test_distort_follows_its_probabilities() -> None:
    policy = Distort(jitter=(0.4, 0.4, 0.2, 0.1), grey=0.2, blur=0.5, solarise=0.1)
    which, level = policy.draw(drawn(4000), (32, 32))
    share = {name: float((which == NUMBER[name]).any(1).mean()) for name in NUMBER}
    wanted = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.8, "grey": 0.2, "blur": 0.5}
    for name, value in {**wanted, "solarise": 0.1}.items():
        assert abs(share[name] - value) < 0.03, name
    hue = level[which == NUMBER["hue"]]
    assert stats.kstest(hue, "uniform", (-0.1, 0.2)).pvalue > 1e-3


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_a_gaussian(sigma: float) -> None:
    image = picture(48, 64)
    got = OPERATIONS[NUMBER["blur"]](image, sigma)
    full = F.gaussian_blur(image, [13, 13], [sigma, sigma])
    assert (got.int() - full.int()).abs().max() <= 1
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).filter(ImageFilter.GaussianBlur(sigma))
    assert (got.float() - F.pil_to_tensor(pillow).float()).abs().mean() < 4


@pytest.mark.parametrize("name", NUMBER)
@pytest.mark.parametrize("size", [(1, 1), (2, 5)])
def test_operations_take_the_smallest_pictures(name: str, size: tuple[int, int]) -> None:
    level = {"posterise": 4.0, "hue": 0.1}.get(name, 1.3)
    assert OPERATIONS[NUMBER[name]](picture(*size), level).shape == (3, *size)


def test_same_key_same_pixels_other_key_other_pixels() -> None:
    augmentation = Augmentation(crop=InceptionCrop(size=(24, 24)), policy=RandAugment(ops=3, magnitude=20))
    array = pixels(50, 60)

    def see(**key: int) -> Tensor:
        return augmentation(EncodedImage(array), CounterRng.for_samples(**{"seed": 0, "epoch": 0, "sample": 0, **key}))

    assert torch.equal(see(), see())
    for other in ({"seed": 1}, {"epoch": 1}, {"sample": 1}, {"view": 1}):
        assert not torch.equal(see(), see(**other))


def test_one_part_more_changes_no_other_part() -> None:
    array, draws = pixels(50, 60), CounterRng.for_samples(seed=0, epoch=0, sample=5)
    plain = inception(24)
    grey = Augmentation(crop=plain.crop, policy=Distort(jitter_probability=0, grey=1.0, blur=0.0))
    wanted = F.rgb_to_grayscale(plain(EncodedImage(array), draws), num_output_channels=3)
    assert torch.equal(grey(EncodedImage(array), draws), wanted)


def test_views_are_those_of_their_own_draws() -> None:
    several = [Augmentation(crop=inception(size).crop, policy=Distort()) for size in (32, 32, 16, 16, 16)]
    array = pixels(60, 80)
    draws = [CounterRng.for_samples(seed=0, epoch=0, sample=0, view=view) for view in range(5)]
    got = TrainViews(tuple(several))(EncodedImage(array), draws)
    assert [tuple(view.shape) for view in got] == [(3, 32, 32)] * 2 + [(3, 16, 16)] * 3
    for view, augmentation, drawn_for in zip(got, several, draws, strict=True):
        assert torch.equal(view, augmentation(EncodedImage(array), drawn_for))


def test_the_three_augment_of_deit_runs() -> None:
    augmentation = Augmentation(crop=inception(20).crop, policy=ThreeAugment())
    for sample in range(6):
        got = augmentation(EncodedImage(pixels(50, 30)), CounterRng.for_samples(seed=0, epoch=0, sample=sample))
        assert (got.shape, got.dtype) == ((3, 20, 20), torch.uint8)


def test_nothing_global_is_drawn() -> None:
    torch.manual_seed(0)
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    augmentation = Augmentation(crop=Squash(size=(20, 20)), policy=Distort(solarise=0.5))
    for sample in range(10):
        augmentation(EncodedImage(pixels(30, 30)), CounterRng.for_samples(seed=0, epoch=0, sample=sample))
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(legacy, np.random.get_state()[1])  # type: ignore[index]


def test_bad_values_are_named() -> None:
    for make, told in [
        (lambda: RandAugment(ops=0), "ops=0"),
        (lambda: RandAugment(magnitude=31), "magnitude=31"),
        (lambda: ThreeAugment(sigma=(0.0, 1.0)), "sigma"),
        (lambda: ThreeAugment(jitter=-0.1), "jitter"),
        (lambda: Distort(jitter=(0.1, 0.1, 0.1, 0.6)), "hue"),
        (lambda: Distort(grey=1.5), "grey=1.5"),
    ]:
        with pytest.raises(ConfigError, match=told):
            make()

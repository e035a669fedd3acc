"""Whole batches, on a device or not, come out as one image at a time does."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.transforms.test_crop import drawn, pixels
from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.augmentation import (
    Augmentation,
    RandomErasing,
    cifar,
    inception,
)
from vitrail.data.transforms.batched import (
    BatchedAugmentation,
    PackedArrays,
    find_unsupported,
)
from vitrail.data.transforms.batched_ops import SORTED, gaussian_kernels, grey, plan_programme
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop, ScaleJitter, Squash
from vitrail.data.transforms.policy import GEOMETRIC, NUMBER, OPERATIONS, Distort, Programme, RandAugment, ThreeAugment

SMOOTH = np.stack([pixels(32, 40, seed) for seed in range(24)])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def together(augmentation: Augmentation, arrays: Any, draws: CounterRng, device: str = "cpu") -> Tensor:
    batch = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous().to(device)
    return BatchedAugmentation(augmentation)(batch, draws).cpu()


def one_by_one(augmentation: Augmentation, arrays: Any, draws: CounterRng) -> Tensor:
    return torch.stack([augmentation(EncodedImage(array), draws.row(i)) for i, array in enumerate(arrays)])


def close(one: Tensor, other: Tensor, most: int, mean: float) -> None:
    assert one.shape == other.shape
    assert one.dtype == torch.uint8
    difference = (one.int() - other.int()).abs()
    assert int(difference.max()) <= most
    assert float(difference.float().mean()) <= mean


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(crop=Squash(size=(32, 40))),
        Augmentation(crop=Squash(size=(32, 40)), flip=0.0),
        cifar((32, 40)),
        Augmentation(crop=ResizeCrop(size=(32, 40), resize=(32, 40), padding=5, edge="reflect")),
        Augmentation(crop=ResizeCrop(size=(28, 30), resize=(32, 40))),
        Augmentation(crop=Squash(size=(32, 40)), erase=RandomErasing(probability=0.7)),
        Augmentation(crop=Squash(size=(32, 40)), erase=RandomErasing(probability=0.7, fill=9)),
    ],
)
def test_bit_for_bit(augmentation: Augmentation, device: str) -> None:
    draws = drawn(24, seed=3)
    assert torch.equal(together(augmentation, SMOOTH, draws, device), one_by_one(augmentation, SMOOTH, draws))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 16), (32, 40), (64, 48)])
def test_resampling_is_pillows(size: tuple[int, int], interpolation: Any, device: str) -> None:
    for crop in (
        InceptionCrop(size=size, interpolation=interpolation),
        InceptionCrop(size=size, interpolation=interpolation, sampler="tensorflow"),
        Squash(size=size, interpolation=interpolation),
        ResizeCrop(size=size, resize=(size[0] + 8, size[1] + 6), interpolation=interpolation),
        ScaleJitter(size=size, interpolation=interpolation),
    ):
        augmentation, draws = Augmentation(crop=crop), drawn(24)
        close(together(augmentation, SMOOTH, draws, device), one_by_one(augmentation, SMOOTH, draws), 2, 0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "crop",
    [
        ResizeCrop(size=(16, 16), resize=(16, 16), padding=2),
        ResizeCrop(size=(24, 24), resize=24, padding=3),
        ResizeCrop(size=(48, 48), resize=(48, 48), padding=6, edge="reflect"),
        ResizeCrop(size=(32, 40), resize=(41, 51), padding=3, edge="reflect"),
        ResizeCrop(size=(64, 48), resize=64, padding=4),
    ],
)
def test_a_padded_crop_of_a_resized_picture(crop: ResizeCrop, interpolation: Any, device: str) -> None:
    """Some are a level off in a quarter of their pixels: Pillow, given a part, may resize its columns first."""
    augmentation, draws = Augmentation(crop=replace(crop, interpolation=interpolation)), drawn(24)
    close(together(augmentation, SMOOTH, draws, device), one_by_one(augmentation, SMOOTH, draws), 3, 0.25)


def run_programme(programme: Programme, batch: torch.Tensor) -> torch.Tensor:
    work = plan_programme(programme, (batch.shape[-2], batch.shape[-1]))
    return work.stage(batch, PackedArrays(work.arrays).to_device(batch.device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in NUMBER if name in SORTED])
def test_each_operation_with_a_level_a_sample(name: str, device: str) -> None:
    span = {"posterise": (3, 8), "solarise": (0, 255), "blur": (0.1, 2.0), "rotate": (-30, 30)}.get(name)
    span = span or ((-0.3, 0.3) if "shear" in name else (-9, 9) if "translate" in name else (0.1, 1.9))
    levels = np.linspace(*span, 24)
    levels = np.round(levels) if name == "posterise" else levels
    batch = torch.from_numpy(SMOOTH).permute(0, 3, 1, 2).contiguous()
    programme = Programme(np.full((24, 1), NUMBER[name]), levels[:, None])
    got = run_programme(programme, batch.to(device)).cpu()
    wanted = torch.stack(
        [OPERATIONS[NUMBER[name]](picture, level) for picture, level in zip(batch, levels, strict=True)]
    )
    if name in GEOMETRIC:  # a nearest neighbour may be another one, where two are as near
        assert (got != wanted).any(1).float().mean() < 0.01
    else:
        close(got, wanted, 1, 0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "policy", [RandAugment(), RandAugment(ops=3, magnitude=20), ThreeAugment(), Distort(jitter=(0.4, 0.4, 0.2, 0.0))]
)
def test_policies(policy: Any, device: str) -> None:
    augmentation = Augmentation(crop=Squash(size=(32, 40)), policy=policy)
    draws = drawn(24, seed=1)
    got, wanted = together(augmentation, SMOOTH, draws, device), one_by_one(augmentation, SMOOTH, draws)
    assert ((got.int() - wanted.int()).abs() > 2).float().mean() < 0.02
    assert len({tuple(row) for row in policy.draw(draws, (32, 40)).which.tolist()}) > 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_colours_of_a_picture_do_not_depend_on_its_borders(flip: float, device: str) -> None:
    """Which stay black: a picture with borders gets the contrast that it has by itself."""
    policy = Distort(jitter=(0.2, 0.8, 0.2, 0.0), jitter_probability=1.0, grey=0.0, blur=0.0)
    augmentation = Augmentation(crop=ScaleJitter(size=(48, 64), scale=(0.2, 1.2)), flip=flip, policy=policy)
    draws, plain = drawn(24, seed=5), replace(augmentation, policy=None)
    got, wanted = together(augmentation, SMOOTH, draws, device), one_by_one(augmentation, SMOOTH, draws)
    close(got, wanted, 5, 0.3)  # the scaled picture is a level off here and there, and contrast doubles that
    before, programme, bare = one_by_one(plain, SMOOTH, draws), policy.draw(draws, (48, 64)), 0
    for place, array in enumerate(SMOOTH):
        left, _, right, bottom = plain.crop.cut(array.shape[:2], draws.row(place)).pad
        left, right = (right, left) if flip else (left, right)
        inside = (place, slice(None), slice(0, 48 - bottom), slice(left, 64 - right))
        alone = Programme(*(some[place : place + 1] for some in programme)).run(before[inside])
        assert torch.equal(wanted[inside], alone)
        bare += wanted[place].numel() - alone.numel()
        assert int(wanted[place].sum()) == int(alone.sum())
        assert int(got[place].sum()) == int(got[inside].sum())
    assert bare > wanted.numel() / 4


@pytest.mark.parametrize("policy", [RandAugment(ops=4), ThreeAugment()])
@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_the_smallest_pictures(size: tuple[int, int], policy: Any) -> None:
    augmentation = Augmentation(crop=Squash(size=size), policy=policy, erase=RandomErasing())
    arrays = np.stack([pixels(*size, seed) for seed in range(40)])
    assert together(augmentation, arrays, drawn(40)).shape == (40, 3, *size)


def test_the_batch_is_left_as_it_was_and_comes_out_the_same_again() -> None:
    augmentation = Augmentation(
        crop=InceptionCrop(size=(32, 40)), policy=RandAugment(), erase=RandomErasing(probability=1.0)
    )
    batch = torch.from_numpy(SMOOTH).permute(0, 3, 1, 2).contiguous()
    before, augment = batch.clone(), BatchedAugmentation(augmentation)
    first = augment(batch, drawn(24))
    assert torch.equal(batch, before)
    assert torch.equal(first, augment(batch, drawn(24)))
    halves = [augment(batch[part], CounterRng(drawn(24).keys[part])) for part in (slice(0, 12), slice(12, 24))]
    assert torch.equal(first, torch.cat(halves))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [None, RandAugment(), ThreeAugment()])
@pytest.mark.parametrize(
    "crop", [InceptionCrop(size=(20, 20)), ResizeCrop(size=(30, 36), resize=(32, 40)), Squash(size=(32, 40))]
)
def test_a_plan_made_elsewhere_gives_the_same(crop: Any, policy: Any, device: str) -> None:
    augment = BatchedAugmentation(Augmentation(crop=crop, policy=policy, erase=RandomErasing(probability=0.5)))
    batch = torch.from_numpy(SMOOTH).permute(0, 3, 1, 2).contiguous().to(device)
    with ThreadPoolExecutor(1) as pool:
        plan = pool.submit(augment.plan, drawn(24), (32, 40)).result()
    wanted = augment(batch, drawn(24))
    assert torch.equal(augment.apply(plan, batch), wanted)
    assert torch.equal(augment.apply(plan, batch, iter(PackedArrays(plan.arrays).to_device(batch.device))), wanted)


def test_a_plan_is_for_one_shape() -> None:
    augment = BatchedAugmentation(inception(16))
    plan = augment.plan(drawn(4), (32, 32))
    for wrong in (
        torch.zeros((5, 3, 32, 32), dtype=torch.uint8),
        torch.zeros((4, 3, 32, 40), dtype=torch.uint8),
        torch.zeros((4, 3, 32, 32)),
    ):
        with pytest.raises(ConfigError, match=r"uint8 \(4, 3, 32, 32\) was given"):
            augment.apply(plan, wrong)


def test_the_operations_of_a_step_do_not_touch_each_other() -> None:
    """Images with any mix of operations come out as they do when each is alone in its batch."""
    names = [name for name in NUMBER if name in SORTED]
    first = np.array([NUMBER[name] for name in names for _ in names])
    which = np.stack([first, np.array([NUMBER[name] for _ in names for name in names])], 1)
    spread = {"posterise": 5.0, "solarise": 90.0, "translate_x": 3.0, "translate_y": -2.0, "rotate": 9.0}
    levels = np.array([spread.get(name, 0.3 if "shear" in name else 1.4) for name in NUMBER])
    batch = torch.from_numpy(SMOOTH).permute(0, 3, 1, 2).contiguous()[np.arange(len(which)) % 24]
    together = run_programme(Programme(which, levels[which]), batch)
    for place in range(0, len(which), 7):
        some = slice(place, place + 1)
        assert torch.equal(together[some], run_programme(Programme(which[some], levels[which[some]]), batch[some]))


@pytest.mark.parametrize(
    "size", [(13, 9), *(pytest.param(size, marks=pytest.mark.slow) for size in ((32, 40), (64, 64)))]
)
@pytest.mark.parametrize("crop", ["squash", "bilinear", "bicubic", "jitter"])
def test_a_picture_is_the_same_to_the_bit_whatever_comes_with_it(size: tuple[int, int], crop: str) -> None:
    """The order of the sums in a product or a convolution may depend on the number of images; nothing else may."""
    plain = {"squash": Squash(size=size), "jitter": ScaleJitter(size=size)}
    cut: Any = plain.get(crop) or InceptionCrop(size=size, interpolation=crop)  # type: ignore[arg-type]
    some = np.random.default_rng(1).integers(0, 256, (150, 3, *size), dtype=np.uint8)
    batch, draws = torch.from_numpy(some), drawn(150, seed=2)
    for policy in (RandAugment(ops=3), ThreeAugment(), Distort(jitter=(0.4, 0.4, 0.2, 0.0))):
        augment = BatchedAugmentation(Augmentation(crop=cut, policy=policy, erase=RandomErasing(probability=0.5)))
        whole = augment(batch, draws)
        parts = [slice(0, 1), slice(1, 8), slice(8, 75), slice(75, 150)]
        assert torch.equal(whole, torch.cat([augment(batch[part], draws.rows(part)) for part in parts]))


def test_grey_is_exact() -> None:
    """Also where a sum is whole and an error in the last bit would take a level off it."""
    levels = torch.arange(256, dtype=torch.uint8)
    colours = torch.cartesian_prod(levels[::5], levels, levels).T[None, :, None].contiguous()
    wanted = (colours.int() * torch.tensor([2989, 5870, 1140], dtype=torch.int32)[:, None, None]).sum(1) // 10_000
    grey(colours)
    assert torch.equal(colours[0, 0].long(), wanted[0])


@pytest.mark.parametrize("size", [(9, 40), (3, 2)])
def test_the_weights_of_a_blur_do_not_depend_on_wider_ones(size: tuple[int, int]) -> None:
    sigma = np.array([0.1, 0.4, 1.1, 2.0])
    together = gaussian_kernels(sigma, size)
    assert together.shape == (2, min(6, max(size) - 1) + 1, 4)
    np.testing.assert_allclose(2 * together.sum(1) - together[:, 0], 1, rtol=1e-6)
    for place, one in enumerate(sigma):
        alone = gaussian_kernels(np.array([one]), size)[:, :, 0]
        np.testing.assert_array_equal(alone, together[:, : alone.shape[1], place])
        assert not together[:, alone.shape[1] :, place].any()


def test_what_is_not_supported_is_refused_with_what_is() -> None:
    distorted = Augmentation(crop=inception(8).crop, policy=Distort())
    with pytest.raises(ConfigError, match=r"Distort uses hue.*supported: InceptionCrop.*blur"):
        BatchedAugmentation(distorted)
    assert find_unsupported(inception(8)) is None
    assert "hue" in (find_unsupported(distorted) or "")
    with pytest.raises(ConfigError, match="3 draws"):
        together(inception(8), SMOOTH, drawn(3))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("augmentation", [cifar((32, 40)), inception(32)])
def test_the_host_never_waits(augmentation: Augmentation) -> None:
    policy = augmentation.policy or RandAugment(ops=3)
    full = Augmentation(crop=augmentation.crop, policy=policy, erase=RandomErasing(probability=0.5))
    batch = torch.from_numpy(SMOOTH).permute(0, 3, 1, 2).contiguous().cuda()
    augment = BatchedAugmentation(full)
    augment(batch, drawn(24))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for seed in range(5):
            augment(batch, drawn(24, seed))
    finally:
        torch.cuda.set_sync_debug_mode("default")

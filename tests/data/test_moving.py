"""Batches with targets that move: a function of the step like all batches, and whole or not at all."""

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.masked import Masked, masked, painted, palette
from tests.data.pictures import Shifted, encoded, noise
from vitrail.core.errors import BadImage, ConfigError
from vitrail.core.text import Pair
from vitrail.data.dataset import ImageDataset
from vitrail.data.datasets.builtin_sets import ShapesDataset
from vitrail.data.device_dataset import DeviceDataset, fits_on_device
from vitrail.data.loader import Batch, BatchStream, eval_batches, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import IGNORED, MaskTargets
from vitrail.data.transforms.augmentation import Augmentation, cifar, inception, reference_inception
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop, ScaleJitter, Squash
from vitrail.data.transforms.policy import RandAugment
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.train.data import can_reside

SIZES: list[Pair] = [(12, 10), (9, 17), (20, 20), (8, 8), (14, 11)]
SOURCE, SOURCE_OF_ONE_SIZE = masked(SIZES), masked([(12, 10)] * 5)
VIEWS = (inception((8, 6)), Augmentation(crop=InceptionCrop(size=(5, 5)), flip=0.5), cifar(10, padding=2))


def same(one: Batch, other: Batch) -> bool:
    pairs = zip((*one.views, *one.targets, one.sample), (*other.views, *other.targets, other.sample), strict=True)
    return one.step == other.step and all(torch.equal(a, b) for a, b in pairs)


@settings(deadline=None, max_examples=5)
@given(batch=st.integers(1, 7), seed=st.integers(0, 10**6), steps=st.integers(1, 5), data=st.data())
@pytest.mark.slow
def test_going_on_after_any_step_is_the_same(batch: int, seed: int, steps: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, steps - 1))
    whole = list(train_batches(SOURCE, VIEWS, BatchStream(batch=batch, seed=seed, stop=steps), targets=MaskTargets()))
    rest = list(
        train_batches(
            SOURCE, VIEWS, BatchStream(batch=batch, seed=seed, start=start, stop=steps), targets=MaskTargets()
        )
    )
    assert [len(one.targets) for one in whole] == [len(VIEWS)] * steps
    assert all(same(one, other) for one, other in zip(whole[start:], rest, strict=True))


@pytest.mark.slow
def test_loader_processes_change_nothing() -> None:
    here, there = (
        list(
            train_batches(
                SOURCE, VIEWS, BatchStream(batch=4, seed=3, stop=5, repeats=2), workers=workers, targets=MaskTargets()
            )
        )
        for workers in (0, 2)
    )
    assert all(same(one, other) for one, other in zip(here, there, strict=True))


def test_targets_do_not_change_the_pixels() -> None:
    with_masks = train_batches(SOURCE, VIEWS, BatchStream(batch=4, seed=3, stop=3), targets=MaskTargets())
    for one, other in zip(with_masks, train_batches(SOURCE, VIEWS, BatchStream(batch=4, seed=3, stop=3)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))
        assert other.target.dtype == torch.int64


def test_masks_show_what_the_pixels_show() -> None:
    """The pixels are those of the mask, moved by a window; a constant is added to all of a view."""
    for batch in train_batches(
        SOURCE_OF_ONE_SIZE, Shifted(2), BatchStream(batch=6, seed=1, stop=3), targets=MaskTargets()
    ):
        for pixels, target in zip(batch.views, batch.targets, strict=True):
            assert target.shape == (6, 4, 4)
            assert all(len((one - other).unique()) == 1 for one, other in zip(pixels[:, 0], target, strict=True))


def test_a_sweep_has_every_mask_once_and_nothing_past_the_end() -> None:
    preparing = Preprocessing(image=(12, 10))
    batches = list(eval_batches(SOURCE_OF_ONE_SIZE, preparing, batch=3, targets=MaskTargets()))
    assert [batch.valid.tolist() for batch in batches] == [[True] * 3, [True, True, False]]
    masks = torch.cat([batch.target for batch in batches])
    assert np.array_equal(masks[:5].numpy(), np.stack([painted(number) for number in range(5)]))
    assert (masks[5] == IGNORED).all()


def test_a_mask_belongs_to_the_upright_image() -> None:
    """A photo that is stored on its side, with a mask of what a person sees."""
    upright = Image.fromarray(np.stack([painted(0)] * 3, -1))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    out = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(out, "PNG", exif=exif)
    source = Masked([painted(0)])
    source.files[0] = out.getvalue()
    (batch,) = eval_batches(source, Preprocessing(image=(12, 10)), batch=1, targets=MaskTargets())
    assert batch.valid.all()
    assert torch.equal(batch.pixels[0, 0], batch.target[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_without_a_usable_mask_is_unreadable(workers: int) -> None:
    masks: list[bytes | np.ndarray | Exception] = [
        painted(0),
        painted(1, (10, 12)),
        palette(painted(2))[:-30],
        np.full((12, 10), 254, np.uint8),
        FileNotFoundError(2, "No such file or directory", "mask.png"),
        encoded(noise(0), "JPEG"),
    ]
    ledger = UnreadableLog()
    (batch,) = eval_batches(
        Masked(masks), Preprocessing(image=(6, 5)), batch=7, workers=workers, ledger=ledger, targets=MaskTargets()
    )
    assert batch.valid.tolist() == [True, False, False, False, False, False, False]
    assert (batch.target[1:] == IGNORED).all()
    assert not batch.pixels[1:].any()
    assert len(ledger) == 5
    assert all(entry.reason.startswith("mask: ") for entry in ledger.known.values())
    assert "10x12" in ledger.known["image-1.png"].reason
    assert "254" in ledger.known["image-3.png"].reason
    with pytest.raises(BadImage, match=r"image-1.png: mask"):
        list(
            eval_batches(
                Masked(masks),
                Preprocessing(image=(6, 5)),
                batch=7,
                ledger=UnreadableLog(strict=True),
                targets=MaskTargets(),
            )
        )


def test_an_unreadable_image_has_no_mask_either() -> None:
    source = masked([(12, 10)] * 2)
    source.files[0] = encoded(noise(0))[:-40]
    batch = next(train_batches(source, VIEWS[0], BatchStream(batch=2), targets=MaskTargets()))
    assert [bool((target == IGNORED).all()) for target in batch.target] == (~batch.valid).tolist()
    assert int(batch.valid.sum()) == 1


def squashed(size: Pair) -> Sequence[Augmentation]:
    return (Augmentation(crop=Squash(size=size), flip=0.0),)


def test_shapes_are_where_their_masks_say() -> None:
    source: ImageDataset = ShapesDataset(6, size=32)
    batch = next(eval_batches(source, Preprocessing(image=(32, 32)), batch=6, targets=MaskTargets()))
    assert torch.equal(batch.target, torch.from_numpy(np.stack([np.asarray(source.mask(at)) for at in range(6)])))
    assert batch.target.amax((1, 2)).tolist() == (source.labels.values + 1).tolist()


class Corners(MaskTargets):
    """Moves, and is not a value of a pixel."""

    fill = None


def test_targets_that_batches_cannot_move_stay_off_the_device() -> None:
    need = 4 * 5 * 12 * 10  # three channels and a mask
    assert fits_on_device(SOURCE_OF_ONE_SIZE, need, MaskTargets())[0]
    assert not fits_on_device(SOURCE_OF_ONE_SIZE, need - 1, MaskTargets())[0]
    assert not fits_on_device(SOURCE_OF_ONE_SIZE, need, Corners())[0]
    assert can_reside(SOURCE_OF_ONE_SIZE, squashed((4, 4)), torch.device("cpu"), MaskTargets())[0]
    assert not can_reside(SOURCE_OF_ONE_SIZE, squashed((4, 4)), torch.device("cpu"), Corners())[0]
    with pytest.raises(ConfigError, match="loader"):
        DeviceDataset(SOURCE_OF_ONE_SIZE, device="cpu", targets=Corners())
    moving = Augmentation(crop=Squash(size=(4, 4)), policy=RandAugment())
    with pytest.raises(ConfigError, match="none"):
        DeviceDataset(SOURCE_OF_ONE_SIZE, device="cpu", targets=MaskTargets()).train_batches(
            moving, BatchStream(batch=1)
        )


RESIDENT = {
    "inception": (inception((8, 6)),),
    "tensorflow": (reference_inception(9),),
    "pad": (cifar((12, 10), padding=3),),
    "resized": (Augmentation(crop=ResizeCrop(size=(7, 7), resize=(10, 9)), flip=1.0),),
    "resized and padded": (Augmentation(crop=ResizeCrop(size=(7, 7), resize=8, padding=2)),),
    "squash": (Augmentation(crop=Squash(size=(5, 16))),),
    "jitter": (Augmentation(crop=ScaleJitter(size=(11, 9))),),
    "larger jitter": (Augmentation(crop=ScaleJitter(size=(9, 9), scale=(1.0, 4.0)), flip=1.0),),
    "several": VIEWS,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("augmentations", list(RESIDENT.values()), ids=list(RESIDENT))
def test_on_the_device_masks_are_the_loaders_bit_for_bit(augmentations: tuple[Augmentation, ...], device: str) -> None:
    masks: list[bytes | np.ndarray | Exception] = [painted(at) for at in range(6)]
    source = Masked([*masks, painted(6, (3, 3))])  # the last one is unusable
    resident = DeviceDataset(source, device=device, targets=MaskTargets())
    for group in (1, 3):
        here = list(
            train_batches(source, augmentations, BatchStream(batch=4, seed=5, start=1, stop=8), targets=MaskTargets())
        )
        there = list(resident.train_batches(augmentations, BatchStream(batch=4, seed=5, start=1, stop=8), group=group))
        for one, other in zip(here, there, strict=True):
            assert (one.step, len(one.targets)) == (other.step, len(other.targets))
            assert torch.equal(one.valid, other.valid.cpu())
            assert all(torch.equal(a, b.cpu()) for a, b in zip(one.targets, other.targets, strict=True))

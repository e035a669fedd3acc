"""A source on the device: the same samples, draws and pixels as the loader gives."""

import numpy as np
import pytest
import torch

from tests.data.pictures import Listed, encoded, listed, noise
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.labels import Labels
from vitrail.data.ledger import Ledger
from vitrail.data.loader import Batch, stream, sweep
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.resident import Resident
from vitrail.data.source import Arrays
from vitrail.data.transforms.augmentation import Augmentation, cifar
from vitrail.data.transforms.crop import Squash

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PICTURES = np.random.default_rng(0).integers(0, 256, (23, 32, 32, 3), dtype=np.uint8)
SOURCE = Arrays(PICTURES, Labels(np.arange(23) % 4), "abcd")


def same(one: Batch, other: Batch) -> bool:
    fields = ("label", "sample", "epoch", "valid")
    other = other.to("cpu")
    return one.step == other.step and all(
        torch.equal(a, b)
        for a, b in [
            *((getattr(one, field), getattr(other, field)) for field in fields),
            *zip(one.views, other.views, strict=True),
        ]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augmentation", [cifar(32), Augmentation(crop=Squash(size=(32, 32)))], ids=["pad", "flip"])
def test_the_stream_is_the_loaders_bit_for_bit(device: str, augmentation: Augmentation) -> None:
    resident = Resident(SOURCE, device=device)
    for rank in range(2):
        here = resident.stream(augmentation, batch=10, seed=3, start=1, stop=6, rank=rank, world=2, repeats=2)
        there = stream(SOURCE, augmentation, batch=10, seed=3, start=1, stop=6, rank=rank, world=2, repeats=2)
        assert all(same(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_the_sweep_is_the_loaders(device: str) -> None:
    for rank in range(2):
        here = Resident(SOURCE, device=device).sweep(batch=8, rank=rank, world=2)
        for one, other in zip(
            sweep(SOURCE, Preprocessing(image=(32, 32)), batch=8, rank=rank, world=2), here, strict=True
        ):
            there = other.to("cpu")
            assert torch.equal(one.sample, there.sample)
            assert torch.equal(one.valid, there.valid)
            assert torch.equal(one.pixels[one.valid], there.pixels[one.valid])
            assert torch.equal(one.label[one.valid], there.label[one.valid])


def test_several_views_and_their_draws() -> None:
    both = [cifar(32), cifar(32)]
    (here,) = Resident(SOURCE, device="cpu").stream(both, batch=6, seed=0, stop=1)
    (there,) = stream(SOURCE, both, batch=6, seed=0, stop=1)
    assert same(there, here)
    assert not torch.equal(*here.views)


def test_pictures_of_several_sizes_need_one() -> None:
    source = Listed([encoded(noise(0)), encoded(noise(1, 9, 9))])
    with pytest.raises(
        DataError, match=r"picture-1\.png: is of another size than the first picture, 12 x 10; give a size"
    ):
        Resident(source, device="cpu")
    assert Resident(source, device="cpu", size=(8, 8)).pixels.shape == (2, 3, 8, 8)


def test_unreadable_ones_are_named_and_not_valid() -> None:
    source = Listed([encoded(noise(0)), b"", encoded(noise(2))])
    ledger = Ledger()
    (batch,) = Resident(source, device="cpu", ledger=ledger).stream(cifar((12, 10), padding=1), batch=3, seed=0, stop=1)
    assert list(ledger.known) == ["picture-1.png"]
    assert batch.valid.tolist() == [sample != 1 for sample in batch.sample.tolist()]


def test_what_does_not_fit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="23 pictures of 32 x 32"):
        Resident(SOURCE, device="cpu", limit=1000)
    with pytest.raises(DataError, match="without pictures"):
        Resident(listed(0), device="cpu")

"""A source on the device: the same samples, draws and pixels as the loader gives."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from tests.data.pictures import Listed, encoded, listed, noise
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.data.device_dataset import DeviceDataset, fits_on_device, groups
from vitrail.data.loader import Batch, BatchStream, train_batches
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.augmentation import Augmentation, RandomErasing, cifar
from vitrail.data.transforms.batched import BatchedAugmentation, BatchPlan
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop, Squash
from vitrail.data.transforms.policy import Distort, RandAugment, ThreeAugment
from vitrail.data.unreadable_log import UnreadableLog

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PICTURES = np.random.default_rng(0).integers(0, 256, (23, 32, 32, 3), dtype=np.uint8)
SOURCE = ArrayDataset(PICTURES, Labels(np.arange(23) % 4), "abcd")


def same(one: Batch, other: Batch) -> bool:
    fields = ("target", "sample", "epoch", "valid")
    other = other.to("cpu")
    return one.step == other.step and all(
        torch.equal(a, b)
        for a, b in [
            *((getattr(one, field), getattr(other, field)) for field in fields),
            *zip(one.views, other.views, strict=True),
        ]
    )


def nearly_same(one: Batch, other: Batch) -> bool:
    """The same samples, and pixels within one level of 255, but for a few in a thousand that an edge falls on."""
    far = [(a.int() - b.int()).abs().gt(1).float().mean() for a, b in zip(one.views, other.views, strict=True)]
    return torch.equal(one.sample, other.sample) and torch.equal(one.target, other.target) and max(far) < 0.005


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augmentation", [cifar(32), Augmentation(crop=Squash(size=(32, 32)))], ids=["pad", "flip"])
def test_the_stream_is_the_loaders_bit_for_bit(device: str, augmentation: Augmentation) -> None:
    resident = DeviceDataset(SOURCE, device=device)
    for rank in range(2):
        here = resident.train_batches(
            augmentation, BatchStream(batch=10, seed=3, start=1, stop=6, rank=rank, world=2, repeats=2)
        )
        there = train_batches(
            SOURCE, augmentation, BatchStream(batch=10, seed=3, start=1, stop=6, rank=rank, world=2, repeats=2)
        )
        assert all(same(a, b) for a, b in zip(there, here, strict=True))


FULL = [
    Augmentation(crop=cifar(32).crop, policy=RandAugment(), erase=RandomErasing(probability=0.5)),
    Augmentation(crop=InceptionCrop(size=(24, 28)), policy=ThreeAugment()),
]


@pytest.mark.parametrize("device", DEVICES)
def test_the_thread_changes_nothing_and_a_later_start_goes_on_where_it_was(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = DeviceDataset(SOURCE, device=device)

    def taken(ahead: int, start: int = 0) -> list[Batch]:
        there = resident.train_batches(FULL, BatchStream(batch=16, seed=5, start=start, stop=9, repeats=3), ahead=ahead)
        return [batch.to("cpu") for batch in there]

    wanted = taken(0)
    assert [batch.step for batch in wanted] == list(range(9))
    for ahead in (1, 4, 20):
        assert all(same(a, b) for a, b in zip(wanted, taken(ahead), strict=True))
    for ahead in (4, 0):  # groups are cut otherwise then, and a GPU may round otherwise in a smaller one
        alike = same if device == "cpu" else nearly_same
        assert all(alike(a, b) for a, b in zip(wanted[7:], taken(ahead, 7), strict=True))
    monkeypatch.setattr("vitrail.data.device_dataset.DRAWN", 40)  # two steps at once, then one
    assert all(same(a, b) for a, b in zip(wanted, taken(4), strict=True))


GROUPED = [
    FULL,
    [Augmentation(crop=InceptionCrop(size=(32, 32), interpolation="bicubic"), policy=RandAugment(ops=3))],
    [Augmentation(crop=ResizeCrop(size=(21, 27), resize=(25, 30)), policy=ThreeAugment(), erase=RandomErasing(fill=7))],
    [cifar(32)],
]


@pytest.mark.parametrize(
    "augmentations",
    [
        pytest.param(augmentations, id=name, marks=[] if name in ("two views", "pad") else pytest.mark.slow)
        for name, augmentations in zip(["two views", "inception", "three", "pad"], GROUPED, strict=True)
    ],
)
def test_the_size_of_a_group_changes_nothing(augmentations: list[Augmentation]) -> None:
    """Over the ends of epochs (23 samples, 3 times each, 12 a step), on both processes, from any step on."""
    resident = DeviceDataset(SOURCE, device="cpu")

    def taken(group: int | None, rank: int, start: int = 0, ahead: int = 2) -> list[Batch]:
        batches = resident.train_batches(
            augmentations,
            BatchStream(batch=12, seed=5, start=start, stop=14, rank=rank, world=2, repeats=3),
            ahead=ahead,
            group=group,
        )
        return list(batches)

    for rank in range(2):
        wanted = taken(1, rank)
        assert [batch.step for batch in wanted] == list(range(14))
        assert int(wanted[-1].epoch.max()) == 2
        for group, start, ahead in ((2, 0, 2), (5, 0, 0), (5, 7, 2), (5, 9, 0), (100, 0, 2), (100, 3, 1), (None, 1, 2)):
            got = taken(group, rank, start, ahead)
            assert all(same(a, b) for a, b in zip(wanted[start:], got, strict=True)), (group, start, ahead)


def test_groups_end_at_multiples_wherever_one_starts_and_at_the_stop() -> None:
    def runs(start: int, stop: int | None, most: int, block: int) -> list[list[tuple[int, int]]]:
        blocks = itertools.islice(groups(start, stop, most, block), 4)
        return [[(steps.start, steps.stop) for steps in several] for several in blocks]

    assert runs(0, 10, 4, 1) == [[(0, 4)], [(4, 8)], [(8, 10)]]
    assert runs(6, 21, 4, 2) == [[(6, 8), (8, 12)], [(12, 16), (16, 20)], [(20, 21)]]
    assert runs(3, 4, 8, 3) == [[(3, 4)]]
    assert runs(5, 5, 4, 1) == []
    assert runs(8, None, 4, 2)[-1] == [(32, 36), (36, 40)]


def test_a_group_is_small_enough() -> None:
    """About 4,096 images, fewer where they are large, and never less than one step."""
    resident = DeviceDataset(SOURCE, device="cpu")
    assert resident.choose_group(512, [(32, 32)]) == 1
    assert resident.choose_group(16, [(32, 32)]) == 32
    assert resident.choose_group(16, [(32, 32), (64, 64)]) == 8
    resident.device = torch.device("cuda")
    assert [resident.choose_group(local, [(32, 32)]) for local in (1, 256, 512, 4096, 10_000)] == [4096, 16, 8, 1, 1]
    assert [resident.choose_group(local, [(224, 224)]) for local in (16, 64, 256)] == [6, 1, 1]


def test_the_steps_of_a_group_are_parts_of_the_same_tensors_and_the_next_group_is_drawn_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = list[int]()

    def plan(self: BatchedAugmentation, draws: CounterRng, size: tuple[int, int]) -> BatchPlan:
        plans.append(len(draws))
        return before(self, draws, size)

    before = BatchedAugmentation.plan
    monkeypatch.setattr(BatchedAugmentation, "plan", plan)
    with closing(
        DeviceDataset(SOURCE, device="cpu").train_batches(FULL[0], BatchStream(batch=4), ahead=4, group=5)
    ) as batches:
        several = list(itertools.islice(batches, 6))
        deadline = time.monotonic() + 10
        while len(plans) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
    assert plans == [20, 20, 20]  # two that were asked for, and one in advance
    places = [batch.pixels.untyped_storage().data_ptr() for batch in several]
    assert len(set(places[:5])) == 1
    assert places[5] != places[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("group", [1, 4])
def test_the_host_never_waits(group: int) -> None:
    batches = DeviceDataset(SOURCE, device="cuda").train_batches(FULL, BatchStream(batch=16), group=group)
    list(itertools.islice(batches, 8))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        list(itertools.islice(batches, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def working() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_the_thread_ends_with_the_iterator() -> None:
    resident = DeviceDataset(SOURCE, device="cpu")

    def begun() -> Iterator[Batch]:
        batches = resident.train_batches(cifar(32), BatchStream(batch=4))
        next(batches)
        return batches

    endless = begun()
    assert working() == 1
    del endless
    assert working() == 0
    assert len(list(resident.train_batches(cifar(32), BatchStream(batch=4, stop=3)))) == 3
    assert working() == 0
    resident.train_batches(cifar(32), BatchStream(batch=4))  # nothing was asked of it
    assert working() == 0


def test_an_error_while_drawing_reaches_the_one_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*_: object) -> None:
        raise ZeroDivisionError("in the other thread")

    batches = DeviceDataset(SOURCE, device="cpu").train_batches(FULL[0], BatchStream(batch=4))
    monkeypatch.setattr(RandAugment, "draw", draw)
    with pytest.raises(ZeroDivisionError, match="other thread"):
        next(batches)
    assert working() == 0


def test_what_cannot_be_drawn_is_refused_at_once() -> None:
    resident = DeviceDataset(SOURCE, device="cpu")
    with pytest.raises(ConfigError, match="Distort uses hue"):
        resident.train_batches(Augmentation(crop=cifar(32).crop, policy=Distort()), BatchStream(batch=4))
    with pytest.raises(ConfigError, match="repeats=0"):
        resident.train_batches(cifar(32), BatchStream(batch=4, repeats=0))
    with pytest.raises(ConfigError, match="group=0"):
        resident.train_batches(cifar(32), BatchStream(batch=4), group=0)


def test_several_views_and_their_draws() -> None:
    both = [cifar(32), cifar(32)]
    (here,) = DeviceDataset(SOURCE, device="cpu").train_batches(both, BatchStream(batch=6, stop=1))
    (there,) = train_batches(SOURCE, both, BatchStream(batch=6, stop=1))
    assert same(there, here)
    assert not torch.equal(*here.views)


def test_images_of_several_sizes_are_refused() -> None:
    source = Listed([encoded(noise(0)), encoded(noise(1, 9, 9))])
    with pytest.raises(DataError, match=r"image-1\.png: is of another size than the first image, 12 x 10; use data"):
        DeviceDataset(source, device="cpu")


def test_unreadable_ones_are_named_and_not_valid() -> None:
    source = Listed([encoded(noise(0)), b"", encoded(noise(2))])
    ledger = UnreadableLog()
    (batch,) = DeviceDataset(source, device="cpu", ledger=ledger).train_batches(
        cifar((12, 10), padding=1), BatchStream(batch=3, stop=1)
    )
    assert list(ledger.known) == ["image-1.png"]
    assert batch.valid.tolist() == [sample != 1 for sample in batch.sample.tolist()]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(DataError, match="without images"):
        DeviceDataset(listed(0), device="cpu")


def test_whether_a_source_fits() -> None:
    need = 23 * 3 * 32 * 32
    assert fits_on_device(SOURCE, need) == (True, "23 images of 32x32 take 0.00 GB, 0.00 GB are allowed")
    assert not fits_on_device(SOURCE, need - 1)[0]
    several = Listed([encoded(noise(0)), encoded(noise(1)), encoded(noise(2, 9, 9))])
    assert fits_on_device(several, 10**9) == (False, "images are of several sizes, 12x10 and 9x9")
    assert fits_on_device(listed(0), 10**9) == (False, "no image can be read")
    assert not fits_on_device(Listed([b"", b""]), 10**9)[0]


def test_few_pictures_are_looked_at() -> None:
    class Counted(ArrayDataset):
        seen = 0

        def read(self, index: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
            self.seen += 1
            return np.zeros((8, 8, 3), np.uint8)

    source = Counted(np.zeros((5000, 1), np.uint8))
    assert fits_on_device(source, 5000 * 3 * 64)[0]
    assert source.seen <= 64


def test_a_first_picture_that_cannot_be_read() -> None:
    source = Listed([b"", encoded(noise(0)), encoded(noise(1))])
    assert fits_on_device(source, 10**6)[0]
    resident = DeviceDataset(source, device="cpu")
    assert resident.size == (12, 10)
    assert resident.valid.tolist() == [False, True, True]
    with pytest.raises(DataError, match=r"image-1\.png"):
        DeviceDataset(Listed([b"", b""]), device="cpu")

"""Segments follow the crops and flips of their images, and batches hold as many as the fullest image has."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.core.errors import BadImage, DataError
from vitrail.data.annotations.rle import decode, encode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.dataset import ArrayDataset, ConcatDataset, SubsetDataset
from vitrail.data.datasets.scenes import SceneDataset
from vitrail.data.device_dataset import DeviceDataset, fits_on_device
from vitrail.data.loader import Batch, BatchStream, eval_batches, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.segment_targets import SegmentTargets, pack_masks, round_up_places, unpack_planes
from vitrail.data.targets import Geometry
from vitrail.data.transforms.augmentation import Augmentation, cifar
from vitrail.data.transforms.crop import InceptionCrop, ScaleJitter

RNG = np.random.default_rng(3)


class RandomSegments(ArrayDataset):
    """Grey images of 12 x 10 pixels; image i has 5 * i segments, which overlap."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(np.full((count, 12, 10, 3), 128, np.uint8))
        self.segment_classes = (SegmentClass("cat"), SegmentClass("dog"), SegmentClass("sky", thing=False))
        self.masks = [RNG.random((5 * at, 12, 10)) < 0.3 for at in range(count)]

    def segments(self, index: int) -> Segments:
        masks = self.masks[index]
        count = len(masks)
        numbers, crowd = np.arange(count, dtype=np.int64) % 3, np.arange(count) % 4 == 3
        boxes = np.zeros((count, 4))
        return Segments(size=(12, 10), classes=numbers, boxes=boxes, crowd=crowd, masks=tuple(map(encode, masks)))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 1.0])
def test_run_lengths_return_to_the_mask(share: float) -> None:
    mask = RNG.random((7, 5)) < share
    rle = encode(mask)
    assert rle.counts.sum() == 35
    assert rle.area == mask.sum()
    assert np.array_equal(decode(rle), mask)


def test_a_batch_holds_every_segment_of_each_image() -> None:
    source = RandomSegments()
    (batch,) = eval_batches(source, Preprocessing(image=(12, 10)), batch=5, targets=SegmentTargets())
    planes, classes, crowd = batch.segments
    assert planes.shape == (5, 2, 12, 10)
    assert classes.shape == crowd.shape == (5, 16)
    masks = unpack_planes(planes).numpy().astype(bool)
    for at in range(4):
        assert np.array_equal(masks[at, : 5 * at], source.masks[at])
        assert not masks[at, 5 * at :].any()
        assert classes[at].tolist() == [number % 3 for number in range(5 * at)] + [-1] * (16 - 5 * at)
    assert (classes[4] == -1).all()
    assert not planes[4].any()
    assert crowd[1].tolist() == [False, False, False, True, False] + [False] * 11
    assert torch.equal(pack_masks(unpack_planes(planes)), planes)


def test_segments_move_with_the_view_and_unseen_ones_are_dropped() -> None:
    masks = np.zeros((2, 4, 4), bool)
    masks[0, :, 0], masks[1, 3, 3] = True, True
    segments = Segments(
        size=(4, 4),
        classes=np.array([4, 7]),
        boxes=np.zeros((2, 4)),
        crowd=np.zeros(2, bool),
        masks=tuple(map(encode, masks)),
    )
    left = Geometry(whole=(4, 4), box=(0, 0, 4, 2), inner=(4, 2), pad=(1, 0, 0, 0), flip=True)
    seen = SegmentTargets().view(segments, left)
    assert seen.classes.tolist() == [4]
    assert seen.planes.tolist() == [[[0, 1, 0]] * 4]


def test_a_segment_mask_of_another_size_makes_the_image_unreadable() -> None:
    source = RandomSegments()
    source.pictures = np.full((4, 9, 9, 3), 128, np.uint8)
    (batch,) = eval_batches(source, Preprocessing(image=(12, 10)), batch=4, targets=SegmentTargets())
    assert not batch.valid.any()
    assert len(batch.unreadable) == 4


def test_parts_of_a_set_keep_their_segments() -> None:
    source = RandomSegments()
    some = SubsetDataset(source, [2, 1])
    assert some.segment_classes == source.segment_classes
    assert len(some.segments(0)) == 10
    assert len(ConcatDataset([some, source]).segments(3)) == 5
    plain = ArrayDataset(np.asarray(Image.new("RGB", (4, 4)))[None])
    with pytest.raises(DataError):
        SegmentTargets().check(plain)
    with pytest.raises(DataError):
        ConcatDataset([plain, ArrayDataset(np.zeros((1, 4, 4, 3), np.uint8)), source])


def test_places_are_eight_doubled() -> None:
    assert [round_up_places(count) for count in (0, 1, 8, 9, 16, 17, 33, 65)] == [8, 8, 8, 16, 16, 32, 64, 128]


def shown(batch: Batch) -> list[list[set[tuple[int, bool, bytes]]]]:
    """Class, crowd and mask of every segment, for each image of each view."""
    views = list[list[set[tuple[int, bool, bytes]]]]()
    for target in batch.targets:
        assert not isinstance(target, torch.Tensor)
        masks = unpack_planes(target.planes)
        assert torch.equal(masks.flatten(2).any(2), target.classes >= 0)  # none without a pixel
        assert not (target.crowd & (target.classes < 0)).any()
        rows = zip(target.classes.tolist(), target.crowd.tolist(), masks.numpy(), strict=True)
        views.append([{(k, c, m.tobytes()) for k, c, m in zip(*row, strict=True) if k >= 0} for row in rows])
    return views


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "views",
    [
        [Augmentation(crop=ScaleJitter(size=(9, 12), scale=(0.5, 4.0)))],
        [Augmentation(crop=InceptionCrop(size=(7, 7), area=(0.05, 0.3)), flip=1.0), cifar((12, 10), padding=2)],
    ],
    ids=["jitter", "two views"],
)
def test_on_the_device_the_segments_are_the_loaders(views: list[Augmentation], device: str) -> None:
    source = RandomSegments(5)
    resident = DeviceDataset(source, device=device, targets=SegmentTargets())
    for group in (1, 3):
        stream = BatchStream(batch=4, seed=2, start=1, stop=6)
        here = list(train_batches(source, views, stream, targets=SegmentTargets()))
        there = [batch.to("cpu") for batch in resident.train_batches(views, stream, group=group)]
        assert [batch.step for batch in there] == [1, 2, 3, 4, 5]
        assert [shown(batch) for batch in there] == [shown(batch) for batch in here]
        assert all(torch.equal(a.sample, b.sample) for a, b in zip(here, there, strict=True))
    assert sum(len(one) for batch in here for view in shown(batch) for one in view) > 50


class OneUnusable(RandomSegments):
    def segments(self, index: int) -> Segments:
        if index == 1:
            raise BadImage("damaged")
        return super().segments(index)


def test_an_unusable_image_has_no_segments_on_the_device() -> None:
    source = OneUnusable(3)
    resident = DeviceDataset(source, device="cpu", targets=SegmentTargets())
    assert resident.valid.tolist() == [True, False, True]
    (batch,) = resident.train_batches(cifar((12, 10), padding=0), BatchStream(batch=3, stop=1))
    assert (batch.segments.classes[~batch.valid] == -1).all()
    assert (batch.segments.classes >= 0).sum(1).tolist() == [{0: 0, 1: 0, 2: 10}[at] for at in batch.sample.tolist()]


def test_planes_count_for_what_fits_on_the_device() -> None:
    source = SceneDataset(20, size=32)
    most = max(len(source.segments(at)) for at in range(20))
    need = 20 * (3 + round_up_places(most) // 8) * 32 * 32
    assert fits_on_device(source, need, SegmentTargets())[0]
    assert not fits_on_device(source, need - 1, SegmentTargets())[0]

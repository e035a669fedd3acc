"""Segments follow the crops and flips of their images, and batches hold as many as the fullest image has."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.core.errors import DataError
from vitrail.data.annotations.rle import decode, encode
from vitrail.data.annotations.segments import SegmentClass, Segments
from vitrail.data.dataset import ArrayDataset, ConcatDataset, SubsetDataset
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.segment_targets import SegmentTargets, pack_masks, round_up_places, unpack_planes
from vitrail.data.targets import Geometry

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
    assert torch.equal(seen.masks[0], torch.tensor([[False, True, False]] * 4))


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

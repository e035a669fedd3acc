"""Masks in the size of the image, from logits in the size of a view."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import Geometry
from vitrail.tasks.segmentation.mask_drawing import make_palette
from vitrail.tasks.segmentation.prediction import PredictedMask, resize_argmax, segment

NAMES = ("ground", "cat", "dog", "bird", "fish")


def random_logits(classes: int, size: Pair) -> torch.Tensor:
    return torch.randn(classes, *size, generator=torch.Generator().manual_seed(0))


def test_an_image_that_was_squashed_gets_a_mask_of_its_own_size() -> None:
    logits = random_logits(5, (8, 8))
    mask = segment(logits, Preprocessing(image=(8, 8)).geometry((21, 34)))
    wanted = F.interpolate(logits[None], (21, 34), mode="bilinear", align_corners=False)[0].argmax(0)
    assert mask.dtype == np.uint8
    assert np.array_equal(mask, wanted.numpy())


@pytest.mark.parametrize("whole", [(20, 40), (40, 20), (16, 16), (30, 31)])
def test_what_a_centre_crop_leaves_out_has_no_class(whole: Pair) -> None:
    view = Preprocessing(image=(8, 8), resize=10).geometry(whole)
    mask = segment(random_logits(5, (8, 8)), view)
    top, left, height, width = view.box
    rows, columns = (np.arange(side) + 0.5 for side in whole)
    seen = np.outer(abs(rows - top - height / 2) < height / 2, abs(columns - left - width / 2) < width / 2)
    assert mask.shape == whole
    assert not seen.all()
    assert ((mask != 255) != seen).mean() < 0.15  # the edge of the box lies within a pixel
    assert (mask[mask != 255] < 5).all()
    rows, columns = np.nonzero(mask != 255)
    assert abs((rows.min() + rows.max() + 1) / 2 - whole[0] / 2) <= 0.5
    assert abs((columns.min() + columns.max() + 1) / 2 - whole[1] / 2) <= 0.5


def test_a_place_of_the_image_keeps_its_class_through_crop_and_back() -> None:
    """Each quarter of the image is of a class; its pixels come back where they were, also out of a mirrored view."""
    truth = np.zeros((40, 60), np.uint8)
    truth[:20, 30:], truth[20:, :30], truth[20:, 30:] = 1, 2, 3
    plain = Preprocessing(image=(16, 16), resize=20).geometry((40, 60))
    flipped = Geometry(whole=plain.whole, box=plain.box, inner=plain.inner, pad=plain.pad, flip=True)
    padded = Geometry(whole=(40, 60), box=(0, 0, 40, 60), inner=(10, 16), pad=(1, 2, 3, 4))
    for view in (plain, flipped, padded):
        seen = view.mask(torch.from_numpy(truth), 255)
        logits = F.one_hot(seen.where(seen != 255, torch.tensor(4, dtype=torch.uint8)).long(), 5).permute(2, 0, 1)
        mask = segment(logits.float(), view)
        assert (mask != 255).any()
        assert np.array_equal(mask[mask != 255], truth[mask != 255])


def test_class_by_class_gives_what_all_at_once_give() -> None:
    # Whole numbers at four times the size are resized exactly, whatever order a processor adds them in.
    logits = (random_logits(7, (4, 5)) * 64).round()
    logits[5] = logits[2]  # of two equal ones the earlier stands
    whole = F.interpolate(logits[None], (16, 20), mode="bilinear", align_corners=False)[0]
    found = resize_argmax(logits, (16, 20))
    assert set(np.unique(found)) == {0, 1, 2, 3, 4, 6}
    picked = np.take_along_axis(whole.numpy(), found[None].astype(np.int64), 0)[0]
    assert np.array_equal(picked, whole.amax(0).numpy())


def test_the_last_class_of_a_byte_can_be_predicted() -> None:
    logits = torch.zeros(255, 2, 2)
    logits[254] = 1
    assert (segment(logits, Preprocessing(image=(2, 2)).geometry((3, 3))) == 254).all()


def test_regions_are_the_classes_that_occur_the_largest_first() -> None:
    mask = np.array([[1, 1, 1, 3], [3, 0, 255, 255]], np.uint8)
    told = PredictedMask(mask, NAMES)
    assert [(one.label, one.index, one.share) for one in told.regions] == [
        ("cat", 1, 3 / 8),
        ("bird", 3, 2 / 8),
        ("ground", 0, 1 / 8),
    ]
    plain = told.to_dict()
    assert plain["size"] == [2, 4]
    assert [region["label"] for region in plain["regions"]] == ["cat", "bird", "ground"]
    assert str(told).startswith("cat 37.5 %")


def test_a_png_keeps_the_indices_and_shows_the_colours() -> None:
    mask = np.arange(256, dtype=np.uint8).reshape(8, 32)
    with Image.open(io.BytesIO(PredictedMask(mask, NAMES).png())) as image:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image), mask)
        assert np.array_equal(np.asarray(image.convert("RGB")).reshape(256, 3), make_palette(NAMES))
    assert len(np.unique(make_palette(NAMES), axis=0)) == 256

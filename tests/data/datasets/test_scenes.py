"""Scenes: segments that belong to the pixels, and nothing that depends on when or where."""

import pickle
import time
from hashlib import sha256

import numpy as np
import pytest

from vitrail.core.errors import ConfigError, SourceNotFound
from vitrail.data.collection import open_collection
from vitrail.data.datasets.builtin_sets import COLOURS
from vitrail.data.datasets.scenes import CLASSES, FEWEST, GROUND, MOST, SIMPLE, SKY, VISIBLE, SceneDataset


def test_a_scene_is_a_function_of_seed_and_index() -> None:
    some, more = SceneDataset(5, size=64), SceneDataset(1000, size=64)
    assert all(np.array_equal(some.read(i), more.read(i)) for i in (3, 1, 4, 1))
    assert np.array_equal(pickle.loads(pickle.dumps(some)).mask(2), more.mask(2))
    assert not np.array_equal(SceneDataset(5, size=64, seed=1).read(2), some.read(2))
    others = [SceneDataset(6, size=64), SceneDataset(5, size=32), SceneDataset(5, size=64, seed=1)]
    assert len({some.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert some.fingerprint == SceneDataset(5, size=64).fingerprint


def test_pixels_and_masks_are_the_same_on_every_machine() -> None:
    source = SceneDataset(24, size=48)
    pixels, masks = (sha256(b"".join(read(i).tobytes() for i in range(24))) for read in (source.read, source.mask))
    assert (pixels.hexdigest()[:16], masks.hexdigest()[:16]) == ("a7524a987fe6e184", "b2028113115eded7")


@pytest.mark.parametrize("size", [32, 64, 150])
def test_every_pixel_has_one_segment_and_boxes_touch_them(size: int) -> None:
    source = SceneDataset(40, size=size)
    for index in range(40):
        found, classes = source.segments(index), source.mask(index)
        masks = found.decode()
        assert found.size == (size, size)
        assert (masks.sum(0) == 1).all()
        assert not found.crowd.any()
        painted = (masks * found.classes[:, None, None]).sum(0)
        assert np.array_equal(painted, classes)
        for mask, (left, top, right, bottom) in zip(masks, found.boxes.astype(int), strict=True):
            assert mask[top:bottom, left:right].sum() == mask.sum()
            assert all(line.any() for line in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]))


def test_shapes_stay_visible_and_overlap() -> None:
    source, hidden, counts = SceneDataset(100, size=64), 0, list[int]()
    for index in range(100):
        found, layout = source.segments(index), source.layout(index)
        things = found.classes < SKY
        counts.append(int(things.sum()))
        assert counts[-1] == len(layout.shapes)
        for mask, shape in zip(found.decode()[things], layout.shapes, strict=True):
            whole, left = int((shape.outline.distance <= 0).sum()), int(mask.sum())
            assert left >= max(VISIBLE[1], VISIBLE[0] * whole)
            hidden += left < whole
        assert {SKY, GROUND} == set(found.classes[~things].tolist())
    assert (min(counts), max(counts)) == (FEWEST, MOST)
    assert hidden > 0.2 * sum(counts)


def test_classes_and_colours_are_independent() -> None:
    source, table = SceneDataset(250, size=32), np.zeros((8, 8))
    tints = np.array(list(COLOURS.values()), float)
    for index in range(250):
        shapes = source.layout(index).shapes
        hues = [
            int(np.abs(tints / tints.sum(1, keepdims=True) - one.tint / one.tint.sum()).sum(1).argmin())
            for one in shapes
        ]
        assert len(set(hues)) == len(hues)  # no colour comes twice
        for one, hue in zip(shapes, hues, strict=True):
            table[one.shape, hue] += 1
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < 49 + 4 * 98**0.5  # chi squared of 49 degrees
    assert table.sum(1).min() > 0.7 * table.sum() / 8


def test_pixels_change_at_the_edges_of_segments() -> None:
    """A segment's pixels vary little where its mask says that it is; across its edge they jump."""
    source = SceneDataset(30, size=128)
    inside, across = list[float](), list[float]()
    for index in range(30):
        pixels, segments = source.read(index).astype(float), source.segments(index)
        owner = segments.decode().argmax(0)
        steps = np.abs(np.diff(pixels, axis=1)).sum(-1)
        edge = owner[:, 1:] != owner[:, :-1]
        across.append(steps[edge].mean())
        inside.append(steps[~edge].mean())
    assert np.mean(across) > 8 * np.mean(inside)


def test_named_sets() -> None:
    whole, small = open_collection("scenes"), open_collection("scenes/64@test")
    assert {split: len(source) for split, source in whole.splits.items()} == {"train": 10_000, "test": 1_000}
    assert (whole.classes, whole.segment_classes) == ((), CLASSES)
    assert whole.splits["train"].open_image(0).size == (128, 128)
    assert small.splits["test"].open_image(0).size == (64, 64)
    assert not np.array_equal(whole.splits["train"].read(0), whole.splits["test"].read(0))


def test_simple_scenes_have_fewer_larger_shapes_of_few_kinds() -> None:
    source = open_collection("scenes/simple").splits["test"]
    assert [one.name for one in source.segment_classes] == [*SIMPLE.shapes, "sky", "ground"]
    assert [one.thing for one in source.segment_classes] == [True] * len(SIMPLE.shapes) + [False] * 2
    counts, seen, share = list[int](), set[int](), list[float]()
    for index in range(40):
        found = source.segments(index)
        masks, things = found.decode(), found.classes < len(SIMPLE.shapes)
        assert np.array_equal((masks * found.classes[:, None, None]).sum(0), source.mask(index))
        counts.append(int(things.sum()))
        seen |= set(found.classes.tolist())
        share += [mask.mean() for mask in masks[things]]
    assert (min(counts), max(counts)) == (FEWEST, SIMPLE.most)
    assert seen == set(range(len(source.segment_classes)))
    usual = SceneDataset(40, size=64, seed=1)
    parts = [usual.segments(index) for index in range(40)]
    assert np.mean(share) > 1.5 * np.mean([m.mean() for one in parts for m in one.decode()[one.classes < SKY]])
    assert source.fingerprint != SceneDataset(1000, size=64, seed=1).fingerprint


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="size=8"):
        SceneDataset(10, size=8)
    with pytest.raises(ConfigError, match="size=9999"):
        open_collection("scenes/9999")
    with pytest.raises(SourceNotFound):
        open_collection("scenes/large")
    with pytest.raises(IndexError):
        SceneDataset(10).read(10)


@pytest.mark.slow
def test_quick_enough_to_train_on() -> None:
    for size, limit in ((64, 3e-3), (128, 6e-3)):
        source = SceneDataset(1000, size=size)
        source.read(0)
        best = np.inf
        for start in range(0, 500, 50):
            began = time.process_time()
            for index in range(start + 1, start + 51):
                source.read(index)
            best = min(best, (time.process_time() - began) / 50)
        assert best < limit

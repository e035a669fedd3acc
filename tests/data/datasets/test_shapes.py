"""Rendered shapes: labels, boxes and masks that belong to the pixels, and nothing that depends on when or where."""

import itertools
import pickle
import time
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest

from vitrail.core.errors import ConfigError, UnknownName
from vitrail.data.datasets import builtin_sets as shapes
from vitrail.data.datasets.builtin_sets import CLASSES, COLOURS, POSITIONS, SIZES, ShapesDataset

LABELS = ("shape", "colour", "position", "size")
FINGERPRINTS = {  # of the first hundred images; runs of 0.1.0 resume by them
    "shape": "90158eaac46a645e",
    "colour": "d096c8ccbd113c04",
    "position": "62f1d76dba02a308",
    "size": "4b92035fcdba531c",
}


def attributes(source: ShapesDataset, index: int) -> SimpleNamespace:
    """The labels of an image by name, and where its shape is."""
    scene = source.scene(index)
    names = {label: CLASSES[label][getattr(scene, label)] for label in LABELS}
    return SimpleNamespace(**names, x=scene.x, y=scene.y, radius=scene.radius, turn=scene.turn / shapes.TURNS)


def test_picture_is_a_function_of_seed_and_index() -> None:
    some, more = ShapesDataset(10), ShapesDataset(1000)
    assert all(np.array_equal(some.read(i), more.read(i)) for i in range(10))
    assert np.array_equal(pickle.loads(pickle.dumps(some)).read(7), some.read(7))
    assert not np.array_equal(ShapesDataset(10, seed=1).read(7), some.read(7))
    assert np.array_equal(ShapesDataset(10, label="colour").read(3), some.read(3))
    assert some.fingerprint == ShapesDataset(10).fingerprint
    others = [ShapesDataset(11), ShapesDataset(10, size=32), ShapesDataset(10, seed=1), ShapesDataset(10, label="size")]
    assert len({some.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_pixels_are_the_same_on_every_machine() -> None:
    source = ShapesDataset(64, size=48)
    digest = sha256(b"".join(source.read(i).tobytes() for i in range(64))).hexdigest()
    assert digest[:16] == "252c5608d7ce3857"


@pytest.mark.parametrize("label", LABELS)
def test_labels_say_what_the_attributes_say(label: str) -> None:
    source = ShapesDataset(200, label=label)
    assert [source.classes[source.labels[i][0]] for i in range(200)] == [
        getattr(attributes(source, i), label) for i in range(200)
    ]


@pytest.mark.parametrize("label", LABELS)
def test_classes_are_balanced(label: str) -> None:
    counts = ShapesDataset(20_000, label=label).labels.counts(len(CLASSES[label]))
    expected = 20_000 / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 2.5 * len(counts) + 10  # chi squared, far in the tail


def test_attributes_are_independent() -> None:
    drawn = np.stack([ShapesDataset(20_000, label=label).labels.values for label in LABELS]).astype(float)
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.03


def test_blocks_of_labels_do_not_show() -> None:
    assert np.array_equal(shapes.draw_labels("colour", 0, 1000, block=64), shapes.draw_labels("colour", 0, 1000))


@pytest.mark.parametrize("size", [32, 64, 200])
def test_boxes_and_masks_fit_the_attributes(size: int) -> None:
    source = ShapesDataset(160, size=size)
    for i in range(160):
        mask, (left, top, right, bottom), what = source.mask(i) > 0, source.box(i), attributes(source, i)
        assert mask[top:bottom, left:right].sum() == mask.sum() > 0
        assert all(line.any() for line in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]))
        low, high = SIZES[what.size]
        assert low <= what.radius <= high
        assert max(right - left, bottom - top) <= 2 * what.radius * size + 2
        assert max(right - left, bottom - top) >= what.radius * size
        row, column = divmod(POSITIONS.index(what.position), 3)
        assert (int(what.y * 3), int(what.x * 3)) == (row, column)
        assert left <= what.x * size <= right
        assert 0 < min(left, top) < max(right, bottom) < size


def test_mask_is_where_the_colour_is() -> None:
    source = ShapesDataset(60, size=96)
    for i in range(60):
        pixels, mask = source.read(i).astype(float), source.mask(i) > 0
        colour = np.array(COLOURS[attributes(source, i).colour])
        near = np.abs(pixels / pixels.sum(-1, keepdims=True) - colour / colour.sum()).sum(-1) < 0.05
        assert (near & mask).sum() > 0.6 * mask.sum()
        assert (near & ~mask).sum() < 0.15 * mask.sum() + 10


@pytest.mark.parametrize("label", LABELS)
def test_masks_hold_the_class_of_the_shape(label: str) -> None:
    """Whatever the image is labelled with; and labels and fingerprints are as they were without masks."""
    source = ShapesDataset(100, label=label)
    assert source.pixel_classes == ("background", *CLASSES["shape"])
    for i in range(100):
        mask = source.mask(i)
        assert (mask.dtype, mask.shape) == (np.uint8, (64, 64))
        assert set(np.unique(mask)) == {0, source.pixel_classes.index(attributes(source, i).shape)}
    assert source.fingerprint[:16] == FINGERPRINTS[label]


def test_resolution_changes_nothing_but_the_sampling() -> None:
    small, large = ShapesDataset(20, size=64), ShapesDataset(20, size=256)
    for i in range(20):
        coarse = (large.mask(i) > 0).reshape(64, 4, 64, 4).mean((1, 3))
        assert np.abs(coarse - (small.mask(i) > 0)).mean() < 0.02
        assert large.box(i)[0] == pytest.approx(4 * small.box(i)[0], abs=5)


def test_shapes_differ_from_each_other() -> None:
    """Every class has its own area in its own circle: no two are drawn alike."""
    areas: dict[str, list[float]] = {}
    source = ShapesDataset(300, size=128)
    for i in range(300):
        what = attributes(source, i)
        areas.setdefault(what.shape, []).append((source.mask(i) > 0).sum() / (what.radius * 128) ** 2)
    means = sorted(float(np.mean(values)) for values in areas.values())
    assert len(means) == 8
    assert min(b - a for a, b in itertools.pairwise(means)) > 0.02


def test_default_set() -> None:
    splits = shapes.read_builtin("shapes/colour")
    assert {name: len(source) for name, source in splits.items()} == {"train": 10_000, "test": 2_000}
    assert splits["train"].classes == tuple(COLOURS)
    assert not np.array_equal(splits["train"].read(0), splits["test"].read(0))
    assert splits["train"].open_image(0).size == (64, 64)


def test_mistakes() -> None:
    with pytest.raises(UnknownName):
        ShapesDataset(10, label="color")
    with pytest.raises(ConfigError, match="size=4"):
        ShapesDataset(10, size=4)
    with pytest.raises(IndexError):
        ShapesDataset(10).read(10)


@pytest.mark.slow
def test_quick_enough_to_train_on() -> None:
    source = ShapesDataset(300)
    times: list[float] = []
    for _ in range(5):
        start = time.process_time()
        for i in range(300):
            source.read(i)
        times.append(time.process_time() - start)
    assert 300 / min(times) > 1000  # 2,000 to 3,500 were measured

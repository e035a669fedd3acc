"""Which pictures a run sees: a share of the training split, with or without labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.labels import Labels
from vitrail.data.source import Arrays, Source, Subset
from vitrail.train.config import Data
from vitrail.train.pictures import cut, find_pictures


def collection(count: int, classes: int) -> Collection:
    """Tiny pictures; without classes they have no labels."""
    pixels = np.zeros((count, 2, 2, 3), np.uint8)
    labels = Labels(np.arange(count) % classes) if classes else None
    train = Arrays(pixels, labels, tuple(f"class {k}" for k in range(classes)))
    return Collection(name="made", kind="made", path=None, splits={"train": train})


def members(source: Source) -> set[int]:
    return set(source.indices.tolist()) if isinstance(source, Subset) else set(range(len(source)))


@given(
    classes=st.integers(0, 5),
    shares=st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0)),
    seed=st.integers(0, 3),
    dev=st.sampled_from([0.0, 0.2]),
)
def test_a_smaller_share_lies_in_a_larger_one(classes: int, shares: tuple[float, float], seed: int, dev: float) -> None:
    whole = collection(120, classes)
    small, large = (
        cut(whole, Data(source="made", part=part, part_seed=seed, test="none"), labelled=False)
        for part in sorted(shares)
    )
    assert members(small.train) <= members(large.train)
    held = cut(whole, Data(source="made", part=shares[0], part_seed=seed, dev=dev, test="none"), labelled=False)
    alone = cut(whole, Data(source="made", part=shares[0], part_seed=seed, test="none"), labelled=False)
    assert members(held.train) | (members(held.watch) if held.watch else set()) == members(alone.train)


def test_one_percent_and_ten_of_a_set() -> None:
    for part, each in ((0.05, 7), (0.1, 14), (0.5, 72)):
        counts = find_pictures(Data(source="digits", part=part)).train.labels.counts(10)
        assert abs(counts - each).max() <= 2, counts
    other = find_pictures(Data(source="digits", part=0.1, part_seed=1))
    assert members(other.train) != members(find_pictures(Data(source="digits", part=0.1)).train)
    assert other.fingerprint != find_pictures(Data(source="digits", part=0.1)).fingerprint
    assert other.test is not None
    assert len(other.test) == 360


def test_a_share_that_leaves_a_class_empty_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.part=0.001 of 1,437 training pictures: .* use 0.0036 or more"):
        find_pictures(Data(source="digits", part=0.001))


@pytest.mark.parametrize("part", [0.0, -0.1, 1.5])
def test_a_share_is_a_share(part: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        Data(part=part)


def test_without_labels_a_dev_split_is_drawn_at_random() -> None:
    found = cut(collection(100, 0), Data(source="made", dev=0.1, test="none"), labelled=False)
    assert (len(found.train), found.classes, found.watched, found.chooses) == (90, (), "dev", False)
    assert found.watch is not None
    held = sorted(members(found.watch))
    assert held != list(range(10))
    assert not members(found.train) & set(held)
    with pytest.raises(DataError, match="made has no labels"):
        cut(collection(100, 0), Data(source="made"))


@pytest.mark.parametrize(
    ("splits", "dev", "watched"),
    [
        (("train",), 0.0, ""),
        (("train", "test"), 0.0, "test"),
        (("train", "val", "test"), 0.0, "val"),
        (("train",), 0.2, "dev"),
    ],
)
def test_any_split_that_there_is_can_be_watched(splits: tuple[str, ...], dev: float, watched: str) -> None:
    """So recipes watch CIFAR-10's test split, and take a folder that has none."""
    whole = collection(40, 2)
    parts = Collection(name="made", kind="made", path=None, splits=dict.fromkeys(splits, whole.splits["train"]))
    assert cut(parts, Data(source="made", dev=dev, watch="any")).watched == watched

"""Which images a run sees: a share of the training split, with or without labels."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ArrayDataset, ImageDataset, Labels, SubsetDataset
from vitrail.data.splits import Selection
from vitrail.train.config import Data
from vitrail.train.data import open_splits, split_collection


def collection(count: int, classes: int) -> Collection:
    """Tiny images; without classes they have no labels."""
    pixels = np.zeros((count, 2, 2, 3), np.uint8)
    labels = Labels(np.arange(count) % classes) if classes else None
    train = ArrayDataset(pixels, labels, tuple(f"class {k}" for k in range(classes)))
    return Collection(name="made", kind="made", path=None, splits={"train": train})


def members(source: ImageDataset) -> set[int]:
    return set(source.indices.tolist()) if isinstance(source, SubsetDataset) else set(range(len(source)))


@given(
    classes=st.integers(0, 5),
    shares=st.tuples(st.floats(0.3, 1.0), st.floats(0.05, 1.0)),  # of the first a part is held out
    seed=st.integers(0, 3),
    dev=st.sampled_from([0.0, 0.2]),
)
def test_a_smaller_share_lies_in_a_larger_one(classes: int, shares: tuple[float, float], seed: int, dev: float) -> None:
    whole = collection(120, classes)
    small, large = (
        split_collection(whole, Data(source="made", part=part, part_seed=seed, test="none"), None)
        for part in sorted(shares)
    )
    assert members(small.train) <= members(large.train)
    held = split_collection(whole, Data(source="made", part=shares[0], part_seed=seed, dev=dev, test="none"), None)
    alone = split_collection(whole, Data(source="made", part=shares[0], part_seed=seed, test="none"), None)
    assert members(held.train) | (members(held.watch) if held.watch else set()) == members(alone.train)


def test_one_percent_and_ten_of_a_set() -> None:
    for part, each in ((0.05, 7), (0.1, 14), (0.5, 72)):
        counts = open_splits(Data(source="digits", part=part)).train.labels.counts(10)
        assert abs(counts - each).max() <= 2, counts
    other = open_splits(Data(source="digits", part=0.1, part_seed=1))
    assert members(other.train) != members(open_splits(Data(source="digits", part=0.1)).train)
    assert other.fingerprint != open_splits(Data(source="digits", part=0.1)).fingerprint
    assert other.test is not None
    assert len(other.test) == 360


def test_a_share_that_leaves_a_class_empty_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.part=0.001 of 1,437 training images: .* use 0.0036 or more"):
        open_splits(Data(source="digits", part=0.001))


@pytest.mark.parametrize("part", [0.0, -0.1, 1.5])
def test_a_share_is_a_share(part: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        Data(part=part)


def test_without_labels_a_dev_split_is_drawn_at_random() -> None:
    found = split_collection(collection(100, 0), Data(source="made", dev=0.1, test="none"), None)
    assert (len(found.train), found.class_names, found.watch_name, found.can_select_best) == (90, (), "dev", False)
    assert found.watch is not None
    held = sorted(members(found.watch))
    assert held != list(range(10))
    assert not members(found.train) & set(held)
    with pytest.raises(DataError, match="made has no labels"):
        split_collection(collection(100, 0), Data(source="made"))


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
    assert split_collection(parts, Data(source="made", dev=dev, watch="any")).watch_name == watched


def dropping(path: Path, source: ImageDataset, *indices: int) -> str:
    """The file of a selection that leaves some out, as `vitrail data dedup` writes it."""
    rule = {"name": "dedup", "against": {"made@test": "0"}}
    made = Selection(source=source.fingerprint, rule=rule, indices=np.array(indices, np.int64), drop=True)
    made.save(path)
    return str(path)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_what_a_selection_drops_is_not_trained_on(part: float, tmp_path: Path) -> None:
    """Nor is it held out to choose by: it is gone before anything is cut."""
    whole = collection(40, 2)
    gone = set(range(0, 40, 4))
    path = dropping(tmp_path / "drop.json", whole.split("train"), *gone)
    data = Data(source="made", without=path, part=part, dev=0.2, test="none")
    found = split_collection(whole, data)
    assert found.watch is not None
    left = roots(found.train) | roots(found.watch)
    assert not left & gone
    assert len(left) == round(30 * part)
    assert found.without is not None
    assert (
        found.fingerprint != split_collection(whole, Data(source="made", part=part, dev=0.2, test="none")).fingerprint
    )


def roots(source: ImageDataset) -> set[int]:
    """The places in the whole set, through selections of selections."""
    places = np.arange(len(source))
    while isinstance(source, SubsetDataset):
        source, places = source.source, source.indices[places]
    return set(places.tolist())


def test_a_selection_of_other_pictures_is_refused(tmp_path: Path) -> None:
    path = dropping(tmp_path / "drop.json", collection(20, 2).split("train"), 1)
    with pytest.raises(DataError, match=r"data.without=.*drop.json: .* have changed since"):
        split_collection(collection(40, 2), Data(source="made", without=path, test="none"))
    with pytest.raises(DataError, match=r"data.without=.*nowhere.json: No such file"):
        split_collection(collection(40, 2), Data(source="made", without=str(tmp_path / "nowhere.json"), test="none"))


def test_a_selection_that_drops_everything_is_refused(tmp_path: Path) -> None:
    whole = collection(4, 2)
    path = dropping(tmp_path / "drop.json", whole.split("train"), 0, 1, 2, 3)
    with pytest.raises(DataError, match=r"data.without=.*drop.json leaves none of 4 images"):
        split_collection(whole, Data(source="made", without=path, test="none"))


def test_a_selection_that_takes_some_is_no_list_of_what_to_leave_out(tmp_path: Path) -> None:
    whole = collection(4, 2)
    taken = Selection(source=whole.split("train").fingerprint, rule={"name": "dev"}, indices=np.array([0, 1]))
    taken.save(tmp_path / "dev.json")
    with pytest.raises(DataError, match=r"data.without=.*dev.json lists images to keep"):
        split_collection(whole, Data(source="made", without=str(tmp_path / "dev.json"), test="none"))

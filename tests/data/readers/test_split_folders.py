"""Folders that are splits, folders that are classes, and folders that may be either."""

from pathlib import Path

import pytest
from PIL import Image

from vitrail.core.errors import DataError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.readers.folder import find_split_word


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(root / name, format="PNG")
    return root


def found(collection: Collection) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {name: (len(source), source.classes) for name, source in collection.splits.items()}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *[(name, "train") for name in ("train", "Training Set", "seg_train", "TRAIN 2", "trainingSet", "trainset")],
        *[(name, "val") for name in ("Validation", "valid.1", "dev-images", "val2017", "DEV")],
        *[(name, "test") for name in ("test-images", "Test Set", "testing_data", "2024 test")],
        *[(name, "train") for name in ("trainval", "train_val")],
        *[(name, None) for name in ("testudo", "trainers", "valley", "constrain", "train_test", "attest", "contest")],
    ],
)
def test_a_split_is_a_word_of_the_name(name: str, split: str | None) -> None:
    assert find_split_word(name) == split


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Training Set", "Test Set"),
        ("seg_train", "seg_test"),
        ("training_set/training_set", "test_set/test_set"),
        ("train/images", "test/images"),
        ("TRAIN 2", "validation-images"),
    ],
)
def test_folders_named_after_splits_are_splits(train: str, test: str, tmp_path: Path) -> None:
    tree(tmp_path, f"{train}/cat/1.png", f"{train}/dog/1.png", f"{test}/cat/1.png", "__MACOSX/cat/1.png")
    opened = open_collection(tmp_path)
    other = "val" if "valid" in test else "test"
    assert found(opened) == {"train": (2, ("cat", "dog")), other: (1, ("cat", "dog"))}


def test_a_single_class_in_each_split_too(tmp_path: Path) -> None:
    tree(tmp_path, "Training Set/cat/1.png", "Test Set/cat/1.png")
    assert found(open_collection(tmp_path)) == {"train": (1, ("cat",)), "test": (1, ("cat",))}


def test_test_images_without_classes_have_no_labels(tmp_path: Path) -> None:
    tree(tmp_path, "Training Set/cat/1.png", "Training Set/dog/1.png", "Test Set/1.png")
    assert found(open_collection(tmp_path)) == {"train": (2, ("cat", "dog")), "test": (1, ())}


def test_a_class_of_one_split_may_have_folders_of_its_own(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/monday/1.png", "val/cat/tuesday/1.png")
    assert found(open_collection(tmp_path))["val"] == (2, ("cat", "dog"))


@pytest.mark.parametrize(
    "classes",
    [
        ("airplane", "car", "train"),  # the vehicle
        ("Airport", "Bus station", "Train station"),
        ("test_negative", "test_positive"),
        ("Dev Patel", "Val Kilmer"),
        ("testudo", "valley"),
        ("beaker", "bullet train", "kettle", "lamp", "test tube"),
    ],
)
def test_classes_with_such_words_stay_classes(classes: tuple[str, ...], tmp_path: Path) -> None:
    tree(tmp_path, *(f"{name}/{number}.png" for name in classes for number in range(2)))
    assert found(open_collection(tmp_path)) == {"train": (2 * len(classes), classes)}


@pytest.mark.parametrize(
    ("names", "ways"),
    [
        (["A/cat/1", "A/dog/1", "B/cat/1", "B/dog/1"], ["{}/A", "classes:{}"]),
        (["A/cat/1", "B/cat/1", "C/cat/1"], ["{}/A", "classes:{}"]),
        (["cat/train/1", "cat/test/1", "dog/train/1", "dog/test/1"], ["{}/cat", "classes:{}"]),
        (["train_1/cat/1", "train_1/dog/1", "train_2/cat/1", "train_2/dog/1"], ["{}/train_1", "classes:{}"]),
        (["train/A/x/1", "train/A/y/1", "train/B/x/1", "train/B/y/1", "test/A/x/1"], ["{}/train/A", "splits:{}"]),
        (["dev/train/cat/1", "dev/test/cat/1"], ["{}/dev", "splits:{}"]),
        (["Training Set/cat/1", "Test Set/cat/1", "extra/1"], ["splits:{}", "classes:{}"]),
        (["Train images/1", "Test images/1", "extra/1"], ["splits:{}", "classes:{}"]),
        (["train/cat/1", "Train 2/cat/1", "test/cat/1"], ["two names for one split", "classes:{}"]),
        (["set/Training Set/cat/1", "set/Test Set/cat/1"], ["{}/set", "classes:{}"]),
    ],
)
def test_what_may_be_either_is_refused_with_both_ways(names: list[str], ways: list[str], tmp_path: Path) -> None:
    tree(tmp_path, *(f"{name}.png" for name in names))
    with pytest.raises(DataError) as refusal:
        open_collection(tmp_path)
    text = str(refusal.value)
    assert "\n" not in text
    for way in ways:
        assert way.format(tmp_path) in text
    for way in (way.format(tmp_path) for way in ways if "{}" in way):
        assert open_collection(way).splits


@pytest.mark.parametrize(
    "names",
    [
        ["a/images/1.png", "b/images/1.png"],  # as in Tiny ImageNet
        ["a/1.png", "a/crops/1.png", "b/1.png", "b/crops/1.png"],
        ["a/x/1.png", "a/y/1.png", "b/x/1.png"],
    ],
)
def test_subfolders_of_plain_classes(names: list[str], tmp_path: Path) -> None:
    assert open_collection(tree(tmp_path, *names)).classes == ("a", "b")


def test_the_reading_can_be_said(tmp_path: Path) -> None:
    tree(tmp_path, "Training Set/cat/1.png", "Test Set/cat/1.png", "extra/1.png")
    assert set(open_collection(f"splits:{tmp_path}").splits) == {"train", "test"}
    assert open_collection(f"classes:{tmp_path}").classes == ("Test Set", "Training Set", "extra")
    with pytest.raises(DataError):
        open_collection(f"splits:{tmp_path / 'extra'}")

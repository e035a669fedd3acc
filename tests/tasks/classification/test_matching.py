"""Outputs and classes find each other by name or by number, and what contradicts itself is refused."""

from pathlib import Path

import numpy as np
import pytest

from vitrail.core.errors import BadLabels, DataError
from vitrail.data.dataset import Labels
from vitrail.tasks.classification.metrics import match_classes, read_names

PETS = ("cat", "dog", "owl")


def test_the_same_names_in_another_order_are_found_by_name() -> None:
    found = match_classes(3, PETS, ("owl", "cat", "dog"), "photos")
    assert (found.how, found.table.tolist(), found.names, found.notes) == ("by name", [2, 0, 1], PETS, ())
    labels = found.relabel(Labels(np.array([0, 1, 2, -1])))
    assert labels.values.tolist() == [2, 0, 1, -1]


def test_several_labels_are_renumbered_too() -> None:
    found = match_classes(3, PETS, ("owl", "cat", "dog"), "photos").relabel(Labels.several([[0, 1], [], [2]]))
    assert [found[at] for at in range(3)] == [(2, 0), (), (1,)]


def test_some_of_the_names_are_enough() -> None:
    found = match_classes(3, PETS, ("owl",), "photos")
    assert found.table.tolist() == [2]
    assert "1 of the network's 3 classes" in found.notes[0]


def test_a_strange_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        BadLabels, match=r"photos has cow, which is not a class of the network \(cat, dog and owl\).*--labels"
    ):
        match_classes(3, PETS, ("cat", "cow", "owl"), "photos")
    assert match_classes(3, PETS, ("cat", "cow", "owl"), "photos", by_number=True).table.tolist() == [0, 1, 2]


def test_numbers_are_no_names() -> None:
    found = match_classes(3, PETS, ("0", "1", "2"), "tar")
    assert (found.how, found.names) == ("by number", PETS)
    found = match_classes(3, ("0", "1", "2"), PETS, "photos")
    assert (found.how, found.names) == ("by number", PETS)
    assert match_classes(3, None, PETS, "photos").names == PETS
    assert match_classes(1000, None, tuple(map(str, range(1000))), "tar").table.tolist() == list(range(1000))


def test_folders_called_by_numbers_go_by_the_numbers() -> None:
    names = tuple(sorted(map(str, range(12))))  # 0, 1, 10, 11, 2, ...
    found = match_classes(12, None, names, "photos")
    assert found.table.tolist() == [int(name) for name in names]
    assert "not by their order" in found.notes[0]
    assert match_classes(12, names, names, "photos").table.tolist() == list(range(12))  # trained on these very folders
    assert match_classes(12, tuple(map(str, range(12))), names, "photos").table.tolist() == [
        int(name) for name in names
    ]


@pytest.mark.parametrize("labels", [None, PETS])
def test_another_count_without_names_is_refused(labels: tuple[str, ...] | None) -> None:
    with pytest.raises(BadLabels):
        match_classes(3, labels, ("0", "1"), "tar")
    with pytest.raises(BadLabels):
        match_classes(3, labels, tuple("0123"), "tar", by_number=True)
    assert match_classes(3, labels, ("0", "1"), "tar", by_number=True).table.tolist() == [0, 1]
    assert match_classes(3, labels, ("2",), "photos", by_number=True).table.tolist() == [2]
    with pytest.raises(BadLabels):
        match_classes(3, labels, ("7",), "photos", by_number=True)


def test_names_without_names_need_the_same_count() -> None:
    with pytest.raises(BadLabels):
        match_classes(3, None, ("cat", "dog"), "photos")


def test_two_classes_of_one_name() -> None:
    twice = ("crane", "dog", "crane")
    assert match_classes(3, twice, twice, "photos").table.tolist() == [0, 1, 2]
    with pytest.raises(BadLabels):
        match_classes(3, twice, ("dog", "crane", "crane"), "photos")


def test_a_network_without_a_classifier() -> None:
    with pytest.raises(DataError):
        match_classes(0, None, PETS, "photos")


def test_real_labels_follow_the_order_of_the_data() -> None:
    rows = [(0, 2), (), (1,)]
    plain = match_classes(3, None, PETS, "imagenet").usual(rows, "real.json")
    assert [plain[at] for at in range(3)] == rows
    turned = match_classes(3, PETS, ("owl", "cat", "dog"), "imagenet").usual(rows, "real.json")
    assert [turned[at] for at in range(3)] == [(2, 1), (), (0,)]
    with pytest.raises(BadLabels):
        match_classes(3, PETS, ("owl",), "imagenet").usual(rows, "real.json")
    with pytest.raises(BadLabels):
        match_classes(2, None, ("a", "b"), "imagenet").usual(rows, "real.json")


def test_names_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("n01440764 tench\nn01443537 great_white_shark\n\n")
    assert read_names(path, 2) == ("tench", "great white shark")
    path.write_text("cat\ndog")
    assert read_names(path, 2) == ("cat", "dog")
    with pytest.raises(BadLabels):
        read_names(path, 3)
    with pytest.raises(DataError):
        read_names(tmp_path / "nothing.txt", 2)

"""The 19 tasks: from files in their true formats, with the right classes; and with the right sizes at full size."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets import writers
from vitrail.core.errors import DataError, UnknownName
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS
from vitrail.data.datasets.open_by_name import choose_samples, find_vtab_task, open_vtab

OWN_CLASSES = {"caltech101": 3, "dtd": 3, "eurosat": 2, "pets": 3, "resisc45": 3, "sun397": 3}  # of the tiny copies


def test_there_are_nineteen_in_three_groups() -> None:
    groups = [task.group for task in VTAB_TASKS.values()]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]


@pytest.mark.parametrize("name", VTAB_TASKS)
def test_a_task_builds_from_its_original_files(name: str, tmp_path: Path) -> None:
    task = VTAB_TASKS[name]
    home = tmp_path / SETS[task.source].folder
    writers.HOMES[SETS[task.source].folder](home)
    splits = open_vtab(f"vtab/{name}", home, first=(8, 2))
    assert list(splits) == ["train", "val", "test", "train8", "val2", "trainval10"]
    assert [len(splits[split]) for split in ("train8", "val2", "trainval10")] == [8, 2, 10]
    for split, source in splits.items():
        assert len(source) > 0, split
        assert len(source.classes) == OWN_CLASSES.get(name, task.classes)
        source.labels.check(len(source.classes), split)
        sample = pickle.loads(pickle.dumps(source)).open_image(len(source) - 1)  # as a loader process gets it
        assert sample.rgb().mode == "RGB"
    seen = {split: {splits[split].name(i) for i in range(len(splits[split]))} for split in ("train", "val", "test")}
    assert [splits["trainval10"].name(i) for i in range(10)] == [
        *(splits["train"].name(i) for i in range(8)),
        *(splits["val"].name(i) for i in range(2)),
    ]
    if not {"pcam", "svhn", "cifar100"} & {name} and not name.startswith("smallnorb"):  # which have numbers for names
        assert not seen["train"] & seen["val"]
        assert not seen["train"] & seen["test"]
        assert not seen["val"] & seen["test"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name.startswith("dsprites") else name for name in VTAB_TASKS],
)
def test_full_splits_have_the_sizes_of_the_table(name: str) -> None:
    task = VTAB_TASKS[name]
    official = SETS[task.source].splits
    rows = {split: choose_samples(task, split, official[whole]) for split, (whole, _, _) in task.plan.items()}
    assert tuple(len(rows[split]) for split in ("train", "val", "test")) == task.sizes
    for whole in {whole for whole, _, _ in task.plan.values()}:
        used = np.concatenate([rows[split] for split, (of, _, _) in task.plan.items() if of == whole])
        assert np.bincount(used, minlength=official[whole]).tolist() == [1] * official[whole]


def test_both_tasks_of_a_set_see_the_same_pictures() -> None:
    for one, other in (("clevr-count", "clevr-distance"), ("dsprites-location", "dsprites-orientation")):
        for split in ("train", "val", "test"):
            np.testing.assert_array_equal(
                choose_samples(VTAB_TASKS[one], split, 1000), choose_samples(VTAB_TASKS[other], split, 1000)
            )


def test_the_order_is_fixed() -> None:
    """Another order would be another benchmark."""
    assert choose_samples(VTAB_TASKS["cifar100"], "train", 50000)[:5].tolist() == [43875, 35570, 24434, 34557, 25997]


def test_parts_share_nothing_and_leave_nothing_out() -> None:
    for count in (0, 1, 7, 99, 73257):
        parts = [choose_samples(VTAB_TASKS["resisc45"], split, count) for split in ("train", "val", "test")]
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))


def test_crop_and_flip_are_off_where_they_would_change_the_label() -> None:
    """BiT's supplement F."""
    assert {name for name, task in VTAB_TASKS.items() if not task.flip} == {
        *("dsprites-orientation", "dsprites-location", "smallnorb-azimuth"),
    }
    assert {name for name, task in VTAB_TASKS.items() if not task.crop} == {
        *("clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"),
    }


def test_a_copy_that_is_too_small_is_refused(tmp_path: Path) -> None:
    writers.pets(tmp_path)
    with pytest.raises(DataError):
        open_vtab("pets", tmp_path)


def test_a_misspelt_task_is_named_with_its_neighbours() -> None:
    with pytest.raises(UnknownName, match="vtab/clevr-count"):
        find_vtab_task("vtab/clevr-cuont")

"""The sets of Section 4.1: VTAB's tasks (D.10 and the benchmark's own code), dev splits, pre-training sets."""

import pytest

from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS
from vitrail.data.splits import DEV
from vitrail.data.transforms.augmentation import bit, inception
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop
from vitrail.recipes.table4 import hyper_rule

VTAB = {  # group, classes, train, val, test
    "caltech101": ("natural", 102, 2754, 306, 6084),
    "cifar100": ("natural", 100, 45000, 5000, 10000),
    "dtd": ("natural", 47, 1880, 1880, 1880),
    "flowers102": ("natural", 102, 1020, 1020, 6149),
    "pets": ("natural", 37, 2944, 736, 3669),
    "sun397": ("natural", 397, 76128, 10875, 21750),
    "svhn": ("natural", 10, 65931, 7326, 26032),
    "pcam": ("specialized", 2, 262144, 32768, 32768),
    "eurosat": ("specialized", 10, 16200, 5400, 5400),
    "resisc45": ("specialized", 45, 18900, 6300, 6300),
    "retinopathy": ("specialized", 5, 35126, 10906, 42670),
    "clevr-count": ("structured", 8, 63000, 7000, 15000),
    "clevr-distance": ("structured", 6, 63000, 7000, 15000),
    "dmlab": ("structured", 6, 65550, 22628, 22735),
    "dsprites-location": ("structured", 16, 589824, 73728, 73728),
    "dsprites-orientation": ("structured", 16, 589824, 73728, 73728),
    "kitti-distance": ("structured", 4, 6347, 423, 711),
    "smallnorb-azimuth": ("structured", 18, 24300, 12150, 12150),
    "smallnorb-elevation": ("structured", 9, 24300, 12150, 12150),
}
# BiT's supplement F: where a random crop or a flip would change the answer.
NO_CROP = {"clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"}
NO_FLIP = {"dsprites-orientation", "smallnorb-azimuth", "dsprites-location"}


@pytest.mark.parametrize("name", VTAB)
def test_vtab(name: str) -> None:
    task = VTAB_TASKS[name]
    assert (task.group, task.classes, *task.sizes) == VTAB[name]
    assert (task.crop, task.flip) == (name not in NO_CROP, name not in NO_FLIP)


def test_vtab_has_no_other_tasks() -> None:
    assert set(VTAB_TASKS) == set(VTAB)


@pytest.mark.parametrize(
    ("name", "classes", "splits"),
    [
        ("imagenet", 1000, {"train": 1281167, "val": 50000}),
        ("cifar10", 10, {"train": 50000, "test": 10000}),
        ("cifar100", 100, {"train": 50000, "test": 10000}),
        ("pets", 37, {"train": 3680, "test": 3669}),
        ("flowers102", 102, {"train": 1020, "val": 1020, "test": 6149}),
    ],
)
def test_sizes(name: str, classes: int, splits: dict[str, int]) -> None:
    assert (SETS[name].classes, dict(SETS[name].splits)) == (classes, splits)


def test_imagenet_21k_has_21843_classes() -> None:
    assert SETS["imagenet21k"].classes == 21843


def test_dev_splits() -> None:
    """4.1: 10 % of Pets and Flowers, 2 % of CIFAR, 1 % of ImageNet."""
    assert DEV == {"pets": 0.1, "flowers102": 0.1, "cifar10": 0.02, "cifar100": 0.02, "imagenet": 0.01}


def test_crops() -> None:
    pretraining, finetuning = inception(224), bit()
    assert pretraining.crop == InceptionCrop(size=(224, 224), area=(0.05, 1.0), aspect=(3 / 4, 4 / 3))
    assert finetuning.crop == ResizeCrop(size=(384, 384), resize=(448, 448))
    assert pretraining.flip == finetuning.flip == 0.5


@pytest.mark.parametrize(
    ("size", "samples", "resize", "crop", "steps", "mixup"),
    [
        ((32, 32), 50_000, 160, 128, 10_000, 0.1),
        ((500, 375), 3_680, 448, 384, 500, 0.0),
        ((96, 96), 19_999, 448, 384, 500, 0.0),
        ((95, 96), 20_000, 160, 128, 10_000, 0.1),
        ((500, 375), 1_281_167, 448, 384, 20_000, 0.1),
    ],
)
def test_hyper_rule(size: tuple[int, int], samples: int, resize: int, crop: int, steps: int, mixup: float) -> None:
    rule = hyper_rule(*size, samples)
    assert (rule.resize, rule.crop, rule.steps, rule.mixup) == (resize, crop, steps, mixup)

"""VTAB: 19 tasks, each with a train, val and test split, and VTAB-1k's thousand images for training.

VTAB-1k is the first 800 images of train and the first 200 of val, in the order in which TensorFlow Datasets stores
them. The original files do not contain that order. Ours is a fixed pseudo-random order that depends only on the set's
name, so the thousand images differ from the published ones, are drawn in the same way, and are the same everywhere. The
same holds for splits that VTAB cuts out of an official one. Flowers, DTD, PatchCamelyon, Retinopathy and DMLab have the
official splits, and KITTI has VTAB's own. The sizes are VTAB's throughout.
"""

from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, unknown_name
from vitrail.core.text import Pair
from vitrail.data.dataset import ConcatDataset, ImageDataset, SubsetDataset
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS, VtabTask
from vitrail.data.datasets.open_by_name import Progress, open_named
from vitrail.data.randomness import EpochOrder, hash_word

Hook: TypeAlias = Progress | None


def find_task(name: str) -> VtabTask:
    """The task of a name, with or without a leading "vtab/"."""
    short = name.removeprefix("vtab/")
    if short not in VTAB_TASKS:
        raise unknown_name("VTAB task", name, (f"vtab/{task}" for task in VTAB_TASKS))
    return VTAB_TASKS[short]


def cut_range(count: int, start: int, end: int) -> range:
    """The samples from one percentage of `count` to another: adjacent parts neither overlap nor leave a gap."""
    return range(count * start // 100, count * end // 100)


def choose_samples(task: VtabTask, split: str, count: int) -> NDArray[np.int64]:
    """Which of the `count` samples of its official split a split of a task consists of, in order.

    The order depends only on the data set's files: both tasks of CLEVR see the same images. A complete official test
    split keeps its order.
    """
    official, start, end = task.plan[split]
    places = np.array(cut_range(count, start, end), np.int64)
    if not count or (split == "test" and (start, end) == (0, 100)):
        return places
    return EpochOrder(count, hash_word(f"vtab {SETS[task.source].folder} {official}"))(0, places)


def open_vtab(
    name: str, root: Path | None = None, *, first: Pair = (800, 200), download: bool = False, progress: Hook = None
) -> dict[str, ImageDataset]:
    """The splits of a task: the full train, val and test, and VTAB-1k's train800, val200 and trainval1000, which are
    the first samples of train, those of val, and both. DataError where there are too few."""
    task = find_task(name)
    sets = open_named(task.source, root, download=download, progress=progress)
    splits: dict[str, ImageDataset] = {}
    for split, (official, _, _) in task.plan.items():
        if official not in sets:
            raise DataError(f"{task.source} has no split {official!r} here; it has {', '.join(sets)}")
        splits[split] = SubsetDataset(sets[official], choose_samples(task, split, len(sets[official])))
    for split, count in zip(("train", "val"), first, strict=True):
        if len(splits[split]) < count:
            rule = f"VTAB-1k takes {count}; the copy of {SETS[task.source].title} is not complete"
            raise DataError(f"vtab/{task.name}: {split} has {len(splits[split])} samples, {rule}")
    train, val = SubsetDataset(splits["train"], np.arange(first[0])), SubsetDataset(splits["val"], np.arange(first[1]))
    names = f"train{first[0]}", f"val{first[1]}", f"trainval{sum(first)}"
    return {**splits, **dict(zip(names, (train, val, ConcatDataset([train, val])), strict=True))}

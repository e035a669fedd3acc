"""VTAB: 19 tasks, each with a train, val and test split, and VTAB-1k's thousand images for training.

VTAB-1k is the first 800 images of train and the first 200 of val, in the order in which TensorFlow Datasets stores
them. That order cannot be had from the original files. Ours is a fixed pseudo-random order that depends on the set's
name alone, so the thousand are others than in the publications, drawn in the same way, and the same everywhere. The
same goes for splits that VTAB cuts out of an official one; those that are official are just these (Flowers, DTD,
PatchCamelyon, Retinopathy, DMLab), and KITTI's are VTAB's own. The sizes are VTAB's throughout.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, unknown
from vitrail.data.dataset import Concat, ImageDataset, Subset
from vitrail.data.datasets.catalogue import SETS
from vitrail.data.datasets.download import Progress
from vitrail.data.datasets.open_by_name import only_split, open_named
from vitrail.data.datasets.vtab_tasks import TASKS, VtabTask
from vitrail.data.randomness import EpochOrder, hash_word


def find_task(name: str) -> VtabTask:
    """The task of a name, with or without "vtab/" before it."""
    short = name.removeprefix("vtab/")
    if short not in TASKS:
        raise unknown("VTAB task", name, (f"vtab/{task}" for task in TASKS))
    return TASKS[short]


def cut(count: int, start: int, end: int) -> range:
    """The places of a part of `count` samples, in hundredths: parts that meet share no sample and leave none out."""
    return range(count * start // 100, count * end // 100)


def part(task: VtabTask, split: str, count: int) -> NDArray[np.int64]:
    """Which of the `count` samples of its official split a split of a task is made of, in order.

    The order depends on the set of files alone: both tasks of CLEVR see the same images. A whole official test split
    stays as it is.
    """
    _, start, end = task.plan[split]
    places = np.arange(count)[slice(cut(count, start, end).start, cut(count, start, end).stop)]
    if not count or (split == "test" and (start, end) == (0, 100)):
        return places
    seed = hash_word(f"vtab {SETS[task.source].folder} {task.plan[split][0]}")
    return EpochOrder(count, seed)(0, places)


def open_vtab(
    name: str,
    root: Path | None = None,
    *,
    first: tuple[int, int] = (800, 200),
    download: bool = False,
    progress: Progress | None = None,
) -> dict[str, ImageDataset]:
    """The splits of a task: train, val and test in full, and VTAB-1k's train800, val200 and trainval1000, which are
    the first of train, the first of val, and both. DataError where there are not as many."""
    task = find_task(name)
    official = open_named(task.source, root, download=download, progress=progress)
    splits: dict[str, ImageDataset] = {}
    for split, (whole, _, _) in task.plan.items():
        source = only_split(official, whole, task.source)
        splits[split] = Subset(source, part(task, split, len(source)))
    for split, count in zip(("train", "val"), first, strict=True):
        if len(splits[split]) < count:
            raise DataError(
                f"vtab/{task.name}: {split} has {len(splits[split])} samples, VTAB-1k takes {count}; "
                f"the copy of {SETS[task.source].title} is not complete"
            )
    train, val = Subset(splits["train"], np.arange(first[0])), Subset(splits["val"], np.arange(first[1]))
    return {
        **splits,
        f"train{first[0]}": train,
        f"val{first[1]}": val,
        f"trainval{sum(first)}": Concat([train, val]),
    }

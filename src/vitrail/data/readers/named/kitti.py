"""KITTI's pictures of roads, for one question: how far is the nearest car, van or truck?

The pictures are frames of drives, so VTAB splits by drive: which picture is of which drive is in the development kit
(mapping/train_rand.txt and train_mapping.txt), and which drives are val and test follows from a seed. The draw is
TensorFlow Datasets' own (numpy's RandomState 123), so these should be the very pictures of VTAB.
"""

from bisect import bisect_left
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from vitrail.core.errors import DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.places import Absent
from vitrail.data.readers.named.trees import Folder, Tree, Zip
from vitrail.data.source import Source

EDGES: Final = (8.0, 20.0, 999.0)  # metres
NONE: Final = 1000.0
CLASSES: Final = ("up to 8 m", "up to 20 m", "beyond 20 m", "none")
VEHICLES: Final = ("Car", "Van", "Truck")
SEED: Final = 123


def distance(root: Path) -> dict[str, Source]:
    images, folder = find(root, "training/image_2", "data_object_image_2.zip")
    answers, labels_folder = find(root, "training/label_2", "data_object_label_2.zip")
    kit, mapping = find(root, "mapping", "devkit_object.zip")
    drives = drive_of_each(kit, mapping)
    names = [n for n in images.names() if n.startswith(folder) and n.lower().endswith((".png", ".jpg"))]
    numbers = [number_of(name, len(drives), images.where) for name in names]
    split_of = splits(drives)
    found: dict[str, list[tuple[str, int]]] = {"train": [], "val": [], "test": []}
    for name, number in zip(names, numbers, strict=True):
        stem = PurePosixPath(name).stem
        text = answers.read(f"{labels_folder}{stem}.txt").decode("utf-8", "replace")
        found[split_of[number]].append((name, nearest(text, f"{answers.where}: {stem}.txt")))
    return {
        split: images.source(
            [name for name, _ in rows], Labels(np.array([label for _, label in rows], np.int64)), CLASSES
        )
        for split, rows in found.items()
    }


def find(root: Path, folder: str, archive: str) -> tuple[Tree, str]:
    """A folder below root or root/raw, or the zip file; and what stands before the names in it."""
    for where in (root, root / "raw"):
        if (where / folder).is_dir():
            return Folder(where / folder), ""
        if (where / archive).is_file():
            return Zip(where / archive), f"{folder}/"
    raise Absent(root, (folder, archive))


def number_of(name: str, count: int, where: str) -> int:
    stem = PurePosixPath(name).stem
    if not stem.isdigit() or int(stem) >= count:
        raise DataError(f"{where}: {name} is not numbered from 000000 to {count - 1:06d}")
    return int(stem)


def nearest(text: str, where: str) -> int:
    """From the lines "Car 0.00 0 -1.57 614 181 727 284 1.57 1.73 4.15 1.00 1.75 13.22 -1.62": the last but one is the
    depth in metres. A depth at an edge counts to the step below it."""
    depth = NONE
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] not in VEHICLES:
            continue
        try:
            depth = min(depth, float(words[13]))
        except (IndexError, ValueError):
            raise DataError(f"{where} has a line {line!r}, which is no object of KITTI") from None
    return bisect_left(EDGES, depth)


def drive_of_each(kit: Tree, folder: str) -> list[str]:
    """For picture 0, 1, ... the drive that it is a frame of."""
    where = f"{kit.where}: {folder}"
    lines = kit.read(f"{folder}train_mapping.txt").decode("utf-8", "replace").splitlines()
    try:
        at = [int(word) - 1 for word in kit.read(f"{folder}train_rand.txt").decode("utf-8", "replace").split(",")]
        if min(at) < 0:
            raise ValueError("a line number below 1")
        return [lines[i].split(" ")[1] for i in at]
    except (ValueError, IndexError) as error:
        raise DataError(f"{where} is not a mapping of KITTI's development kit ({reason_of(error)})") from None


def splits(drives: list[str]) -> list[str]:
    """The split of each picture: a tenth of the drives are test, a tenth of the number of all are val."""
    names = sorted(set(drives))
    count = max(1, len(names) * 10 // 100)
    random = np.random.RandomState(SEED)  # the older generator, whose stream numpy keeps for good
    test = {str(name) for name in random.choice(names, count, replace=False)}
    rest = [name for name in names if name not in test]
    val = {str(name) for name in random.choice(rest, count, replace=False)} if len(rest) >= count else set[str]()
    return ["test" if drive in test else "val" if drive in val else "train" for drive in drives]

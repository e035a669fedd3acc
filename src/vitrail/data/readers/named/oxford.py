"""The sets of Oxford's Visual Geometry Group: Pets, Flowers-102 and the Describable Textures (DTD), fold 1."""

from pathlib import Path

import numpy as np

from vitrail.core.errors import BadLabels, DataError
from vitrail.data.labels import Labels
from vitrail.data.readers.named.mat import read_mat
from vitrail.data.readers.named.places import present, read_text, unpacked
from vitrail.data.readers.named.trees import Folder
from vitrail.data.source import Source


def pets(root: Path) -> dict[str, Source]:
    """Train is the official trainval list. A line is "Abyssinian_100 1 1 1": the picture, and its class from 1."""
    lists = unpacked(root, "annotations", "annotations.tar.gz")
    images = unpacked(root, "images", "images.tar.gz")
    rows = {
        split: [
            line.split() for line in read_text(present(lists, file)).splitlines() if line.strip() and line[0] != "#"
        ]
        for split, file in (("train", "trainval.txt"), ("test", "test.txt"))
    }
    numbers: dict[int, str] = {}
    for split, lines in rows.items():
        for line in lines:
            if len(line) < 2 or not line[1].isdigit():
                raise DataError(f"{lists}: the list of {split} has a line {' '.join(line)!r}, not NAME CLASS ...")
            numbers[int(line[1])] = line[0].rpartition("_")[0].replace("_", " ")
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        raise BadLabels(f"{lists}: the lists have the classes {sorted(numbers)}, not 1 to {len(numbers)}")
    classes = [numbers[i] for i in sorted(numbers)]
    return {
        split: Folder(images).source(
            [f"{line[0]}.jpg" for line in lines],
            Labels(np.array([int(line[1]) - 1 for line in lines], np.int64)),
            classes,
        )
        for split, lines in rows.items()
    }


def flowers102(root: Path) -> dict[str, Source]:
    """The pictures are numbered from 1; setid.mat says which are in which split, imagelabels.mat the classes from 1."""
    sets = read_mat(present(root, "setid.mat"), "trnid", "valid", "tstid")
    targets = read_mat(present(root, "imagelabels.mat"), "labels")["labels"].ravel().astype(np.int64) - 1
    images = unpacked(root, "jpg", "102flowers.tgz")
    from torchvision.datasets import Flowers102

    classes: list[str] = Flowers102.classes
    splits: dict[str, Source] = {}
    for split, field in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        numbers = sets[field].ravel().astype(np.int64)
        if numbers.size and not (numbers.min() >= 1 and numbers.max() <= len(targets)):
            raise DataError(f"{root / 'setid.mat'} names picture {numbers.max()}, imagelabels.mat has {len(targets)}")
        labels = Labels(targets[numbers - 1])
        labels.check(len(classes), str(root / "imagelabels.mat"))
        splits[split] = Folder(images).source([f"image_{number:05d}.jpg" for number in numbers], labels, classes)
    return splits


def dtd(root: Path) -> dict[str, Source]:
    """The first of the ten official folds; a line is "banded/banded_0002.jpg"."""
    home = unpacked(root, "dtd", "dtd-r1.0.1.tar.gz") if not (root / "labels").is_dir() else root
    rows = {split: read_text(present(home / "labels", f"{split}1.txt")).split() for split in ("train", "val", "test")}
    classes = sorted({name.partition("/")[0] for name in rows["train"]})
    numbers = {name: i for i, name in enumerate(classes)}
    images = Folder(present(home, "images"))
    splits: dict[str, Source] = {}
    for split, names in rows.items():
        strange = sorted({name.partition("/")[0] for name in names} - set(classes))
        if strange:
            raise BadLabels(f"{home / 'labels'}: {split}1.txt has the class {strange[0]!r}, train1.txt has not")
        labels = Labels(np.array([numbers[name.partition("/")[0]] for name in names], np.int64))
        splits[split] = images.source(names, labels, classes)
    return splits

"""Caltech-101 as VTAB counts it: 102 classes, the background among them; 30 images a class are train, the rest test.

The images of train were drawn at random by TensorFlow Datasets, in an order that depends on the disk it ran on. Ours
are drawn by a fixed pseudo-random order of each class, so they are others, and the same everywhere.

SVHN, the cropped digits: train_32x32.mat and test_32x32.mat. The "extra" images are not used, as in VTAB.

SUN397: 108,754 scenes in folders a/abbey, a/airplane_cabin and so on.

VTAB's splits are lists that come with TensorFlow Datasets: sun397_tfds_tr.txt, _va.txt and _te.txt. Where they lie
next to the images they are used. Where not, the same numbers (a tenth val, a fifth test, the rest train) are drawn by
a fixed pseudo-random order, so that the images in each differ from VTAB's.

The sets of Oxford's Visual Geometry Group: Pets, Flowers-102 and the Describable Textures (DTD), fold 1.
"""

import zipfile
from pathlib import Path
from typing import Final

import numpy as np

from vitrail.core.atomic_files import replacing
from vitrail.core.errors import BadLabels, DataError, reason_of
from vitrail.data.dataset import Arrays, ImageDataset, Labels
from vitrail.data.datasets.file_formats import Folder
from vitrail.data.datasets.matlab import read_mat
from vitrail.data.datasets.open_by_name import Absent, present, read_text, unpacked
from vitrail.data.randomness import EpochOrder, hash_word
from vitrail.data.readers.folder import below, is_folder, listed

A_CLASS: Final = 30
FOLDER: Final = "101_ObjectCategories"
ARCHIVE: Final = "101_ObjectCategories.tar.gz"
WRAPPED: Final = "caltech-101/101_ObjectCategories.tar.gz"  # inside caltech-101.zip


def caltech101(root: Path) -> dict[str, ImageDataset]:
    home = find(root)
    classes = [entry.name for entry in listed(str(home)) if is_folder(entry)]
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        files = [f"{name}/{entry.name}" for entry in listed(str(home / name)) if entry.name.lower().endswith(".jpg")]
        if len(files) <= A_CLASS:
            raise DataError(f"{home / name} holds {len(files)} images; {A_CLASS} are for train and some for test")
        order = EpochOrder(len(files), hash_word(f"caltech101 {name}"))(0, np.arange(len(files)))
        train += [(files[i], label) for i in sorted(order[:A_CLASS])]
        test += [(files[i], label) for i in sorted(order[A_CLASS:])]
    return {
        split: Folder(home).source(
            [name for name, _ in rows], Labels(np.array([label for _, label in rows], np.int64)), classes
        )
        for split, rows in (("train", train), ("test", test))
    }


def find(root: Path) -> Path:
    """The folder of class folders; the archive is unpacked, and the one inside caltech-101.zip too."""
    for where in (root, root / "caltech-101"):
        if (where / FOLDER).is_dir() or (where / ARCHIVE).is_file():
            return unpacked(where, FOLDER, ARCHIVE)
    wrapper = root / "caltech-101.zip"
    if not wrapper.is_file():
        raise Absent(root, (FOLDER, ARCHIVE, wrapper.name))
    try:
        with zipfile.ZipFile(wrapper) as opened, opened.open(WRAPPED) as inner, replacing(root / ARCHIVE) as file:
            while piece := inner.read(1 << 20):
                file.write(piece)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DataError(f"{wrapper}: {WRAPPED} cannot be taken out of it ({reason_of(error)})") from None
    return unpacked(root, FOLDER, ARCHIVE)


def svhn(root: Path) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "test"):
        path = present(root, f"{split}_32x32.mat")
        held = read_mat(path, "X", "y")
        pixels, labels = held["X"], held["y"].ravel().astype(np.int64)
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[2] != 3 or pixels.shape[3] != labels.size:
            raise DataError(f"{path} holds X {pixels.shape} and y {labels.shape}, not 32 x 32 x 3 x N and N")
        labels = np.where(labels == 10, 0, labels)  # the digit 0 is class 10 in the file
        splits[split] = Arrays(
            np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), Labels(labels), tuple("0123456789"), called=path.name
        )
        splits[split].labels.check(10, str(path))
    return splits


LISTS: Final = {"train": "sun397_tfds_tr.txt", "val": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
LEFT_OUT: Final = "c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"  # decodes differently from one library to the next


def sun397(root: Path) -> dict[str, ImageDataset]:
    home = unpacked(root, "SUN397", "SUN397.tar.gz") if root.name != "SUN397" else root
    pictures, _ = below(str(home), "")
    names = sorted(name for name in pictures if name != LEFT_OUT and name.rpartition("/")[2].startswith("sun_"))
    if not names:
        raise DataError(f"{home}: no images called sun_*.jpg below it")
    classes = class_names(home, names)
    numbers = {name: i for i, name in enumerate(classes)}
    strange = sorted({class_of(name) for name in names} - set(classes))
    if strange:
        raise BadLabels(f"{home}: the folder {strange[0]} is not a class of ClassName.txt")
    splits = listed_splits(root, home, names) or drawn_splits(names)
    return {
        split: Folder(home).source(chosen, Labels(np.array([numbers[class_of(n)] for n in chosen], np.int64)), classes)
        for split, chosen in splits.items()
    }


def class_of(name: str) -> str:
    """a/abbey/sun_xyz.jpg -> abbey; c/church/outdoor/sun_xyz.jpg -> church/outdoor"""
    return "/".join(name.split("/")[1:-1])


def class_names(home: Path, names: list[str]) -> list[str]:
    """From ClassName.txt, lines such as /a/abbey; where that is not there, from the folders."""
    if (home / "ClassName.txt").is_file():
        return [line.strip()[3:] for line in read_text(home / "ClassName.txt").splitlines() if line.strip()]
    return sorted({class_of(name) for name in names})


def listed_splits(root: Path, home: Path, names: list[str]) -> dict[str, list[str]] | None:
    """By the lists, where all three are there; a line is /a/abbey/sun_xyz.jpg."""
    for where in (root, home):
        if all((where / file).is_file() for file in LISTS.values()):
            break
    else:
        return None
    there, splits = set(names), dict[str, list[str]]()
    for split, file in LISTS.items():
        splits[split] = [line.strip().lstrip("/") for line in read_text(where / file).splitlines() if line.strip()]
        missing = [name for name in splits[split] if name not in there]
        if missing:
            raise DataError(f"{where / file} lists {missing[0]} and {len(missing) - 1} more that are not in {home}")
    return splits


def counts(total: int) -> tuple[int, int, int]:
    """Train, val and test: what is left over, a tenth and a fifth."""
    return total - total // 10 - total // 5, total // 10, total // 5


def drawn_splits(names: list[str]) -> dict[str, list[str]]:
    order = EpochOrder(len(names), hash_word("sun397"))(0, np.arange(len(names)))
    train, val, _ = counts(len(names))
    parts = {"train": order[:train], "val": order[train : train + val], "test": order[train + val :]}
    return {split: [names[i] for i in sorted(chosen)] for split, chosen in parts.items()}


def pets(root: Path) -> dict[str, ImageDataset]:
    """Train is the official trainval list. A line is "Abyssinian_100 1 1 1": the image, and its class from 1."""
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


def flowers102(root: Path) -> dict[str, ImageDataset]:
    """The images are numbered from 1; setid.mat says which are in which split, imagelabels.mat the classes from 1."""
    sets = read_mat(present(root, "setid.mat"), "trnid", "valid", "tstid")
    targets = read_mat(present(root, "imagelabels.mat"), "labels")["labels"].ravel().astype(np.int64) - 1
    images = unpacked(root, "jpg", "102flowers.tgz")
    from torchvision.datasets import Flowers102

    classes: list[str] = Flowers102.classes
    splits: dict[str, ImageDataset] = {}
    for split, field in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        numbers = sets[field].ravel().astype(np.int64)
        if numbers.size and not (numbers.min() >= 1 and numbers.max() <= len(targets)):
            raise DataError(f"{root / 'setid.mat'} names image {numbers.max()}, imagelabels.mat has {len(targets)}")
        labels = Labels(targets[numbers - 1])
        labels.check(len(classes), str(root / "imagelabels.mat"))
        splits[split] = Folder(images).source([f"image_{number:05d}.jpg" for number in numbers], labels, classes)
    return splits


def dtd(root: Path) -> dict[str, ImageDataset]:
    """The first of the ten official folds; a line is "banded/banded_0002.jpg"."""
    home = unpacked(root, "dtd", "dtd-r1.0.1.tar.gz") if not (root / "labels").is_dir() else root
    rows = {split: read_text(present(home / "labels", f"{split}1.txt")).split() for split in ("train", "val", "test")}
    classes = sorted({name.partition("/")[0] for name in rows["train"]})
    numbers = {name: i for i, name in enumerate(classes)}
    images = Folder(present(home, "images"))
    splits: dict[str, ImageDataset] = {}
    for split, names in rows.items():
        strange = sorted({name.partition("/")[0] for name in names} - set(classes))
        if strange:
            raise BadLabels(f"{home / 'labels'}: {split}1.txt has the class {strange[0]!r}, train1.txt has not")
        labels = Labels(np.array([numbers[name.partition("/")[0]] for name in names], np.int64))
        splits[split] = images.source(names, labels, classes)
    return splits

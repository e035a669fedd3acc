"""Caltech-101 as VTAB counts it: 102 classes, the background among them; 30 pictures a class are train, the rest test.

The pictures of train were drawn at random by TensorFlow Datasets, in an order that depends on the disk it ran on. Ours
are drawn by a fixed pseudo-random order of each class, so they are others, and the same everywhere.
"""

import zipfile
from pathlib import Path
from typing import Final

import numpy as np

from vitrail.core.errors import DataError, reason_of
from vitrail.core.storage import replacing
from vitrail.data.draws import number
from vitrail.data.labels import Labels
from vitrail.data.order import Order
from vitrail.data.readers.folder import is_folder, listed
from vitrail.data.readers.named.places import Absent, unpacked
from vitrail.data.readers.named.trees import Folder
from vitrail.data.source import Source

A_CLASS: Final = 30
FOLDER: Final = "101_ObjectCategories"
ARCHIVE: Final = "101_ObjectCategories.tar.gz"
WRAPPED: Final = "caltech-101/101_ObjectCategories.tar.gz"  # inside caltech-101.zip


def caltech101(root: Path) -> dict[str, Source]:
    home = find(root)
    classes = [entry.name for entry in listed(str(home)) if is_folder(entry)]
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        files = [f"{name}/{entry.name}" for entry in listed(str(home / name)) if entry.name.lower().endswith(".jpg")]
        if len(files) <= A_CLASS:
            raise DataError(f"{home / name} holds {len(files)} pictures; {A_CLASS} are for train and some for test")
        order = Order(len(files), number(f"caltech101 {name}"))(0, np.arange(len(files)))
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

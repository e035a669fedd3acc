"""Pictures from above, in class folders and without official splits: EuroSAT (RGB) and NWPU-RESISC45."""

from pathlib import Path

import numpy as np

from vitrail.core.errors import DataError
from vitrail.data.labels import Labels
from vitrail.data.readers.named.places import Absent
from vitrail.data.readers.named.trees import Tree, tree
from vitrail.data.source import Source


def eurosat(root: Path) -> dict[str, Source]:
    """2750/AnnualCrop/AnnualCrop_1.jpg and so on, unpacked or in EuroSAT.zip; newer copies say EuroSAT_RGB."""
    for folder in ("2750", "EuroSAT_RGB"):
        try:
            return {"train": class_folders(*tree(root, folder, "EuroSAT.zip", "EuroSAT_RGB.zip"))}
        except Absent:
            continue
    raise Absent(root, ("2750", "EuroSAT_RGB", "EuroSAT.zip"))


def resisc45(root: Path) -> dict[str, Source]:
    """NWPU-RESISC45/airplane/airplane_001.jpg and so on. A .rar has to be unpacked by hand; a .zip is read as it is."""
    return {"train": class_folders(*tree(root, "NWPU-RESISC45", "NWPU-RESISC45.zip"))}


def class_folders(files: Tree, prefix: str) -> Source:
    """What lies in a folder directly below the top is of that class."""
    inside = [name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)]
    names = [name for name in inside if name.lower().endswith((".jpg", ".jpeg", ".png")) and name.count("/") == 1]
    if not names and inside and len({name.partition("/")[0] for name in inside}) == 1:  # one folder more around it
        return class_folders(files, f"{prefix}{inside[0].partition('/')[0]}/")
    classes = sorted({name.partition("/")[0] for name in names})
    if not classes:
        raise DataError(f"{files.where}: no class folders with pictures in it")
    numbers = {name: i for i, name in enumerate(classes)}
    labels = Labels(np.array([numbers[name.partition("/")[0]] for name in names], np.int64))
    return files.source([prefix + name for name in names], labels, classes)

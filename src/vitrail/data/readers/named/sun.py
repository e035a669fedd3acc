"""SUN397: 108,754 scenes in folders a/abbey, a/airplane_cabin and so on.

VTAB's splits are lists that come with TensorFlow Datasets: sun397_tfds_tr.txt, _va.txt and _te.txt. Where they lie
beside the pictures they are used. Where not, the same numbers (a tenth val, a fifth test, the rest train) are drawn by
a fixed pseudo-random order, so that the pictures in each differ from VTAB's.
"""

from pathlib import Path
from typing import Final

import numpy as np

from vitrail.core.errors import BadLabels, DataError
from vitrail.data.draws import number
from vitrail.data.labels import Labels
from vitrail.data.order import Order
from vitrail.data.readers.folder import below
from vitrail.data.readers.named.places import read_text, unpacked
from vitrail.data.readers.named.trees import Folder
from vitrail.data.source import Source

LISTS: Final = {"train": "sun397_tfds_tr.txt", "val": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
LEFT_OUT: Final = "c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"  # decodes differently from one library to the next


def sun397(root: Path) -> dict[str, Source]:
    home = unpacked(root, "SUN397", "SUN397.tar.gz") if root.name != "SUN397" else root
    pictures, _ = below(str(home), "")
    names = sorted(name for name in pictures if name != LEFT_OUT and name.rpartition("/")[2].startswith("sun_"))
    if not names:
        raise DataError(f"{home}: no pictures called sun_*.jpg below it")
    classes = class_names(home, names)
    numbers = {name: i for i, name in enumerate(classes)}
    strange = sorted({class_of(name) for name in names} - set(classes))
    if strange:
        raise BadLabels(f"{home}: the folder {strange[0]} is no class of ClassName.txt")
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
    order = Order(len(names), number("sun397"))(0, np.arange(len(names)))
    train, val, _ = counts(len(names))
    parts = {"train": order[:train], "val": order[train : train + val], "test": order[train + val :]}
    return {split: [names[i] for i in sorted(chosen)] for split, chosen in parts.items()}

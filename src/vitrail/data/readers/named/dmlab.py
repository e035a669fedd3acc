"""DMLab: frames of a maze as TensorFlow record files, dmlab-train.tfrecord-00000-of-00010 and so on.

The six classes are {near, far, very far} x {good, bad object}; the files do not say which number is which.
"""

from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from vitrail.core.errors import DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.kept import Tables, kept
from vitrail.data.readers.named.pieces import Pieces
from vitrail.data.readers.named.places import unpacked
from vitrail.data.readers.named.tfrecord import Malformed, example, records
from vitrail.data.source import Source
from vitrail.data.strings import Strings

CLASSES: Final = tuple("012345")


def dmlab(root: Path) -> dict[str, Source]:
    home = root if files(root, "train") else unpacked(root, "dmlab", "dmlab.tar.gz")
    splits: dict[str, Source] = {}
    for split, word in (("train", "train"), ("val", "validation"), ("test", "test")):
        paths = files(home, word)
        if not paths:
            raise DataError(f"{home} holds no dmlab-{word}.tfrecord*; unpack dmlab.tar.gz again")
        tables = kept(f"dmlab-{split}", paths, lambda paths=paths: index(paths))
        splits[split] = Pieces(
            [str(path) for path in paths],
            tables["piece"].astype(np.int32),
            tables["offset"].astype(np.int64),
            tables["length"].astype(np.int64),
            Strings.over(tables["names"].astype(np.uint8), tables["starts"].astype(np.int64)),
            Labels(tables["label"].astype(np.int64)),
            CLASSES,
        )
    return splits


def files(home: Path, word: str) -> list[Path]:
    return sorted(home.glob(f"dmlab-{word}.tfrecord*"))


def index(paths: list[Path]) -> Tables:
    """Where each picture lies, its label and its name: all files are read through, once."""
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    for number, path in enumerate(paths):
        for start, data in records(path):
            try:
                found = example(data)
                image, label, name = found["image"], found["label"], found["filename"]
                if not (isinstance(image, tuple) and isinstance(label, int) and isinstance(name, tuple)):
                    raise Malformed("image, label and filename are of other types")
                if label >= len(CLASSES):
                    raise Malformed(f"its label is {label}")
            except (Malformed, KeyError, IndexError) as error:
                raise DataError(
                    f"{path}: the record at byte {start:,} is not an image of DMLab ({reason_of(error)})"
                ) from None
            rows.append((number, start + image[0], image[1] - image[0], label))
            names.append(PurePosixPath(data[name[0] : name[1]].decode("utf-8", "replace")).name)
    table = np.array(rows, np.int64).reshape(-1, 4)
    packed = Strings(names)
    return {
        "names": packed.bytes,
        "starts": packed.starts,
        "piece": table[:, 0],
        "offset": table[:, 1],
        "length": table[:, 2],
        "label": table[:, 3],
    }

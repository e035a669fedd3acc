"""smallNORB: toys from two cameras, six files in a format of their own that are called .mat all the same.

A file is a magic number (bytes or integers), the number of dimensions, at least three of them, and the values, all
little-endian. The pictures are those of the first camera, as in VTAB.
"""

import struct
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError
from vitrail.data.labels import Labels
from vitrail.data.readers.named.pieces import Records
from vitrail.data.readers.named.places import inflated
from vitrail.data.source import Source

STEMS: Final = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
KINDS: Final = {BYTES: "u1", INTEGERS: "<i4"}
TOYS: Final = ("four-legged animals", "human figures", "airplanes", "trucks", "cars")
ELEVATION, AZIMUTH = 1, 2  # columns of info: instance, elevation, azimuth, lighting


def category(root: Path) -> dict[str, Source]:
    """The kind of toy."""
    return {split: pictures(root, split, values(root, split, "cat"), TOYS) for split in STEMS}


def azimuth(root: Path) -> dict[str, Source]:
    """From which side, in steps of 20 degrees; the file counts 0, 2, ... 34."""
    classes = [f"{20 * i} degrees" for i in range(18)]
    return {split: pictures(root, split, values(root, split, "info")[:, AZIMUTH] // 2, classes) for split in STEMS}


def elevation(root: Path) -> dict[str, Source]:
    """From how high, 30 to 70 degrees in steps of 5."""
    classes = [f"{30 + 5 * i} degrees" for i in range(9)]
    return {split: pictures(root, split, values(root, split, "info")[:, ELEVATION], classes) for split in STEMS}


def pictures(root: Path, split: str, labels: NDArray[np.int64], classes: "tuple[str, ...] | list[str]") -> Source:
    path = inflated(root, f"{STEMS[split]}-dat.mat")
    kind, shape, start = header(path)
    if kind != "u1" or len(shape) != 4 or shape[0] != labels.shape[0]:
        raise DataError(f"{path} holds {' x '.join(map(str, shape))} for {labels.shape[0]} labels")
    made = Labels(labels)
    made.check(len(classes), str(path))
    return Records(path, start=start, stride=prod(shape[1:]), shape=shape[2:], labels=made, classes=classes)


def values(root: Path, split: str, part: str) -> NDArray[np.int64]:
    path = inflated(root, f"{STEMS[split]}-{part}.mat")
    kind, shape, start = header(path)
    array = np.fromfile(path, kind, prod(shape), offset=start).astype(np.int64)
    return array.reshape(shape)


def header(path: Path) -> tuple[str, tuple[int, ...], int]:
    """Type of the values, dimensions, and where the values begin; checked against the size of the file."""
    with path.open("rb") as file:
        head = file.read(8)
        magic, count = struct.unpack("<Ii", head) if len(head) == 8 else (0, 0)
        if magic not in KINDS or not 1 <= count <= 8:
            raise DataError(f"{path} is no file of NORB: it begins with {head.hex()}")
        stored = max(3, count)
        sizes = file.read(4 * stored)
    if len(sizes) < 4 * stored:
        raise DataError(f"{path} is cut short; download it again")
    shape = struct.unpack(f"<{stored}i", sizes)[:count]
    start = 8 + 4 * stored
    size = path.stat().st_size - start
    if min(shape) < 0 or size != prod(shape) * np.dtype(KINDS[magic]).itemsize:
        raise DataError(f"{path} holds {size:,} bytes for {' x '.join(map(str, shape))}; download it again")
    return KINDS[magic], shape, start

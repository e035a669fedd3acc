"""PatchCamelyon: six HDF5 files, pictures x [N, 96, 96, 3] and labels y [N, 1, 1, 1]. Needs h5py."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadPicture, DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.places import inflated
from vitrail.data.source import Source


def pcam(root: Path) -> dict[str, Source]:
    splits: dict[str, Source] = {}
    for split, word in (("train", "train"), ("val", "valid"), ("test", "test")):
        pictures = inflated(root, f"camelyonpatch_level_2_split_{word}_x.h5")
        targets = inflated(root, f"camelyonpatch_level_2_split_{word}_y.h5")
        with opened(targets) as file:
            labels = np.asarray(member(file, "y", targets)).reshape(-1).astype(np.int64)
        with opened(pictures) as file:
            shape = tuple(member(file, "x", pictures).shape)
        if len(shape) != 4 or shape[3] != 3 or shape[0] != labels.size:
            raise DataError(f"{pictures} holds x {shape} and {targets.name} {labels.size} labels: they do not fit")
        splits[split] = Hdf5(pictures, Labels(labels), ("no tumour", "tumour"))
        splits[split].labels.check(2, str(targets))
    return splits


def hdf5() -> Any:
    try:
        return import_module("h5py")
    except ImportError:
        raise DataError("PatchCamelyon is stored as HDF5, which needs h5py: pip install 'vitrail[data]'") from None


def opened(path: Path) -> Any:
    try:
        return hdf5().File(path, "r")
    except OSError as error:
        raise DataError(
            f"{path} is no HDF5 file, or is damaged or cut short ({reason_of(error)}); download it again"
        ) from None


def member(file: Any, name: str, path: Path) -> Any:
    if name not in file:
        raise DataError(f"{path} holds no data set {name!r}")
    return file[name]


class Hdf5(Source):
    """Pictures in the data set x. Each process that reads opens the file itself: handles do not survive a fork."""

    def __init__(self, path: Path, labels: Labels, classes: tuple[str, ...]) -> None:
        self.path, self.labels, self.classes = path, labels, classes
        self.handle: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def read(self, index: int) -> NDArray[np.uint8]:
        if self.handle is None or self.handle[0] != os.getpid():
            self.handle = (os.getpid(), opened(self.path))
        try:
            return np.asarray(self.handle[1]["x"][index], np.uint8)
        except (OSError, KeyError, ValueError) as error:
            raise BadPicture(str(error)) from None

    def name(self, index: int) -> str:
        return f"{self.path.name}[{index}]"

"""SVHN, the cropped digits: train_32x32.mat and test_32x32.mat. The "extra" pictures are not used, as in VTAB."""

from pathlib import Path

import numpy as np

from vitrail.core.errors import DataError
from vitrail.data.labels import Labels
from vitrail.data.readers.named.mat import read_mat
from vitrail.data.readers.named.places import present
from vitrail.data.source import Arrays, Source


def svhn(root: Path) -> dict[str, Source]:
    splits: dict[str, Source] = {}
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

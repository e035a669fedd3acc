"""MNIST and Fashion-MNIST: four idx files, plain or gzipped.

An idx file is two zero bytes, the type of its values (8: bytes), the number of dimensions, each of them as a big-endian
number, and the values.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.places import present
from vitrail.data.source import Arrays, Source

CLOTHES: Final = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
MOST: Final = 2**31


def mnist(root: Path) -> dict[str, Source]:
    return read(root, tuple("0123456789"))


def fashion_mnist(root: Path) -> dict[str, Source]:
    return read(root, CLOTHES)


def read(root: Path, classes: tuple[str, ...]) -> dict[str, Source]:
    splits: dict[str, Source] = {}
    for split, word in (("train", "train"), ("test", "t10k")):
        images = find(root, f"{word}-images", 3)
        labels = find(root, f"{word}-labels", 1)
        pictures, targets = read_idx(images), read_idx(labels)
        if pictures.ndim != 3 or targets.shape != pictures.shape[:1]:
            raise DataError(f"{images} holds {pictures.shape} and {labels.name} {targets.shape}: they do not fit")
        splits[split] = Arrays(pictures, Labels(targets), classes, called=f"{root.name}/{split}")
        splits[split].labels.check(len(classes), str(labels))
    return splits


def find(root: Path, stem: str, dimensions: int) -> Path:
    """Some copies have a dot where the others have a hyphen, and torchvision unpacks into MNIST/raw."""
    names = [f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte"]
    return present(root, *(f"{name}{suffix}" for name in names for suffix in ("", ".gz")))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes from an idx file; DataError where the lengths do not fit."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != 8 or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is no idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    start = 4 + 4 * data[3]
    if len(data) - start != (count := int(np.prod(shape, dtype=object))) or count > MOST:
        raise DataError(
            f"{path} holds {len(data) - start:,} bytes for {' x '.join(map(str, shape))}; download it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)

"""CIFAR-10 and CIFAR-100: the python archives, the binary ones, or the folders that either unpacks to.

The python version is pickles. They are read by an unpickler that knows arrays, text and containers and nothing else,
so a file that is not what it says runs no code.

MNIST and Fashion-MNIST: four idx files, plain or gzipped.

An idx file is two zero bytes, the type of its values (8: bytes), the number of dimensions, each of them as a big-endian
number, and the values.
"""

import gzip
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, reason_of
from vitrail.data.dataset import Arrays, ImageDataset, Labels
from vitrail.data.datasets.open_by_name import Absent, present

PIXELS: Final = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """How one version is packed."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str  # the file with the names of the classes
    key: str  # of the labels, or of the names, in a pickle
    names_key: str
    bytes_of_labels: int  # before each image, in the binary version


TEN: Final = (
    Version(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        names="batches.meta",
        key="labels",
        names_key="label_names",
        bytes_of_labels=0,
    ),
    Version(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test=("test_batch.bin",),
        names="batches.meta.txt",
        key="",
        names_key="",
        bytes_of_labels=1,
    ),
)
HUNDRED: Final = (
    Version(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test=("test",),
        names="meta",
        key="fine_labels",
        names_key="fine_label_names",
        bytes_of_labels=0,
    ),
    Version(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        train=("train.bin",),
        test=("test.bin",),
        names="fine_label_names.txt",
        key="",
        names_key="",
        bytes_of_labels=2,  # coarse, then fine
    ),
)


def cifar10(root: Path) -> dict[str, ImageDataset]:
    return read_cifar(root, TEN)


def cifar100(root: Path) -> dict[str, ImageDataset]:
    return read_cifar(root, HUNDRED)


def read_cifar(root: Path, versions: Sequence[Version]) -> dict[str, ImageDataset]:
    """The first version that is there, unpacked or not."""
    for version in versions:
        wanted = (*version.train, *version.test, version.names)
        folders = [root / version.folder, *([root] if root.name == version.folder else [])]
        for folder in folders:
            if folder.is_dir():
                files = {name: read_member(folder / name) for name in wanted}
                return {split: assemble(files, version, split, folder) for split in ("train", "test")}
        if (root / version.archive).is_file():
            files = read_members(root / version.archive, version.folder, wanted)
            return {split: assemble(files, version, split, root / version.archive) for split in ("train", "test")}
    raise Absent(root, tuple(name for version in versions for name in (version.folder, version.archive)))


def read_member(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def read_members(archive: Path, folder: str, wanted: Sequence[str]) -> dict[str, bytes]:
    """In one pass; nothing is written."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = member.name.removeprefix("./").removeprefix(f"{folder}/")
                if name in wanted and member.isreg():
                    found[name] = opened.extractfile(member).read()  # type: ignore[union-attr]
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{archive} is damaged or cut short ({reason_of(error)}); download it again") from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"{archive} has no member {folder}/{missing[0]}; download it again")
    return found


def assemble(files: dict[str, bytes], version: Version, split: str, where: Path) -> ImageDataset:
    pictures: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.int64]] = []
    for name in version.train if split == "train" else version.test:
        data, target = (batch if version.key else records)(files[name], version, f"{where}: {name}")
        pictures.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(target)
    classes = class_names(files[version.names], version, f"{where}: {version.names}")
    source = Arrays(
        np.concatenate(pictures), Labels(np.concatenate(labels)), classes, called=f"{version.folder}/{split}"
    )
    source.labels.check(len(classes), str(where))
    return source


def batch(data: bytes, version: Version, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pickle: data [N, 3072] and labels."""
    held = unpickled(data, where)
    try:
        pixels: NDArray[np.uint8] = held[b"data"].array
        labels = np.asarray(held[version.key.encode()], np.int64)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise DataError(f"{where} is not a batch of CIFAR: it has no data and {version.key}") from None
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS or labels.shape != pixels.shape[:1]:
        raise DataError(f"{where} is not a batch of CIFAR: data {pixels.shape} and labels {labels.shape}")
    return pixels, labels


def records(data: bytes, version: Version, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The binary version: labels of a byte each, then the pixels, plane by plane."""
    length = version.bytes_of_labels + PIXELS
    if not data or len(data) % length:
        raise DataError(f"{where} has {len(data):,} bytes, no multiple of {length:,}; download it again")
    rows = np.frombuffer(data, np.uint8).reshape(-1, length)
    return rows[:, version.bytes_of_labels :], rows[:, version.bytes_of_labels - 1].astype(np.int64)


def class_names(data: bytes, version: Version, where: str) -> tuple[str, ...]:
    if not version.names_key:
        return tuple(data.decode("utf-8", "replace").split())
    held = unpickled(data, where)
    try:
        return tuple(name.decode() for name in held[version.names_key.encode()])
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        raise DataError(f"{where} holds no {version.names_key}; download it again") from None


class Tame(pickle.Unpickler):
    """An unpickler that can make arrays and nothing else that is not plain data; and these by our own hands, since
    numpy believes a pickle about types."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return Values
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return Kind
        if (module, name) == ("_codecs", "encode"):
            return encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class Kind:
    """A type of numbers, as a pickle speaks of it."""

    def __init__(self, code: bytes | str = "", *_: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """The byte order, among others; the sets have bytes only."""


class Values:
    """An array, as a pickle speaks of it."""

    def __init__(self, *_: object) -> None:
        self.array = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, data = state
        if not isinstance(kind, Kind) or kind.code != "u1":
            raise pickle.UnpicklingError("it holds an array of other things than bytes")
        self.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def encode(text: str, *_: object) -> bytes:
    """How Python 3 writes bytes in the older protocols: as text, to be encoded as Latin-1."""
    return text.encode("latin1")


def unpickled(data: bytes, where: str) -> dict[bytes, Any]:
    """A dictionary with its keys as bytes, which Python 2 wrote and Python 3 would write as text."""
    try:
        held: Any = Tame(io.BytesIO(data), encoding="bytes").load()
        return {key.encode() if isinstance(key, str) else key: as_bytes(value) for key, value in held.items()}
    except Exception as error:  # a damaged pickle may raise anything at all
        raise DataError(f"{where} is damaged, or no file of CIFAR: {reason_of(error)}") from None


def as_bytes(value: Any) -> Any:
    return [item.encode() if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


CLOTHES: Final = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
MOST: Final = 2**31


def mnist(root: Path) -> dict[str, ImageDataset]:
    return read_mnist(root, tuple("0123456789"))


def fashion_mnist(root: Path) -> dict[str, ImageDataset]:
    return read_mnist(root, CLOTHES)


def read_mnist(root: Path, classes: tuple[str, ...]) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
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
        raise DataError(f"{path} is not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    start = 4 + 4 * data[3]
    if len(data) - start != (count := int(np.prod(shape, dtype=object))) or count > MOST:
        raise DataError(
            f"{path} holds {len(data) - start:,} bytes for {' x '.join(map(str, shape))}; download it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)

"""CIFAR-10 and CIFAR-100, MNIST and Fashion-MNIST.

CIFAR is read from the Python archives, the binary ones, or the folders that either unpacks to. The Python version is
pickled; it is read by an unpickler for arrays, text and containers only, so that no file can run code.

MNIST is four idx files, plain or gzipped: two zero bytes, the type of the values (8: bytes), the number of dimensions,
each dimension as a big-endian number, and the values.
"""

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, describe_error
from vitrail.data.dataset import ArrayDataset, ImageDataset
from vitrail.data.datasets.file_formats import make_labels
from vitrail.data.datasets.open_by_name import FilesMissing, find_file, refuse_damaged

NUM_PIXELS: Final = 3 * 32 * 32
CLOTHES: Final = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


class CifarVersion(NamedTuple):
    """The files of one version. The Python one has a key into its pickles, the binary one bytes of labels per image."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    names: str  # file with the class names
    label_bytes: int = 0  # coarse, then fine, where there are two
    key: str = ""


BATCHES: Final = tuple(f"data_batch_{i}" for i in range(1, 6))
BINARY: Final = tuple(f"{name}.bin" for name in BATCHES)
CIFAR10: Final = (
    CifarVersion("cifar-10-batches-py", "cifar-10-python.tar.gz", BATCHES, "test_batch", "batches.meta", key="label"),
    CifarVersion("cifar-10-batches-bin", "cifar-10-binary.tar.gz", BINARY, "test_batch.bin", "batches.meta.txt", 1),
)
CIFAR100: Final = (
    CifarVersion("cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test", "meta", key="fine_label"),
    CifarVersion("cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), "test.bin", "fine_label_names.txt", 2),
)


def read_cifar(root: Path, versions: Sequence[CifarVersion]) -> dict[str, ImageDataset]:
    """Reads the first version that exists, unpacked or not."""
    for version in versions:
        wanted = (*version.train, version.test, version.names)
        place, archive = (root if root.name == version.folder else root / version.folder, root / version.archive)
        if place.is_dir():
            with refuse_damaged(place):
                return build_splits({name: (place / name).read_bytes() for name in wanted}, version, place)
        if archive.is_file():
            found: dict[str, bytes] = {}
            with refuse_damaged(archive), tarfile.open(archive) as opened:  # in one pass, without writing anything
                for member in opened:
                    name = member.name.removeprefix("./").removeprefix(f"{version.folder}/")
                    if name in wanted and (content := opened.extractfile(member)):
                        found[name] = content.read()
            if missing := [name for name in wanted if name not in found]:
                raise DataError(f"{archive} has no member {version.folder}/{missing[0]}; download it again")
            return build_splits(found, version, archive)
    raise FilesMissing(root, tuple(name for version in versions for name in (version.folder, version.archive)))


read_cifar10 = partial(read_cifar, versions=CIFAR10)
read_cifar100 = partial(read_cifar, versions=CIFAR100)


def build_splits(files: dict[str, bytes], version: CifarVersion, where: Path) -> dict[str, ImageDataset]:
    classes = tuple(files[version.names].decode("utf-8", "replace").split())
    if version.key:
        held = unpickle(files[version.names], f"{where}: {version.names}")
        with refuse_damaged(f"{where}: {version.names}", "a list of class names"):
            classes = tuple(name.decode() for name in held[f"{version.key}_names".encode()])
    read_part = read_batch if version.key else read_binary
    splits: dict[str, ImageDataset] = {}
    for split, names in (("train", version.train), ("test", (version.test,))):
        parts = [read_part(files[name], version, f"{where}: {name}") for name in names]
        images = np.concatenate([data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for data, _ in parts])
        labels = make_labels(np.concatenate([labels for _, labels in parts]), len(classes), where)
        splits[split] = ArrayDataset(images, labels, classes, called=f"{version.folder}/{split}")
    return splits


def read_batch(data: bytes, version: CifarVersion, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pickle of data [N, 3072] and labels."""
    held = unpickle(data, where)
    with refuse_damaged(where, "a batch of CIFAR"):
        images: NDArray[np.uint8] = held[b"data"].array
        labels = np.asarray(held[f"{version.key}s".encode()], np.int64)
    if images.ndim != 2 or images.shape[1] != NUM_PIXELS or labels.shape != images.shape[:1]:
        raise DataError(f"{where} is not a batch of CIFAR: data {images.shape} and labels {labels.shape}")
    return images, labels


def read_binary(data: bytes, version: CifarVersion, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The binary version: labels of one byte each, then the pixels, plane by plane."""
    length = version.label_bytes + NUM_PIXELS
    if not data or len(data) % length:
        raise DataError(f"{where} has {len(data):,} bytes, not a multiple of {length:,}; download it again")
    rows = np.frombuffer(data, np.uint8).reshape(-1, length)
    return rows[:, version.label_bytes :], rows[:, version.label_bytes - 1].astype(np.int64)


class SafeUnpickler(pickle.Unpickler):
    """An unpickler of plain data and arrays only. Arrays are built here, because numpy trusts a pickle about types."""

    def find_class(self, module: str, name: str, /) -> Any:
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct":
                return PickledArray
            case "numpy.ndarray" | "numpy.dtype":
                return PickledType
            case "_codecs.encode":  # how Python 3 writes bytes in the older protocols: as text in Latin-1
                return lambda text, *_: text.encode("latin1")
            case other:
                raise pickle.UnpicklingError(f"it asks for {other}")


class PickledType:
    """A numpy type in a pickle."""

    def __init__(self, code: bytes | str = "", *_: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Ignores byte order and the like: the data sets have bytes only."""


class PickledArray:
    """A numpy array in a pickle."""

    def __init__(self, *_: object) -> None:
        self.array = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, data = state
        if not isinstance(kind, PickledType) or kind.code != "u1":
            raise pickle.UnpicklingError("it has an array that is not of bytes")
        self.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def unpickle(data: bytes, where: str) -> dict[bytes, Any]:
    """A pickled dictionary. Keys and lists of names are bytes, which Python 2 wrote and Python 3 writes as text."""

    def to_bytes(value: Any) -> Any:
        if isinstance(value, list):
            return [to_bytes(item) for item in value]
        return value.encode() if isinstance(value, str) else value

    try:
        held: Any = SafeUnpickler(io.BytesIO(data), encoding="bytes").load()
        return {to_bytes(key): to_bytes(value) for key, value in held.items()}
    except Exception as error:  # a damaged pickle may raise any exception
        raise DataError(f"{where} is damaged or not a file of CIFAR: {describe_error(error)}") from None


def read_idx_sets(root: Path, classes: tuple[str, ...]) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
    for split, word in (("train", "train"), ("test", "t10k")):
        image_file, label_file = find_idx(root, f"{word}-images", 3), find_idx(root, f"{word}-labels", 1)
        images, labels = read_idx(image_file), read_idx(label_file)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(f"{image_file} has {images.shape} and {label_file.name} {labels.shape}: they do not match")
        checked = make_labels(labels, len(classes), label_file)
        splits[split] = ArrayDataset(images, checked, classes, called=f"{root.name}/{split}")
    return splits


read_mnist = partial(read_idx_sets, classes=tuple("0123456789"))
read_fashion_mnist = partial(read_idx_sets, classes=tuple(CLOTHES.split(",")))


def find_idx(root: Path, stem: str, dimensions: int) -> Path:
    """Finds a file, with the hyphen that most copies have or with the dot of others."""
    names = [f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte"]
    return find_file(root, *(f"{name}{suffix}" for name in names for suffix in ("", ".gz")))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads an array of bytes from an idx file. DataError if the lengths do not match."""
    with refuse_damaged(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an idx file of bytes")
    shape, start = struct.unpack_from(f">{data[3]}I", data, 4), 4 + 4 * data[3]
    if len(data) - start != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path} has {len(data) - start:,} bytes for {' x '.join(map(str, shape))}; download it again")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)

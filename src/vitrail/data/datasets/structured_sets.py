"""CLEVR for two questions: how many objects are there, and how near is the nearest?

The labels come from scenes/CLEVR_train_scenes.json and its sibling for val. The test scenes were never given out.

DMLab: frames of a maze as TensorFlow record files, dmlab-train.tfrecord-00000-of-00010 and so on.

The six classes are {near, far, very far} x {good, bad object}; the files do not say which number is which.

dSprites for two questions: where across is the sprite, and how is it turned? From the .npz of its authors.

Unpacked, its 737,280 images of 64 x 64 take 3 GB for one bit a pixel. They are read in a stream once and kept in the
cache as bits, 377 MB, from where single images are read.

KITTI's images of roads, for one question: how far is the nearest car, van or truck?

The images are frames of drives, so VTAB splits by drive: which image is of which drive is in the development kit
(mapping/train_rand.txt and train_mapping.txt), and which drives are val and test follows from a seed. The draw is
TensorFlow Datasets' own (numpy's RandomState 123), so these should be the very images of VTAB.

smallNORB: toys from two cameras, six files in a format of their own that are called .mat all the same.

A file is a magic number (bytes or integers), the number of dimensions, at least three of them, and the values, all
little-endian. The images are those of the first camera, as in VTAB.
"""

import json
import struct
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Callable
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replacing
from vitrail.core.errors import DataError, reason_of
from vitrail.data.dataset import ImageDataset, Labels, Strings
from vitrail.data.datasets.file_formats import (
    Bits,
    Folder,
    Malformed,
    Pieces,
    Records,
    Tables,
    Tree,
    Zip,
    example,
    kept,
    records,
    tree,
)
from vitrail.data.datasets.open_by_name import Absent, inflated, present, unpacked

FEWEST, MOST = 3, 10
CLEVR_EDGES: Final = (8.0, 8.5, 9.0, 9.5, 10.0)


def count(root: Path) -> dict[str, ImageDataset]:
    """Objects less three."""
    return read_clevr(root, lambda objects: len(objects) - FEWEST, [str(n) for n in range(FEWEST, MOST + 1)])


def clevr_distance(root: Path) -> dict[str, ImageDataset]:
    """The depth of the nearest object, in six steps."""
    names = ["up to 8", *(f"up to {edge:g}" for edge in CLEVR_EDGES[1:]), "beyond 10"]
    return read_clevr(root, clevr_nearest, names)


def clevr_nearest(objects: list[dict[str, Any]]) -> int:
    """The step of the smallest depth; a depth at an edge counts to the step below it."""
    return bisect_left(CLEVR_EDGES, min(float(one["pixel_coords"][2]) for one in objects))


def read_clevr(root: Path, label: Callable[[list[dict[str, Any]]], int], classes: list[str]) -> dict[str, ImageDataset]:
    files, prefix = tree(root, "CLEVR_v1.0", "CLEVR_v1.0.zip")
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val"):
        where = f"{files.where}: CLEVR_{split}_scenes.json"
        try:
            scenes = json.loads(files.read(f"{prefix}scenes/CLEVR_{split}_scenes.json"))["scenes"]
            rows = sorted((str(scene["image_filename"]), label(scene["objects"])) for scene in scenes)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DataError(f"{where} is damaged, or no file of CLEVR ({reason_of(error)})") from None
        labels = Labels(np.array([value for _, value in rows], np.int64))
        labels.check(len(classes), where)
        splits[split] = files.source([f"{prefix}images/{split}/{name}" for name, _ in rows], labels, classes)
    return splits


CLASSES: Final = tuple("012345")


def dmlab(root: Path) -> dict[str, ImageDataset]:
    home = root if files(root, "train") else unpacked(root, "dmlab", "dmlab.tar.gz")
    splits: dict[str, ImageDataset] = {}
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
    """Where each image lies, its label and its name: all files are read through, once."""
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


FILE: Final = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
ORIENTATION, ACROSS = 3, 4  # columns of latents_classes: colour, shape, scale, orientation, x, y
ORIENTATIONS, PLACES = 40, 32
BINS: Final = 16
AT_ONCE: Final = 4096  # images


def location(root: Path) -> dict[str, ImageDataset]:
    """The place from left to right, 32 of them two by two."""
    return read_dsprites(root, ACROSS, PLACES)


def orientation(root: Path) -> dict[str, ImageDataset]:
    """The turn, 40 of them in 16 steps of two and a half."""
    return read_dsprites(root, ORIENTATION, ORIENTATIONS)


def binned(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """floor(v / (count / 16)), in whole numbers."""
    return values * BINS // count


def read_dsprites(root: Path, column: int, count: int) -> dict[str, ImageDataset]:
    path = present(root, FILE)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            latents = cast("NDArray[np.int64]", held["latents_classes"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    if latents.ndim != 2 or latents.shape[1] != 6 or latents.dtype.kind not in "iu":
        raise DataError(f"{path} holds latents_classes {latents.shape}, not N x 6")
    bits, shape = packed(path)
    if shape[0] != len(latents):
        raise DataError(f"{path} holds {shape[0]} images for {len(latents)} latents")
    labels = Labels(binned(latents[:, column].astype(np.int64), count).astype(np.int16))
    classes = [str(i) for i in range(BINS)]
    labels.check(BINS, str(path))
    source = Bits(
        bits, start=0, stride=prod(shape[1:]) // 8, shape=(shape[1], shape[2]), labels=labels, classes=classes
    )
    source.called = "dsprites"
    return {"train": source}


def packed(path: Path) -> tuple[Path, tuple[int, ...]]:
    """The images as bits, and the shape they have in the file. Made once, in pieces of a few megabytes."""
    try:
        with zipfile.ZipFile(path) as opened, opened.open("imgs.npy") as member:
            shape = dsprites_header(member, path)
            checksum = opened.getinfo("imgs.npy").CRC
            target = cache_folder("data") / "dsprites" / f"imgs-{checksum:08x}.bits"
            size = prod(shape) // 8
            if target.is_file() and target.stat().st_size == size:
                return target, shape
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                left, piece = prod(shape), AT_ONCE * prod(shape[1:])
                while left:
                    data = member.read(min(piece, left))
                    if not data:
                        raise EOFError("cut short")
                    while len(data) % 8 and (more := member.read(8 - len(data) % 8)):
                        data += more
                    file.write(np.packbits(np.frombuffer(data, np.uint8)).tobytes())
                    left -= len(data)
            return target, shape
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DataError(f"{path} is damaged or cut short ({reason_of(error)}); download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked to {cache_folder('data')} ({error.strerror or error})") from None


def dsprites_header(member: IO[bytes], path: Path) -> tuple[int, ...]:
    """The shape of an array of bytes in a .npy stream, which stands at its first value afterwards."""
    try:
        version = np.lib.format.read_magic(member)
        reads = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reads(member)
    except ValueError as error:
        raise DataError(f"{path}: imgs is not an array ({reason_of(error)})") from None
    if fortran or dtype != np.uint8 or len(shape) != 3 or shape[2] % 8:
        raise DataError(f"{path} holds imgs {shape} of {dtype}, not N x 64 x 64 of uint8")
    return shape


KITTI_EDGES: Final = (8.0, 20.0, 999.0)  # metres
NONE: Final = 1000.0
KITTI_CLASSES: Final = ("up to 8 m", "up to 20 m", "beyond 20 m", "none")
VEHICLES: Final = ("Car", "Van", "Truck")
SEED: Final = 123


def kitti_distance(root: Path) -> dict[str, ImageDataset]:
    images, folder = find(root, "training/image_2", "data_object_image_2.zip")
    answers, labels_folder = find(root, "training/label_2", "data_object_label_2.zip")
    kit, mapping = find(root, "mapping", "devkit_object.zip")
    drives = drive_of_each(kit, mapping)
    names = [n for n in images.names() if n.startswith(folder) and n.lower().endswith((".png", ".jpg"))]
    numbers = [number_of(name, len(drives), images.where) for name in names]
    split_of = splits(drives)
    found: dict[str, list[tuple[str, int]]] = {"train": [], "val": [], "test": []}
    for name, number in zip(names, numbers, strict=True):
        stem = PurePosixPath(name).stem
        text = answers.read(f"{labels_folder}{stem}.txt").decode("utf-8", "replace")
        found[split_of[number]].append((name, nearest_object(text, f"{answers.where}: {stem}.txt")))
    return {
        split: images.source(
            [name for name, _ in rows], Labels(np.array([label for _, label in rows], np.int64)), KITTI_CLASSES
        )
        for split, rows in found.items()
    }


def find(root: Path, folder: str, archive: str) -> tuple[Tree, str]:
    """A folder below root or root/raw, or the zip file; and what stands before the names in it."""
    for where in (root, root / "raw"):
        if (where / folder).is_dir():
            return Folder(where / folder), ""
        if (where / archive).is_file():
            return Zip(where / archive), f"{folder}/"
    raise Absent(root, (folder, archive))


def number_of(name: str, count: int, where: str) -> int:
    stem = PurePosixPath(name).stem
    if not stem.isdigit() or int(stem) >= count:
        raise DataError(f"{where}: {name} is not numbered from 000000 to {count - 1:06d}")
    return int(stem)


def nearest_object(text: str, where: str) -> int:
    """From the lines "Car 0.00 0 -1.57 614 181 727 284 1.57 1.73 4.15 1.00 1.75 13.22 -1.62": the last but one is the
    depth in metres. A depth at an edge counts to the step below it."""
    depth = NONE
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] not in VEHICLES:
            continue
        try:
            depth = min(depth, float(words[13]))
        except (IndexError, ValueError):
            raise DataError(f"{where} has a line {line!r}, which is not an object of KITTI") from None
    return bisect_left(KITTI_EDGES, depth)


def drive_of_each(kit: Tree, folder: str) -> list[str]:
    """For image 0, 1, ... the drive that it is a frame of."""
    where = f"{kit.where}: {folder}"
    lines = kit.read(f"{folder}train_mapping.txt").decode("utf-8", "replace").splitlines()
    try:
        at = [int(word) - 1 for word in kit.read(f"{folder}train_rand.txt").decode("utf-8", "replace").split(",")]
        if min(at) < 0:
            raise ValueError("a line number below 1")
        return [lines[i].split(" ")[1] for i in at]
    except (ValueError, IndexError) as error:
        raise DataError(f"{where} is not a mapping of KITTI's development kit ({reason_of(error)})") from None


def splits(drives: list[str]) -> list[str]:
    """The split of each image: a tenth of the drives are test, a tenth of the number of all are val."""
    names = sorted(set(drives))
    count = max(1, len(names) * 10 // 100)
    random = np.random.RandomState(SEED)  # the older generator, whose stream numpy keeps for good
    test = {str(name) for name in random.choice(names, count, replace=False)}
    rest = [name for name in names if name not in test]
    val = {str(name) for name in random.choice(rest, count, replace=False)} if len(rest) >= count else set[str]()
    return ["test" if drive in test else "val" if drive in val else "train" for drive in drives]


STEMS: Final = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
KINDS: Final = {BYTES: "u1", INTEGERS: "<i4"}
TOYS: Final = ("four-legged animals", "human figures", "airplanes", "trucks", "cars")
ELEVATION, AZIMUTH = 1, 2  # columns of info: instance, elevation, azimuth, lighting


def category(root: Path) -> dict[str, ImageDataset]:
    """The kind of toy."""
    return {split: pictures(root, split, values(root, split, "cat"), TOYS) for split in STEMS}


def azimuth(root: Path) -> dict[str, ImageDataset]:
    """From which side, in steps of 20 degrees; the file counts 0, 2, ... 34."""
    classes = [f"{20 * i} degrees" for i in range(18)]
    return {split: pictures(root, split, values(root, split, "info")[:, AZIMUTH] // 2, classes) for split in STEMS}


def elevation(root: Path) -> dict[str, ImageDataset]:
    """From how high, 30 to 70 degrees in steps of 5."""
    classes = [f"{30 + 5 * i} degrees" for i in range(9)]
    return {split: pictures(root, split, values(root, split, "info")[:, ELEVATION], classes) for split in STEMS}


def pictures(root: Path, split: str, labels: NDArray[np.int64], classes: "tuple[str, ...] | list[str]") -> ImageDataset:
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
            raise DataError(f"{path} is not a file of NORB: it begins with {head.hex()}")
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

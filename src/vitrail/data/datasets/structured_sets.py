"""VTAB's structured image sets: CLEVR, DMLab, dSprites, KITTI and smallNORB.

CLEVR      how many objects there are, and how near the nearest is, from scenes/CLEVR_train_scenes.json and its sibling
           for val; the test scenes are not public.
DMLab      frames of a maze as TFRecord files, dmlab-train.tfrecord-00000-of-00010 and so on. The six classes are
           {near, far, very far} x {good, bad object}; the files do not say which number is which.
dSprites   where a sprite is and how it is turned, from its authors' .npz. Unpacked, its 737,280 images of 64 x 64 take
           3 GB for one bit per pixel; they are streamed once into the cache as bits, 377 MB.
KITTI      how far the nearest car, van or truck is. Images are frames of drives, so VTAB splits by drive: the
           development kit has the drive of each image, and a seed draws the drives of val and test. The draw is
           TensorFlow Datasets' own (numpy's RandomState 123), so these should be the very images of VTAB.
smallNORB  toys, from six files in a format of their own that are called .mat all the same: a magic number (bytes or
           integers), the number of dimensions, at least three of them, and the values, all little-endian. The images
           are those of the first camera, as in VTAB.
"""

import json
import struct
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import DataError, describe_error
from vitrail.data.dataset import ImageDataset
from vitrail.data.datasets import file_formats as formats
from vitrail.data.datasets.file_formats import ByteRangeDataset, FileTree, FixedRecordDataset, make_labels, open_tree
from vitrail.data.datasets.open_by_name import decompress, find_file, refuse_damaged, unpack

CLEVR_FEWEST, CLEVR_MOST = 3, 10
CLEVR_EDGES: Final = (8.0, 8.5, 9.0, 9.5, 10.0)
DMLAB_CLASSES: Final = tuple("012345")
DSPRITES_FILE: Final = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
DSPRITES_BINS, DSPRITES_CHUNK = 16, 4096  # classes, and images packed at a time
KITTI_EDGES: Final = (8.0, 20.0, 999.0)  # metres
KITTI_CLASSES: Final = ("up to 8 m", "up to 20 m", "beyond 20 m", "none")
KITTI_NONE, KITTI_SEED = 1000.0, 123  # metres without a vehicle; the seed of VTAB's draw
NORB_STEMS: Final = {"train": "5x46789x9x18x6x2x96x96-training", "test": "5x01235x9x18x6x2x96x96-testing"}
NORB_TYPES: Final = {0x1E3D4C55: "u1", 0x1E3D4C54: "<i4"}  # by magic number
NORB_TOYS: Final = ("four-legged animals", "human figures", "airplanes", "trucks", "cars")
# The columns of smallNORB's info files are instance, elevation, azimuth and lighting.


def read_clevr_count(root: Path) -> dict[str, ImageDataset]:
    """The number of objects, minus three."""
    names = [str(count) for count in range(CLEVR_FEWEST, CLEVR_MOST + 1)]
    return read_clevr(root, lambda objects: len(objects) - CLEVR_FEWEST, names)


def read_clevr_distance(root: Path) -> dict[str, ImageDataset]:
    """The depth of the nearest object, in six steps; a depth at an edge belongs to the step below it."""
    names = ["up to 8", *(f"up to {edge:g}" for edge in CLEVR_EDGES[1:]), "beyond 10"]

    def step(objects: list[dict[str, Any]]) -> int:
        return bisect_left(CLEVR_EDGES, min(float(one["pixel_coords"][2]) for one in objects))

    return read_clevr(root, step, names)


def read_clevr(root: Path, label: Callable[[list[dict[str, Any]]], int], classes: list[str]) -> dict[str, ImageDataset]:
    files, prefix = open_tree(root, "CLEVR_v1.0", "CLEVR_v1.0.zip")
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val"):
        where, images = f"{files.where}: CLEVR_{split}_scenes.json", f"{prefix}images/{split}"
        with refuse_damaged(where, "a file of CLEVR"):
            scenes = json.loads(files.read(f"{prefix}scenes/CLEVR_{split}_scenes.json"))["scenes"]
            rows = sorted((f"{images}/{scene['image_filename']}", label(scene["objects"])) for scene in scenes)
        splits[split] = files.label(rows, classes, where)
    return splits


def read_dmlab(root: Path) -> dict[str, ImageDataset]:
    home = root if any(root.glob("dmlab-train.tfrecord*")) else unpack(root, "dmlab", "dmlab.tar.gz")
    splits: dict[str, ImageDataset] = {}
    for split, word in (("train", "train"), ("val", "validation"), ("test", "test")):
        paths = sorted(home.glob(f"dmlab-{word}.tfrecord*"))
        if not paths:
            raise DataError(f"{home} has no dmlab-{word}.tfrecord*; unpack dmlab.tar.gz again")
        table = formats.cached_index(f"dmlab-{split}", paths, lambda paths=paths: index_dmlab(paths))
        splits[split] = ByteRangeDataset(paths, table, DMLAB_CLASSES)
    return splits


def index_dmlab(paths: list[Path]) -> formats.IndexTable:
    """Indexes each image with its label and name. All files are read completely, but only once."""
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    for number, path in enumerate(paths):
        for start, data in formats.read_records(path):
            try:
                found = formats.parse_example(data)
                image, label, name = found["image"], found["label"], found["filename"]
                if not (isinstance(image, tuple) and isinstance(label, int) and isinstance(name, tuple)):
                    raise ValueError("image, label and filename have other types")
                if label >= len(DMLAB_CLASSES):
                    raise ValueError(f"its label is {label}")
            except (KeyError, IndexError, ValueError) as error:
                reason = f"the record at byte {start:,} is not an image of DMLab ({describe_error(error)})"
                raise DataError(f"{path}: {reason}") from None
            rows.append((number, start + image[0], image[1] - image[0], label))
            names.append(PurePosixPath(data[name[0] : name[1]].decode("utf-8", "replace")).name)
    return formats.build_index(rows, names)


def read_dsprites(root: Path, column: int, count: int) -> dict[str, ImageDataset]:
    """One column of latents_classes, which has `count` values, in 16 steps: floor(v / (count / 16)), in integers."""
    path = find_file(root, DSPRITES_FILE)
    with refuse_damaged(path), path.open("rb") as file, np.load(file, allow_pickle=False) as held:
        latents = cast("NDArray[np.int64]", held["latents_classes"])
    if latents.ndim != 2 or latents.shape[1] != 6 or latents.dtype.kind not in "iu":
        raise DataError(f"{path} has latents_classes {latents.shape}, not N x 6")
    bits, shape = pack_dsprites(path)
    if shape[0] != len(latents):
        raise DataError(f"{path} has {shape[0]} images for {len(latents)} latents")
    labels = make_labels(latents[:, column].astype(np.int64) * DSPRITES_BINS // count, DSPRITES_BINS, path)
    classes = [str(i) for i in range(DSPRITES_BINS)]
    source = formats.BitmapDataset(bits, 0, prod(shape[1:]) // 8, shape[1:], labels, classes)
    source.called = "dsprites"
    return {"train": source}


read_dsprites_location = partial(read_dsprites, column=4, count=32)  # horizontally
read_dsprites_orientation = partial(read_dsprites, column=3, count=40)


def pack_dsprites(path: Path) -> tuple[Path, tuple[int, ...]]:
    """The images as bits, and their shape in the file. Packed once, a few megabytes at a time."""
    with refuse_damaged(path), zipfile.ZipFile(path) as opened, opened.open("imgs.npy") as member:
        npy = np.lib.format
        old = npy.read_magic(member) == (1, 0)
        shape, fortran, dtype = (npy.read_array_header_1_0 if old else npy.read_array_header_2_0)(member)
        if fortran or dtype != np.uint8 or len(shape) != 3 or shape[2] % 8:
            raise DataError(f"{path} has imgs {shape} of {dtype}, not N x 64 x 64 of uint8")
        target = cache_folder("data") / "dsprites" / f"imgs-{opened.getinfo('imgs.npy').CRC:08x}.bits"
        if target.is_file() and target.stat().st_size == prod(shape) // 8:
            return target, shape
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(target) as file:
            left, chunk = prod(shape), DSPRITES_CHUNK * prod(shape[1:])
            while left:
                data = member.read(min(chunk, left))
                while len(data) % 8 and (more := member.read(8 - len(data) % 8)):
                    data += more
                if not data:
                    raise EOFError("cut short")
                file.write(np.packbits(np.frombuffer(data, np.uint8)).tobytes())
                left -= len(data)
        return target, shape


def read_kitti_distance(root: Path) -> dict[str, ImageDataset]:
    images, folder = find_kitti(root, "training/image_2", "data_object_image_2.zip")
    objects, label_folder = find_kitti(root, "training/label_2", "data_object_label_2.zip")
    split_of = split_drives(read_drives(*find_kitti(root, "mapping", "devkit_object.zip")))
    rows: dict[str, list[tuple[str, int]]] = {"train": [], "val": [], "test": []}
    for name in (n for n in images.names() if n.startswith(folder) and n.lower().endswith((".png", ".jpg"))):
        stem = PurePosixPath(name).stem
        if not stem.isdigit() or int(stem) >= len(split_of):
            raise DataError(f"{images.where}: {name} is not numbered from 000000 to {len(split_of) - 1:06d}")
        text = objects.read(f"{label_folder}{stem}.txt").decode("utf-8", "replace")
        rows[split_of[int(stem)]].append((name, distance_class(text, f"{objects.where}: {stem}.txt")))
    return {split: images.label(found, KITTI_CLASSES) for split, found in rows.items()}


def find_kitti(root: Path, folder: str, archive: str) -> tuple[FileTree, str]:
    """A folder below root or root/raw, or the zip file; and the prefix of the names in it."""
    raw = not any((root / name).exists() for name in (folder, archive)) and (root / "raw").is_dir()
    return open_tree(root / "raw" if raw else root, folder, archive)


def distance_class(text: str, where: str) -> int:
    """The class of the nearest vehicle, from lines such as "Car 0.00 0 -1.57 614 181 727 284 1.57 1.73 4.15 1.00 1.75
    13.22 -1.62": the last number but one is the depth in metres. A depth at an edge belongs to the step below it."""
    lines = [line.split() for line in text.splitlines() if line.startswith(("Car ", "Van ", "Truck "))]
    with refuse_damaged(where, "a list of KITTI's objects"):
        return bisect_left(KITTI_EDGES, min([float(words[13]) for words in lines], default=KITTI_NONE))


def read_drives(kit: FileTree, folder: str) -> list[str]:
    """The drive of image 0, 1, ..."""
    lines = kit.read(f"{folder}train_mapping.txt").decode("utf-8", "replace").splitlines()
    with refuse_damaged(f"{kit.where}: {folder}", "a mapping of KITTI's development kit"):
        at = [int(word) - 1 for word in kit.read(f"{folder}train_rand.txt").decode("utf-8", "replace").split(",")]
        if min(at) < 0:
            raise ValueError("a line number below 1")
        return [lines[i].split(" ")[1] for i in at]


def split_drives(drives: Sequence[str]) -> list[str]:
    """The split of each image: a tenth of the drives are test, as many are val."""
    names = sorted(set(drives))
    count = max(1, len(names) * 10 // 100)
    random = np.random.RandomState(KITTI_SEED)  # the older generator, whose stream numpy keeps for good
    test = {str(name) for name in random.choice(names, count, replace=False)}
    rest = [name for name in names if name not in test]
    val = {str(name) for name in random.choice(rest, count, replace=False)} if len(rest) >= count else set[str]()
    return ["test" if drive in test else "val" if drive in val else "train" for drive in drives]


def read_norb_sets(root: Path, column: int, step: int, classes: Sequence[str]) -> dict[str, ImageDataset]:
    """The images of both splits, with labels from a column of the info files in units of `step`; or, with column -1,
    from the file of categories, which has no columns."""
    part = "info" if column >= 0 else "cat"
    splits: dict[str, ImageDataset] = {}
    for split, stem in NORB_STEMS.items():
        label_file, path = (decompress(root, f"smallnorb-{stem}-{name}.mat") for name in (part, "dat"))
        kind, shape, start = read_norb_header(label_file)
        values = np.fromfile(label_file, kind, prod(shape), offset=start).astype(np.int64).reshape(shape)
        values = (values[:, column] if column >= 0 else values) // step
        kind, shape, start = read_norb_header(path)
        if kind != "u1" or len(shape) != 4 or shape[0] != len(values):
            raise DataError(f"{path} has {' x '.join(map(str, shape))} images for {len(values)} labels")
        labels = make_labels(values, len(classes), path)
        splits[split] = FixedRecordDataset(path, start, prod(shape[1:]), shape[2:], labels, classes)
    return splits


read_smallnorb = partial(read_norb_sets, column=-1, step=1, classes=NORB_TOYS)
# The azimuth in steps of 20 degrees, which the file counts as 0, 2, ... 34; the elevation in steps of 5.
read_smallnorb_azimuth = partial(read_norb_sets, column=2, step=2, classes=[f"{d} degrees" for d in range(0, 360, 20)])
read_smallnorb_elevation = partial(read_norb_sets, column=1, step=1, classes=[f"{d} degrees" for d in range(30, 71, 5)])


def read_norb_header(path: Path) -> tuple[str, tuple[int, ...], int]:
    """Type of the values, dimensions, and where the values begin; checked against the size of the file."""
    with path.open("rb") as file:
        head = file.read(8)
        magic, count = struct.unpack("<Ii", head) if len(head) == 8 else (0, 0)
        if magic not in NORB_TYPES or not 1 <= count <= 8:
            raise DataError(f"{path} is not a file of NORB: it begins with {head.hex()}")
        stored = max(3, count)
        sizes = file.read(4 * stored)
    if len(sizes) < 4 * stored:
        raise DataError(f"{path} is cut short; download it again")
    shape = struct.unpack(f"<{stored}i", sizes)[:count]
    start = 8 + 4 * stored
    size = path.stat().st_size - start
    if min(shape) < 0 or size != prod(shape) * np.dtype(NORB_TYPES[magic]).itemsize:
        raise DataError(f"{path} has {size:,} bytes for {' x '.join(map(str, shape))}; download it again")
    return NORB_TYPES[magic], shape, start

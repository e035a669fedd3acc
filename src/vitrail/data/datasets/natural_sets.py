"""VTAB's natural image sets (Caltech-101, SVHN, SUN397, Oxford Pets, Flowers-102, Describable Textures) and its
specialized ones (EuroSAT, NWPU-RESISC45, PatchCamelyon, Diabetic Retinopathy).

TensorFlow Datasets draws Caltech's training images in an order that depends on the disk it ran on. Here they follow a
fixed pseudo-random order per class, so they are different images, and the same ones everywhere. SUN397's splits are
lists that come with TensorFlow Datasets; without them, splits of the same sizes are drawn in a fixed pseudo-random
order.

EuroSAT (RGB) and RESISC45 are class folders without official splits. PatchCamelyon is six HDF5 files, images
x [N, 96, 96, 3] and labels y [N, 1, 1, 1]; it needs h5py. Diabetic Retinopathy Detection (Kaggle, 2015) has five
stages of a disease of the eye:

    trainLabels.csv           image,level
    train/10_left.jpeg        and so on
    retinopathy_solution.csv  image,level,Usage: val is the public part of the competition's test set, test the private
    test/1_left.jpeg          and so on

VTAB uses the version that TensorFlow Datasets calls btgraham-300: scaled to an eyeball of radius 300, minus the local
average, cropped to nine tenths of the radius. `PreparedEyes` computes that when an image is read.
"""

import csv
import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.dataset import ArrayDataset, ImageDataset, Labels, RelabelledDataset
from vitrail.data.datasets.file_formats import FileTree, make_labels, open_tree, read_mat
from vitrail.data.datasets.open_by_name import decompress, find_file, read_text, refuse_damaged, unpack
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import EpochOrder, hash_word
from vitrail.data.readers.folder import is_folder, list_below, list_entries
from vitrail.data.readers.parquet import import_extra

CALTECH_TRAIN: Final = 30  # images per class
CALTECH_FOLDER: Final = "101_ObjectCategories"
CALTECH_ARCHIVE: Final = "101_ObjectCategories.tar.gz"
SUN_LISTS: Final = {"train": "sun397_tfds_tr.txt", "val": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
SUN_SKIPPED: Final = "c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"  # decoders disagree on it
STAGES: Final = ("no DR", "mild", "moderate", "severe", "proliferative DR")
RADIUS, VISIBLE = 300, 0.9  # of an eyeball in pixels, and the share of it that is seen
GREY, QUALITY = 128, 72  # the level around it, and of the JPEG


def read_caltech101(root: Path) -> dict[str, ImageDataset]:
    """102 classes, the background included: 30 images per class are train, the others test."""
    home = find_caltech(root)
    classes = [entry.name for entry in list_entries(str(home)) if is_folder(entry)]
    splits: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for label, name in enumerate(classes):
        names = [entry.name for entry in list_entries(str(home / name))]
        files = [f"{name}/{file}" for file in names if file.lower().endswith(".jpg")]
        if len(files) <= CALTECH_TRAIN:
            raise DataError(f"{home / name} has {len(files)} images; at least {CALTECH_TRAIN + 1} are needed")
        order = EpochOrder(len(files), hash_word(f"caltech101 {name}"))(0, np.arange(len(files)))
        for split, chosen in (("train", order[:CALTECH_TRAIN]), ("test", order[CALTECH_TRAIN:])):
            splits[split] += [(files[i], label) for i in sorted(chosen)]
    return {split: FileTree(home).label(rows, classes) for split, rows in splits.items()}


def find_caltech(root: Path) -> Path:
    """The folder of class folders. The archive is unpacked, and so is the one inside caltech-101.zip."""
    places = (root, root / "caltech-101")
    found = [place for place in places if (place / CALTECH_FOLDER).is_dir() or (place / CALTECH_ARCHIVE).is_file()]
    if not found:
        wrapper, archive = find_file(root, "caltech-101.zip", CALTECH_FOLDER, CALTECH_ARCHIVE), root / CALTECH_ARCHIVE
        with refuse_damaged(wrapper), zipfile.ZipFile(wrapper) as opened, replace_on_success(archive) as file:
            shutil.copyfileobj(opened.open(f"caltech-101/{CALTECH_ARCHIVE}"), file, 1 << 20)
    return unpack(found[0] if found else root, CALTECH_FOLDER, CALTECH_ARCHIVE)


def read_svhn(root: Path) -> dict[str, ImageDataset]:
    """The cropped digits. The "extra" images are not used, as in VTAB."""
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "test"):
        path = find_file(root, f"{split}_32x32.mat")
        held = read_mat(path, path, "X", "y")
        images, labels = held["X"], held["y"].ravel()
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != labels.size:
            raise DataError(f"{path} has X {images.shape} and y {labels.shape}, not 32 x 32 x 3 x N and N")
        digits = make_labels(np.where(labels == 10, 0, labels), 10, path)  # the digit 0 is class 10 in the file
        images = np.ascontiguousarray(images.transpose(3, 0, 1, 2))
        splits[split] = ArrayDataset(images, digits, tuple("0123456789"), called=path.name)
    return splits


def read_sun397(root: Path) -> dict[str, ImageDataset]:
    """108,753 scenes in folders a/abbey, a/airplane_cabin, c/church/outdoor and so on."""

    def class_of(name: str) -> str:
        return "/".join(name.split("/")[1:-1])

    home = unpack(root, "SUN397", "SUN397.tar.gz") if root.name != "SUN397" else root
    images, _ = list_below(str(home), "")
    names = sorted(name for name in images if name != SUN_SKIPPED and name.rpartition("/")[2].startswith("sun_"))
    if not names:
        raise DataError(f"{home}: no images called sun_*.jpg below it")
    if (home / "ClassName.txt").is_file():  # lines such as /a/abbey
        classes = [line.strip()[3:] for line in read_text(home / "ClassName.txt").splitlines() if line.strip()]
    else:
        classes = sorted({class_of(name) for name in names})
    where = next((place for place in (root, home) if all((place / f).is_file() for f in SUN_LISTS.values())), None)
    splits = draw_sun_splits(names) if where is None else dict[str, list[str]]()
    for split, path in () if where is None else ((split, where / file) for split, file in SUN_LISTS.items()):
        splits[split] = [line.strip().lstrip("/") for line in read_text(path).splitlines() if line.strip()]
        if missing := sorted(set(splits[split]).difference(names)):
            raise DataError(f"{path} lists {missing[0]} and {len(missing) - 1} more that are not in {home}")
    return FileTree(home).label_splits(splits, classes, class_of, "ClassName.txt")


def draw_sun_splits(names: list[str]) -> dict[str, list[str]]:
    """A tenth of the images is val, a fifth is test, the rest is train."""
    order = EpochOrder(len(names), hash_word("sun397"))(0, np.arange(len(names)))
    val, train = len(names) // 10, len(names) - len(names) // 10 - len(names) // 5
    parts = {"train": order[:train], "val": order[train : train + val], "test": order[train + val :]}
    return {split: [names[i] for i in sorted(chosen)] for split, chosen in parts.items()}


def read_pets(root: Path) -> dict[str, ImageDataset]:
    """Train is the official trainval list. A line is "Abyssinian_100 1 1 1": the image, and its class from 1."""
    lists = unpack(root, "annotations", "annotations.tar.gz")
    images = FileTree(unpack(root, "images", "images.tar.gz"))
    splits: dict[str, list[tuple[str, int]]] = {}
    names: dict[int, str] = {}
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        lines = [line.split() for line in read_text(find_file(lists, file)).splitlines() if line.strip("# \t")]
        lines = [line for line in lines if not line[0].startswith("#")]
        for line in lines:
            if len(line) < 2 or not line[1].isdigit():
                raise DataError(f"{lists}: the list of {split} has a line {' '.join(line)!r}, not NAME CLASS ...")
            names[int(line[1])] = line[0].rpartition("_")[0].replace("_", " ")
        splits[split] = [(f"{line[0]}.jpg", int(line[1]) - 1) for line in lines]
    if sorted(names) != list(range(1, len(names) + 1)):
        raise BadLabels(f"{lists}: the lists have the classes {sorted(names)}, not 1 to {len(names)}")
    classes = [names[i] for i in sorted(names)]
    return {split: images.label(rows, classes) for split, rows in splits.items()}


def read_flowers102(root: Path) -> dict[str, ImageDataset]:
    """Images are numbered from 1; setid.mat has the images of each split, imagelabels.mat the classes from 1."""
    set_file, label_file = find_file(root, "setid.mat"), find_file(root, "imagelabels.mat")
    sets = read_mat(set_file, set_file, "trnid", "valid", "tstid")
    labels = read_mat(label_file, label_file, "labels")["labels"].ravel().astype(np.int64) - 1
    images = FileTree(unpack(root, "jpg", "102flowers.tgz"))
    from torchvision.datasets import Flowers102

    splits: dict[str, ImageDataset] = {}
    for split, field in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        numbers = sets[field].ravel().astype(np.int64)
        if numbers.size and not (numbers.min() >= 1 and numbers.max() <= len(labels)):
            raise DataError(f"{set_file} lists image {numbers.max()}, but imagelabels.mat has {len(labels)} labels")
        rows = [(f"image_{number:05d}.jpg", int(labels[number - 1])) for number in numbers]
        splits[split] = images.label(rows, Flowers102.classes, label_file)
    return splits


def read_dtd(root: Path) -> dict[str, ImageDataset]:
    """The first of the ten official folds; a line is "banded/banded_0002.jpg"."""
    home = unpack(root, "dtd", "dtd-r1.0.1.tar.gz") if not (root / "labels").is_dir() else root
    rows = {split: read_text(find_file(home / "labels", f"{split}1.txt")).split() for split in ("train", "val", "test")}
    classes = sorted({name.partition("/")[0] for name in rows["train"]})
    images = FileTree(find_file(home, "images"))
    return images.label_splits(rows, classes, lambda name: name.partition("/")[0], "train1.txt")


def read_eurosat(root: Path) -> dict[str, ImageDataset]:
    """2750/AnnualCrop/AnnualCrop_1.jpg and so on, unpacked or in EuroSAT.zip; newer copies say EuroSAT_RGB."""
    folder = next((name for name in ("2750", "EuroSAT_RGB") if (root / name).is_dir()), "2750")
    return {"train": read_class_folders(*open_tree(root, folder, "EuroSAT.zip", "EuroSAT_RGB.zip"))}


def read_resisc45(root: Path) -> dict[str, ImageDataset]:
    """NWPU-RESISC45/airplane/airplane_001.jpg and so on. A .rar has to be unpacked by hand; a .zip is read as it is."""
    return {"train": read_class_folders(*open_tree(root, "NWPU-RESISC45", "NWPU-RESISC45.zip"))}


def read_class_folders(files: FileTree, prefix: str) -> ImageDataset:
    """The folders directly below the top are the classes."""
    inside = [name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)]
    names = [name for name in inside if name.lower().endswith((".jpg", ".jpeg", ".png")) and name.count("/") == 1]
    if not names and inside and len({name.partition("/")[0] for name in inside}) == 1:  # one more enclosing folder
        return read_class_folders(files, f"{prefix}{inside[0].partition('/')[0]}/")
    classes = sorted({name.partition("/")[0] for name in names})
    if not classes:
        raise DataError(f"{files.where}: no class folders with images in it")
    return files.label([(prefix + name, classes.index(name.partition("/")[0])) for name in names], classes)


def read_pcam(root: Path) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
    for split, word in (("train", "train"), ("val", "valid"), ("test", "test")):
        image_file = decompress(root, f"camelyonpatch_level_2_split_{word}_x.h5")
        label_file = decompress(root, f"camelyonpatch_level_2_split_{word}_y.h5")
        with refuse_damaged(label_file, "an HDF5 file"), open_hdf5(label_file) as file:
            labels = np.asarray(file["y"]).reshape(-1)
        with refuse_damaged(image_file, "an HDF5 file"), open_hdf5(image_file) as file:
            shape = tuple(file["x"].shape)
        if len(shape) != 4 or shape[3] != 3 or shape[0] != labels.size:
            raise DataError(f"{image_file} has x {shape} and {label_file.name} {labels.size} labels: they do not match")
        splits[split] = Hdf5Dataset(image_file, make_labels(labels, 2, label_file), ("no tumour", "tumour"))
    return splits


def open_hdf5(path: Path) -> Any:
    """Opens an HDF5 file. ValueError if it is damaged; h5py's own OSError has no readable message."""
    h5py = import_extra("h5py", "PatchCamelyon is stored as HDF5, which")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(str(error)) from None


class Hdf5Dataset(ImageDataset):
    """Images in the array x. Each process opens the file itself: handles do not survive a fork."""

    def __init__(self, path: Path, labels: Labels, classes: tuple[str, ...]) -> None:
        self.path, self.labels, self.classes = path, labels, classes
        self.handle: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def read(self, index: int) -> NDArray[np.uint8]:
        try:
            if self.handle is None or self.handle[0] != os.getpid():
                self.handle = (os.getpid(), open_hdf5(self.path))
            return np.asarray(self.handle[1]["x"][index], np.uint8)
        except (OSError, KeyError, ValueError) as error:
            raise BadImage(str(error)) from None

    def name(self, index: int) -> str:
        return f"{self.path.name}[{index}]"


def read_retinopathy(root: Path) -> dict[str, ImageDataset]:
    """The images as published, up to 5,000 pixels wide."""
    table, solution = find_file(root, "trainLabels.csv"), find_file(root, "retinopathy_solution.csv")
    train, test = FileTree(find_file(root, "train")), FileTree(find_file(root, "test"))
    parts = {"val": read_stages(solution, "Public"), "test": read_stages(solution, "Private")}
    splits = {split: test.label(rows, STAGES) for split, rows in parts.items()}
    return {"train": train.label(read_stages(table, ""), STAGES), **splits}


def read_prepared_retinopathy(root: Path) -> dict[str, ImageDataset]:
    """The images as VTAB uses them."""
    return {split: PreparedEyes(each, each.labels, each.classes) for split, each in read_retinopathy(root).items()}


def read_stages(path: Path, usage: str) -> list[tuple[str, int]]:
    """File and stage of each image, of one usage where one is given."""
    with refuse_damaged(path, f"a table of image,level{',Usage' if usage else ''}"):
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if not usage or row["Usage"] == usage]
        return [(f"{row['image']}.jpeg", int(row["level"])) for row in rows]


class PreparedEyes(RelabelledDataset):
    """Images of eyes at one size and brightness, computed as the winner of the competition did."""

    def read(self, index: int) -> bytes:
        pixels = normalise_eye(np.asarray(EncodedImage(self.source.read(index)).rgb()))
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=QUALITY)
        return out.getvalue()

    def sizes(self) -> None:
        return None


def normalise_eye(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4 (x - blurred x) + 128 on an eyeball of radius 300, grey outside nine tenths of it, cropped to that."""
    line = pixels[pixels.shape[0] // 2].astype(np.int64).sum(axis=1)
    radius = float((line > line.mean() / 10).sum()) / 2
    if radius < 1:  # a black line: the image's height stands in
        radius = pixels.shape[0] / 2
    scale = RADIUS / radius
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(RADIUS / 30)), np.int64)
    contrast = np.clip(4 * np.asarray(image, np.int64) - 4 * blurred + GREY, 0, 255)
    height, width = contrast.shape[:2]
    inner = int(RADIUS * VISIBLE)
    y, x = np.ogrid[:height, :width]
    contrast[(y - height // 2) ** 2 + (x - width // 2) ** 2 > inner**2] = GREY
    top, left = max(height // 2 - inner, 0), max(width // 2 - inner, 0)
    return contrast[top : height // 2 + inner, left : width // 2 + inner].astype(np.uint8)

"""VTAB's specialized image sets: EuroSAT, NWPU-RESISC45, PatchCamelyon and Diabetic Retinopathy.

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
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ImageDataset, Labels, RelabelledDataset
from vitrail.data.datasets.file_formats import FileTree, make_labels, open_tree
from vitrail.data.datasets.open_by_name import decompress, find_file, import_extra, refuse_damaged
from vitrail.data.decode.image import EncodedImage

STAGES: Final = ("no DR", "mild", "moderate", "severe", "proliferative DR")
RADIUS: Final = 300
VISIBLE: Final = 0.9  # share of the radius
GREY: Final = 128
QUALITY: Final = 72


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
    if not names and inside and len({name.partition("/")[0] for name in inside}) == 1:  # one more folder around it
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
    """ValueError where the file is damaged; an OSError that h5py raises has no text for people."""
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

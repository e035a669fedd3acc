"""Images from above, in class folders and without official splits: EuroSAT (RGB) and NWPU-RESISC45.

PatchCamelyon: six HDF5 files, images x [N, 96, 96, 3] and labels y [N, 1, 1, 1]. Needs h5py.

Diabetic Retinopathy Detection (Kaggle, 2015): five stages of a disease of the eye.

root/trainLabels.csv           image,level
root/train/10_left.jpeg        and so on
root/retinopathy_solution.csv  image,level,Usage: val is the public part of the competition's test set, test the private
root/test/1_left.jpeg          and so on

VTAB uses the version that TensorFlow Datasets calls btgraham-300: scaled to an eyeball of radius 300, less the local
average, cropped to nine tenths of the radius. `Prepared` makes that of an image when it is read.
"""

import csv
import io
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vitrail.core.errors import BadImage, DataError, reason_of
from vitrail.data.dataset import ImageDataset, Labels, RelabelledDataset
from vitrail.data.datasets.file_formats import Folder, Tree, tree
from vitrail.data.datasets.open_by_name import Absent, inflated, present
from vitrail.data.decode.image import EncodedImage


def eurosat(root: Path) -> dict[str, ImageDataset]:
    """2750/AnnualCrop/AnnualCrop_1.jpg and so on, unpacked or in EuroSAT.zip; newer copies say EuroSAT_RGB."""
    for folder in ("2750", "EuroSAT_RGB"):
        try:
            return {"train": class_folders(*tree(root, folder, "EuroSAT.zip", "EuroSAT_RGB.zip"))}
        except Absent:
            continue
    raise Absent(root, ("2750", "EuroSAT_RGB", "EuroSAT.zip"))


def resisc45(root: Path) -> dict[str, ImageDataset]:
    """NWPU-RESISC45/airplane/airplane_001.jpg and so on. A .rar has to be unpacked by hand; a .zip is read as it is."""
    return {"train": class_folders(*tree(root, "NWPU-RESISC45", "NWPU-RESISC45.zip"))}


def class_folders(files: Tree, prefix: str) -> ImageDataset:
    """What lies in a folder directly below the top is of that class."""
    inside = [name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)]
    names = [name for name in inside if name.lower().endswith((".jpg", ".jpeg", ".png")) and name.count("/") == 1]
    if not names and inside and len({name.partition("/")[0] for name in inside}) == 1:  # one folder more around it
        return class_folders(files, f"{prefix}{inside[0].partition('/')[0]}/")
    classes = sorted({name.partition("/")[0] for name in names})
    if not classes:
        raise DataError(f"{files.where}: no class folders with images in it")
    numbers = {name: i for i, name in enumerate(classes)}
    labels = Labels(np.array([numbers[name.partition("/")[0]] for name in names], np.int64))
    return files.source([prefix + name for name in names], labels, classes)


def pcam(root: Path) -> dict[str, ImageDataset]:
    splits: dict[str, ImageDataset] = {}
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


class Hdf5(ImageDataset):
    """Images in the data set x. Each process that reads opens the file itself: handles do not survive a fork."""

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
            raise BadImage(str(error)) from None

    def name(self, index: int) -> str:
        return f"{self.path.name}[{index}]"


STAGES: Final = ("no DR", "mild", "moderate", "severe", "proliferative DR")
RADIUS: Final = 300
KEPT: Final = 0.9  # of the radius
GREY: Final = 128
QUALITY: Final = 72


def original(root: Path) -> dict[str, ImageDataset]:
    """The images as they were given out, up to 5,000 pixels wide."""
    train, test = present(root, "trainLabels.csv"), present(root, "retinopathy_solution.csv")
    return {
        "train": pictures(root, "train", rows(train, None)),
        "val": pictures(root, "test", rows(test, "Public")),
        "test": pictures(root, "test", rows(test, "Private")),
    }


def prepared(root: Path) -> dict[str, ImageDataset]:
    """The images as VTAB has them."""
    return {split: Prepared(source, source.labels, source.classes) for split, source in original(root).items()}


def rows(path: Path, usage: str | None) -> list[tuple[str, int]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            return [
                (row["image"], int(row["level"]))
                for row in csv.DictReader(file)
                if usage is None or row["Usage"] == usage
            ]
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            raise DataError(
                f"{path} is not a table of image,level{',Usage' if usage else ''} ({reason_of(error)})"
            ) from None


def pictures(root: Path, folder: str, table: list[tuple[str, int]]) -> ImageDataset:
    labels = Labels(np.array([level for _, level in table], np.int64))
    labels.check(len(STAGES), str(root / folder))
    return Folder(present(root, folder)).source([f"{name}.jpeg" for name, _ in table], labels, STAGES)


class Prepared(RelabelledDataset):
    """Images of eyes brought to one size and brightness on the way, as the winner of the competition did."""

    def read(self, index: int) -> bytes:
        pixels = even(np.asarray(EncodedImage(self.source.read(index)).rgb()))
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=QUALITY)
        return out.getvalue()

    def sizes(self) -> None:
        return None


def even(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4 (x - blurred x) + 128 on an eyeball of radius 300, grey outside of nine tenths of it, cropped to that."""
    line = pixels[pixels.shape[0] // 2].astype(np.int64).sum(axis=1)
    radius = float((line > line.mean() / 10).sum()) / 2
    if radius < 1:  # a black line: then the image's height has to do
        radius = pixels.shape[0] / 2
    scale = RADIUS / radius
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(RADIUS / 30)), np.int64)
    contrast = np.clip(4 * np.asarray(image, np.int64) - 4 * blurred + GREY, 0, 255)
    height, width = contrast.shape[:2]
    inner = int(RADIUS * KEPT)
    y, x = np.ogrid[:height, :width]
    outside = (y - height // 2) ** 2 + (x - width // 2) ** 2 > inner**2
    contrast[outside] = GREY
    top, left = max(height // 2 - inner, 0), max(width // 2 - inner, 0)
    return contrast[top : height // 2 + inner, left : width // 2 + inner].astype(np.uint8)

"""Diabetic Retinopathy Detection (Kaggle, 2015): five stages of a disease of the eye.

root/trainLabels.csv           image,level
root/train/10_left.jpeg        and so on
root/retinopathy_solution.csv  image,level,Usage: val is the public part of the competition's test set, test the private
root/test/1_left.jpeg          and so on

VTAB uses the version that TensorFlow Datasets calls btgraham-300: scaled to an eyeball of radius 300, less the local
average, cropped to nine tenths of the radius. `Prepared` makes that of a picture when it is read.
"""

import csv
import io
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from vitrail.core.errors import DataError, reason_of
from vitrail.data.decode.picture import Picture
from vitrail.data.labels import Labels
from vitrail.data.readers.named.places import present
from vitrail.data.readers.named.trees import Folder
from vitrail.data.source import Relabelled, Source

STAGES: Final = ("no DR", "mild", "moderate", "severe", "proliferative DR")
RADIUS: Final = 300
KEPT: Final = 0.9  # of the radius
GREY: Final = 128
QUALITY: Final = 72


def original(root: Path) -> dict[str, Source]:
    """The pictures as they were given out, up to 5,000 pixels wide."""
    train, test = present(root, "trainLabels.csv"), present(root, "retinopathy_solution.csv")
    return {
        "train": pictures(root, "train", rows(train, None)),
        "val": pictures(root, "test", rows(test, "Public")),
        "test": pictures(root, "test", rows(test, "Private")),
    }


def prepared(root: Path) -> dict[str, Source]:
    """The pictures as VTAB has them."""
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


def pictures(root: Path, folder: str, table: list[tuple[str, int]]) -> Source:
    labels = Labels(np.array([level for _, level in table], np.int64))
    labels.check(len(STAGES), str(root / folder))
    return Folder(present(root, folder)).source([f"{name}.jpeg" for name, _ in table], labels, STAGES)


class Prepared(Relabelled):
    """Pictures of eyes brought to one size and brightness on the way, as the winner of the competition did."""

    def read(self, index: int) -> bytes:
        pixels = even(np.asarray(Picture(self.source.read(index)).rgb()))
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=QUALITY)
        return out.getvalue()

    def sizes(self) -> None:
        return None


def even(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4 (x - blurred x) + 128 on an eyeball of radius 300, grey outside of nine tenths of it, cropped to that."""
    line = pixels[pixels.shape[0] // 2].astype(np.int64).sum(axis=1)
    radius = float((line > line.mean() / 10).sum()) / 2
    if radius < 1:  # a black line: then the picture's height has to do
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

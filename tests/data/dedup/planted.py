"""Sets with copies planted in them, so that it is known what a search should find."""

import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import BadImage
from vitrail.data.dataset import ImageDataset, Labels

SUFFIXES: Final = (".webp", ".jpg", ".jpeg", ".png")


class Files(ImageDataset):
    """Image files in memory, with names."""

    def __init__(self, files: Sequence[bytes], names: Sequence[str]) -> None:
        self.files, self.names = list(files), list(names)
        self.labels = Labels.none(len(self.files))

    def read(self, index: int) -> bytes:
        if not self.files[index]:
            raise BadImage("the file is empty")
        return self.files[index]

    def name(self, index: int) -> str:
        return self.names[index]

    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(file) for file in self.files], np.int64)


def tar_files(path: Path) -> Files:
    """The images of a tar file."""
    files: dict[str, bytes] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(SUFFIXES) else None
            if content is not None and ".trimap" not in member.name:
                files[member.name] = content.read()
    return Files(list(files.values()), list(files))


def encoded(picture: Image.Image, form: str = "PNG", quality: int = 90) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **({"quality": quality} if form == "JPEG" else {}))
    return out.getvalue()


def resized(picture: Image.Image, factor: float) -> Image.Image:
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    return picture.resize(size, Image.Resampling.BICUBIC)


def cropped(picture: Image.Image, side: float, rng: np.random.Generator) -> Image.Image:
    """A window with this part of each side, anywhere."""
    width, height = round(picture.width * side), round(picture.height * side)
    left, top = int(rng.integers(picture.width - width + 1)), int(rng.integers(picture.height - height + 1))
    return picture.crop((left, top, left + width, top + height))


def mirrored(picture: Image.Image) -> Image.Image:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


Copy = Callable[[Image.Image, np.random.Generator], bytes]
COPIES: Final[dict[str, Copy]] = {
    "exact": lambda picture, rng: encoded(picture),
    "jpeg 50": lambda picture, rng: encoded(picture, "JPEG", 50),
    "half size": lambda picture, rng: encoded(resized(picture, 0.5), "JPEG"),
    "double size": lambda picture, rng: encoded(resized(picture, 2), "JPEG"),
    "crop 10% of area": lambda picture, rng: encoded(cropped(picture, 0.9**0.5, rng), "JPEG"),
    "crop 10% of sides": lambda picture, rng: encoded(cropped(picture, 0.9, rng), "JPEG"),
    "flip": lambda picture, rng: encoded(mirrored(picture), "JPEG"),
    "flip and crop": lambda picture, rng: encoded(mirrored(cropped(picture, 0.9, rng)), "JPEG"),
    "grey": lambda picture, rng: encoded(picture.convert("L"), "JPEG"),
}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """TRAIN as it was, TEST with a copy of each kind of some of its images and with strangers."""

    train: ImageDataset
    test: Files
    truth: dict[int, tuple[int, str]]  # by test number: the train number that it is a copy of, and how it was made


def plant(train: ImageDataset, strangers: ImageDataset, *, every: int = 1, seed: int = 0) -> Planted:
    """Copies every so-manyth image of TRAIN in each way."""
    rng = np.random.default_rng(seed)
    files, names, truth = [], [], {}
    for index in range(0, len(train), every):
        picture = train.open_image(index).rgb()
        for kind, copy in COPIES.items():
            truth[len(files)] = index, kind
            files.append(copy(picture, rng))
            names.append(f"{kind} of {train.name(index)}")
    for index in range(len(strangers)):
        content = strangers.read(index)
        files.append(content if isinstance(content, bytes) else encoded(Image.fromarray(content)))
        names.append(strangers.name(index))
    return Planted(train=train, test=Files(files, names), truth=truth)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How much of what was planted was found, by kind, and how much of what was found was planted."""

    recall: dict[str, float]
    precision: float
    wrong: list[tuple[int, int]]  # (train, test)


def score(planted: Planted, found: set[tuple[int, int]]) -> Score:
    """From pairs of (train, test)."""
    hits: dict[str, list[bool]] = {}
    for test, (train, kind) in planted.truth.items():
        hits.setdefault(kind, []).append((train, test) in found)
    true = {(train, test) for test, (train, _) in planted.truth.items()}
    return Score(
        recall={kind: sum(each) / len(each) for kind, each in hits.items()},
        precision=len(found & true) / max(1, len(found)),
        wrong=sorted(found - true),
    )


def scene(rng: np.random.Generator, side: int = 96) -> Image.Image:
    """An image with the spectrum of a photograph, and with colours."""
    down, across = np.meshgrid(np.fft.fftfreq(side), np.fft.rfftfreq(side), indexing="ij")
    fall = 1 / np.maximum(np.hypot(down, across), 1 / side) ** 1.2
    noise = rng.normal(size=(4, side, side // 2 + 1)) + 1j * rng.normal(size=(4, side, side // 2 + 1))
    planes = np.fft.irfft2(noise * fall, s=(side, side))
    planes /= planes.std((1, 2), keepdims=True)
    pixels = 120 + 40 * planes[:1] + 15 * planes[1:]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def scenes(count: int, seed: int, side: int = 96) -> Files:
    rng = np.random.default_rng(seed)
    return Files([encoded(scene(rng, side)) for _ in range(count)], [f"scene {seed}-{i}" for i in range(count)])

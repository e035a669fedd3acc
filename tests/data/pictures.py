"""Small images and sources for tests."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vitrail.core.text import Pair
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import CounterRng
from vitrail.data.targets import Geometry


def noise(number: int, height: int = 12, width: int = 10) -> NDArray[np.uint8]:
    """An image of its own for every number."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


class Listed(ImageDataset):
    """Encoded images from a list; what is not bytes is raised instead."""

    def __init__(
        self, files: Sequence[bytes | Exception], labels: Sequence[int] | None = None, classes: int = 3
    ) -> None:
        self.files = list(files)
        numbers = [i % classes for i in range(len(files))] if labels is None else labels
        self.labels = Labels(np.array(numbers, np.int64))
        self.classes = tuple(f"class {i}" for i in range(classes))

    def read(self, index: int) -> bytes:
        data = self.files[index]
        if isinstance(data, Exception):
            raise data
        return data

    def name(self, index: int) -> str:
        return f"image-{index}.png"


def listed(count: int, classes: int = 3) -> Listed:
    return Listed([encoded(noise(i)) for i in range(count)], classes=classes)


class Shifted:
    """A view with something random in it, cheap enough for property tests: a random crop, a random constant added."""

    def __init__(self, count: int = 1) -> None:
        self.sizes: tuple[Pair, ...] = ((4, 4),) * count

    def __call__(self, picture: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        pixels = F.pil_to_tensor(picture.rgb())
        return tuple(self.shifted(pixels, each) for each in draws)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        places = [each.integers("place", 6, 2)[0].tolist() for each in draws]
        return tuple(Geometry(whole=whole, box=(top, left, 4, 4), inner=(4, 4)) for top, left in places)

    def shifted(self, pixels: Tensor, draws: CounterRng) -> Tensor:
        top, left = draws.integers("place", 6, 2)[0].tolist()
        return pixels[:, top : top + 4, left : left + 4] + int(draws.integers("colour", 256)[0, 0])

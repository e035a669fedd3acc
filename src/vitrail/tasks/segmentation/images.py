"""The pixels of each image of a split, counted by class, so that a score can be computed for other draws of images.

Colours for class indices: far apart from their neighbours, the same wherever a class is drawn.
"""

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.targets import IGNORED
from vitrail.evaluation.metrics.intervals import DRAWS, RESAMPLES, Floats, Interval, bootstrap
from vitrail.evaluation.metrics.metric import SupportsAllReduce

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage


NUMBERS: Final = ("miou", "pixel_accuracy", "loss")  # in the order of `ImageCounts.statistics`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageCounts:
    """Of N images with pixels that count, in the order of the split."""

    pixels: NDArray[np.int64]  # [N]
    both: NDArray[np.int64]  # [N, K], of this class and predicted to be
    either: NDArray[np.int64]  # [N, K]
    loss: NDArray[np.float32]  # [N]

    def statistics(self, weights: Floats) -> Floats:
        """NUMBERS of images that count as often as the weights [N] say."""
        both, either = weights @ self.both, weights @ self.either
        there = either > 0
        return np.array(
            [
                float((both[there] / either[there]).mean()),
                float(both.sum() / (weights @ self.pixels)),
                float(weights @ self.loss.astype(np.float64) / weights.sum()),
            ]
        )

    def intervals(self, seed: int) -> Mapping[str, Interval | None]:
        """By a bootstrap over images."""
        resamples = min(RESAMPLES, DRAWS // max(self.both.size, 1))
        found = bootstrap(self.statistics, len(self.pixels), seed=seed, resamples=resamples)
        return dict(zip(NUMBERS, found, strict=True))


class ImageTable:
    """Rows of images, batch by batch, on the device. Processes have equally many, as they have batches of one size."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.counts: list[Tensor] = []  # [B, 2 + 2 K] each: sample, pixels, both, either
        self.losses: list[Tensor] = []  # [B] each

    def add(self, samples: Tensor, both: Tensor, either: Tensor, pixels: Tensor, losses: Tensor) -> None:
        self.counts.append(torch.cat([torch.stack([samples, pixels], 1), both, either], 1).int())
        self.losses.append(losses.float())

    def merge(self, world: SupportsAllReduce) -> None:
        if self.counts:
            self.counts = [gather_rows(torch.cat(self.counts), world)]
            self.losses = [gather_rows(torch.cat(self.losses), world)]

    def read(self) -> ImageCounts | None:
        if not self.counts:
            return None
        rows, losses = torch.cat(self.counts).long().cpu().numpy(), torch.cat(self.losses).cpu().numpy()
        order = np.argsort(rows[:, 0], kind="stable")
        order = order[rows[order, 1] > 0]
        both, either = rows[order, 2 : 2 + self.classes], rows[order, 2 + self.classes :]
        return ImageCounts(pixels=rows[order, 1], both=both, either=either, loss=losses[order])


def gather_rows(mine: Tensor, world: SupportsAllReduce) -> Tensor:
    """The rows of all processes: each lays its own into its place of a table that is then summed."""
    table = mine.new_zeros(world.size, *mine.shape)
    table[world.rank] = mine
    world.sum_(table)
    return table.flatten(0, 1)


GROUND: Final = (36, 38, 48)  # of class 0, which is most often the background
UNSEEN: Final = (250, 250, 250)  # of pixels that count for nothing
GOLDEN: Final = 0.61803398875  # of a turn, between the hues of two classes
COVER: Final = 0.55  # how much of a pixel an overlay covers


@cache
def make_palette() -> NDArray[np.uint8]:
    """A colour for each of 256 indices [256, 3]."""
    colours: list[tuple[int, int, int]] = [GROUND]
    for index in range(1, 256):
        value, saturation = (0.92, 0.72) if index % 2 else (0.74, 0.85)
        red, green, blue = colorsys.hsv_to_rgb((0.02 + index * GOLDEN) % 1, saturation, value)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    colours[IGNORED] = UNSEEN
    return np.array(colours, np.uint8)


def list_colours(classes: int) -> list[str]:
    """The colours of classes in a drawing, as "#2c5aa0"; that of class 0, which is left as it is, is empty."""
    return ["", *("#{:02x}{:02x}{:02x}".format(*colour) for colour in make_palette()[1:classes].tolist())]


def colour_mask(mask: NDArray[np.uint8]) -> "PillowImage":
    """A mask [H, W] as a PNG-ready image of class indices that shows their colours."""
    image = Image.fromarray(mask)
    image.putpalette(make_palette().tobytes())
    return image


def blend_mask(mask: NDArray[np.uint8], image: "PillowImage") -> "PillowImage":
    """The colours of a mask over its image, or a smaller copy of it; class 0 and pixels that count for nothing stay as
    they are."""
    if mask.shape != (image.height, image.width):
        mask = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shown = ((mask != 0) & (mask != IGNORED))[..., None]
    mixed = (1 - COVER) * pixels + COVER * make_palette()[mask]
    return Image.fromarray(np.where(shown, mixed, pixels).round().astype(np.uint8))

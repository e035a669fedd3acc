"""Random erasing (Zhong et al. 2020): a rectangle of a picture is covered."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.draws import GOLDEN, Draws, Keys, mix
from vitrail.data.transforms.crop import TRIES, Range, column, rectangles


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomErasing:
    """With a probability, a rectangle of random area and aspect becomes noise, or one level of grey where `fill` is a
    number. Its distribution is that of torchvision's RandomErasing."""

    probability: float = 0.25
    area: Range = (0.02, 1 / 3)
    aspect: Range = (0.3, 3.3)
    fill: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} must lie in 0 to 1")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(f"area={self.area} must be two fractions of the picture, the smaller first")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ConfigError(f"aspect={self.aspect} must be two ratios above 0, the smaller first")
        if self.fill is not None and not 0 <= self.fill <= 255:
            raise ConfigError(f"fill={self.fill} must be a level from 0 to 255, or None for noise")

    def chosen(self, draws: Draws) -> NDArray[np.bool_]:
        """Which of B samples are to be erased, if a rectangle fits."""
        return draws.uniform("erase or not")[:, 0] < self.probability

    def boxes(self, draws: Draws, height: int, width: int) -> NDArray[np.int64]:
        """Top, left, height, width for each of B samples [B, 4]; no height where nothing is erased."""
        on = self.chosen(draws)
        drawn = draws.uniform("erase", 2 * TRIES + 2)
        rows, columns = rectangles(drawn, column(height * width), self.area, self.aspect)
        fits = (rows < height) & (columns < width)
        first = fits.argmax(1)
        every = np.arange(len(draws))
        on &= fits[every, first]
        h, w = np.where(on, rows[every, first], 0), np.where(on, columns[every, first], 0)
        top, left = drawn[:, -2] * (height - h + 1), drawn[:, -1] * (width - w + 1)
        return np.stack([top, left, h, w], axis=1).astype(np.int64)

    def __call__(self, pixels: Tensor, draws: Draws) -> Tensor:
        """On one picture [3, H, W], uint8, which is left as it was."""
        top, left, height, width = self.boxes(draws, *pixels.shape[-2:])[0].tolist()
        if not height or not width:
            return pixels
        pixels = pixels.clone()
        hole = pixels[:, top : top + height, left : left + width]
        if self.fill is None:
            rows = np.arange(top, top + height)[:, None] * pixels.shape[-1]
            place = rows + np.arange(left, left + width)
            hole.copy_(torch.from_numpy(noise(noise_keys(draws)[0], place)))
        else:
            hole.fill_(self.fill)
        return pixels


def noise_keys(draws: Draws) -> Keys:
    """What the noise of each sample is made from [B]."""
    return draws.bits("erase noise")[:, 0]


def noise(key: "np.uint64", place: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Bytes [3, ...] that look like noise: a hash of where a pixel is, so that an accelerator makes the same."""
    bits = mix(key + place.astype(np.uint64) * GOLDEN)
    return np.stack([bits >> np.uint64(8 * (channel + 1)) for channel in range(3)]).astype(np.uint8)

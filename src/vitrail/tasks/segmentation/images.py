"""The pixels of each image of a split, counted by class, so that a score can be computed for other draws of images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation.intervals import DRAWS, RESAMPLES, Floats, Interval, bootstrap
from vitrail.evaluation.metric import Together

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

    def merge(self, world: Together) -> None:
        if self.counts:
            self.counts = [gather(torch.cat(self.counts), world)]
            self.losses = [gather(torch.cat(self.losses), world)]

    def read(self) -> ImageCounts | None:
        if not self.counts:
            return None
        rows, losses = torch.cat(self.counts).long().cpu().numpy(), torch.cat(self.losses).cpu().numpy()
        order = np.argsort(rows[:, 0], kind="stable")
        order = order[rows[order, 1] > 0]
        both, either = rows[order, 2 : 2 + self.classes], rows[order, 2 + self.classes :]
        return ImageCounts(pixels=rows[order, 1], both=both, either=either, loss=losses[order])


def gather(mine: Tensor, world: Together) -> Tensor:
    """The rows of all processes: each lays its own into its place of a table that is then summed."""
    table = mine.new_zeros(world.size, *mine.shape)
    table[world.rank] = mine
    world.sum_(table)
    return table.flatten(0, 1)

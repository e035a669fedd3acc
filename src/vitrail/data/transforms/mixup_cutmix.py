"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) on batches, wherever they lie.

How strongly, and which box, is drawn from (seed, step). A sample is mixed with its neighbour in the global batch, so a
batch comes out the same on any number of processes, as long as each holds whole pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.randomness import CounterRng, hash_keys, hash_word


class Mixing(NamedTuple):
    """What was drawn for one step. Where there is a box (top, left, bottom, right), it comes from the partner whole;
    `weight` is what remains of the sample itself."""

    weight: float = 1.0
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Which of the two, and how strongly: `mixup` and `cutmix` are the alphas of their Beta distributions, 0 for never.
    A step is mixed with `probability`; where both are on, it is CutMix with `switch`. With repeated augmentation the
    `stride` is the number of repeats, so that no sample is mixed with itself."""

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    stride: int = 1

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise ConfigError(f"mixup={self.mixup} and cutmix={self.cutmix} must not be below 0")
        if not (0 <= self.probability <= 1 and 0 <= self.switch <= 1):
            raise ConfigError(f"probability={self.probability} and switch={self.switch} must lie in 0 to 1")
        if self.stride < 1:
            raise ConfigError(f"stride={self.stride} must be at least 1")

    def draw(self, seed: int, step: int, size: Pair) -> Mixing:
        """What step `step` does, for images of this size."""
        if not (self.mixup or self.cutmix):
            return Mixing()
        draws = CounterRng(hash_keys(hash_word("mix"), seed, step))
        on, which, down, across = draws.uniform("mix", 4)[0].tolist()
        if on >= self.probability:
            return Mixing()
        cut = self.cutmix > 0 and (not self.mixup or which < self.switch)
        alpha = self.cutmix if cut else self.mixup
        weight = float(draws.generator("beta").beta(alpha, alpha))
        if not cut:
            return Mixing(weight)
        height, width = size
        side = (1 - weight) ** 0.5
        middle = int(down * height), int(across * width)
        half = int(height * side) // 2, int(width * side) // 2
        top, left = max(middle[0] - half[0], 0), max(middle[1] - half[1], 0)
        bottom, right = min(middle[0] + half[0], height), min(middle[1] + half[1], width)
        return Mixing(1 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))

    def __call__(
        self, pixels: Tensor, targets: Tensor, *, seed: int, step: int, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pixels [B, 3, H, W], uint8 or float, and targets [B, K], mixed. Where `valid` [B] says that one of a pair is
        missing, the other stays as it was."""
        mixing = self.draw(seed, step, (pixels.shape[-2], pixels.shape[-1]))
        if mixing.weight == 1:
            return pixels, targets
        mixed = self.mixed_pixels(pixels, mixing)
        mixed_targets = torch.lerp(self.partners(targets), targets, mixing.weight)
        if valid is None:
            return mixed, mixed_targets
        whole = valid & self.partners(valid)
        return torch.where(whole[:, None, None, None], mixed, pixels), torch.where(
            whole[:, None], mixed_targets, targets
        )

    def mixed_pixels(self, pixels: Tensor, mixing: Mixing) -> Tensor:
        others = self.partners(pixels)
        if mixing.box is not None:
            top, left, bottom, right = mixing.box
            mixed = pixels.clone()
            mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
            return mixed
        if pixels.is_floating_point():
            return torch.lerp(others, pixels, mixing.weight)
        return torch.lerp(others.float(), pixels.float(), mixing.weight).round_().to(pixels.dtype)

    def partners(self, batch: Tensor) -> Tensor:
        """Each sample's partner in its place: neighbours change places, in runs of `stride`."""
        if len(batch) % (2 * self.stride):
            raise ConfigError(
                f"a batch of {len(batch)} on a process does not split into pairs of {self.stride}; "
                f"use a multiple of {2 * self.stride}"
            )
        return batch.unflatten(0, (-1, 2, self.stride)).flip(1).flatten(0, 2)


def one_hot(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Targets [B, K], float32, of labels [B], or [B, M] filled up with -1 where samples have several, each of which
    gets a 1. With smoothing they are pulled towards 1 / K. A sample without a label is all zeros."""
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing={smoothing} must be at least 0 and below 1")
    rows = labels if labels.ndim == 2 else labels[:, None]
    hot = torch.zeros(len(rows), classes + 1, device=labels.device)
    hot.scatter_(1, torch.where(rows < 0, classes, rows), 1.0)  # the column past the end takes the fillers
    hot = hot[:, :classes]
    if not smoothing:
        return hot
    return hot * (1 - smoothing) + smoothing / classes * (rows >= 0).any(1, keepdim=True)

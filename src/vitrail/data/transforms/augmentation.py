"""The augmentation of training: crop, flip, policy and random erasing per image, mixup and CutMix per batch.

    augmentation = inception(224)
    pixels = augmentation(image, CounterRng.for_samples(seed=0, epoch=3, sample=17))  # uint8 [3, 224, 224]

Random erasing (Zhong et al. 2020) covers a rectangle of an image. Mixup (Zhang et al. 2018) and CutMix (Yun et al.
2019) mix each sample with its neighbour in the global batch; strength and box are drawn from (seed, step). A batch is
therefore the same on any number of processes, provided that each holds whole pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, pair
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import GOLDEN, CounterRng, as_int64, hash_keys, hash_word, splitmix64_tensor
from vitrail.data.targets import Geometry
from vitrail.data.transforms.crop import TRIES, Crop, Cut, InceptionCrop, Range, ResizeCrop, check_ranges, rectangles
from vitrail.data.transforms.policy import GEOMETRIC, Policy, check_probability, operations_of

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomErasing:
    """Replaces, with a probability, a rectangle of random area and aspect by noise, or by one level of grey if `fill`
    is a number. The distribution is that of torchvision's RandomErasing."""

    probability: float = 0.25
    area: Range = (0.02, 1 / 3)
    aspect: Range = (0.3, 3.3)
    fill: int | None = None

    def __post_init__(self) -> None:
        check_probability("probability", self.probability)
        check_ranges(self.area, self.aspect)
        if self.fill is not None and not 0 <= self.fill <= 255:
            raise ConfigError(f"fill={self.fill} must be a level from 0 to 255, or None for noise")

    def chooses(self, draws: CounterRng) -> NDArray[np.bool_]:
        """Chooses which of the B samples are erased, if a rectangle fits [B]."""
        return draws.uniform("erase or not")[:, 0] < self.probability

    def boxes(self, draws: CounterRng, height: int, width: int) -> NDArray[np.int64]:
        """Draws top, left, height and width per sample [B, 4]; height and width are 0 if nothing is erased."""
        on = self.chooses(draws)
        drawn = draws.uniform("erase", 2 * TRIES + 2)
        rows, columns = rectangles(drawn, np.array([[height * width]]), self.area, self.aspect)
        fits = (rows < height) & (columns < width)
        first = fits.argmax(1)
        every = np.arange(len(draws))
        on &= fits[every, first]
        h, w = np.where(on, rows[every, first], 0), np.where(on, columns[every, first], 0)
        top, left = drawn[:, -2] * (height - h + 1), drawn[:, -1] * (width - w + 1)
        return np.stack([top, left, h, w], axis=1).astype(np.int64)

    def __call__(self, pixels: Tensor, draws: CounterRng) -> Tensor:
        """Erases a rectangle of one image [3, H, W], uint8. The input is not modified."""
        top, left, height, width = self.boxes(draws, *pixels.shape[-2:])[0].tolist()
        if not height or not width:
            return pixels
        pixels = pixels.clone()
        hole = pixels[:, top : top + height, left : left + width]
        if self.fill is None:
            rows = torch.arange(top, top + height)[:, None] * pixels.shape[-1]
            hole.copy_(make_noise(torch.from_numpy(noise_keys(draws)), rows + torch.arange(left, left + width))[0])
        else:
            hole.fill_(self.fill)
        return pixels


def noise_keys(draws: CounterRng) -> NDArray[np.int64]:
    """Returns the key of each sample's noise [B, 1, 1]."""
    return draws.bits("erase noise").view(np.int64)[:, :, None]


def make_noise(keys: Tensor, place: Tensor) -> Tensor:
    """Makes noise bytes [B, 3, H, W] by hashing the keys [B, 1, 1] and the position of each pixel [H, W]."""
    bits = splitmix64_tensor(place * as_int64(int(GOLDEN)) + keys)  # [B, H, W]
    return bits.view(torch.uint8).unflatten(-1, (-1, 8))[..., 1:4].movedim(-1, 1)  # low bytes come first


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """The augmentation of one view, applied in the order of the fields. Tasks whose targets a crop or a flip would
    change use `Squash` or flip=0 (VTAB)."""

    crop: Crop
    flip: float = 0.5
    policy: Policy | None = None
    erase: RandomErasing | None = None

    def __post_init__(self) -> None:
        check_probability("flip", self.flip)

    @property
    def size(self) -> Pair:
        return self.crop.size

    def flips(self, draws: CounterRng) -> NDArray[np.bool_]:
        """Chooses which of the B samples are mirrored [B]."""
        return draws.uniform("flip")[:, 0] < self.flip

    def geometry(self, whole: Pair, draws: CounterRng) -> Geometry:
        """Returns where the pixels of a view come from in an upright image of size `whole`. The same draws give the
        same crop and flip as in `__call__`. A policy that moves pixels has no geometry: see `check_geometries`."""
        cut = self.crop.cut(whole, draws)
        return Geometry(whole=whole, box=cut.box, inner=cut.inner, pad=cut.pad, flip=bool(self.flips(draws)[0]))

    def __call__(self, encoded: EncodedImage, draws: CounterRng) -> Tensor:
        """Augments one image to pixels [3, H, W], uint8; `draws` belong to one sample and view."""
        return TrainViews((self,))(encoded, [draws])[0]

    def finish(self, image: "Image", whole: Pair, cut: Cut, draws: CounterRng) -> Tensor:
        """Does everything after decoding. `whole` is the full size of the image, which may be decoded at a smaller
        scale."""
        seen, pad = np.asarray(cut(image, whole)), cut.pad  # [H, W, 3]
        if self.flips(draws)[0]:
            seen, pad = seen[:, ::-1], (pad[2], pad[1], pad[0], pad[3])
        pixels = torch.from_numpy(np.array(seen.transpose(2, 0, 1), order="C"))  # mirrored and reordered in one copy
        if self.policy is not None:
            programme = self.policy.draw(draws, self.size)
            pixels = programme.run(pixels, pad if cut.framed else (0, 0, 0, 0))
        return pixels if self.erase is None else self.erase(pixels, draws)


Augmentations: TypeAlias = Augmentation | Sequence[Augmentation]  # one for each view


@dataclass(frozen=True, slots=True)
class TrainViews:
    """The training views of an image, which is decoded once, at the scale that the most demanding view needs."""

    augmentations: tuple[Augmentation, ...]

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return tuple(augmentation.size for augmentation in self.augmentations)

    def __call__(self, image: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        cuts = [each.crop.cut(image.size, drawn) for each, drawn in zip(self.augmentations, draws, strict=True)]
        decoded = image.rgb(min(cut.scale for cut in cuts))
        views = zip(self.augmentations, cuts, draws, strict=True)
        return tuple(each.finish(decoded, image.size, cut, drawn) for each, cut, drawn in views)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        return tuple(each.geometry(whole, drawn) for each, drawn in zip(self.augmentations, draws, strict=True))


def check_geometries(augmentations: Sequence[Augmentation]) -> None:
    """Raises ConfigError if a policy moves pixels in ways that masks, boxes and points cannot follow."""
    for policy in (augmentation.policy for augmentation in augmentations):
        if policy is not None and (moving := sorted(operations_of(policy).intersection(GEOMETRIC))):
            fact = f"augmentation.policy={type(policy).__name__} uses {', '.join(moving)}, which masks cannot follow"
            raise ConfigError(f"{fact}; use ThreeAugment or Distort, which change colours only, or none")


def inception(size: int | Pair) -> Augmentation:
    """Inception crop and flip, with torchvision's boxes."""
    return Augmentation(crop=InceptionCrop(size=pair(size)))


def reference_inception(size: int | Pair) -> Augmentation:
    """Inception crop and flip with the boxes of the paper's own pipeline: TensorFlow's sampler and its default aspect
    of 1.33."""
    return Augmentation(crop=InceptionCrop(size=pair(size), aspect=(0.75, 1.33), sampler="tensorflow"))


def bit(resize: int = 448, crop: int = 384) -> Augmentation:
    """BiT's augmentation, with which the paper fine-tunes: resize to a square, random crop, flip."""
    return Augmentation(crop=ResizeCrop(size=pair(crop), resize=pair(resize)))


def cifar(size: int | Pair = 32, padding: int = 4) -> Augmentation:
    """The usual augmentation of small images: pad, random crop, flip."""
    return Augmentation(crop=ResizeCrop(size=pair(size), resize=pair(size), padding=padding))


class Mixing(NamedTuple):
    """The mixing drawn for one step. If there is a box (top, left, bottom, right), it is copied from the partner;
    `weight` is the share of the sample itself."""

    weight: float = 1.0
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Mixup and CutMix. `mixup` and `cutmix` are the alphas of their Beta distributions; 0 disables one. A step is
    mixed with `probability`; if both are enabled, it uses CutMix with probability `switch`. With repeated augmentation,
    `stride` is the number of repeats, so that no sample is mixed with itself."""

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    stride: int = 1

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise ConfigError(f"mixup={self.mixup} and cutmix={self.cutmix} must not be below 0")
        check_probability("probability", self.probability)
        check_probability("switch", self.switch)
        if self.stride < 1:
            raise ConfigError(f"stride={self.stride} must be at least 1")

    def draw(self, seed: int, step: int, size: Pair) -> Mixing:
        """Draws the mixing of one step, for images of this size."""
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
        """Mixes pixels [B, 3, H, W], uint8 or float, and targets [B, K]. If `valid` [B] is false for one sample of a
        pair, the other stays unmixed."""
        mixing = self.draw(seed, step, (pixels.shape[-2], pixels.shape[-1]))
        if mixing.weight == 1:
            return pixels, targets
        others = self.partners(pixels)
        if mixing.box is not None:
            top, left, bottom, right = mixing.box
            mixed = pixels.clone()
            mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        elif pixels.is_floating_point():
            mixed = torch.lerp(others, pixels, mixing.weight)
        else:
            mixed = torch.lerp(others.float(), pixels.float(), mixing.weight).round_().to(pixels.dtype)
        mixed_targets = torch.lerp(self.partners(targets), targets, mixing.weight)
        if valid is None:
            return mixed, mixed_targets
        whole = valid & self.partners(valid)
        pixels = torch.where(whole[:, None, None, None], mixed, pixels)
        return pixels, torch.where(whole[:, None], mixed_targets, targets)

    def partners(self, batch: Tensor) -> Tensor:
        """Replaces each sample by its partner: neighbours swap places, in runs of `stride`."""
        if len(batch) % (2 * self.stride):
            pairs = f"pairs of {self.stride}; use a multiple of {2 * self.stride}"
            raise ConfigError(f"a batch of {len(batch)} on a process does not split into {pairs}")
        return batch.unflatten(0, (-1, 2, self.stride)).flip(1).flatten(0, 2)


def one_hot(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Encodes labels as targets [B, K], float32. Labels are [B], or [B, M] padded with -1 if samples have several, and
    each of them gets a 1. Smoothing pulls targets towards 1 / K. A sample without a label is all zeros."""
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing={smoothing} must be at least 0 and below 1")
    rows = labels if labels.ndim == 2 else labels[:, None]
    hot = torch.zeros(len(rows), classes + 1, device=labels.device)
    hot.scatter_(1, torch.where(rows < 0, classes, rows), 1.0)  # the extra column takes the padding
    hot = hot[:, :classes]
    if not smoothing:
        return hot
    return hot * (1 - smoothing) + smoothing / classes * (rows >= 0).any(1, keepdim=True)

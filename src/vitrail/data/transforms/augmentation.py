"""Everything that training does to one image, as one value: crop, flip, policy, erasing.

augmentation = inception(224)
pixels = augmentation(image, CounterRng.for_samples(seed=0, epoch=3, sample=17))    # uint8 [3, 224, 224]

Random erasing (Zhong et al. 2020): a rectangle of an image is covered.

Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) on batches, wherever they lie.

How strongly, and which box, is drawn from (seed, step). A sample is mixed with its neighbour in the global batch, so a
batch comes out the same on any number of processes, as long as each holds whole pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, pair
from vitrail.data.decode.image import EncodedImage
from vitrail.data.randomness import GOLDEN, CounterRng, Keys, hash_keys, hash_word, splitmix64
from vitrail.data.targets import Geometry
from vitrail.data.transforms.crop import TRIES, Crop, Cut, InceptionCrop, Range, ResizeCrop, column, rectangles
from vitrail.data.transforms.policy import GEOMETRIC, Distort, Policy, Programme, ThreeAugment, operations_of

if TYPE_CHECKING:
    from PIL.Image import Image


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
            raise ConfigError(f"area={self.area} must be two fractions of the image, the smaller first")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ConfigError(f"aspect={self.aspect} must be two ratios above 0, the smaller first")
        if self.fill is not None and not 0 <= self.fill <= 255:
            raise ConfigError(f"fill={self.fill} must be a level from 0 to 255, or None for noise")

    def chosen(self, draws: CounterRng) -> NDArray[np.bool_]:
        """Which of B samples are to be erased, if a rectangle fits."""
        return draws.uniform("erase or not")[:, 0] < self.probability

    def boxes(self, draws: CounterRng, height: int, width: int) -> NDArray[np.int64]:
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

    def __call__(self, pixels: Tensor, draws: CounterRng) -> Tensor:
        """On one image [3, H, W], uint8, which is left as it was."""
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


def noise_keys(draws: CounterRng) -> Keys:
    """What the noise of each sample is made from [B]."""
    return draws.bits("erase noise")[:, 0]


def noise(key: "np.uint64", place: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Bytes [3, ...] that look like noise: a hash of where a pixel is, so that an accelerator makes the same."""
    bits = splitmix64(key + place.astype(np.uint64) * GOLDEN)
    return np.stack([bits >> np.uint64(8 * (channel + 1)) for channel in range(3)]).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """The parts are done in this order. A task whose answer a crop or a flip would change is given a `Squash` or a
    `flip` of 0 (VTAB)."""

    crop: Crop
    flip: float = 0.5
    policy: Policy | None = None
    erase: RandomErasing | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"flip={self.flip} must be a probability, 0 to 1")

    @property
    def size(self) -> Pair:
        return self.crop.size

    def flips(self, draws: CounterRng) -> NDArray[np.bool_]:
        """Whether each of the B samples is mirrored [B]."""
        return draws.uniform("flip")[:, 0] < self.flip

    def geometry(self, whole: Pair, draws: CounterRng) -> Geometry:
        """Where the pixels of a view come from, in an upright image of size `whole`; with the same draws, what is done
        to its pixels. A policy that moves pixels has no geometry: see `check_geometries`."""
        cut = self.crop.cut(whole, draws)
        return Geometry(whole=whole, box=cut.box, inner=cut.inner, pad=cut.pad, flip=bool(self.flips(draws)[0]))

    def __call__(self, picture: EncodedImage, draws: CounterRng) -> Tensor:
        """One image to pixels [3, H, W], uint8; `draws` are those of one sample and view."""
        return augment_views([self], picture, [draws])[0]

    def finish(self, image: "Image", whole: Pair, cut: Cut, draws: CounterRng) -> Tensor:
        """All that follows the decoding. `whole` is the size of the image, which may have come smaller."""
        seen = np.asarray(cut(image, whole))  # [H, W, 3]
        if self.flips(draws)[0]:
            seen = seen[:, ::-1]
        pixels = torch.from_numpy(np.array(seen.transpose(2, 0, 1), order="C"))  # mirrored and reordered in one copy
        if self.policy is not None:
            pixels = apply_programme(self.policy.draw(draws, self.size), pixels)
        return pixels if self.erase is None else self.erase(pixels, draws)


def augment_views(
    augmentations: Sequence[Augmentation], picture: EncodedImage, draws: Sequence[CounterRng]
) -> tuple[Tensor, ...]:
    """Several views of one image, which is decoded once, as finely as the most demanding of them needs."""
    whole = picture.size
    cuts = [each.crop.cut(whole, drawn) for each, drawn in zip(augmentations, draws, strict=True)]
    image = picture.rgb(min(cut.scale for cut in cuts))
    return tuple(
        each.finish(image, whole, cut, drawn) for each, cut, drawn in zip(augmentations, cuts, draws, strict=True)
    )


def check_geometries(augmentations: Sequence[Augmentation]) -> None:
    """ConfigError where a policy moves pixels in ways that masks, boxes and points do not follow."""
    for policy in (augmentation.policy for augmentation in augmentations):
        if policy is not None and (moving := sorted(GEOMETRIC & operations_of(policy))):
            raise ConfigError(
                f"augmentation.policy={type(policy).__name__} uses {', '.join(moving)}, which masks and other targets "
                "with places in the image do not follow; use augmentation.policy=ThreeAugment or Distort, which "
                "change colours alone, or none"
            )


def apply_programme(programme: Programme, pixels: Tensor) -> Tensor:
    """What was drawn for one image, done to it."""
    from vitrail.data.transforms.policy import OPERATIONS  # loads torchvision

    for which, level in zip(programme.which[0].tolist(), programme.level[0].tolist(), strict=True):
        pixels = OPERATIONS[which](pixels, level)
    return pixels


def inception(size: int | Pair) -> Augmentation:
    """Inception crop and flip, with torchvision's boxes."""
    return Augmentation(crop=InceptionCrop(size=pair(size)))


def reference_inception(size: int | Pair) -> Augmentation:
    """The same with the boxes of the paper's own pipeline, TensorFlow's, and its default of 1.33 for the aspect."""
    return Augmentation(crop=InceptionCrop(size=pair(size), aspect=(0.75, 1.33), sampler="tensorflow"))


def bit(resize: int = 448, crop: int = 384) -> Augmentation:
    """BiT's, which the paper fine-tunes with: resize to a square, crop at random, flip."""
    return Augmentation(crop=ResizeCrop(size=pair(crop), resize=pair(resize)))


def cifar(size: int | Pair = 32, padding: int = 4) -> Augmentation:
    """The usual one for small images: pad, crop at random, flip."""
    return Augmentation(crop=ResizeCrop(size=pair(size), resize=pair(size), padding=padding))


def three_augment(size: int | Pair, *, area: Range = (0.08, 1.0)) -> Augmentation:
    """DeiT III's on ImageNet-1k: Inception crop, flip, 3-Augment with a colour jitter of 0.3."""
    crop = InceptionCrop(size=pair(size), area=area, interpolation="bicubic")
    return Augmentation(crop=crop, policy=ThreeAugment())


def simple_three_augment(size: int | Pair) -> Augmentation:
    """DeiT III's on ImageNet-21k: the shorter side to the size, a reflected border of 4, a random window."""
    size = pair(size)
    crop = ResizeCrop(size=size, resize=max(size), padding=4, edge="reflect", interpolation="bicubic")
    return Augmentation(crop=crop, policy=ThreeAugment())


def multi_crop(size: int = 224, local: int = 96, count: int = 8, split: float = 0.4) -> tuple[Augmentation, ...]:
    """DINO's views: two of more than `split` of the image, `count` of less, each with its colour distortion."""
    wide = InceptionCrop(size=pair(size), area=(split, 1.0), interpolation="bicubic")
    near = InceptionCrop(size=pair(local), area=(0.05, split), interpolation="bicubic")
    first = Augmentation(crop=wide, policy=Distort(blur=1.0))
    second = Augmentation(crop=wide, policy=Distort(blur=0.1, solarise=0.2))
    return (first, second, *[Augmentation(crop=near, policy=Distort(blur=0.5))] * count)


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

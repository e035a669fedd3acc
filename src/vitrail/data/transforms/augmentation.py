"""Everything that training does to one image, as one value: crop, flip, policy, erasing.

augmentation = inception(224)
pixels = augmentation(image, CounterRng.for_samples(seed=0, epoch=3, sample=17))    # uint8 [3, 224, 224]

Random erasing (Zhong et al. 2020): a rectangle of an image is covered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, pair
from vitrail.data.decode.image import EncodedImage
from vitrail.data.geometry import Geometry
from vitrail.data.randomness import GOLDEN, CounterRng, Keys, splitmix64
from vitrail.data.transforms.crop import TRIES, Crop, Cut, InceptionCrop, Range, ResizeCrop, column, rectangles
from vitrail.data.transforms.policy import GEOMETRIC, Distort, Policy, Programme, ThreeAugment, used

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
        return views([self], picture, [draws])[0]

    def finish(self, image: "Image", whole: Pair, cut: Cut, draws: CounterRng) -> Tensor:
        """All that follows the decoding. `whole` is the size of the image, which may have come smaller."""
        seen = np.asarray(cut(image, whole))  # [H, W, 3]
        if self.flips(draws)[0]:
            seen = seen[:, ::-1]
        pixels = torch.from_numpy(np.array(seen.transpose(2, 0, 1), order="C"))  # mirrored and reordered in one copy
        if self.policy is not None:
            pixels = run(self.policy.draw(draws, self.size), pixels)
        return pixels if self.erase is None else self.erase(pixels, draws)


def views(
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
        if policy is not None and (moving := sorted(GEOMETRIC & used(policy))):
            raise ConfigError(
                f"augmentation.policy={type(policy).__name__} uses {', '.join(moving)}, which masks and other targets "
                "with places in the image do not follow; use augmentation.policy=ThreeAugment or Distort, which "
                "change colours alone, or none"
            )


def run(programme: Programme, pixels: Tensor) -> Tensor:
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

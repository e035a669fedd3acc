"""Crops: which part of an image is used, at the size that the network takes.

A crop first decides what to do with an image of a given size (`cut`), before any pixel is decoded. A JPEG much larger
than its crop needs is then decoded at a half, a quarter or an eighth of its size, which is far faster.
"""

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.text import Pair, format_size, pair
from vitrail.data.preprocessing import Interpolation, pillow_filter
from vitrail.data.randomness import CounterRng, Whole

if TYPE_CHECKING:
    from PIL.Image import Image

Range: TypeAlias = tuple[float, float]
Sides: TypeAlias = NDArray[np.int64]  # [B, 1]
Edge: TypeAlias = Literal["zeros", "reflect"]
Sampler: TypeAlias = Literal["torchvision", "tensorflow"]

TRIES: Final = 10  # torchvision's number
ATTEMPTS: Final = 100  # TensorFlow's
LARGEST_SCALE: Final = 16.0  # of an image before its window is cut out
SCALES: Final = (8, 4, 2)  # at which a JPEG can be decoded, besides 1


class Cut(NamedTuple):
    """What to do with an image: resize a box (top, left, height, width, in the pixels of the whole image) to `inner`
    pixels and add `pad` (left, top, right, bottom). A `tight` box of an image decoded at full size is cropped before it
    is resized, so that no pixel outside it bleeds in. If `framed`, the borders are not part of the picture: they stay
    black under colour operations, and are left out of the mean that contrast uses."""

    box: tuple[float, float, float, float]
    inner: Pair
    interpolation: Interpolation
    tight: bool = True
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    edge: Edge = "zeros"
    framed: bool = False

    @property
    def scale(self) -> int:
        """The largest reduction, 1, 2, 4 or 8, at which the box still has as many pixels as the output."""
        (_, _, height, width), (tall, wide) = self.box, self.inner
        return next((scale for scale in SCALES if height >= scale * tall and width >= scale * wide), 1)

    def __call__(self, image: "Image", whole: Pair) -> "Image":
        """Applies the cut to an image of size `whole`, which may have been decoded at a smaller size."""
        mode = pillow_filter(self.interpolation)
        top, left, height, width = self.box
        size = (self.inner[1], self.inner[0])
        if self.tight and (image.height, image.width) == whole:  # as torchvision does for Pillow images
            done = image.crop((int(left), int(top), int(left + width), int(top + height))).resize(size, mode)
        else:  # with fractions of pixels, so that an image decoded at a smaller scale is not shifted
            down, across = image.height / whole[0], image.width / whole[1]
            bottom, right = min((top + height) * down, image.height), min((left + width) * across, image.width)
            done = image.resize(size, mode, box=(left * across, top * down, right, bottom))
        if not any(self.pad):
            return done
        from torchvision.transforms.v2 import functional as F  # heavy: loaded when there is something to pad

        pad: Any = F.pad  # its annotation leaves out images
        return pad(done, list(self.pad), padding_mode="constant" if self.edge == "zeros" else "reflect")


@dataclass(frozen=True, kw_only=True, slots=True)
class InceptionCrop:
    """A box of random area and aspect, resized: the crop that the paper trains with (5 to 100 %, 3/4 to 4/3).

    `sampler` chooses the distribution of the boxes. "torchvision" is that of RandomResizedCrop: uniform areas,
    log-uniform aspects, and boxes that do not fit are drawn again. "tensorflow" is that of
    sample_distorted_bounding_box, with which the reference trains: uniform aspects, then uniform heights between the
    smallest and the largest that fit. Its boxes are smaller: on a 375x500 image they cover 34 % on average, against
    42 %."""

    size: Pair
    area: Range = (0.05, 1.0)
    aspect: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    sampler: Sampler = "torchvision"

    def __post_init__(self) -> None:
        check_crop(self.size, self.interpolation)
        if self.sampler not in get_args(Sampler):
            raise unknown_name("sampler", str(self.sampler), get_args(Sampler))
        check_ranges(self.area, self.aspect)

    def boxes(self, draws: CounterRng, height: Whole, width: Whole) -> NDArray[np.int64]:
        """Draws top, left, height and width for each of the B samples [B, 4]."""
        tall, wide = column(height), column(width)
        if self.sampler == "tensorflow":
            return self._tensorflow_boxes(draws, tall, wide)
        drawn = draws.uniform("crop", 2 * TRIES + 2)
        columns, rows = rectangles(drawn, tall * wide, self.area, self.aspect)
        fits = (columns <= wide) & (rows <= tall) & (columns * rows > 0)
        first = np.arange(len(draws)), fits.argmax(1)
        out = np.empty((len(draws), 4))
        out[:, 2], out[:, 3] = rows[first], columns[first]
        out[:, 0] = drawn[:, -2] * (tall[:, 0] + 1 - out[:, 2])
        out[:, 1] = drawn[:, -1] * (wide[:, 0] + 1 - out[:, 3])
        if not (found := fits[first]).all():
            out = np.where(found[:, None], out, self.central(tall, wide))
        return out.astype(np.int64)

    def _tensorflow_boxes(self, draws: CounterRng, tall: Sides, wide: Sides) -> NDArray[np.int64]:
        """Takes the first of 100 attempts that fits, or the whole image if none does. Most need one attempt."""
        tall, wide = (np.broadcast_to(side, (len(draws), 1)) for side in (tall, wide))
        boxes, fits = draw_attempts(draws.uniform("crop", 4)[:, None], tall, wide, self.area, self.aspect)
        out = np.where(fits, boxes[:, 0], np.concatenate([0 * tall, 0 * wide, tall, wide], 1))
        again = np.flatnonzero(~fits[:, 0])
        if again.size:
            drawn = draws.rows(again).uniform("crop again", 4 * (ATTEMPTS - 1)).reshape(len(again), -1, 4)
            boxes, fits = draw_attempts(drawn, tall[again], wide[again], self.area, self.aspect)
            found = fits.any(1)
            out[again[found]] = boxes[np.flatnonzero(found), fits.argmax(1)[found]]
        return out.astype(np.int64)

    def central(self, tall: Sides, wide: Sides) -> NDArray[np.float64]:
        """Returns the largest central box of an allowed aspect, the fallback after ten misses."""
        narrowest, widest = self.aspect
        rows = np.where(wide < narrowest * tall, np.rint(wide / narrowest), tall).clip(1)
        columns = np.where(wide > widest * tall, np.rint(tall * widest), wide).clip(1)
        return np.concatenate([(tall - rows) // 2, (wide - columns) // 2, rows, columns], 1, dtype=np.float64)

    def cut(self, whole: Pair, draws: CounterRng) -> Cut:
        top, left, height, width = self.boxes(draws, *whole)[0].tolist()
        return Cut((top, left, height, width), self.size, self.interpolation)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeCrop:
    """The whole image resized, optionally padded, then a random window of it. With two numbers for `resize` the image
    is resized to (height, width), as to BiT's square; with one number its shorter side is. The usual crop for CIFAR has
    `resize` equal to `size` and a padding of 4."""

    size: Pair
    resize: Pair | int
    padding: int = 0
    edge: Edge = "zeros"
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_crop(self.size, self.interpolation)
        if self.edge not in get_args(Edge):
            raise unknown_name("edge", str(self.edge), get_args(Edge))
        smallest = self.resize if isinstance(self.resize, tuple) else pair(self.resize)
        if smallest[0] + 2 * self.padding < self.size[0] or smallest[1] + 2 * self.padding < self.size[1]:
            raise ConfigError(f"resize={self.resize} and padding={self.padding} leave less than a crop of {self.size}")
        if self.padding and not 0 <= 3 * self.padding < min(self.size):
            raise ConfigError(f"padding={self.padding} must stay under a third of the crop {self.size}")

    def resized(self, whole: Pair) -> Pair:
        """Returns the size of the resized image, without padding."""
        if isinstance(self.resize, tuple):
            return self.resize
        other = self.resize * max(whole) // min(whole)
        return (self.resize, other) if whole[0] <= whole[1] else (other, self.resize)

    def windows(self, draws: CounterRng, whole: Pair) -> NDArray[np.int64]:
        """Draws top and left of each of the B windows in the resized, padded image [B, 2]."""
        room = np.array(self.resized(whole)) + 2 * self.padding - np.array(self.size) + 1
        return (draws.uniform("crop", 2) * room).astype(np.int64)

    def cut(self, whole: Pair, draws: CounterRng) -> Cut:
        height, width = self.resized(whole)
        top, left = (int(at) - self.padding for at in self.windows(draws, whole)[0])
        bottom, right = min(top + self.size[0], height), min(left + self.size[1], width)
        inside = (max(top, 0), max(left, 0))
        inner = (bottom - inside[0], right - inside[1])
        down, across = whole[0] / height, whole[1] / width
        box = (inside[0] * down, inside[1] * across, inner[0] * down, inner[1] * across)
        over = (inside[1] - left, inside[0] - top, left + self.size[1] - right, top + self.size[0] - bottom)
        return Cut(box, inner, self.interpolation, False, over, self.edge)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleJitter:
    """The image at a random scale relative to the size that fits into `size`, with its own aspect. Larger images are
    cropped at random, smaller ones get black borders on the right and at the bottom. This is the crop of Mask2Former
    and EoMT for segments (large scale jitter: Ghiasi et al. 2021). A scale of (1, 1) always shows the whole image."""

    size: Pair
    scale: Range = (0.1, 2.0)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_crop(self.size, self.interpolation)
        low, high = self.scale
        if not 0 < low <= high <= LARGEST_SCALE:
            raise ConfigError(f"scale={self.scale} must be two numbers up to {LARGEST_SCALE}, the smaller first")

    def windows(self, draws: CounterRng, whole: Pair) -> NDArray[np.int64]:
        """Draws, for each of the B samples, the height and width of the resized image, and the top and left of the
        window in it [B, 4]."""
        low, high = self.scale
        fit = min(self.size[0] / whole[0], self.size[1] / whole[1])
        scale = fit * (low + (high - low) * draws.uniform("scale"))
        resized = np.rint(np.array(whole) * scale).astype(np.int64).clip(1)
        room = (resized - np.array(self.size)).clip(0) + 1
        return np.concatenate([resized, (draws.uniform("crop", 2) * room).astype(np.int64)], 1)

    def measure_pictures(self, draws: CounterRng, whole: Pair) -> NDArray[np.int64]:
        """Returns the rows and columns of the view that the picture fills, for each of the B samples [B, 2]."""
        found = self.windows(draws, whole)
        return np.minimum(found[:, :2] - found[:, 2:], np.array(self.size))

    def cut(self, whole: Pair, draws: CounterRng) -> Cut:
        height, width, top, left = self.windows(draws, whole)[0].tolist()
        inner = (min(self.size[0], height - top), min(self.size[1], width - left))
        down, across = whole[0] / height, whole[1] / width
        box = (top * down, left * across, inner[0] * down, inner[1] * across)
        pad = (0, 0, self.size[1] - inner[1], self.size[0] - inner[0])
        return Cut(box, inner, self.interpolation, False, pad, framed=any(pad))


@dataclass(frozen=True, kw_only=True, slots=True)
class Squash:
    """The whole image, whatever its aspect: for tasks where a crop would remove the answer (VTAB's structured ones)."""

    size: Pair
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_crop(self.size, self.interpolation)

    def cut(self, whole: Pair, _draws: CounterRng) -> Cut:
        return Cut((0, 0, *whole), self.size, self.interpolation)


Crop: TypeAlias = InceptionCrop | ResizeCrop | ScaleJitter | Squash


def column(sizes: Whole) -> NDArray[np.int64]:
    """Reshapes sizes to [B, 1], or to [1, 1] if all samples have the same size."""
    return np.array(sizes, np.int64, ndmin=1)[:, None]


def rectangles(
    drawn: NDArray[np.float64], pixels: NDArray[np.int64], area: Range, aspect: Range
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draws the sides of TRIES rectangles for each of B images, [B, TRIES] twice, with uniform areas and log-uniform
    aspects. The aspect is the first side divided by the second. `pixels` [B, 1] are the areas of the images."""
    areas = pixels * (area[0] + (area[1] - area[0]) * drawn[:, :TRIES])
    low, high = log(aspect[0]) / 2, log(aspect[1]) / 2
    root = np.exp(low + (high - low) * drawn[:, TRIES : 2 * TRIES])
    side = np.sqrt(areas)
    return np.rint(side * root), np.rint(side / root)


def draw_attempts(
    drawn: NDArray[np.float64], tall: Sides, wide: Sides, area: Range, aspect: Range
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Turns random numbers [B, n, 4] into boxes [B, n, 4] as TensorFlow does, and returns which of them fit [B, n]. A
    width is aspect times height, rounded. As in TensorFlow, a box never touches the far edges if it has room to
    move."""
    ratio = aspect[0] + (aspect[1] - aspect[0]) * drawn[..., 0]
    least, most = area[0] * tall * wide, area[1] * tall * wide
    highest = np.rint(np.sqrt(most / ratio))
    highest = np.where(np.rint(highest * ratio) > wide, np.floor((wide + 0.5 - 1e-7) / ratio), highest)
    highest = np.minimum(highest - (np.rint(highest * ratio) > wide), tall)
    rows = np.minimum(np.rint(np.sqrt(least / ratio)), highest)
    rows += np.floor(drawn[..., 1] * (highest - rows + 1))
    rows = rows + (rows * np.rint(rows * ratio) < least)  # rounding may make it one row too small, or too large
    rows = rows - (rows * np.rint(rows * ratio) > most)
    columns = np.rint(rows * ratio)
    covered = rows * columns
    fits = (covered >= least) & (covered <= most) & (rows <= tall) & (columns <= wide) & (rows > 0) & (columns > 0)
    top, left = np.floor(drawn[..., 2] * (tall - rows)), np.floor(drawn[..., 3] * (wide - columns))
    return np.stack([top, left, rows, columns], -1), fits


def check_ranges(area: Range, aspect: Range) -> None:
    if not 0 < area[0] <= area[1] <= 1:
        raise ConfigError(f"area={area} must be two fractions of the image, the smaller first")
    if not 0 < aspect[0] <= aspect[1]:
        raise ConfigError(f"aspect={aspect} must be two ratios above 0, the smaller first")


def check_crop(size: Pair, interpolation: Interpolation) -> None:
    if min(size) < 1:
        raise ConfigError(f"a crop of {format_size(size)} has no pixels")
    if interpolation not in get_args(Interpolation):
        raise unknown_name("interpolation", str(interpolation), get_args(Interpolation))

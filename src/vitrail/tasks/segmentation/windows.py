"""Semantic segmentation by sliding windows, for images that are larger or longer than the network's input.

    SlidingWindows("fit")   # resizes the image until its shorter side fits the network; windows along the longer side
    SlidingWindows("full")  # keeps the resolution of the image; windows over all of it

Windows have the size of the network's input. They are evenly spaced from edge to edge, at most `stride` of a window's
side apart. The logits of a pixel are averaged over the windows that contain it. An image at full resolution is
completed band by band, so that only the logits of one row of windows are held at once. If a single window covers the
image, the result is the network's plain prediction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadImage, ConfigError, unknown_name
from vitrail.core.text import LARGEST_SIDE, Pair, format_size
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import LARGEST, Preprocessing
from vitrail.tasks.segmentation.prediction import resize_argmax

if TYPE_CHECKING:
    from PIL.Image import Image

Scale: TypeAlias = Literal["fit", "full"]
SCALES: Final[tuple[Scale, ...]] = get_args(Scale)
STRIDE: Final = 2 / 3  # of a window's side, as in DINOv3's evaluation (341 of 512)

Segment: TypeAlias = Callable[[Tensor], Tensor]  # uint8 [n, 3, h, w] -> logits [n, K, h, w]


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """How images are cut into windows."""

    scale: Scale = "fit"
    stride: float = STRIDE

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown_name("windows", str(self.scale), SCALES)
        if not 0 < self.stride <= 1:
            raise ConfigError(f"stride={self.stride:g} is a share of a window's side; use one above 0 and at most 1")

    def choose_size(self, whole: Pair, window: Pair) -> Pair:
        """The size to which an image is resized before windows are cut, at least that of a window. BadImage if a very
        long image would become too large."""
        cover = max(window[0] / whole[0], window[1] / whole[1])
        scale = cover if self.scale == "fit" else max(cover, 1.0)
        size = (max(round(whole[0] * scale), window[0]), max(round(whole[1] * scale), window[1]))
        if size[0] * size[1] > max(LARGEST, whole[0] * whole[1]) or (max(size) > LARGEST_SIDE and size != whole):
            limit = f"the limit is {LARGEST_SIDE} pixels a side and {LARGEST:,} in all"
            raise BadImage(f"{format_size(whole)} pixels would become {format_size(size)} for sliding windows; {limit}")
        return size

    def cut(self, image: "Image", preprocessing: Preprocessing) -> Tensor:
        """Prepares the pixels that windows are cut from: uint8 [3, H, W]."""
        upright = upright_rgb(image)
        whole = (upright.height, upright.width)
        size = self.choose_size(whole, preprocessing.image)
        if size == whole != preprocessing.image:
            return torch.from_numpy(np.array(upright)).permute(2, 0, 1)
        return replace(preprocessing, image=size, resize=None, fit="squash").pixels(upright)


def place_windows(length: int, window: int, stride: float) -> list[int]:
    """The starts of windows along a side, evenly spaced from edge to edge."""
    rest, step = length - window, max(round(stride * window), 1)
    count = -(-rest // step)
    return [round(at * rest / count) for at in range(count + 1)] if count else [0]


def segment_windows(
    segment: Segment, pixels: Tensor, whole: Pair, windows: SlidingWindows, window: Pair, batch: int
) -> NDArray[np.uint8]:
    """Predicts the class of each pixel [H, W] of an image of size `whole`, from the `pixels` [3, h, w] that
    `SlidingWindows.cut` returned. `segment` gets at most `batch` windows at once."""
    size = (pixels.shape[1], pixels.shape[2])
    bands = average_bands(segment, pixels, windows, window, batch)
    if size == whole:
        return np.concatenate([band.max(0).indices.to(torch.uint8).numpy() for band in bands])
    return resize_argmax(torch.cat(list(bands), 1), whole)


def average_bands(
    segment: Segment, pixels: Tensor, windows: SlidingWindows, window: Pair, batch: int
) -> Iterator[Tensor]:
    """Averages logits over windows: yields bands [K, rows, w] from top to bottom, in float32 on the CPU."""
    (height, width), (tall, wide) = pixels.shape[1:], window
    tops, lefts = place_windows(height, tall, windows.stride), place_windows(width, wide, windows.stride)
    across = count_cover(width, lefts, wide)
    sums: Tensor | None = None  # of logits, from the top row of the current windows
    counts = torch.zeros(0)
    for top, following in zip(tops, [*tops[1:], height], strict=True):
        counts = torch.cat([counts, torch.zeros(tall - len(counts))]) + 1
        for some in (lefts[at : at + batch] for at in range(0, len(lefts), batch)):
            views = torch.stack([pixels[:, top : top + tall, left : left + wide] for left in some])
            logits = segment(views).float().cpu()
            if sums is None:
                sums = logits.new_zeros(logits.shape[1], tall, width)
            for left, found in zip(some, logits, strict=True):
                sums[:, :, left : left + wide] += found
        assert sums is not None
        done = following - top
        yield sums[:, :done] / (counts[:done, None] * across)
        sums = torch.cat([sums[:, done:], sums.new_zeros(len(sums), done, width)], 1)
        counts = counts[done:]


def count_cover(length: int, starts: list[int], window: int) -> Tensor:
    """Counts how many windows cover each position along a side."""
    found = torch.zeros(length)
    for start in starts:
        found[start : start + window] += 1
    return found

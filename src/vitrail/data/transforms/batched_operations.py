"""The operations of operations.py for many samples at once, on any device, each sample with its own level.

torchvision's kernels take one level for a whole batch; where levels differ, the same arithmetic stands here with a
level a sample. Nothing in here makes the host wait for the device.
"""

from collections.abc import Callable
from math import ceil
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad
from torchvision.transforms.v2 import functional as F

from vitrail.core.shapes import Pair
from vitrail.data.transforms.programme import NUMBER

Batched: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # uint8 [n, 3, H, W] and levels [n, 1, 1, 1] to uint8

GEOMETRIC: Final = frozenset(NUMBER[name] for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"))


def blend(one: Tensor, other: Tensor | float, level: Tensor) -> Tensor:
    """`level` of the one and the rest of the other, which may be a negative rest."""
    return (one * level + other * (1 - level)).clamp_(0, 255).to(torch.uint8)


def grey_levels(pixels: Tensor) -> Tensor:
    """[n, 1, H, W], float, whole numbers."""
    red, green, blue = pixels.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def brightness(pixels: Tensor, level: Tensor) -> Tensor:
    return (pixels * level).clamp_(0, 255).to(torch.uint8)


def saturation(pixels: Tensor, level: Tensor) -> Tensor:
    return blend(pixels, grey_levels(pixels), level)


def contrast(pixels: Tensor, level: Tensor) -> Tensor:
    return blend(pixels, grey_levels(pixels).mean((1, 2, 3), keepdim=True), level)


def sharpness(pixels: Tensor, level: Tensor) -> Tensor:
    """The border of one pixel stays as it is, as in torchvision's and Pillow's."""
    if min(pixels.shape[-2:]) <= 2:
        return pixels
    kernel = torch.full((1, 1, 3, 3), 1 / 13, device=pixels.device)
    kernel[0, 0, 1, 1].fill_(5 / 13)
    smooth = conv2d(pixels.flatten(0, 1).unsqueeze(1).float(), kernel).round_().unflatten(0, pixels.shape[:2])
    done = pixels.clone()
    done[..., 1:-1, 1:-1] = blend(pixels[..., 1:-1, 1:-1], smooth.squeeze(2), level)
    return done


def posterise(pixels: Tensor, level: Tensor) -> Tensor:
    dropped = 8 - level.to(torch.uint8)
    return (pixels >> dropped) << dropped


def solarise(pixels: Tensor, level: Tensor) -> Tensor:
    return torch.where(pixels >= level, pixels.bitwise_not(), pixels)


def autocontrast(pixels: Tensor, level: Tensor) -> Tensor:
    del level
    return F.autocontrast(pixels)


def equalise(pixels: Tensor, level: Tensor) -> Tensor:
    del level
    return F.equalize(pixels)


def grey(pixels: Tensor, level: Tensor) -> Tensor:
    del level
    return F.rgb_to_grayscale(pixels, num_output_channels=3)


def blur_within(most: float) -> Batched:
    """Gaussian blurs of at most so many pixels of standard deviation, which the host knows."""

    def blur(pixels: Tensor, level: Tensor) -> Tensor:
        (count, channels), (height, width) = pixels.shape[:2], pixels.shape[-2:]
        rows = pixels.float().reshape(1, count * channels, height, width)
        for side in (height, width):  # down, then across after turning
            far = min(ceil(3 * most), side - 1)
            at = torch.arange(-far, far + 1, device=pixels.device)
            sigma = level.view(count, 1)
            kernel = torch.exp(-0.5 * (at / sigma).square()) * (at.abs() <= torch.ceil(3 * sigma))
            kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)
            padded = pad(rows, (0, 0, far, far), mode="reflect")
            rows = conv2d(padded, kernel[:, None, :, None], groups=count * channels).transpose(2, 3)
        return rows.round_().to(torch.uint8).view(count, channels, height, width)

    return blur


OPERATIONS: Final[dict[int, Batched]] = {
    NUMBER[operation.__name__]: operation
    for operation in (
        brightness,
        saturation,
        contrast,
        sharpness,
        posterise,
        solarise,
        autocontrast,
        equalise,
        grey,
    )
}


def matrices(which: NDArray[np.int64], level: NDArray[np.float64], size: Pair) -> NDArray[np.float32]:
    """From a place in the picture that comes out to the place it is taken from, both from the centre, in pixels
    [n, 2, 3]."""
    height, width = size
    still, one = np.zeros(len(which)), np.ones(len(which))

    def when(name: str, value: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(which == NUMBER[name], value, still)

    turn = np.radians(when("rotate", level))
    shear_x, shear_y = when("shear_x", level), when("shear_y", level)
    x = [np.cos(turn), shear_x - np.sin(turn), shear_x * height / 2 - when("translate_x", np.trunc(level))]
    y = [shear_y + np.sin(turn), np.cos(turn) * one, shear_y * width / 2 - when("translate_y", np.trunc(level))]
    return np.stack([np.stack(x, 1), np.stack(y, 1)], 1).astype(np.float32)


def warp(pixels: Tensor, matrix: Tensor) -> Tensor:
    """Moves pixels [n, 3, H, W] by matrices [n, 2, 3], nearest neighbours, black outside."""
    height, width = pixels.shape[-2:]
    x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=pixels.device)
    y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=pixels.device)
    places = torch.stack(
        [x.expand(height, width), y[:, None].expand(height, width), torch.ones_like(x).expand(height, width)], -1
    )
    scaled = torch.stack([matrix[:, 0] / (width / 2), matrix[:, 1] / (height / 2)], 2)  # [n, 3, 2]
    grid = places.view(1, -1, 3).expand(len(pixels), -1, -1).bmm(scaled).view(-1, height, width, 2)
    moved = grid_sample(pixels.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved.round_().to(torch.uint8)

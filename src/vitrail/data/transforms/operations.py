"""The operations on colour and geometry that policies choose from, each with one number, its level.

They act on uint8 pixels [3, H, W] and are torchvision's kernels. The same table, for whole batches with a level a
sample, is in batched_operations.py.
"""

from collections.abc import Callable
from math import atan, ceil, degrees
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vitrail.data.transforms.programme import NUMBER

Operation: TypeAlias = Callable[[Tensor, float], Tensor]


def identity(pixels: Tensor, level: float) -> Tensor:
    del level
    return pixels


def shear_x(pixels: Tensor, level: float) -> Tensor:
    """Rows move by `level` times their distance from the upper edge."""
    return affine(pixels, shear=[degrees(atan(level)), 0.0], center=[0, 0])


def shear_y(pixels: Tensor, level: float) -> Tensor:
    return affine(pixels, shear=[0.0, degrees(atan(level))], center=[0, 0])


def translate_x(pixels: Tensor, level: float) -> Tensor:
    """By whole pixels."""
    return affine(pixels, translate=[int(level), 0])


def translate_y(pixels: Tensor, level: float) -> Tensor:
    return affine(pixels, translate=[0, int(level)])


def affine(pixels: Tensor, *, shear: Any = (0.0, 0.0), translate: Any = (0, 0), center: Any = None) -> Tensor:
    return F.affine(pixels, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=center)


def rotate(pixels: Tensor, level: float) -> Tensor:
    """By degrees, about the centre."""
    return F.rotate(pixels, level)


def brightness(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_brightness(pixels, level)


def saturation(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_saturation(pixels, level)


def contrast(pixels: Tensor, level: float) -> Tensor:
    return F.adjust_contrast(pixels, level)


def sharpness(pixels: Tensor, level: float) -> Tensor:
    # Three grey pictures for one of three channels: the same numbers, from a quicker convolution.
    return F.adjust_sharpness(pixels.unsqueeze(1), level).squeeze(1)


def posterise(pixels: Tensor, level: float) -> Tensor:
    """Keeps `level` bits."""
    return F.posterize(pixels, int(level))


def solarise(pixels: Tensor, level: float) -> Tensor:
    """Inverts what is at or above `level`, of 255."""
    return F.solarize(pixels, level)


def autocontrast(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.autocontrast(pixels)


def equalise(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.equalize(pixels)


def hue(pixels: Tensor, level: float) -> Tensor:
    """Turns the colour circle by `level`, of 1."""
    return F.adjust_hue(pixels, level)


def grey(pixels: Tensor, level: float) -> Tensor:
    del level
    return F.rgb_to_grayscale(pixels, num_output_channels=3)


def blur(pixels: Tensor, level: float) -> Tensor:
    """Gaussian with a standard deviation of `level` pixels: torchvision's kernel, once down and once across, which is
    the same blur for a fraction of the work."""
    tall, wide = (2 * reach(level, side) + 1 for side in pixels.shape[-2:])
    down = F.gaussian_blur(pixels.to(torch.float32), [1, tall], [level, level])
    return F.gaussian_blur(down, [wide, 1], [level, level]).round_().to(torch.uint8)


def reach(sigma: float, side: int) -> int:
    """How far a blur looks: three standard deviations, or to the end of a very small picture."""
    return min(ceil(3 * sigma), side - 1)


FUNCTIONS: Final[tuple[Operation, ...]] = (
    *(identity, shear_x, shear_y, translate_x, translate_y, rotate),
    *(brightness, saturation, contrast, sharpness, posterise, solarise, autocontrast, equalise),
    *(hue, grey, blur),
)
OPERATIONS: Final[dict[int, Operation]] = {NUMBER[function.__name__]: function for function in FUNCTIONS}

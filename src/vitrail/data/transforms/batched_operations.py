"""The operations of operations.py for many samples at once, on any device, each sample with its own level.

torchvision's kernels take one level for a whole batch; here the same arithmetic stands with a level a sample. All work
in place on uint8 [n, 3, H, W], neighbours in a batch that was sorted before, and with as few launches as give the same
numbers: on small pictures the launches are what takes time. Nothing in here makes the host wait for the device.
"""

import itertools
from math import ceil
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad

from vitrail.core.shapes import Pair

SMOOTH: Final = np.full((1, 1, 3, 3), 1 / 13, np.float32)  # a pixel and an eighth of the rest from each neighbour
SMOOTH[0, 0, 1, 1] = 5 / 13


class Blends(NamedTuple):
    """How many neighbours are blended with what."""

    brightness: int
    saturation: int
    contrast: int
    sharpness: int


def blend(pixels: Tensor, level: Tensor, rest: Tensor, kinds: Blends, kernel: Tensor) -> None:
    """`level` of each picture and `rest`, 1 - level, of another: black (brightness), the picture in grey (saturation),
    its mean grey (contrast), or smooth by a kernel (sharpness). Both are [n, 1, 1, 1]; the rest may be negative."""
    first, last = kinds.brightness, len(pixels) - kinds.sharpness
    done = pixels * level
    if last > first:
        grey = grey_levels(pixels[first:last]).floor_()
        if kinds.contrast:
            flat = grey[kinds.saturation :]
            flat.copy_(flat.mean((1, 2, 3), keepdim=True))
        done[first:last].add_(grey.mul_(rest[first:last]))
    if not kinds.sharpness:
        pixels.copy_(done.clamp_(0, 255))
        return
    # The border of one pixel stays as it is, as in torchvision's and Pillow's.
    sharp = pixels[last:]
    inside, within = sharp[:, :, 1:-1, 1:-1], done[last:, :, 1:-1, 1:-1]
    if large := min(pixels.shape[-2:]) > 2:
        planes = sharp.flatten(0, 1).unsqueeze(1).float()
        smooth = conv2d(planes, kernel).round_().unflatten(0, sharp.shape[:2]).squeeze(2)
        within.add_(smooth.mul_(rest[last:]))
    done.clamp_(0, 255)
    pixels[:last].copy_(done[:last])
    if large:
        inside.copy_(within)


def grey_levels(pixels: Tensor) -> Tensor:
    """[n, 1, H, W], float, not yet whole numbers."""
    red, green, blue = pixels.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def posterise(pixels: Tensor, kept: Tensor) -> None:
    """`kept` are the bits that stay, as masks [n, 1, 1, 1], uint8."""
    pixels.bitwise_and_(kept)


def solarise(pixels: Tensor, level: Tensor) -> None:
    upper = (pixels >= level).view(torch.uint8)
    pixels.bitwise_xor_(upper.neg_())  # 255 where it holds


def autocontrast(pixels: Tensor) -> None:
    """The levels of each channel, spread from 0 to 255; a channel of one level stays."""
    low, high = (side[..., None] for side in pixels.flatten(2).aminmax(dim=-1, keepdim=True))
    flat = low == high
    step = ((high - low) * (1 / 255)).masked_fill_(flat, 1.0)
    pixels.copy_((pixels - low.masked_fill_(flat, 0)) / step)


def equalise(pixels: Tensor, levels: Tensor) -> None:
    """The levels of each channel moved apart where they are frequent, by Pillow's whole numbers; a channel with too
    few pixels below its highest level for that stays. `levels` are 0 to 255."""
    planes = pixels.flatten(2)  # [n, 3, H W]
    level = planes.long()
    found = level.new_zeros((*planes.shape[:2], 256))
    found.scatter_add_(-1, level, levels[1].expand_as(level))
    below = found.cumsum(-1).sub_(found)  # how many pixels are darker than a level
    step = below.gather(-1, level.amax(-1, keepdim=True)).div_(255, rounding_mode="floor")
    table = below.add_(step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    table = torch.where(step == 0, levels, table).to(torch.uint8)
    torch.gather(table, -1, level, out=planes)


def grey(pixels: Tensor) -> None:
    pixels.copy_(grey_levels(pixels))


def blur(pixels: Tensor, level: Tensor, most: float) -> None:
    """Gaussian, with a standard deviation of `level` pixels [n, 1, 1, 1]; the host knows the `most` of them."""
    (count, channels), (height, width) = pixels.shape[:2], pixels.shape[-2:]
    rows = pixels.float().reshape(1, count * channels, height, width)
    kernels = dict[int, Tensor]()
    for side in (height, width):  # down, then across after turning
        far = min(ceil(3 * most), side - 1)
        if far not in kernels:
            kernels[far] = bells(level.view(count, 1), far).repeat_interleave(channels, 0)[:, None, :, None]
        padded = pad(rows, (0, 0, far, far), mode="reflect")
        rows = conv2d(padded, kernels[far], groups=count * channels).transpose(2, 3)
    pixels.copy_(rows.round_().view_as(pixels))


def bells(sigma: Tensor, far: int) -> Tensor:
    """The weights of pixels up to `far` away, for standard deviations [n, 1]: [n, 2 far + 1]."""
    at = torch.arange(-far, far + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (at / sigma).square()) * (at.abs() <= torch.ceil(3 * sigma))
    return kernel / kernel.sum(1, keepdim=True)


class Moves(NamedTuple):
    """How many neighbours are moved in which way."""

    shear_x: int
    shear_y: int
    translate_x: int
    translate_y: int
    rotate: int


def matrices(kinds: Moves, level: NDArray[np.float64], size: Pair) -> NDArray[np.float32]:
    """From a place in the picture that comes out, from the centre in pixels, to the place it is taken from, from the
    centre in halves of the picture: [n, 3, 2], for (x, y, 1) from the left."""
    height, width = size
    out = np.zeros((len(level), 3, 2))
    out[:, 0, 0] = out[:, 1, 1] = 1
    ends = [0, *itertools.accumulate(kinds)]
    shear_x, shear_y, right, down, turned = (slice(*between) for between in itertools.pairwise(ends))
    out[shear_x, 1, 0], out[shear_x, 2, 0] = level[shear_x], level[shear_x] * height / 2
    out[shear_y, 0, 1], out[shear_y, 2, 1] = level[shear_y], level[shear_y] * width / 2
    out[right, 2, 0], out[down, 2, 1] = -np.trunc(level[right]), -np.trunc(level[down])
    angle = np.radians(level[turned])
    out[turned, 0, 0] = out[turned, 1, 1] = np.cos(angle)
    out[turned, 0, 1] = np.sin(angle)
    out[turned, 1, 0] = -out[turned, 0, 1]
    return out.astype(np.float32) / np.array([width / 2, height / 2], np.float32)


def centred(size: Pair) -> tuple[NDArray[np.float32], ...]:
    """The places of a row of pixels, x [1, W], and of a column of them, y [H, 1], from the centre; and a 1 [1, 1]."""
    y, x = (np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2) for side in size)
    return x[None], y[:, None], np.ones((1, 1), np.float32)


def warp(pixels: Tensor, matrix: Tensor, places: Tensor) -> None:
    """Moves pixels by matrices [n, 3, 2], nearest neighbours, black outside. `places` are (x, y, 1) of every pixel
    [1, H W, 3]."""
    count, (height, width) = len(pixels), pixels.shape[-2:]
    grid = places.expand(count, -1, -1).bmm(matrix).view(count, height, width, 2)
    pixels.copy_(grid_sample(pixels.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False))

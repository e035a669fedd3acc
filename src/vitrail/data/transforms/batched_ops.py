"""The operations of policy.py for whole batches on any device, with one level per sample.

torchvision's kernels take one level per batch; these do the same arithmetic with one level per sample, in place on
uint8 [n, 3, H, W]. Nothing here makes the host wait for the device. An image is bit-identical whatever images share its
batch: where a library computes a sum in an order that may depend on shapes, the terms are integers that float32
represents exactly.

`plan_programme` sorts a batch by operation on the host, so that each operation runs once per step on neighbours: one
gather per step and one to restore the order. It computes all parameters without torch, possibly in another thread.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad

from vitrail.core.text import Pair
from vitrail.data.transforms.policy import GEOMETRIC, NUMBER, Programme

SMOOTH: Final = np.ones((1, 1, 3, 3), np.float32)  # 13 times the weights of a pixel (5) and its neighbours (1 each)
SMOOTH[0, 0, 1, 1] = 5


def blend(pixels: Tensor, level: Tensor, rest: Tensor, counts: Sequence[int], kernel: Tensor) -> None:
    """Blends `level` of each image with `rest`, 1 - level, of another: black (brightness), the image in grey
    (saturation), its mean grey (contrast), or the image smoothed by a kernel (sharpness). Both are [n, 1, 1, 1]; the
    rest may be negative. `counts` are the numbers of consecutive images for each of BLENDS."""
    first, saturation, contrast, sharpness = counts
    last = len(pixels) - sharpness
    done = pixels * level
    if last > first:
        grey = grey_levels(pixels[first:last]).floor_()
        if contrast:
            flat = grey[saturation:]
            flat.copy_(flat.mean((1, 2, 3), keepdim=True, dtype=torch.float64))  # exact for images of any size
        done[first:last].add_(grey.mul_(rest[first:last]))
    if not sharpness:
        pixels.copy_(done.clamp_(0, 255))
        return
    # The border of one pixel is not sharpened, as in torchvision and Pillow.
    sharp = pixels[last:]
    inside, within = sharp[:, :, 1:-1, 1:-1], done[last:, :, 1:-1, 1:-1]
    if large := min(pixels.shape[-2:]) > 2:
        planes = sharp.flatten(0, 1).unsqueeze(1).float()
        smooth = conv2d(planes, kernel).div_(13).round_().unflatten(0, sharp.shape[:2]).squeeze(2)
        within.add_(smooth.mul_(rest[last:]))
    done.clamp_(0, 255)
    pixels[:last].copy_(done[:last])
    if large:
        inside.copy_(within)


def grey_levels(pixels: Tensor) -> Tensor:
    """Computes grey levels [n, 1, H, W] as floats that are not rounded. All but the last product is exact, and results
    that should be whole numbers are."""
    red, green, blue = pixels.split(1, dim=1)
    return red.mul(2989.0).add_(green, alpha=5870.0).add_(blue, alpha=1140.0).mul_(1e-4)


def solarise(pixels: Tensor, level: Tensor) -> None:
    upper = (pixels >= level).view(torch.uint8)
    pixels.bitwise_xor_(upper.neg_())  # 255 where it holds


def autocontrast(pixels: Tensor) -> None:
    """Stretches the levels of each channel to 0 to 255. A channel of one level is unchanged."""
    low, high = (side[..., None] for side in pixels.flatten(2).aminmax(dim=-1, keepdim=True))
    flat = low == high
    step = ((high - low) * (1 / 255)).masked_fill_(flat, 1.0)
    pixels.copy_((pixels - low.masked_fill_(flat, 0)) / step)


def equalise(pixels: Tensor, levels: Tensor) -> None:
    """Equalises the histogram of each channel in Pillow's integer arithmetic. A channel with too few pixels below its
    highest level is unchanged. `levels` are 0 to 255."""
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


def blur(pixels: Tensor, weights: Sequence[Tensor]) -> None:
    """Applies a Gaussian blur, with weights [far + 1, n, 1, 1, 1] by distance for each axis. Terms are added one after
    another, in an order that does not depend on the shapes."""
    rows = pixels.float()
    for bell, side in zip(weights, pixels.shape[-2:], strict=True):  # down, then across after turning
        far = min(len(bell), side) - 1
        middle, *shares = bell[: far + 1].unbind(0)
        padded = pad(rows, (0, 0, far, far), mode="reflect")
        rows = padded[:, :, far : far + side] * middle
        for away, share in enumerate(shares, 1):
            both = padded[:, :, far - away : far - away + side] + padded[:, :, far + away : far + away + side]
            rows.add_(both.mul_(share))
        rows = rows.transpose(2, 3)
    pixels.copy_(rows.round_())


def gaussian_kernels(sigma: NDArray[np.float64], size: Pair) -> NDArray[np.float32]:
    """Computes the weights of blurs with standard deviations [n], for both axes: [2, far + 1, n]. The radius is three
    standard deviations, at most the side of a very small image minus 1; narrower blurs are padded with zeros."""
    reach = np.minimum(np.ceil(3 * sigma), np.array(size)[:, None] - 1)[:, None]  # [2, 1, n]
    away = np.arange(int(reach.max(initial=0)) + 1)[:, None]
    shares = np.exp(-0.5 * (away / sigma) ** 2) * (away <= reach)
    return (shares / (2 * shares.cumsum(1)[:, -1:] - 1)).astype(np.float32)  # sequential, so that zeros change nothing


def matrices(counts: Sequence[int], level: NDArray[np.float64], size: Pair) -> NDArray[np.float32]:
    """Builds the matrices [n, 3, 2] of geometric operations, for (x, y, 1) from the left. They map a position in the
    output, in pixels from the centre, to its source, in half image sides from the centre. `counts` are the numbers of
    consecutive images for each of GEOMETRIC."""
    height, width = size
    out = np.zeros((len(level), 3, 2))
    out[:, 0, 0] = out[:, 1, 1] = 1
    ends = [0, *itertools.accumulate(counts)]
    shear_x, shear_y, right, down, turned = (slice(*between) for between in itertools.pairwise(ends))
    out[shear_x, 1, 0], out[shear_x, 2, 0] = level[shear_x], level[shear_x] * height / 2
    out[shear_y, 0, 1], out[shear_y, 2, 1] = level[shear_y], level[shear_y] * width / 2
    out[right, 2, 0], out[down, 2, 1] = -np.trunc(level[right]), -np.trunc(level[down])
    angle = np.radians(level[turned])
    out[turned, 0, 0] = out[turned, 1, 1] = np.cos(angle)
    out[turned, 0, 1] = np.sin(angle)
    out[turned, 1, 0] = -out[turned, 0, 1]
    return out.astype(np.float32) / np.array([width / 2, height / 2], np.float32)


def warp(pixels: Tensor, matrix: Tensor, x: Tensor, y: Tensor) -> None:
    """Moves pixels by matrices [n, 3, 2], with nearest neighbours and black outside. `x` [W, 1] and `y` [H, 1, 1] are
    the coordinates of columns and rows, in pixels from the centre."""
    across, down, shift = matrix[:, :, None, None].unbind(1)  # [n, 1, 1, 2] each
    grid = (across * x) + (down * y).add_(shift)  # [n, H, W, 2]
    pixels.copy_(grid_sample(pixels.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False))


class BatchStage(NamedTuple):
    """A stage of a batch's augmentation: the arrays to send, and a function of the pixels and arrays on the device."""

    arrays: tuple[NDArray[Any], ...]
    stage: Callable[[Tensor, Sequence[Tensor]], Tensor]


# The order by which a batch is sorted, so that operations that run together are neighbours. Unchanged images come last.
BLENDS: Final = ("brightness", "saturation", "contrast", "sharpness")
SORTED: Final = (*GEOMETRIC, *BLENDS, "posterise", "solarise", "autocontrast", "equalise", "grey", "blur", "identity")
MOVED, BLENDED = len(GEOMETRIC), len(GEOMETRIC) + len(BLENDS)  # where these groups end in SORTED
CONTRAST, BLURRED = SORTED.index("contrast"), SORTED.index("blur")
# The place of each operation in that order, as uint8, which sorts fastest.
PLACES: Final = np.full(len(NUMBER), len(SORTED), np.uint8)
PLACES[[NUMBER[name] for name in SORTED]] = np.arange(len(SORTED))
LEVELS: Final = np.arange(256)


def plan_programme(programme: Programme, size: Pair, filled: NDArray[np.float64] | None = None) -> BatchStage:
    """Plans a programme for a batch of images of this size. `filled` [B] is the share of each image that its picture
    fills; the rest is black, and left out of the mean that contrast uses."""
    places, exact = PLACES[programme.which.T], programme.level.T  # [S, B]
    order = places.argsort(axis=1, kind="stable")
    level = np.empty(exact.shape, np.float32)
    gathers, back = np.empty((len(order) + 1, order.shape[1]), np.int64), np.arange(order.shape[1])
    steps = [np.bincount(row, minlength=len(SORTED)).tolist() for row in places]
    matrix, rests, masks, sigmas = (list[NDArray[Any]]() for _ in range(4))
    for row, sorting in enumerate(order):
        by = exact[row][sorting]
        level[row] = by
        ends = [0, *itertools.accumulate(steps[row])]
        sigmas.append(by[ends[BLURRED] : ends[BLURRED + 1]])
        matrix.append(matrices(steps[row][:MOVED], by[: ends[MOVED]], size))
        rest = 1 - level[row]
        if filled is not None:
            rest[ends[CONTRAST] : ends[CONTRAST + 1]] /= filled[sorting][ends[CONTRAST] : ends[CONTRAST + 1]]
        rests.append(rest[ends[MOVED] : ends[BLENDED]])
        bits = level[row, ends[BLENDED] : ends[BLENDED + 1]].astype(np.int64)
        masks.append((255 << (8 - bits)).astype(np.uint8))
        gathers[row], back = back[sorting], np.empty_like(back)
        back[sorting] = np.arange(len(back))
    gathers[-1] = back
    arrays = (gathers, column(level), column(np.concatenate(rests)), column(np.concatenate(masks)))
    shares = column(gaussian_kernels(np.concatenate(sigmas), size))
    y, x = (np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2) for side in size)
    more = (np.concatenate(matrix), shares, SMOOTH, LEVELS, x[:, None], y[:, None, None])
    return BatchStage((*arrays, *more), partial(run_steps, steps))


def column(numbers: NDArray[Any]) -> NDArray[Any]:
    """Reshapes one number per image to [..., 1, 1, 1]."""
    return numbers[..., None, None, None]


def run_steps(steps: list[list[int]], pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """Runs the steps of a programme on a copy of the batch. Each step has the number of images of the sorted batch for
    each operation."""
    gathers, level, rest, kept, matrix, shares, kernel, levels, x, y = arrays
    rests = rest.split([sum(step[MOVED:BLENDED]) for step in steps])
    masks = kept.split([step[BLENDED] for step in steps])
    moves = matrix.split([sum(step[:MOVED]) for step in steps])
    bell = shares.split([step[BLURRED] for step in steps], 2)
    for row, step in enumerate(steps):
        pixels, blends = pixels.index_select(0, gathers[row]), step[MOVED:BLENDED]
        counts = [sum(step[:MOVED]), sum(blends), *step[BLENDED:]]
        turned, blended, posterised, solarised, spread, equal, grey_ones, blurred, _ = pixels.split(counts)
        _, amounts, _, thresholds, *_ = level[row].split(counts)
        work: list[tuple[Tensor, Callable[..., object], tuple[Any, ...]]] = [
            (turned, warp, (moves[row], x, y)),
            (blended, blend, (amounts, rests[row], blends, kernel)),
            (posterised, Tensor.bitwise_and_, (masks[row],)),  # masks of the bits to keep
            (solarised, solarise, (thresholds,)),
            (spread, autocontrast, ()),
            (equal, equalise, (levels,)),
            (grey_ones, grey, ()),
            (blurred, blur, (bell[row].unbind(0),)),
        ]
        for some, operation, parameters in work:
            if len(some):
                operation(some, *parameters)
    return pixels.index_select(0, gathers[-1])

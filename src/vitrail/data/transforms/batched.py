"""Augments whole batches on their device, for data sets that are kept on the accelerator.

    augment = BatchedAugmentation(inception(32))
    pixels = augment(pixels, CounterRng.for_samples(seed=0, epoch=epochs, sample=samples))  # uint8 [B, 3, h, w]

The host draws the parameters, with the same functions as a loader process, and sends them in one copy; it never waits
for the device. Drawing them needs no pixels, so it can be done in advance, in another thread:

    plan = augment.plan(draws, (32, 32))
    pixels = augment.apply(plan, pixels)

Masks are also transformed on the device: a gather reads the pixels that `Geometry.mask` would, for B samples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Interpolation
from vitrail.data.randomness import CounterRng
from vitrail.data.targets import TIE
from vitrail.data.transforms.augmentation import Augmentation, RandomErasing, make_noise, noise_keys
from vitrail.data.transforms.batched_ops import SORTED, BatchStage, column, plan_programme
from vitrail.data.transforms.crop import Crop, InceptionCrop, ResizeCrop, ScaleJitter
from vitrail.data.transforms.policy import operations_of

UNIT: Final = 2.0**15  # weight of 1: times 255 it fits in 23 of float32's 24 bits; negative weights may need the last


class PackedArrays:
    """Arrays in one buffer, for one copy to a device. Packing needs no device and works in any thread."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.order = sorted(range(len(arrays)), key=lambda place: -arrays[place].itemsize)  # keeps all arrays aligned
        some = [np.ascontiguousarray(arrays[place]).reshape(-1).view(np.uint8) for place in self.order]
        self.bytes: NDArray[np.uint8] = np.concatenate([np.empty(0, np.uint8), *some])
        self.forms = [(torch.from_numpy(np.empty(0, array.dtype)).dtype, array.shape) for array in arrays]
        self.lengths = [len(piece) for piece in some]

    def to_device(self, device: torch.device) -> list[Tensor]:
        """Copies the arrays to the device as tensors, in their original order, without waiting for the copy."""
        whole = torch.from_numpy(self.bytes)
        there = (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)
        pieces = dict(zip(self.order, there.split_with_sizes(self.lengths), strict=True))
        return [pieces[place].view(dtype).view(shape) for place, (dtype, shape) in enumerate(self.forms)]


def find_unsupported(augmentation: Augmentation) -> str | None:
    """Why an augmentation has no batched form; None if it has one."""
    policy = augmentation.policy
    missing = [] if policy is None else sorted(name for name in operations_of(policy) if name not in SORTED)
    if not missing:
        return None
    known = ", ".join(["InceptionCrop", "ResizeCrop", "ScaleJitter", "Squash", "flip", "RandomErasing", *SORTED])
    return f"{type(policy).__name__} uses {', '.join(missing)}, which has no batched form; supported: {known}"


class BatchPlan(NamedTuple):
    """The stages of an augmentation, with their parameters, for B images of one size. All of it is on the host."""

    images: int
    size: Pair
    works: tuple[BatchStage, ...]

    @property
    def arrays(self) -> "list[NDArray[Any]]":
        """The arrays to send to the device."""
        return [array for work in self.works for array in work.arrays]


@dataclass(frozen=True, slots=True)
class BatchedAugmentation:
    """An augmentation for uint8 pixels [B, 3, H, W] on any device. Raises ConfigError if it has no batched form."""

    augmentation: Augmentation

    def __post_init__(self) -> None:
        if reason := find_unsupported(self.augmentation):
            raise ConfigError(reason)

    @property
    def size(self) -> Pair:
        return self.augmentation.size

    def __call__(self, pixels: Tensor, draws: CounterRng) -> Tensor:
        """Augments a batch. `draws` are those of its B samples, in the same order."""
        if len(pixels) != len(draws):
            raise ConfigError(f"{len(draws)} draws for {len(pixels)} images")
        return self.apply(self.plan(draws, (pixels.shape[-2], pixels.shape[-1])), pixels)

    def plan(self, draws: CounterRng, size: Pair) -> BatchPlan:
        """Does the host's part for images of this size: it draws arrays, with the same result in any thread."""
        augmentation = self.augmentation
        crop, flips = augmentation.crop, augmentation.flips(draws)
        works = plan_crop(crop, flips, draws, size)
        if augmentation.policy is not None:
            programme = augmentation.policy.draw(draws, self.size)
            if isinstance(crop, ScaleJitter):
                inner = crop.measure_pictures(draws, size)
                works.append(plan_programme(programme, self.size, inner.prod(1) / math.prod(self.size)))
                works.append(plan_borders(inner, flips, self.size))
            else:
                works.append(plan_programme(programme, self.size))
        if augmentation.erase is not None:
            works += plan_erasing(augmentation.erase, draws, self.size)
        return BatchPlan(len(draws), size, tuple(works))

    def apply(self, plan: BatchPlan, pixels: Tensor, sent: Iterator[Tensor] | None = None) -> Tensor:
        """Runs the device's part. `sent` holds the plan's arrays if they are on the device already."""
        if pixels.dtype != torch.uint8 or tuple(pixels.shape) != (plan.images, 3, *plan.size):
            given = f"{pixels.dtype} {tuple(pixels.shape)}"
            raise ConfigError(f"a plan for uint8 {(plan.images, 3, *plan.size)} was given {given}")
        arrays = iter(PackedArrays(plan.arrays).to_device(pixels.device)) if sent is None else sent
        for work in plan.works:
            pixels = work.stage(pixels, [next(arrays) for _ in work.arrays])
        return pixels


def plan_crop(crop: Crop, flips: NDArray[np.bool_], draws: CounterRng, whole: Pair) -> list[BatchStage]:
    """Plans the crop and the flip of images of one size."""
    height, width = whole
    mirror = lambda pixels, sent: torch.where(sent[0], pixels.flip(-1), pixels)  # noqa: E731
    flipped = BatchStage((column(flips),), mirror)
    if isinstance(crop, ResizeCrop):
        resized = crop.resized(whole)
        windows = crop.windows(draws, whole)
        if resized == whole:
            return [plan_windows(crop, windows, flips)]
        if crop.padding:  # it surrounds the resized image, so that is made first
            return [*plan_squash(len(draws), whole, resized, crop.interpolation), plan_windows(crop, windows, flips)]
        scale = np.array([height / resized[0], width / resized[1]])
        # A window of the resized image is a box of this one, and the filter may read pixels outside the box.
        boxes = np.concatenate([windows * scale, np.broadcast_to(np.array(crop.size) * scale, windows.shape)], 1)
        return [plan_resampling(boxes, whole, crop.size, crop.interpolation, tight=False), flipped]
    if isinstance(crop, ScaleJitter):
        return [*plan_jitter(crop, draws, whole), flipped]
    if isinstance(crop, InceptionCrop):
        boxes = crop.boxes(draws, height, width)
        return [plan_resampling(boxes, whole, crop.size, crop.interpolation, tight=True), flipped]
    return [*plan_squash(len(draws), whole, crop.size, crop.interpolation), flipped]


def plan_jitter(crop: ScaleJitter, draws: CounterRng, whole: Pair) -> list[BatchStage]:
    """Plans a scale jitter: images are resampled each at its own scale, and pixels beyond their edges become black."""
    found = crop.windows(draws, whole)
    resized, corner = found[:, :2], found[:, 2:]
    scale = np.array(whole) / resized
    boxes = np.concatenate([corner * scale, np.array(crop.size) * scale], 1)
    sampled = plan_resampling(boxes, whole, crop.size, crop.interpolation, tight=False)
    return [sampled, plan_borders(resized - corner, np.zeros(len(found), np.bool_), crop.size)]


def plan_borders(inner: NDArray[np.int64], flips: NDArray[np.bool_], size: Pair) -> BatchStage:
    """Plans black borders around pictures of `inner` rows and columns [B, 2]: at the bottom and on the right, or on the
    left of mirrored ones."""
    left = np.where(flips, size[1] - inner[:, 1], 0)
    edges = map(column, (inner[:, 0], left, left + inner[:, 1]))
    return BatchStage((*edges, np.arange(size[0])[:, None], np.arange(size[1])), apply_borders)


def apply_borders(pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """Draws the borders, in place, because the pixels belong to the stage before."""
    height, left, right, row, across = arrays
    return pixels.masked_fill_((row >= height) | (across < left) | (across >= right), 0)


def plan_squash(count: int, whole: Pair, size: Pair, interpolation: Interpolation) -> list[BatchStage]:
    """Plans the resize of `count` whole images to a size."""
    if size == whole:
        return []
    boxes = np.broadcast_to(np.array([0, 0, *whole]), (count, 4))
    return [plan_resampling(boxes, whole, size, interpolation, tight=True)]


def plan_windows(crop: ResizeCrop, windows: NDArray[np.int64], flips: NDArray[np.bool_]) -> BatchStage:
    """Plans a window for each padded image, read from the left, or from the right for mirrored ones."""
    height, width = crop.size
    left = np.where(flips, windows[:, 1] + width - 1, windows[:, 1])
    every, top, left, sense = map(column, (np.arange(len(windows)), windows[:, 0], left, np.where(flips, -1, 1)))
    channels, down, across = np.arange(3)[:, None, None], np.arange(height)[:, None], np.arange(width)
    arrays = (every, channels, top, down, left, sense, across)
    return BatchStage(arrays, partial(apply_windows, crop))


def apply_windows(crop: ResizeCrop, pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    every, channels, top, down, left, sense, across = arrays
    mode = "constant" if crop.edge == "zeros" else "reflect"
    padded = pad(pixels, (crop.padding,) * 4, mode=mode) if crop.padding else pixels
    return padded[every, channels, top + down, torch.addcmul(left, sense, across)]


def plan_resampling(
    boxes: NDArray[Any], whole: Pair, size: Pair, interpolation: Interpolation, *, tight: bool
) -> BatchStage:
    """Plans the resize of a box of each image to one size, with Pillow's filters, as two matrix products. For square
    images and outputs, the weights of both axes are computed together."""
    sides = boxes.astype(np.float32)
    square = whole[0] == whole[1] and size[0] == size[1]
    axes = [(0, 1)] if square else [(0,), (1,)]
    arrays = list[NDArray[Any]]()
    for some in axes:
        first = sides[:, some].T.reshape(-1, 1, 1)
        length = sides[:, [axis + 2 for axis in some]].T.reshape(-1, 1, 1)
        scale = length / np.float32(size[some[0]])
        arrays += [first, first + length, scale, np.maximum(scale, np.float32(1))]
        arrays += [np.arange(size[some[0]], dtype=np.float32)[:, None] + np.float32(0.5)]
        arrays += [np.arange(whole[some[0]], dtype=np.float32) + np.float32(0.5)]
    return BatchStage(tuple(arrays), partial(apply_resampling, interpolation, tight))


def apply_resampling(interpolation: Interpolation, tight: bool, pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    several = [resampling_weights(arrays[at : at + 6], interpolation, tight) for at in range(0, len(arrays), 6)]
    down, across = several if len(several) == 2 else several[0].split(len(pixels))  # [B, h, H] and [B, w, W]
    (count, tall, high), wide = down.shape, across.shape[1]
    rows = pixels.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)  # [B, H, 3, W]
    narrow = round_levels(rows.view(count, high * 3, -1) @ across.transpose(1, 2))  # Pillow also rounds in between
    del rows
    done = round_levels(down @ narrow.view(count, high, 3 * wide)).view(count, tall, 3, wide)
    return done.transpose(1, 2).to(torch.uint8, memory_format=torch.contiguous_format)


def round_levels(levels: Tensor) -> Tensor:
    """Rounds sums of weighted levels to whole levels from 0 to 255, halves upwards."""
    return levels.mul_(1 / UNIT).add_(0.5).floor_().clamp_(0, 255)


def resampling_weights(arrays: Sequence[Tensor], interpolation: Interpolation, tight: bool) -> Tensor:
    """Computes the weights of `side` input pixels for each of `out` output pixels, for B boxes: [B, out, side], in
    units of 1 / UNIT. When shrinking, the filter widens with the scale, as in Pillow. Weights are whole numbers, so
    that sums of levels times weights are exact in float32, in any order of summation."""
    first, last, scale, reach, out, at = arrays
    away = (at - (out * scale).add_(first)).abs_().div_(reach)
    if interpolation == "bicubic":  # Keys' cubic with a = -1/2
        near = (1.5 * away - 2.5) * away * away + 1
        far = ((-0.5 * away + 2.5) * away - 4) * away + 2
        shares = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    else:
        shares = (1 - away).clamp_(min=0)
    if tight:
        shares.mul_((at > first) & (at < last))
    total = shares.sum(-1, keepdim=True)
    # The sum is zero for pixels far beyond an edge, which borders cover later.
    return shares.div_(total.masked_fill_(total == 0, 1)).mul_(UNIT).round_()


def plan_erasing(erase: RandomErasing, draws: CounterRng, size: Pair) -> list[BatchStage]:
    """Plans the erased rectangles of the samples that have one."""
    height, width = size
    some = np.flatnonzero(erase.chooses(draws))
    if not some.size:
        return []
    draws = draws.rows(some)
    top, left, tall, wide = erase.boxes(draws, height, width).T[..., None, None, None]
    edges = (top, top + tall, left, left + wide)  # [n, 1, 1, 1] each
    rulers = (np.arange(height)[:, None], np.arange(width))
    return [BatchStage((some, *edges, *rulers, noise_keys(draws)), partial(apply_erasing, erase.fill))]


def apply_erasing(fill: int | None, pixels: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """Erases the rectangles, in place, because the pixels belong to the stages before."""
    some, top, bottom, left, right, row, column, keys = arrays
    hole = ((row >= top) & (row < bottom)) & ((column >= left) & (column < right))  # [n, 1, H, W]
    mine = pixels.index_select(0, some)
    if fill is not None:
        return pixels.index_copy_(0, some, mine.masked_fill_(hole, fill))
    noise = make_noise(keys, row * pixels.shape[-1] + column)
    return pixels.index_copy_(0, some, torch.where(hole, noise, mine))


def find_sources(augmentation: Augmentation, draws: CounterRng, whole: Pair) -> tuple[NDArray[np.int64], ...]:
    """Finds, for B samples of one size, the rows [B, h] and columns [B, w] of the image nearest to the pixels of the
    view; -1 in its borders."""
    crop, count = augmentation.crop, len(draws)
    found: list[NDArray[np.int64]] = []
    windows = crop.windows(draws, whole) if isinstance(crop, ResizeCrop) else None
    jittered = crop.windows(draws, whole) if isinstance(crop, ScaleJitter) else None
    boxes = crop.boxes(draws, *whole) if isinstance(crop, InceptionCrop) else np.array([[0, 0, *whole]] * count)
    for axis, side in enumerate(whole):
        places = np.arange(crop.size[axis])
        if isinstance(crop, ResizeCrop) and windows is not None:
            resized = crop.resized(whole)[axis]
            places = windows[:, axis, None] - crop.padding + places
            centres, inside = (2 * places + 1) * side / (2 * resized), (places >= 0) & (places < resized)
        elif jittered is not None:
            resized, places = jittered[:, axis, None], jittered[:, axis + 2, None] + places
            centres, inside = (2 * places + 1) * side / (2 * resized), places < resized
        else:
            centres = boxes[:, axis, None] + (2 * places + 1) * boxes[:, axis + 2, None] / (2 * crop.size[axis])
            inside = np.True_
        found.append(np.where(inside, np.floor(centres + TIE).astype(np.int64).clip(0, side - 1), -1))
    rows, columns = found
    return rows, np.where(augmentation.flips(draws)[:, None], columns[:, ::-1], columns)


def gather_masks(masks: Tensor, rows: Tensor, columns: Tensor, fill: int) -> Tensor:
    """Gathers rows and columns of masks, [B, ..., H, W] to [B, ..., h, w], with `fill` where a row or column is -1."""
    if several := masks.shape[1:-2].numel() if masks.ndim > 3 else 0:
        flat = masks.flatten(0, -3)
        rows, columns = rows.repeat_interleave(several, 0), columns.repeat_interleave(several, 0)
        return gather_masks(flat, rows, columns, fill).unflatten(0, masks.shape[:-2])
    found = masks.gather(1, rows.clamp(min=0)[:, :, None].expand(-1, -1, masks.shape[2]))
    found = found.gather(2, columns.clamp(min=0)[:, None, :].expand(-1, rows.shape[1], -1))
    return found.masked_fill_((rows < 0)[:, :, None] | (columns < 0)[:, None, :], fill)

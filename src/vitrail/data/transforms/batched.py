"""Augmentation of whole batches where they lie, for sets that live on the accelerator.

    augment = BatchedAugmentation(inception(32))
    pixels = augment(pixels, Draws.of(seed=0, epoch=epochs, sample=samples))    # uint8 [B, 3, H, W] to [B, 3, h, w]

The parameters are drawn on the host by the very functions that a loader process uses, and sent along; the host never
waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.data.draws import Draws
from vitrail.data.preprocessing import Interpolation
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.batched_operations import GEOMETRIC, OPERATIONS, blur_within, matrices, warp
from vitrail.data.transforms.crop import Crop, InceptionCrop, ResizeCrop
from vitrail.data.transforms.erase import RandomErasing, noise_keys
from vitrail.data.transforms.policy import used
from vitrail.data.transforms.programme import IDENTITY, NUMBER, Programme

BLUR = NUMBER["blur"]
SUPPORTED = frozenset(OPERATIONS) | GEOMETRIC | {IDENTITY, BLUR}


def supported() -> tuple[str, ...]:
    """What can be done to whole batches."""
    names = [name for name, which in NUMBER.items() if which in SUPPORTED]
    return ("InceptionCrop", "ResizeCrop", "Squash", "flip", "RandomErasing", *names)


@dataclass(frozen=True, slots=True)
class BatchedAugmentation:
    """An augmentation for uint8 pixels [B, 3, H, W] on any device. What it has no batched form of is refused here."""

    augmentation: Augmentation

    def __post_init__(self) -> None:
        policy = self.augmentation.policy
        missing = [] if policy is None else sorted(name for name in used(policy) if NUMBER[name] not in SUPPORTED)
        if missing:
            raise ConfigError(
                f"{type(policy).__name__} uses {', '.join(missing)}, which has no batched form; "
                f"supported: {', '.join(supported())}"
            )

    @property
    def size(self) -> Pair:
        return self.augmentation.size

    def __call__(self, pixels: Tensor, draws: Draws) -> Tensor:
        """`draws` are those of the B samples, in the same order."""
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or len(pixels) != len(draws):
            raise ConfigError(f"{len(draws)} draws for {pixels.dtype} {tuple(pixels.shape)}, not uint8 [B, 3, H, W]")
        augmentation = self.augmentation
        pixels = cropped(augmentation.crop, pixels, draws)
        flips = send(augmentation.flips(draws), pixels.device)
        pixels = torch.where(flips[:, None, None, None], pixels.flip(-1), pixels)
        if augmentation.policy is not None:
            pixels = run(augmentation.policy.draw(draws, self.size), pixels)
        return pixels if augmentation.erase is None else erased(augmentation.erase, pixels, draws)


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def cropped(crop: Crop, pixels: Tensor, draws: Draws) -> Tensor:
    height, width = pixels.shape[-2:]
    if isinstance(crop, ResizeCrop):
        resized = crop.resized((height, width))
        windows = crop.windows(draws, (height, width))
        if resized == (height, width):
            return windowed(crop, pixels, windows)
        if crop.padding:
            raise ConfigError(f"{crop} would resize and pad {height}x{width}; batches can do one or the other")
        scale = np.array([height / resized[0], width / resized[1]])
        # A window of the resized picture is a box of this one, and what lies outside the box may shine in.
        boxes = np.concatenate([windows * scale, np.broadcast_to(np.array(crop.size) * scale, windows.shape)], 1)
        return resampled(pixels, boxes, crop.size, crop.interpolation, tight=False)
    if isinstance(crop, InceptionCrop):
        return resampled(pixels, crop.boxes(draws, height, width), crop.size, crop.interpolation, tight=True)
    if crop.size == (height, width):
        return pixels
    whole = np.broadcast_to(np.array([0, 0, height, width]), (len(pixels), 4))
    return resampled(pixels, whole, crop.size, crop.interpolation, tight=True)


def windowed(crop: ResizeCrop, pixels: Tensor, windows: NDArray[np.int64]) -> Tensor:
    """Pads, and takes from each picture its own window."""
    device, border = pixels.device, crop.padding
    mode = "constant" if crop.edge == "zeros" else "reflect"
    padded = pad(pixels, (border,) * 4, mode=mode) if border else pixels
    first = send(windows, device)
    rows = first[:, :1] + torch.arange(crop.size[0], device=device)  # [B, h]
    columns = first[:, 1:] + torch.arange(crop.size[1], device=device)
    every = torch.arange(len(pixels), device=device)[:, None, None, None]
    channels = torch.arange(pixels.shape[1], device=device)[:, None, None]
    return padded[every, channels, rows[:, None, :, None], columns[:, None, None, :]]


def resampled(
    pixels: Tensor,
    boxes: "NDArray[np.integer[Any] | np.floating[Any]]",
    size: Pair,
    interpolation: Interpolation,
    *,
    tight: bool,
) -> Tensor:
    """A box of each picture at one size, with the filters of Pillow, as two matrix products."""
    sent = send(boxes.astype(np.float32), pixels.device)
    down = weights(sent[:, 0], sent[:, 2], size[0], pixels.shape[-2], interpolation, tight)  # [B, h, H]
    across = weights(sent[:, 1], sent[:, 3], size[1], pixels.shape[-1], interpolation, tight)
    narrow = whole_levels(pixels.float() @ across[:, None].transpose(2, 3))  # Pillow too rounds in between
    return whole_levels(down[:, None] @ narrow).to(torch.uint8)


def whole_levels(levels: Tensor) -> Tensor:
    """0 to 255, halves upwards."""
    return levels.add_(0.5).floor_().clamp_(0, 255)


def weights(first: Tensor, length: Tensor, out: int, side: int, interpolation: Interpolation, tight: bool) -> Tensor:
    """How much of each of `side` pixels goes into each of `out`, for B boxes [B, out, side]. Where pixels get fewer,
    the filter is as wide as what becomes one of them, so nothing is left out."""
    first, scale = first[:, None, None], (length / out)[:, None, None]
    centre = first + (torch.arange(out, device=first.device)[:, None] + 0.5) * scale
    at = torch.arange(side, device=first.device) + 0.5
    away = (at - centre).abs() / scale.clamp(min=1)
    if interpolation == "bicubic":  # Keys' cubic with a = -1/2
        near = (1.5 * away - 2.5) * away * away + 1
        far = ((-0.5 * away + 2.5) * away - 4) * away + 2
        shares = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    else:
        shares = (1 - away).clamp(min=0)
    if tight:
        shares = shares * ((at > first) & (at < first + length[:, None, None]))
    return shares / shares.sum(-1, keepdim=True)


def run(programme: Programme, pixels: Tensor) -> Tensor:
    """What was drawn for each picture, done to it: step by step, and in each step together those with one operation."""
    device, size = pixels.device, (pixels.shape[-2], pixels.shape[-1])
    group = np.where(np.isin(programme.which, list(GEOMETRIC)), -1, programme.which)
    order = np.argsort(group, axis=0, kind="stable")
    places, levels = send(order, device), send(programme.level.astype(np.float32), device)
    pixels = pixels.clone()
    for step in range(group.shape[1]):
        names, counts = np.unique(group[:, step], return_counts=True)
        ends = np.cumsum(counts)
        for which, start, end in zip(names.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            if which == IDENTITY:
                continue
            chosen, mine = order[start:end, step], places[start:end, step]
            level = programme.level[chosen, step]
            if which == -1:
                moves = matrices(programme.which[chosen, step], level, size)
                done = warp(pixels[mine], send(moves, device))
            else:
                operation = blur_within(float(level.max())) if which == BLUR else OPERATIONS[which]
                done = operation(pixels[mine], levels[mine, step].view(-1, 1, 1, 1))
            pixels.index_copy_(0, mine, done)
    return pixels


def erased(erase: RandomErasing, pixels: Tensor, draws: Draws) -> Tensor:
    device, (height, width) = pixels.device, pixels.shape[-2:]
    boxes = send(erase.boxes(draws, height, width), device)[:, :, None, None]  # [B, 4, 1, 1]
    top, left, tall, wide = boxes.unbind(1)
    row, column = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    hole = (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)  # [B, H, W]
    if erase.fill is not None:
        return pixels.masked_fill(hole[:, None], erase.fill)
    keys = send(noise_keys(draws).view(np.int64), device)[:, None, None]
    return torch.where(hole[:, None], noise(keys, row * width + column), pixels)


def noise(key: Tensor, place: Tensor) -> Tensor:
    """The bytes of `erase.noise` [B, 3, H, W]. Signed numbers wrap like unsigned ones; only their shifts need care."""
    bits = hashed(key + place * wrapped(0x9E3779B97F4A7C15))
    return torch.stack([(bits >> 8 * (channel + 1)) & 255 for channel in range(3)], 1).to(torch.uint8)


def hashed(x: Tensor) -> Tensor:
    """`draws.mix` on int64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * wrapped(factor)
    return x ^ ((x >> 31) & (2**33 - 1))


def wrapped(value: int) -> int:
    """An unsigned number of 64 bits as the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value

"""Colours at 3 bits a channel (B.1.2): 512 classes, to and fro."""

import torch
from torch import Tensor

LEVELS = 8  # of a channel: 3 bits
COLOURS = LEVELS**3


def colours(patches: Tensor, side: int) -> Tensor:
    """Colour classes of patches shrunk to side x side by the mean over areas: uint8 [..., P, P, 3] -> [..., side²].

    With the mean m of a channel in [0, 1]: b = min(7, ⌊8·m⌋), and the class is 64·R + 8·G + B. In whole numbers, so
    that a mean on the edge of two bins falls into the upper one wherever it is computed. Where the side does not divide
    the patch, areas overlap by a pixel, as in adaptive average pooling."""
    cells = [
        levels(patches[..., top:bottom, left:right, :].sum((-3, -2)), (bottom - top) * (right - left))
        for top, bottom in areas(patches.shape[-3], side)
        for left, right in areas(patches.shape[-2], side)
    ]
    red, green, blue = torch.stack(cells, -2).unbind(-1)
    return LEVELS**2 * red + LEVELS * green + blue


def levels(sums: Tensor, pixels: int) -> Tensor:
    """The bins of means, from the sums of so many bytes."""
    return (LEVELS * sums // (255 * pixels)).clamp(max=LEVELS - 1)


def areas(length: int, count: int) -> list[tuple[int, int]]:
    """From where to where each of `count` parts of a side reaches."""
    return [(part * length // count, -(-(part + 1) * length // count)) for part in range(count)]


def middles(classes: Tensor) -> Tensor:
    """The colour in the middle of each class's bin, red, green and blue from 0 to 1: [...] -> [..., 3]."""
    bins = torch.stack([classes // LEVELS**2, classes // LEVELS % LEVELS, classes % LEVELS], -1)
    return (bins.float() + 0.5) / LEVELS

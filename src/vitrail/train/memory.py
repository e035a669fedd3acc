"""How much memory a run takes, in closed form: what a parameter needs, and what an image needs.

A parameter takes 4 bytes for itself, 4 for its gradient, and the optimiser's moments; its bfloat16 copy another 2, an
average another 4. An image takes what the backward pass reads again. For a ViT block that is, a token: the inputs of
both norms and their outputs (4D), q, k and v (3D), what attention gives (D), and the MLP's inside before and after GELU
(2M): docs/scale.md holds this against measurements. With recomputation only the inputs of the blocks stay, and what
one block needs at its peak (10D + 3M). For a ResNet it is about four times what each unit gives.
"""

import os
from math import prod

import torch

from vitrail.models.family import ModelConfig
from vitrail.optim.config import Optim

CUDA_OWN = 1 << 30  # context, libraries, workspaces
USED = 0.85  # of what is free; the allocator leaves gaps


def state_bytes(config: ModelConfig, optim: Optim, *, low: bool, average: bool, shards: int = 1) -> int:
    """Parameters, gradients, moments; `shards` processes hold a part each."""
    return weights_bytes(config.parameters, 0, optim, low=low, average=average) // shards


def weights_bytes(trained: int, kept: int, optim: Optim, *, low: bool, average: bool) -> int:
    """Of so many numbers that are trained, and so many that are not: a teacher's, which has no gradient or moments."""
    first = 2 if optim.momentum_type == "bfloat16" else 4
    moments = first + (4 if optim.kind == "adamw" else 0)
    always = 4 + (2 if low else 0) + (4 if average else 0)
    return trained * (always + 4 + moments) + kept * always


def image_bytes(config: ModelConfig, *, low: bool, recompute: bool) -> int:
    """What one image adds while a step runs."""
    width = 2 if low else 4
    pixels = prod(config.image) * config.channels * 5  # as bytes and as floats
    return pixels + config.activation_bytes(width, recompute=recompute)


def free_bytes(device: torch.device) -> int:
    """What this process may take."""
    if device.type == "cuda":
        return max(torch.cuda.mem_get_info(device)[0] - CUDA_OWN, 0)
    known = getattr(os, "sysconf_names", {})  # Windows has none, and macOS does not say what is free
    if "SC_AVPHYS_PAGES" in known:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if "SC_PHYS_PAGES" in known:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def fitting(local: int, each: int, room: int, most: int) -> int:
    """The micro-batch of a process's batch that fits into the room, at most `most`."""
    return portion(local, max(1, min(most, int(room * USED) // max(each, 1))))


def portion(local: int, most: int) -> int:
    """How many of `local` samples to take at once, `most` or fewer: a divisor, so that all parts have one shape, unless
    that is less than half of it; then so many that the parts are as even as can be."""
    divisor = next(size for size in range(min(local, most), 0, -1) if local % size == 0)
    return divisor if 2 * divisor > min(local, most) else -(-local // parts(local, most))


def parts(local: int, micro: int) -> int:
    """How many micro-batches there are; the last may be smaller."""
    return -(-local // micro)

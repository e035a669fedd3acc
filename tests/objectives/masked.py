"""A small network with grids and patches that are not square, and batches for objectives that hide patches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.datasets.builtin_sets import load_digit_scans
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import World
from vitrail.models.build import Model, build
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig

# 3 x 4 patches; 4 divides neither of their sides.
VIT = ViTConfig(
    width=16, depth=2, mlp_width=24, heads=2, image=(18, 20), patch=(6, 5), classes=0, head="none", registers=2
)
PLAIN = Preprocessing(image=VIT.image, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.5))
WORLD = World(device=torch.device("cpu"))
SEED, STEP = 5, 7


def model(**changes: Any) -> ViTConfig:
    return replace(VIT, **changes)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What is drawn meanwhile is the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def network(config: ModelConfig = VIT) -> Model:
    with seeded():
        return build(config).train()


def stirred(objective: nn.Module, *, seed: int = 3) -> nn.Module:
    """All parameters a little off from where they start, so that nothing is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return objective


def batch_of(pixels: Tensor, *, first: int = 0, valid: Tensor | None = None) -> Batch:
    """Images as samples from `first` on, in an epoch of their own."""
    count = len(pixels)
    return Batch(
        step=STEP,
        views=(pixels,),
        targets=(torch.full((count,), -1),),
        sample=torch.arange(first, first + count),
        epoch=torch.full((count,), 2),
        valid=torch.ones(count, dtype=torch.bool) if valid is None else valid,
    )


def noise(count: int, *, seed: int = 1) -> Tensor:
    """Random bytes as images [count, 3, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, *VIT.image), generator=generator).byte()


def digits(count: int, size: int = 16) -> Tensor:
    """Handwritten digits as images [count, 3, size, size]."""
    ink = (
        torch.from_numpy(load_digit_scans()[0][:count]).repeat_interleave(size // 8, 1).repeat_interleave(size // 8, 2)
    )
    return ink[:, None].expand(-1, 3, -1, -1).contiguous()


def place(patch: int) -> tuple[slice, slice]:
    """Where a patch of the small network lies in the image."""
    row, column = divmod(patch, VIT.grid[1])
    (tall, wide) = VIT.patch
    return slice(row * tall, (row + 1) * tall), slice(column * wide, (column + 1) * wide)


def slow_classes(patch: Tensor, side: int) -> list[int]:
    """Of one patch [P, P, 3] by adaptive average pooling in float64; on random bytes no mean is on an edge."""
    small = F.adaptive_avg_pool2d(patch.permute(2, 0, 1).double() / 255, side)
    found = list[int]()
    for y in range(side):
        for x in range(side):
            red, green, blue = (min(7, math.floor(8 * float(small[channel, y, x]))) for channel in range(3))
            found.append(64 * red + 8 * green + blue)
    return found

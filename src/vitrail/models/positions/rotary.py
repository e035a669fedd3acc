"""Rotary positions: the angles by which queries and keys are rotated (`Rotary` in vit_parts.py lists the kinds).

Angles are computed in each pass from the current grid, in float32 or finer, so that one formula serves images of any
size and no file has to store them. Tokens before the patches are not rotated.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary


class RotaryPositions(nn.Module):
    """Cosines and sines for all tokens; learned frequencies give one set per layer."""

    def __init__(self, config: ViTConfig, rotary: Rotary):
        super().__init__()
        self.rotary = rotary
        self.prefix = config.prefix
        self.head_size = config.head_size
        shape = (config.depth, 2, config.heads, config.head_size // 2)
        self.frequencies = nn.Parameter(torch.empty(shape)) if rotary.mixed else None

    def initialise(self) -> None:
        """Initialises learned frequencies as two axes at right angles, rotated at random for each layer and head."""
        if self.frequencies is None:
            return
        depth, _, heads, _ = self.frequencies.shape
        size = frequencies(self.head_size, self.rotary.base, self.frequencies)
        angle = 2 * math.pi * torch.rand(depth, heads, 1, device=size.device, dtype=size.dtype)
        both = torch.cat([angle, angle + math.pi / 2], dim=-1)[..., None]
        axes = torch.stack([both.cos(), both.sin()], dim=1)  # [depth, 2, heads, 2, 1]
        self.frequencies.copy_((axes * size).flatten(-2))

    def forward(self, grid: Pair, like: Tensor, keep: Tensor | None = None) -> Tensor:
        """Computes cosines and sines [2, T, D_h], or [depth, 2, heads, T, D_h] with learned frequencies. With `keep`
        [B, M], the patches in use, they also depend on the image: [2, B, 1, T, D_h] or
        [depth, 2, B, heads, T, D_h]."""
        places = self.coordinates(grid, like.device)  # [N, 2]
        if self.frequencies is None:
            turn = 2 * math.pi if self.rotary.coordinates == "unit" else 1.0
            angles = (turn * places[:, :, None] * frequencies(self.head_size, self.rotary.base, places)).flatten(1)
        else:
            exact = torch.promote_types(self.frequencies.dtype, places.dtype)
            angles = torch.einsum("na,lahf->lhnf", places.to(exact), self.frequencies.to(exact))
        if keep is not None:
            angles = angles[..., None, :, :] if self.frequencies is None else angles[:, None]
            index = keep[:, None, :, None].expand(-1, -1, -1, angles.shape[-1])
            index = index.expand(*angles.shape[:-4], -1, angles.shape[-3], -1, -1)
            angles = angles.expand(*angles.shape[:-4], keep.shape[0], *angles.shape[-3:]).gather(-2, index)
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        both = torch.stack([angles.cos(), angles.sin()], dim=0 if self.frequencies is None else 1)
        if self.rotary.layout == "pairs":
            return both.repeat_interleave(2, dim=-1)
        return torch.cat([both, both], dim=-1)

    def coordinates(self, grid: Pair, device: torch.device) -> Tensor:
        """Computes the coordinates of the patches, in the order of the axes: [N, 2]."""
        r = self.rotary
        axes = [torch.arange(length, device=device, dtype=torch.float32) for length in grid]
        if r.coordinates == "unit":
            y, x = (2 * (axis + 0.5) / (axis[-1:] + 1) - 1 for axis in axes)
        else:
            y, x = (axis + r.offset for axis in axes)
            if r.reference is not None:
                y, x = (p / (axis[-1:] + 1) * own for p, axis, own in zip((y, x), axes, r.reference, strict=True))
        down, across = y[:, None].expand(-1, x.shape[0]), x[None].expand(y.shape[0], -1)
        places = torch.stack([down, across] if r.order == "yx" else [across, down], dim=-1).flatten(0, 1)
        return self._vary(places) if self.training else places

    def _vary(self, places: Tensor) -> Tensor:
        """Shifts and stretches coordinates at random, the same for all images of a batch."""
        r = self.rotary
        if r.shift:
            places = places + places.new_empty(2).uniform_(-r.shift, r.shift)
        for factor, axes in ((r.jitter, 2), (r.rescale, 1)):
            if factor:
                limit = math.log(factor)
                places = places * places.new_empty(axes).uniform_(-limit, limit).exp()
        return places


def frequencies(head_size: int, base: float, like: Tensor) -> Tensor:
    """Computes base^(-4i/D_h): [D_h/4]."""
    steps = torch.arange(head_size // 4, device=like.device, dtype=torch.float32)
    return base ** (-4 * steps / head_size)

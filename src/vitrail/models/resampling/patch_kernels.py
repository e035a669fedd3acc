"""Kernels of the first layer for another patch size (FlexiViT) or another number of channels.

**Patch size.** A kernel w gives <x, w> on a patch x. Let the matrix B be the resize of patches to the new size. The new
kernel is the one whose products with resized patches are closest to the old ones, in the mean over all patches:

    w' = argmin_v E (<x, w> - <B x, v>)^2 = (B^T)^+ w        (Beyer et al., FlexiViT, Section 3.4)

If patches grow, nothing is lost, and the products are the same. If they shrink, the fine detail of the kernel is lost,
so every resize starts from the stored kernel, never from a resized one. B is bilinear, antialiased when it shrinks, and
separable, so its pseudo-inverse is, too.

**Channels.** A single channel takes the sum over the old ones, so that a grey image gives the same result as three
equal channels. Any other number takes the old channels in turn, times old / new, so that their sum stays about as
large. Standardised kernels (BiT, hybrids) lose that scale again, so the first layer has to be trained.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.core.text import Pair
from vitrail.models.resampling.interpolation import interpolation_matrix


def resize_kernel(kernel: Tensor, patch: Pair) -> Tensor:
    """Resizes kernels to another patch: [..., P, P] -> [..., p, p], computed in float64 and returned in their type."""
    old: Pair = (kernel.shape[-2], kernel.shape[-1])
    return kernel if old == tuple(patch) else PatchResize.between(old, patch, like=kernel.double()).apply(kernel)


class PatchResize(NamedTuple):
    """Resizes kernels to one patch size by matrices [p, P] for each axis, in their type and on their device."""

    patch: Pair
    rows: Tensor
    columns: Tensor

    @classmethod
    def between(cls, old: Pair, new: Pair, *, like: Tensor) -> "PatchResize":
        """Builds the resize with matrices in the type and on the device of the tensor `like`."""
        made = [kernel_matrix(*sides).to(like.device, like.dtype) for sides in zip(old, new, strict=True)]
        return cls((new[0], new[1]), *made)

    def apply(self, kernel: Tensor) -> Tensor:
        """[..., P, P] -> [..., p, p], with gradients; the result has the kernel's own type."""
        with torch.autocast(kernel.device.type, enabled=False):  # the matrices have large entries of both signs
            return (self.rows @ kernel.to(self.rows.dtype) @ self.columns.mT).to(kernel.dtype)


@lru_cache(maxsize=64)
def kernel_matrix(old: int, new: int) -> Tensor:
    """Computes (B^T)^+ along one axis: float64 [new, old]."""
    resize = interpolation_matrix(old, new, torch.empty((), dtype=torch.float64), "bilinear-antialias")
    return torch.linalg.pinv(resize).mT.contiguous()


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Adapts kernels to another number of channels: [D, C, P, P] -> [D, c, P, P]."""
    old = kernel.shape[1]
    if channels == old:
        return kernel
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    return kernel[:, torch.arange(channels, device=kernel.device) % old] * (old / channels)

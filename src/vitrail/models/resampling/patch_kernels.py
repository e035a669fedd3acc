"""Kernels of the first layer for another patch size (FlexiViT) or another number of channels.

**Patch size.** A kernel w of a patch x gives <x, w>. Let B be the resize of patches to the new size, a matrix; the new
kernel is the one whose products with resized patches come closest to the old ones, in the mean over all patches:

    w' = argmin_v E (<x, w> - <B x, v>)^2 = (B^T)^+ w        (Beyer et al., FlexiViT, Section 3.4)

Where patches grow nothing is lost, and the products are the same. Where they shrink the fine parts of the kernel are,
so every resize starts from the stored kernel, never from a resized one. B is bilinear, antialiased where it shrinks,
and works on each axis by itself, so its pseudo-inverse does, too.

**Channels.** One channel takes the sum over the old ones, so that a grey image gives what three equal channels gave.
Any other number takes the old channels in turn, times old / new, so that the sum over all of them is about as large.
Where kernels are standardised (BiT, hybrids) that scale is lost again, and the first layer has to be trained.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.core.text import Pair
from vitrail.models.resampling.interpolation import interpolation_matrix


def resize_kernel(kernel: Tensor, patch: Pair) -> Tensor:
    """Kernels for another patch: [..., P, P] -> [..., p, p], in float64 and back in their own type."""
    old: Pair = (kernel.shape[-2], kernel.shape[-1])
    return kernel if old == tuple(patch) else PatchResize.between(old, patch, like=kernel.double()).apply(kernel)


class PatchResize(NamedTuple):
    """The resize of kernels to one patch size, in the type and on the device of its matrices: [p, P] for each axis."""

    patch: Pair
    rows: Tensor
    columns: Tensor

    @classmethod
    def between(cls, old: Pair, new: Pair, *, like: Tensor) -> "PatchResize":
        """The matrices in the type and on the device of a tensor."""
        made = [kernel_matrix(*sides).to(like.device, like.dtype) for sides in zip(old, new, strict=True)]
        return cls((new[0], new[1]), *made)

    def apply(self, kernel: Tensor) -> Tensor:
        """[..., P, P] -> [..., p, p], with gradients; the result has the kernel's own type."""
        with torch.autocast(kernel.device.type, enabled=False):  # the matrices have large entries of both signs
            return (self.rows @ kernel.to(self.rows.dtype) @ self.columns.mT).to(kernel.dtype)


@lru_cache(maxsize=64)
def kernel_matrix(old: int, new: int) -> Tensor:
    """(B^T)^+ along one axis: float64 [new, old]."""
    resize = interpolation_matrix(old, new, torch.empty((), dtype=torch.float64), "bilinear-antialias")
    return torch.linalg.pinv(resize).mT.contiguous()


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Kernels for another number of channels: [D, C, P, P] -> [D, c, P, P]."""
    old = kernel.shape[1]
    if channels == old:
        return kernel
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    return kernel[:, torch.arange(channels, device=kernel.device) % old] * (old / channels)

"""`tf.image.resize` as Google's pipelines call it, in its own arithmetic: half-pixel centres, without antialiasing.

`bilinear` looks at the two nearest pixels along each axis, however many become one (vit_jax, BiT, big_vision's crops);
`area` is the mean over what becomes one pixel (big_vision's `resize_small`).
"""

from typing import TYPE_CHECKING

from vitrail.core.shapes import Pair

if TYPE_CHECKING:
    from torch import Tensor


def bilinear(pixels: "Tensor", size: Pair) -> "Tensor":
    """uint8 [C, H, W] to levels, float32 [C, h, w]: left + (right - left) · share, first across and then down."""
    import torch

    def between(old: int, new: int) -> "tuple[Tensor, Tensor, Tensor]":
        at = (torch.arange(new) + 0.5) * (old / new) - 0.5
        low = at.floor()
        return low.clamp(min=0).long(), at.ceil().clamp(max=old - 1).long(), at - low

    left, right, across = between(pixels.shape[2], size[1])
    upper, lower, down = between(pixels.shape[1], size[0])

    def row(which: "Tensor") -> "Tensor":
        some = pixels[:, which]
        first = some[:, :, left].float()
        return first + (some[:, :, right].float() - first) * across

    top = row(upper)
    return top + (row(lower) - top) * down[:, None]


def area(pixels: "Tensor", size: Pair) -> "Tensor":
    """uint8 [C, H, W] to levels, float64 [C, h, w]: each the mean of a rectangle, its fractions of pixels included."""
    import torch

    def shares(old: int, new: int) -> "Tensor":
        edges = torch.arange(new + 1, dtype=torch.float64) * (old / new)
        ruler = torch.arange(old, dtype=torch.float64)
        covered = torch.minimum(edges[1:, None], ruler + 1) - torch.maximum(edges[:-1, None], ruler)
        return covered.clamp_(min=0) / (old / new)

    down, across = shares(pixels.shape[1], size[0]), shares(pixels.shape[2], size[1])
    return down @ (pixels.double() @ across.T)


def truncated(levels: "Tensor") -> "Tensor":
    """Levels to bytes as `tf.cast` does it: what is behind the point is cut off, but for what rounding left there."""
    return (levels + 1e-5).clamp(0, 255).byte()

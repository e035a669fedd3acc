"""The residual stream as layers pass it on when kernels add to it and normalise it: in inference, with gradients, and
between fp8 products.

A layer takes a stream, asks it for the norm, and adds the output of each branch to it.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.models.kernels import float8_layers
from vitrail.models.kernels.float8_layers import Float8
from vitrail.models.kernels.fused_ops import add_product, fused_add_norm, shifted_norm
from vitrail.models.layers import LayerScale


class Stream(NamedTuple):
    """The residual stream in inference, held as z + shift: the product at the end of each branch adds to z in place,
    and the biases of those products accumulate in the shift [D]."""

    z: Tensor  # [B, T, D]
    shift: Tensor | None = None  # in float32, or in the type of z if that is more precise

    def normalise(self, norm: nn.Module) -> "tuple[Stream, Tensor]":
        """The stream and its norm."""
        assert isinstance(norm, nn.LayerNorm)
        return self, shifted_norm(self.z, self.shift, norm.weight, norm.bias, norm.eps)

    def add(self, inner: Tensor | Float8, last: nn.Linear, scale: nn.Module) -> "Stream":
        """Adds a branch: the product of `inner` with the branch's `last` layer, times a factor per channel."""
        assert isinstance(inner, Tensor)
        weight, bias = _scaled(last, scale)
        add_product(self.z.view(-1, self.z.shape[-1]), inner.reshape(-1, inner.shape[-1]), weight)
        if bias is None:
            return self
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        return Stream(self.z, bias if self.shift is None else self.shift + bias)

    def take(self) -> Tensor:
        return self.z if self.shift is None else (self.z + self.shift).to(self.z.dtype)


class TrainedStream(NamedTuple):
    """The residual stream with gradients, held as z + branch + bias: one kernel sums the three and normalises the sum,
    and one kernel in the backward pass computes all of their gradients."""

    z: Tensor  # [B, T, D]
    branch: Tensor | None = None
    bias: Tensor | None = None

    def normalise(self, norm: nn.Module) -> "tuple[TrainedStream, Tensor]":
        if self.branch is None:
            return self, norm(self.z)
        assert isinstance(norm, nn.LayerNorm)
        total, normed = fused_add_norm(self.z, self.branch, self.bias, norm)
        return TrainedStream(total), normed

    def add(self, inner: Tensor | Float8, last: nn.Linear, scale: nn.Module) -> "TrainedStream":
        assert isinstance(inner, Tensor)
        assert isinstance(scale, nn.Identity)
        return TrainedStream(self.z, F.linear(inner, last.weight), last.bias)

    def take(self) -> Tensor:
        branch = self.branch if self.branch is None or self.bias is None else self.branch + self.bias
        return self.z if branch is None else self.z + branch


class Float8Stream(NamedTuple):
    """The residual stream between fp8 products, with or without gradients, held as z + branch + bias: the kernel that
    sums and normalises it also quantises the norm."""

    z: Tensor  # [B, T, D]
    branch: Tensor | None = None
    bias: Tensor | None = None

    def normalise(self, norm: nn.Module) -> "tuple[Float8Stream, Float8]":
        assert isinstance(norm, nn.LayerNorm)
        if self.branch is None:
            return self, float8_layers.round_norm(norm(self.z), norm)
        total, normed = float8_layers.add_norm(self.z, self.branch, self.bias, norm)
        return Float8Stream(total), normed

    def add(self, inner: Tensor | Float8, last: nn.Linear, scale: nn.Module) -> "Float8Stream":
        assert isinstance(inner, Float8)
        weight, bias = _scaled(last, scale)
        return Float8Stream(self.z, float8_layers.linear(inner, weight), bias)

    def take(self) -> Tensor:
        return TrainedStream(*self).take()


def _scaled(layer: nn.Linear, scale: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer, with the factor per channel that scales its output multiplied in."""
    weight, bias = layer.weight, layer.bias
    if isinstance(scale, LayerScale):
        weight, bias = weight * scale.gamma[:, None], None if bias is None else bias * scale.gamma
    return weight, bias


AnyStream: TypeAlias = Stream | TrainedStream | Float8Stream

"""Intermediates of a forward pass, for callers that ask for them; a pass that nobody taps pays nothing.

A fused kernel never holds the attention weights. Where they are asked for they are computed next to it; `explicit`
puts them in its place, so that gradients reach them. Memory is the caller's to bound: `ViT.forward_blocks` runs any
range of layers, so one layer's weights [B, k, T, T] are all that has to be held at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from vitrail.core.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTap:
    """Inside one attention: q, k, v [S, k, t, D_h] and the weights [S, k, t, t] of S sequences whose tokens see each
    other. Those are the images, or each row or column of them (D.6)."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerTap:
    """One layer at work. `before` is what its first norm reads, positions included; `after` is what it hands on. An
    axial block is two layers."""

    layer: int
    before: Tensor  # [B, T, D]
    after: Tensor  # [B, T, D]
    inside: AttentionTap | None
    spread: Callable[[Tensor], Tensor]  # weights over sequences to weights over all tokens of an image

    @property
    def attention(self) -> Tensor:
        """A of all heads over all tokens (Eq. 6), zero between two that do not see each other: [B, k, T, T]."""
        return self.spread(self.weights)

    @property
    def weights(self) -> Tensor:
        """A as it was computed, with its gradient: [S, k, t, t]."""
        if self.inside is None:
            raise ValueError("the pass was not asked for attention")
        return self.inside.weights


@dataclass(slots=True, eq=False)
class Taps:
    """What a pass is asked for, and what it found: a LayerTap for each layer that ran, in order."""

    attention: bool = False
    explicit: bool = False  # the output is computed from the weights, not by the fused kernel
    first: int = 0  # the number of the first layer that runs
    layers: list[LayerTap] = field(default_factory=list)  # torch.compile cannot trace list[LayerTap]
    _inside: AttentionTap | None = None

    def take_attention(self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> None:
        self._inside = AttentionTap(q, k, v, weights)

    def take_layer(self, before: Tensor, after: Tensor, spread: Callable[[Tensor], Tensor]) -> None:
        self.layers.append(LayerTap(self.first + len(self.layers), before, after, self._inside, spread))
        self._inside = None


@dataclass(frozen=True, slots=True, eq=False)
class Intermediates:
    """What `forward_intermediates` found after each of the layers it was asked for, in the order they were given."""

    layers: tuple[int, ...]
    tokens: tuple[Tensor, ...]  # [B, T, D]; without the prefix tokens [B, N, D]
    maps: tuple[Tensor, ...]  # the patch tokens on their grid, [B, D, rows, columns]
    attention: tuple[Tensor, ...] = ()  # [B, k, T, T] where it was asked for
    qkv: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()  # [B, k, T, D_h] thrice where they were asked for


def layer_numbers(layers: int | list[int] | tuple[int, ...] | None, depth: int) -> tuple[int, ...]:
    """The layers that are meant, counted from 0: all, the last so many, or those in a list, whose negative numbers
    count from the end."""
    if layers is None:
        return tuple(range(depth))
    if isinstance(layers, int):
        wanted = range(depth - layers, depth) if 1 <= layers <= depth else None
    else:
        wanted = [layer + depth if layer < 0 else layer for layer in layers]
    if wanted is None or not all(0 <= layer < depth for layer in wanted):
        raise ConfigError(f"layers={layers!r}: this network has {depth}, counted from 0")
    return tuple(wanted)

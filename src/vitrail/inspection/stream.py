"""The layers of a network one after the other, each with its attention weights, while the model stays as it is.

A fused kernel never holds the weights A. They are computed again from what the block was given, a layer at a time, and
go before the next layer comes: [B, k, T, T] once, whatever the depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.inspection.tokens import placed, transformer
from vitrail.models import attention
from vitrail.models.resting import resting
from vitrail.models.vit import AxialBlock, Block, ColumnBlock, RowBlock, ViT


@dataclass(frozen=True, slots=True)
class View:
    """One layer at work. `before` is what its first norm reads, positions included; `after` is what it hands on."""

    layer: int
    attention: Tensor  # [B, k, T, T]
    before: Tensor  # [B, T, D]
    after: Tensor  # [B, T, D]


@dataclass(frozen=True, slots=True)
class Layer:
    """A block, what enters in front of it and what its attention is given. An axial block is two layers (D.6)."""

    block: Block
    offsets: Tensor | None
    entry: int | None  # the layer whose positions are added in front; none before a second half

    def enter(self, z: Tensor, model: ViT) -> Tensor:
        return z if self.entry is None else model.position(z, self.entry)


def layers(model: ViT) -> list[Layer]:
    found: list[Layer] = []
    for index, block in enumerate(model.blocks):
        offsets = model.position.offsets(index)
        if isinstance(block, AxialBlock):
            found += [Layer(block.row, offsets, index), Layer(block.column, offsets, None)]
        else:
            assert isinstance(block, Block)
            found.append(Layer(block, offsets, index))
    return found


def stream(model: nn.Module, images: Tensor) -> Iterator[View]:
    """Layer by layer, [B, C, H, W] prepared. Of a hybrid the layers behind its backbone; of an axial network two for
    each block, with zeros between tokens that do not see each other.

    A loop's variable lives until the next layer is there: `del view` at the end of its body makes room before that.
    """
    network = transformer(model)
    with resting(network), torch.no_grad():
        z = network.tokens(placed(images, network))
    for index, layer in enumerate(layers(network)):
        # The mode of a generator's caller is not the generator's to change: it holds for the work alone, not between.
        with resting(network), torch.no_grad():
            z = layer.enter(z, network)
            view = View(index, weights(layer, z), z, layer.block(z, layer.offsets))
            z = view.after
        yield view
        del view


def states(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """The tokens alone, z_0 (positions included), z_1, ..., z_L: [B, C, H, W] prepared -> [B, T, D] each."""
    network = transformer(model)
    with resting(network), torch.no_grad():
        z = network.position(network.tokens(placed(images, network)), 0)
    yield z
    for index, layer in enumerate(layers(network)):
        with resting(network), torch.no_grad():
            z = layer.block(layer.enter(z, network) if index else z, layer.offsets)
        yield z


def weights(layer: Layer, z: Tensor) -> Tensor:
    """A of all heads over all tokens, from the block's input: [B, T, D] -> [B, k, T, T]."""
    block = layer.block
    return over_all(block, block.attention.weights(apart(block, block.norm_attention(z)), layer.offsets))


def rebuilt(layer: Layer, z: Tensor) -> tuple[Tensor, Tensor]:
    """The block with its weights written out (Eqs. 2, 3, 5-8): the weights of each of its sequences, and its output.

    What the block computes without holding them, for whoever needs their gradients.
    """
    block = layer.block
    mixing, inner = block.attention, apart(block, block.norm_attention(z))
    q, k, v = mixing.project(inner)
    bias = None if layer.offsets is None else attention.relative_logits(q, layer.offsets)
    seen = attention.attention_weights(q, k, bias)
    z = z + together(block, mixing.out((seen @ v).transpose(1, 2).flatten(2)))
    return seen, z + block.mlp(block.norm_mlp(z))


def apart(block: Block, z: Tensor) -> Tensor:
    """The sequences that see each other: all tokens, or each row or column of the grid by itself."""
    if isinstance(block, ColumnBlock):
        return attention.columns(z, block.grid)
    return attention.rows(z, block.grid) if isinstance(block, RowBlock) else z


def together(block: Block, z: Tensor) -> Tensor:
    if isinstance(block, ColumnBlock):
        return attention.from_columns(z, block.grid)
    return attention.from_rows(z, block.grid) if isinstance(block, RowBlock) else z


def over_all(block: Block, seen: Tensor) -> Tensor:
    """What the sequences see, [.., X, S, S], as of all tokens [B, X, T, T]: zero between two that do not meet."""
    if not isinstance(block, RowBlock):
        return seen
    rows, columns = block.grid
    along = isinstance(block, ColumnBlock)
    count = columns if along else rows
    own = seen.unflatten(0, (-1, count)).movedim(1, 2)  # [B, X, sequence, S, S]
    whole = seen.new_zeros(*own.shape[:2], rows, columns, rows, columns)
    each = torch.arange(count, device=seen.device)
    if along:
        whole[:, :, :, each, :, each] = own.movedim(2, 0)
    else:
        whole[:, :, each, :, each, :] = own.movedim(2, 0)
    return whole.flatten(4, 5).flatten(2, 3)

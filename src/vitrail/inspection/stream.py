"""The layers of a network one after the other, each with its attention weights, while the model stays as it is.

A fused kernel never holds the weights A. They are computed next to it, a layer at a time, and go before the next layer
comes: [B, k, T, T] once, whatever the depth.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitrail.inspection.tokens import fitted, transformer
from vitrail.models.resting import resting
from vitrail.models.taps import LayerTap, Taps


def stream(model: nn.Module, images: Tensor) -> Iterator[LayerTap]:
    """Layer by layer, [B, C, H, W] prepared. Of a hybrid the layers behind its backbone; of an axial network two for
    each block, with zeros between tokens that do not see each other.

    A loop's variable lives until the next layer is there: `del view` at the end of its body makes room before that.
    """
    return _layers(model, images, attention=True)


def states(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """The tokens alone, z_0 (positions included), z_1, ..., z_L: [B, C, H, W] prepared -> [B, T, D] each."""
    for index, view in enumerate(_layers(model, images, attention=False)):
        if not index:
            yield view.before
        after = view.after
        del view
        yield after


def _layers(model: nn.Module, images: Tensor, *, attention: bool) -> Iterator[LayerTap]:
    network = transformer(model)
    # The mode of a generator's caller is not the generator's to change: it holds for the work alone, not between.
    with resting(network), torch.no_grad():
        z = network.embed(fitted(images, network))
    done = 0
    for block in range(len(network.blocks)):
        taps = Taps(attention=attention, first=done)
        with resting(network), torch.no_grad():
            z = network.forward_blocks(z, first=block, last=block + 1, taps=taps)
        found, taps = taps.layers, None
        done += len(found)
        while found:
            yield found.pop(0)

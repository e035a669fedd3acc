"""The layers of a network one after the other, each with its attention weights, while the model stays as it is.

A fused kernel never holds the weights A. They are computed next to it, a layer at a time, and go before the next layer
comes: [B, k, T, T] once, whatever the depth.

Where the tokens of a network lie on its image, and what every function here takes for granted of both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair, format_size
from vitrail.models.backbone import LayerTap, Taps, resting
from vitrail.models.vit import ViT


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """T = prefix + rows · columns: class token and registers first, then the patches in raster order."""

    prefix: int
    grid: Pair
    class_token: bool
    patch: Pair  # in pixels of the input; of a hybrid, how far its patches lie apart

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


def has_attention(model: nn.Module) -> TypeGuard[ViT]:
    """Whether a network has tokens, and attention between them, to look at."""
    return isinstance(model, ViT)


def require_transformer(model: nn.Module) -> ViT:
    """The network, if it has tokens to look at."""
    if has_attention(model):
        return model
    raise ConfigError(
        f"a {type(model).__name__} has no tokens and no attention between them; take a ViT or a hybrid "
        "(for a ResNet there is grad_cam)"
    )


def get_token_layout(model: nn.Module) -> TokenLayout:
    config = require_transformer(model).config
    return TokenLayout(config.prefix, config.grid, config.class_token, config.patch_pixels)


def to_grid(z: Tensor, tokens: TokenLayout, dim: int = -1) -> Tensor:
    """The tokens that are patches, along one axis, on their grid: [..., T, ...] -> [..., rows, columns, ...]."""
    return z.narrow(dim, tokens.prefix, tokens.patches).unflatten(dim, tokens.grid)


def has_token_readout(model: nn.Module) -> bool:
    """Whether the head reads the class token; else it reads all patches."""
    config = require_transformer(model).config
    return config.pool == "token" and not config.has_patch_head


def select_output(z: Tensor, model: nn.Module) -> Tensor:
    """What the head reads of all tokens' rows, [..., T, X] -> [..., X]: the class token's, or the mean over the patches
    where it reads all of them."""
    return (
        z[..., 0, :] if has_token_readout(model) else z[..., require_transformer(model).config.prefix :, :].mean(dim=-2)
    )


def move_to_model(images: Tensor, model: nn.Module) -> Tensor:
    """Prepared images, on the model's device and in its type."""
    if not images.is_floating_point() or images.ndim != 4:
        raise ConfigError(
            f"images are {images.dtype} {list(images.shape)}; prepared floats [B, C, H, W] are wanted: "
            "`preprocessing.normalise(pixels)` makes them of bytes"
        )
    like = next(model.parameters())
    return images.to(like.device, like.dtype)


def check_images(images: Tensor, network: ViT) -> Tensor:
    """The same, of the network's own size: what is read off them lies on its grid."""
    images = move_to_model(images, network)
    if tuple(images.shape[1:]) != (network.config.channels, *network.config.image):
        raise ImageSizeError(
            f"images of {tuple(images.shape)} do not fit a network for [B, {network.config.channels}, "
            f"{format_size(network.config.image).replace('x', ', ')}]; load it with image_size=... to resize "
            "its positions"
        )
    return images


def to_float32(z: Tensor) -> Tensor:
    """In float32 at least: products over many layers want more than half precision."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def mean_logits(outputs: Tensor) -> Tensor:
    """One logit for each class and image [B, K]: of a head that answers for places [B, K, ...], the mean over them."""
    return outputs if outputs.ndim == 2 else outputs.flatten(2).mean(-1)


def choose_classes(logits: Tensor, classes: Tensor | None) -> Tensor:
    """The class to explain for each image [B]: the given one, or the one that the network says."""
    count = logits.shape[-1]
    if classes is None:
        return logits.argmax(dim=-1)
    if classes.shape != logits.shape[:1] or classes.is_floating_point():
        raise ConfigError(
            f"classes are {classes.dtype} {list(classes.shape)}; one whole number for each of the "
            f"{logits.shape[0]} images is wanted"
        )
    if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < count:
        raise ConfigError(
            f"classes from {int(classes.min())} to {int(classes.max())}: this network knows 0 to {count - 1}"
        )
    return classes.to(logits.device, torch.int64)


def check_maps(maps: Tensor, images: Tensor) -> None:
    """One map for each image, no finer than its pixels."""
    fits = maps.ndim == 3 and maps.shape[0] == images.shape[0]
    if not fits or maps.shape[1] > images.shape[2] or maps.shape[2] > images.shape[3]:
        raise ConfigError(
            f"maps of {list(maps.shape)} do not fit {images.shape[0]} images of "
            f"{format_size((images.shape[2], images.shape[3]))}; [B, rows, columns] is wanted"
        )


def iterate_layers(model: nn.Module, images: Tensor) -> Iterator[LayerTap]:
    """Layer by layer, [B, C, H, W] prepared. Of a hybrid the layers behind its backbone; of an axial network two for
    each block, with zeros between tokens that do not see each other.

    A loop's variable lives until the next layer is there: `del view` at the end of its body makes room before that.
    """
    return _layers(model, images, attention=True)


def iterate_states(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """The tokens alone, z_0 (positions included), z_1, ..., z_L: [B, C, H, W] prepared -> [B, T, D] each."""
    for index, view in enumerate(_layers(model, images, attention=False)):
        if not index:
            yield view.before
        after = view.after
        del view
        yield after


def _layers(model: nn.Module, images: Tensor, *, attention: bool) -> Iterator[LayerTap]:
    network = require_transformer(model)
    # The mode of a generator's caller is not the generator's to change: it holds for the work alone, not between.
    with resting(network), torch.no_grad():
        z = network.embed(check_images(images, network))
    done = 0
    for block in range(len(network.blocks)):
        taps = Taps(attention=attention, first=done)
        with resting(network), torch.no_grad():
            z = network.forward_blocks(z, first=block, last=block + 1, taps=taps)
        found, taps = taps.layers, None
        done += len(found)
        while found:
            yield found.pop(0)

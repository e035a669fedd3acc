"""Iterates over the layers of a network with their attention weights, and maps tokens to the image.

A fused kernel never stores the attention weights A. They are computed in addition, one layer at a time, and released
before the next layer runs, so memory holds [B, k, T, T] once, whatever the depth. The model itself is not changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair
from vitrail.models.backbone import LayerTap, Taps, eval_mode
from vitrail.models.vit import ViT


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """T = prefix + rows · columns: class tokens and registers first, then the patches in raster order."""

    prefix: int
    grid: Pair
    class_tokens: int
    patch: Pair  # in pixels of the input; for a hybrid, the distance between patches
    distilled: bool = False  # whether the first register is a distillation token, which the head reads, too

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


def has_attention(model: nn.Module) -> TypeGuard[ViT]:
    """Whether a network has tokens with attention between them."""
    return isinstance(model, ViT)


def require_transformer(model: nn.Module) -> ViT:
    """The network itself; ConfigError if it has no tokens."""
    if has_attention(model):
        return model
    why = f"{type(model).__name__} has no tokens and no attention between them"
    raise ConfigError(f"{why}; use a ViT or a hybrid (for a ResNet there is grad_cam)")


def get_token_layout(model: nn.Module) -> TokenLayout:
    config = require_transformer(model).config
    count, distilled = config.class_tokens * config.class_token, config.head == "distilled"
    return TokenLayout(config.prefix, config.grid, count, config.patch_pixels, distilled)


def to_grid(z: Tensor, tokens: TokenLayout, dim: int = -1) -> Tensor:
    """The patch tokens along one axis on their grid: [..., T, ...] -> [..., rows, columns, ...]."""
    return z.narrow(dim, tokens.prefix, tokens.patches).unflatten(dim, tokens.grid)


def has_token_readout(model: nn.Module) -> bool:
    """Whether the head reads the class token, perhaps next to the mean of the patches; otherwise it reads all
    patches."""
    config = require_transformer(model).config
    return "token" in config.pool and not config.has_patch_head


def select_output(z: Tensor, model: nn.Module) -> Tensor:
    """The row that stands for the output, [..., T, X] -> [..., X]: the class token's, the mean of several, or the mean
    over the patches."""
    tokens = get_token_layout(model)
    if has_token_readout(model):
        first = tokens.class_tokens + tokens.distilled
        return z[..., 0, :] if first == 1 else z[..., :first, :].mean(dim=-2)
    return z[..., tokens.prefix :, :].mean(dim=-2)


def read_output(rows: Tensor, last: Tensor, model: nn.Module) -> Tensor:
    """Like `select_output`, for rows of all tokens of each image [B, T, X] -> [B, X]. Attention pooling mixes them by
    its weights on the tokens z [B, T, D]."""
    network = require_transformer(model)
    if network.map_pool is None or network.config.has_patch_head:
        return select_output(rows, model)
    with torch.no_grad():
        share = network.map_pool.weights(network.norm(last)).mean(dim=1, keepdim=True)
    return (share.to(rows.dtype) @ rows)[:, 0]


def move_to_model(images: Tensor, model: nn.Module) -> Tensor:
    """Prepared images on the model's device and in its dtype."""
    if not images.is_floating_point() or images.ndim != 4:
        found = f"images are {images.dtype} {list(images.shape)}, not prepared floats [B, C, H, W]"
        raise ConfigError(f"{found}; convert bytes with `preprocessing.normalise(pixels)`")
    like = next(model.parameters())
    return images.to(like.device, like.dtype)


def check_images(images: Tensor, network: ViT) -> Tensor:
    """The images on the model's device; ImageSizeError unless they have the network's own size, which the grid of its
    tokens refers to."""
    images, config = move_to_model(images, network), network.config
    if tuple(images.shape[1:]) != (own := (config.channels, *config.image)):
        found = f"images of {tuple(images.shape)} do not fit a network for {own}"
        raise ImageSizeError(f"{found}; load it with image_size=... to resize its positions")
    return images


def to_float32(z: Tensor) -> Tensor:
    """At least float32: products over many layers need more than half precision."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def mean_logits(outputs: Tensor) -> Tensor:
    """One logit per class and image [B, K]: for a head with outputs per place [B, K, ...], the mean over the places."""
    return outputs if outputs.ndim == 2 else outputs.flatten(2).mean(-1)


def choose_classes(logits: Tensor, classes: Tensor | None) -> Tensor:
    """The class to explain for each image [B]: the given one, or the predicted one."""
    batch, count = logits.shape
    if classes is None:
        return logits.argmax(dim=-1)
    if classes.shape != (batch,) or classes.is_floating_point():
        raise ConfigError(f"classes are {classes.dtype} {list(classes.shape)}; give one integer per image [{batch}]")
    low, high = (int(end) for end in classes.aminmax()) if classes.numel() else (0, 0)
    if not 0 <= low <= high < count:
        raise ConfigError(f"classes from {low} to {high} are out of range; the network has 0 to {count - 1}")
    return classes.to(logits.device, torch.int64)


def iterate_layers(model: nn.Module, images: Tensor) -> Iterator[LayerTap]:
    """Yields every layer in turn, for prepared images [B, C, H, W]. For a hybrid these are the layers after its
    backbone; an axial network has two per block, with zeros between tokens that do not see each other.

    A loop variable lives until the next layer is computed: `del layer` at the end of the body frees its memory earlier.
    """
    return _run_layers(model, images, attention=True)


def iterate_states(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """Yields only the tokens, z_0 (with positions), z_1, ..., z_L: [B, C, H, W] prepared -> [B, T, D] each."""
    for index, layer in enumerate(_run_layers(model, images, attention=False)):
        if not index:
            yield layer.before
        after = layer.after
        del layer
        yield after


def _run_layers(model: nn.Module, images: Tensor, *, attention: bool) -> Iterator[LayerTap]:
    network = require_transformer(model)
    # A generator must not change its caller's mode, so the mode holds during the work only, not between layers.
    with eval_mode(network), torch.no_grad():
        z = network.embed(check_images(images, network))
    done = 0
    for block in range(len(network.blocks)):
        taps = Taps(attention=attention, first=done)
        with eval_mode(network), torch.no_grad():
            z = network.forward_blocks(z, first=block, last=block + 1, taps=taps)
        layers, taps = taps.layers, None
        done += len(layers)
        while layers:
            yield layers.pop(0)

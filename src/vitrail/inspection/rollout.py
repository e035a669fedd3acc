"""Attention rollout (Figure 6, D.8): how much of each patch reaches the output, through all layers.

Each layer's weights are averaged over the heads, the identity is added for the residual, rows are divided by their sum
(so half of what a token is stays its own), and the matrices are multiplied through: R_1 = Â_1, R_l = Â_l R_{l-1}. The
row that the head reads, without the class token and registers, is the map.

Grad-CAM (Selvaraju et al.) for the BiT ResNets, which have no attention to look at.

A map over its image as in Figure 6: what the map does not mark goes dark.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.inspection.layer_taps import (
    check_images,
    choose_classes,
    get_token_layout,
    has_attention,
    iterate_layers,
    mean_logits,
    move_to_model,
    require_transformer,
    select_output,
    to_float32,
    to_grid,
)
from vitrail.models.backbone import Taps, backbone, resting
from vitrail.models.vit import ViT


def combine_layers(attention: Sequence[Tensor]) -> Tensor:
    """R_L of the layers' head-averaged weights, the first layer first: [B, T, T] each -> [B, T, T]."""
    if not attention:
        raise ConfigError("there are no layers to join; give the weights of at least one")
    through: Tensor | None = None
    for seen in attention:
        through = roll_layer(seen, through)
    assert through is not None
    return through


def roll_layer(seen: Tensor, before: Tensor | None) -> Tensor:
    """One more layer: Â_l R_{l-1}."""
    kept = seen + torch.eye(seen.shape[-1], device=seen.device, dtype=seen.dtype)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept if before is None else kept @ before


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Of each patch the part that reaches the output: [B, C, H, W] prepared -> [B, rows, columns]. What the class token
    and the registers hold themselves is left out, so a map sums to less than 1."""
    last: Tensor | None = None
    for through in _rolled(model, images):
        last = through
    assert last is not None
    return to_grid(select_output(last, model), get_token_layout(model))


def rollout_by_layer(model: nn.Module, images: Tensor) -> Tensor:
    """Rollout up to each layer (D.8): [B, C, H, W] prepared -> [B, L, rows, columns]."""
    rows = [select_output(through, model) for through in _rolled(model, images)]
    return to_grid(torch.stack(rows, dim=1), get_token_layout(model))


def _rolled(model: nn.Module, images: Tensor) -> Iterable[Tensor]:
    """R_l layer by layer; only the last one is kept."""
    through: Tensor | None = None
    for view in iterate_layers(model, images):
        through = roll_layer(to_float32(view.attention.mean(dim=1)), through)
        del view
        yield through


def class_attention(model: nn.Module, images: Tensor) -> Tensor:
    """Where the output's token looks, head by head: [B, C, H, W] prepared -> [B, L, k, rows, columns]. In a network
    that averages its patches, where they look on average."""
    rows: list[Tensor] = []
    for view in iterate_layers(model, images):
        rows.append(select_output(view.attention, model).clone())  # a view would keep all of the layer
        del view
    return to_grid(torch.stack(rows, dim=1), get_token_layout(model))


def gradient_rollout(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Rollout of what speaks for a class (by default the one that the network says): [B, rows, columns], none below 0.
    Of a head of patches, a class's logit is the mean over the image.

    After Chefer, Gur and Wolf ("Generic Attention-model Explainability"): weights count by how much the class's logit y
    would gain from them, and what would lower it counts for nothing,

        Ā_l = mean over heads of max(∂y/∂A_l ⊙ A_l, 0),    R_l = (I + Ā_l) R_{l-1},    R_0 = I,

    and the map is the output's row of R_L - I. The network is gone through twice: forward, keeping each layer's input,
    then backward a layer at a time, so that the weights and gradients of one layer are all that is ever held.
    """
    network = require_transformer(model)
    if network.head.classifier is None:
        raise ConfigError("this network has no classes to explain; plain rollout needs none")
    with torch.inference_mode(False), resting(network):
        inputs, last = _inputs(network, images)
        speaks = _speaks(network, last, classes)
        row = first = select_output(to_float32(torch.eye(last.shape[1]).to(last)), network).expand(last.shape[0], -1)
        for block in reversed(range(len(inputs))):
            weights, speaks = _weighted(network, block, inputs.pop(), speaks)
            for weight in reversed(weights):
                row = row + (row[:, None] @ weight)[:, 0]
    return to_grid(row - first, get_token_layout(network))


def _inputs(network: ViT, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """What each block is given, and what the last one hands on: [B, T, D] each."""
    found: list[Tensor] = []
    with torch.no_grad():
        z = network.embed(check_images(images, network))
        for block in range(len(network.blocks)):
            found.append(z)
            z = network.forward_blocks(z, first=block, last=block + 1)
    return found, z


def _speaks(network: ViT, last: Tensor, classes: Tensor | None) -> Tensor:
    """∂y/∂z_L of each image's class: [B, T, D]."""
    with torch.enable_grad():
        z = last.detach().requires_grad_()
        logits = _logits(network, z)
        picked = logits.gather(1, choose_classes(logits, classes)[:, None])
        return torch.autograd.grad(picked.sum(), z)[0]


def _logits(network: ViT, last: Tensor) -> Tensor:
    """[B, T, D] of the last block -> [B, K]."""
    if not network.config.has_patch_head:
        return network.head(network.read(last))
    return mean_logits(network.forward_head(last if network.config.norm_after_pool else network.norm(last)))


def _weighted(network: ViT, block: int, z: Tensor, speaks: Tensor) -> tuple[list[Tensor], Tensor]:
    """Ā_l [B, T, T] of a block's layers, the first one first; and ∂y/∂z [B, T, D] at its input, from that at its
    output."""
    taps = Taps(attention=True, explicit=True)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        out = network.forward_blocks(z, first=block, last=block + 1, taps=taps)
        seen = [tap.weights for tap in taps.layers]
        *by_weight, by_input = torch.autograd.grad(out, (*seen, z), speaks)
    found: list[Tensor] = []
    for tap, weights, slope in zip(taps.layers, seen, by_weight, strict=True):
        helpful = to_float32(slope * weights.detach()).clamp(min=0).mean(dim=1, keepdim=True)
        found.append(tap.spread(helpful)[:, 0])
    return found, by_input


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """What of the last stage's map speaks for a class (by default the one that the network says): [B, C, H, W] prepared
    -> [B, rows, columns], none below 0.

    max(Σ_c α_c F_c, 0) over the channels F_c of the map behind the last norm, α_c the mean over places of ∂y/∂F_c."""
    if has_attention(model):
        raise ConfigError(f"grad_cam is for ResNets, not for a {type(model).__name__}; take gradient_rollout")
    model = backbone(model)
    if not model.config.classes:
        raise ConfigError("this network has no classes to explain: it has no head")
    with torch.inference_mode(False), resting(model):
        with torch.no_grad():
            found = model.forward_features(move_to_model(images, model))
        with torch.enable_grad():
            found = found.requires_grad_()
            logits = model.forward_head(found)
            picked = logits.gather(1, choose_classes(logits, classes)[:, None])
            speaks = torch.autograd.grad(picked.sum(), found)[0]
    weight = to_float32(speaks).mean(dim=(2, 3), keepdim=True)
    return (weight * to_float32(found.detach())).sum(dim=1).clamp(min=0)


DIM: Final = 0.3  # mean brightness below which an image is brightened before it is lit
BLACK: Final = 8 / 255  # below this there is nothing but noise to stretch
TOP: Final = 99.5  # per cent of the values that stay below white

Map: TypeAlias = Tensor | NDArray[np.floating[Any]]


def overlay(pixels: NDArray[np.uint8], map: Map) -> NDArray[np.uint8]:
    """Pixels [H, W, 3] lit by a map [rows, columns] -> [H, W, 3], after the author's recipe: the map over its largest
    value, in 8 bits, enlarged by Lanczos, blurred with the patch's side for radius, stretched to [0, 1], and multiplied
    with the image. A map that is the same everywhere leaves the image as it is. A dark image is brightened first:
    else nothing of it could be seen, lit or not."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ConfigError(f"pixels are {pixels.dtype} {list(pixels.shape)}; bytes of [H, W, 3] are wanted")
    light = light_from_map(map, (pixels.shape[0], pixels.shape[1]))
    return np.rint(brighten(pixels) * light[..., None]).astype(np.uint8)


def brighten(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels [H, W, 3] as floats. Those of a dark image are stretched to the whole range, and then bent until their
    mean is near `DIM`; others are left as they are."""
    values = pixels.astype(np.float32) / 255
    if values.mean() >= DIM:
        return pixels.astype(np.float32)
    stretched = np.minimum(values / max(float(np.percentile(values, TOP)), BLACK), 1.0)
    lifted = (stretched + BLACK) / (1 + BLACK)
    power = min(math.log(DIM) / math.log(float(lifted.mean())), 1.0)
    return (255 * lifted**power).astype(np.float32)


def light_from_map(map: Map, size: tuple[int, int]) -> NDArray[np.float32]:
    """The map as the light on each pixel: [rows, columns] -> [H, W] in [0, 1]."""
    values = np.asarray(map.detach().float().cpu() if isinstance(map, Tensor) else map, np.float32)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ConfigError(
            f"a map is finite numbers of [rows, columns], not {list(values.shape)} with something else in it"
        )
    height, width = size
    top = float(values.max())
    bits = np.rint(np.clip(values / top, 0, 1) * 255).astype(np.uint8) if top > 0 else np.zeros(values.shape, np.uint8)
    large = Image.fromarray(bits).resize((width, height), Image.Resampling.LANCZOS)
    radius = (width / values.shape[1], height / values.shape[0])
    blurred = np.asarray(large.filter(ImageFilter.GaussianBlur(radius)), np.float32)
    low, high = float(blurred.min()), float(blurred.max())
    return (blurred - low) / (high - low) if high > low else np.ones_like(blurred)

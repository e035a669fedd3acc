"""Attention rollout (Figure 6, D.8): how much of each patch reaches the output through all layers, over the image.

Each layer's weights are averaged over the heads, the identity is added for the residual, rows are divided by their sum
(so a token keeps half of itself), and the matrices are multiplied: R_1 = Â_1, R_l = Â_l R_{l-1}. The map is the row
that the head reads, without class tokens and registers; where attention pooling reads several, they are mixed by its
weights.

BiT ResNets have no attention; Grad-CAM (Selvaraju et al.) takes its place.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.inspection import layer_taps
from vitrail.models.backbone import Taps, eval_mode, unwrap_backbone
from vitrail.models.vit import ViT

DIM: Final = 0.3  # mean brightness below which an image is brightened before a map is laid over it
BLACK: Final = 8 / 255  # an image whose brightest pixels are below this has only noise to stretch
TOP: Final = 99.5  # percentile of the values that becomes white

Map: TypeAlias = Tensor | NDArray[np.floating[Any]]


def combine_layers(attention: Sequence[Tensor]) -> Tensor:
    """R_L from the layers' head-averaged weights, first layer first: [B, T, T] each -> [B, T, T]."""
    if not attention:
        raise ConfigError("there are no layers to combine; give the weights of at least one")
    return reduce(lambda before, weights: roll_layer(weights, before), attention[1:], roll_layer(attention[0], None))


def roll_layer(weights: Tensor, before: Tensor | None) -> Tensor:
    """One more layer: Â_l R_{l-1}."""
    residual = weights + torch.eye(weights.shape[-1], device=weights.device, dtype=weights.dtype)
    residual = residual / residual.sum(dim=-1, keepdim=True)
    return residual if before is None else residual @ before


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """The share of each patch that reaches the output: [B, C, H, W] prepared -> [B, rows, columns]. The shares of the
    class token and the registers are not part of the map, so it sums to less than 1."""
    (last,) = deque(_roll(model, images), maxlen=1)
    return layer_taps.to_grid(layer_taps.read_output(*last, model), layer_taps.get_token_layout(model))


def rollout_by_layer(model: nn.Module, images: Tensor) -> Tensor:
    """Rollout up to each layer (D.8): [B, C, H, W] prepared -> [B, L, rows, columns]."""
    rows = [layer_taps.read_output(product, z, model) for product, z in _roll(model, images)]
    return layer_taps.to_grid(torch.stack(rows, dim=1), layer_taps.get_token_layout(model))


def _roll(model: nn.Module, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """R_l and z_l layer by layer; only the last ones stay in memory."""
    product: Tensor | None = None
    for layer in layer_taps.iterate_layers(model, images):
        product = roll_layer(layer_taps.to_float32(layer.mean_attention), product)
        after = layer.after
        del layer
        yield product, after


def class_attention(model: nn.Module, images: Tensor) -> Tensor:
    """Where the output's token looks, per head: [B, C, H, W] prepared -> [B, L, k, rows, columns]. In a network that
    averages its patches, where they look on average."""
    rows: list[Tensor] = []
    for layer in layer_taps.iterate_layers(model, images):
        rows.append(layer_taps.select_output(layer.attention, model).clone())  # a view would keep the whole layer
        del layer
    return layer_taps.to_grid(torch.stack(rows, dim=1), layer_taps.get_token_layout(model))


def gradient_rollout(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Rollout of what raises the logit of a class (by default the predicted one): [B, rows, columns], none below 0.
    With a patch head, a class's logit is the mean over the image.

    After Chefer, Gur and Wolf ("Generic Attention-model Explainability"): weights count by how much the class's logit y
    would gain from them, and negative contributions count as zero,

        Ā_l = mean over heads of max(∂y/∂A_l ⊙ A_l, 0),    R_l = (I + Ā_l) R_{l-1},    R_0 = I,

    and the map is the output's row of R_L - I. The network runs twice: forward, keeping each layer's input, then
    backward one layer at a time, so that only one layer's weights and gradients are in memory at once.
    """
    network = layer_taps.require_transformer(model)
    if network.head.classifier is None:
        raise ConfigError("this network has no classes to explain; use rollout, which needs none")
    with torch.inference_mode(False), eval_mode(network):
        inputs: list[Tensor] = []  # of each block, [B, T, D]
        with torch.no_grad():
            last = network.embed(layer_taps.check_images(images, network))
            for block in range(len(network.blocks)):
                inputs.append(last)
                last = network.forward_blocks(last, first=block, last=block + 1)
        gradient = _class_gradient(network, last, classes)
        eye = layer_taps.to_float32(torch.eye(last.shape[1]).to(last)).expand(last.shape[0], -1, -1)
        row = first = layer_taps.read_output(eye, last, network)
        for block in reversed(range(len(inputs))):
            weights, gradient = _weigh_attention(network, block, inputs.pop(), gradient)
            for weight in reversed(weights):
                row = row + (row[:, None] @ weight)[:, 0]
    return layer_taps.to_grid(row - first, layer_taps.get_token_layout(network))


def _class_gradient(network: ViT, last: Tensor, classes: Tensor | None) -> Tensor:
    """∂y/∂z_L of each image's class: [B, T, D]."""
    with torch.enable_grad():
        z = last.detach().requires_grad_()
        outputs = network.forward_head(z if network.config.norm_after_pool else network.norm(z))
        logits = layer_taps.mean_logits(outputs)
        picked = logits.gather(1, layer_taps.choose_classes(logits, classes)[:, None])
        return torch.autograd.grad(picked.sum(), z)[0]


def _weigh_attention(network: ViT, block: int, z: Tensor, gradient: Tensor) -> tuple[list[Tensor], Tensor]:
    """Ā_l [B, T, T] of a block's layers, first layer first; and ∂y/∂z [B, T, D] at its input, from that at its
    output."""
    taps = Taps(attention=True, explicit=True)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        out = network.forward_blocks(z, first=block, last=block + 1, taps=taps)
        attention = [tap.weights for tap in taps.layers]
        *by_weight, by_input = torch.autograd.grad(out, (*attention, z), gradient)
    weighted: list[Tensor] = []
    for tap, weights, slope in zip(taps.layers, attention, by_weight, strict=True):
        positive = layer_taps.to_float32(slope * weights.detach()).clamp(min=0).mean(dim=1, keepdim=True)
        weighted.append(tap.spread(positive)[:, 0])
    return weighted, by_input


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Which places of the last stage's map raise the logit of a class (by default the predicted one): [B, C, H, W]
    prepared -> [B, rows, columns], none below 0.

    max(Σ_c α_c F_c, 0) over the channels F_c of the map after the last norm, α_c the mean over places of ∂y/∂F_c."""
    if layer_taps.has_attention(model):
        raise ConfigError(f"grad_cam is for ResNets, not for a {type(model).__name__}; use gradient_rollout")
    model = unwrap_backbone(model)
    if not model.config.classes:
        raise ConfigError("this network has no head, so there are no classes to explain")
    with torch.inference_mode(False), eval_mode(model):
        with torch.no_grad():
            features = model.forward_features(layer_taps.move_to_model(images, model))
        with torch.enable_grad():
            features = features.requires_grad_()
            logits = model.forward_head(features)
            picked = logits.gather(1, layer_taps.choose_classes(logits, classes)[:, None])
            gradient = torch.autograd.grad(picked.sum(), features)[0]
    weight = layer_taps.to_float32(gradient).mean(dim=(2, 3), keepdim=True)
    return (weight * layer_taps.to_float32(features.detach())).sum(dim=1).clamp(min=0)


def overlay(pixels: NDArray[np.uint8], map: Map) -> NDArray[np.uint8]:
    """Lights pixels [H, W, 3] by a map [rows, columns] -> [H, W, 3], following the authors' recipe: the map is divided
    by its largest value, in 8 bits, enlarged by Lanczos, blurred with the patch's side as radius, stretched to [0, 1]
    and multiplied with the image. A constant map leaves the image unchanged. A dark image is brightened first, since
    otherwise nothing of it would be visible."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ConfigError(f"pixels are {pixels.dtype} {list(pixels.shape)}; give uint8 [H, W, 3]")
    light = light_from_map(map, (pixels.shape[0], pixels.shape[1]))
    return np.rint(brighten(pixels) * light[..., None]).astype(np.uint8)


def brighten(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels [H, W, 3] as floats. Those of a dark image are stretched to the full range and raised by a power until
    their mean is near `DIM`; others are unchanged."""
    values = pixels.astype(np.float32) / 255
    if values.mean() >= DIM:
        return pixels.astype(np.float32)
    stretched = np.minimum(values / max(float(np.percentile(values, TOP)), BLACK), 1.0)
    lifted = (stretched + BLACK) / (1 + BLACK)
    power = min(math.log(DIM) / math.log(float(lifted.mean())), 1.0)
    return (255 * lifted**power).astype(np.float32)


def light_from_map(map: Map, size: tuple[int, int]) -> NDArray[np.float32]:
    """The map as the brightness of each pixel: [rows, columns] -> [H, W] in [0, 1]."""
    values = np.asarray(map.detach().float().cpu() if isinstance(map, Tensor) else map, np.float32)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ConfigError(f"a map has finite numbers [rows, columns]; this one is {list(values.shape)} or not finite")
    height, width = size
    top = float(values.max())
    bits = np.rint(np.clip(values / top, 0, 1) * 255).astype(np.uint8) if top > 0 else np.zeros(values.shape, np.uint8)
    large = Image.fromarray(bits).resize((width, height), Image.Resampling.LANCZOS)
    radius = (width / values.shape[1], height / values.shape[0])
    blurred = np.asarray(large.filter(ImageFilter.GaussianBlur(radius)), np.float32)
    low, high = float(blurred.min()), float(blurred.max())
    return (blurred - low) / (high - low) if high > low else np.ones_like(blurred)

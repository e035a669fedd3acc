"""The cost of a Vision Transformer in closed form: steps with parameters and multiply-accumulates, and the memory of
its activations. No torch."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitrail.core.text import format_size
from vitrail.models.family import CostStep
from vitrail.models.resnet_config import trunk_steps

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig


def walk_vit(c: "ViTConfig") -> Iterator[CostStep]:
    """Yields the steps of one image from pixels to logits."""
    yield from walk_stem(c)
    for layer in range(1, c.depth + 1):
        yield from walk_block(c, layer)
    yield from _patch_head(c) if c.has_patch_head else _head(c)


def walk_stem(c: "ViTConfig") -> Iterator[CostStep]:
    """Yields the steps from pixels to the input of the first block."""
    n, t, d, channels = c.patches, c.tokens, c.width, c.channels
    yield CostStep("image", (*c.image, channels))
    if c.backbone is not None:
        yield from trunk_steps(c.backbone)
        channels = c.backbone.features
    inside = math.prod(c.patch) * channels
    yield CostStep(f"patches {format_size(c.patch)}", (n, inside))
    yield CostStep("embeddings E", (n, d), inside * d + d * c.patch_bias, n * inside * d)
    if c.norm_stem == "patches":
        yield CostStep("norm of patches", (n, d), norm_parameters(c, d))
    if c.class_token:
        several = "class token" if c.class_tokens == 1 else f"{c.class_tokens} class tokens"
        yield CostStep(several, (n + c.class_tokens, d), c.class_tokens * d)
    if c.registers:
        yield CostStep(f"{c.registers} register{'s' if c.registers > 1 else ''}", (t, d), c.registers * d)
    if c.position != "none" and c.entry in ("stem", "shared"):
        shared = ", shared by all layers" if c.entry == "shared" else ""
        yield CostStep(f"positions ({c.position}{shared})", (t, d), _table_parameters(c), _resample_macs(c))
    if c.rotary is not None:
        learned = c.depth * c.attention_width if c.rotary.mixed else 0
        kind = "mixed" if c.rotary.mixed else "axial"
        yield CostStep(f"rotary positions ({kind})", (t, c.head_size), learned, n * learned)
    if c.position_bias == "shared-table":
        yield CostStep("position bias, shared by all layers", (c.heads, t, t), _bias_parameters(c, 0))
    if c.norm_stem == "tokens":
        yield CostStep("norm of tokens", (t, d), norm_parameters(c, d))


def vit_activation_bytes(c: "ViTConfig", width: int, *, recompute: bool) -> int:
    """Estimates the memory of activations kept for the backward pass, in bytes.

    A block keeps for each token: the inputs and outputs of both norms (4D), q, k and v (3D), the output of attention
    (D), and the hidden layer of the MLP before and after GELU (2M). A gated MLP has four hidden tensors, quick GELU
    three. LayerScale and inner norms keep their inputs; rotated q and k are kept, too, and so is a bias computed from
    queries, for all pairs of tokens. With recomputation only the inputs of the blocks and the peak of one block
    (10D + 3M) are kept."""
    tokens, d, m = c.tokens, c.width, c.mlp_width
    layers, inside = c.depth * (2 if c.attention == "axial" else 1), kept_by_block(c)
    kept = tokens * (layers * d + inside + 2 * d + m) if recompute else tokens * layers * inside
    if c.position_bias == "decomposed":
        pairs = [c.heads * q * k for layer in range(1, c.depth + 1) for _, q, k in _sequences(c, layer)]
        kept += max(pairs) if recompute else sum(pairs)
    stem = 0 if c.backbone is None else c.backbone.activation_bytes(1, recompute=recompute)
    # Logits and their gradient in float32; with logits per pixel, also the head's output before that.
    pixels = math.prod(c.image)
    logits = 8 * pixels + width * (pixels + c.patches) if c.has_patch_head else 8
    return width * (kept + stem + 4 * tokens * d) + c.classes * logits


def kept_by_block(c: "ViTConfig") -> int:
    """Counts the values that a block keeps per token for the backward pass."""
    d, a, m = c.width, c.attention_width, c.mlp_width
    a_extra = (2 if c.rotary else 0) + (2 if c.norm_qk else 0) + (1 if c.norm_inner_attention else 0)
    m_extra = (2 if c.gated else c.gelu == "quick") + (1 if c.norm_inner_mlp else 0)
    d_extra = 2 if c.layer_scale else 0
    return (4 + d_extra) * d + (4 + a_extra) * a + (2 + m_extra) * m


def norm_parameters(c: "ViTConfig", width: int) -> int:
    return width * (2 if c.norm == "layer" else 1)


def _head(c: "ViTConfig") -> Iterator[CostStep]:
    t, d = c.tokens, c.width
    if c.norm_final and not c.norm_after_pool:
        yield CostStep("norm", (t, d), norm_parameters(c, d))
    if c.neck:
        yield from _neck(c)
    if c.pool == "map":
        yield from _map_pool(c)
    else:
        names = {"token": "class token's row", "mean": "mean of patches", "token+mean": "class token and mean"}
        yield CostStep(names[c.pool], (c.patch_features * (2 if c.pool == "token+mean" else 1),))
    if c.norm_final and c.norm_after_pool:
        yield CostStep("norm", (d,), norm_parameters(c, d))
    if c.projection:
        read = d * (2 if c.pool == "token+mean" else 1)
        yield CostStep("projection", (c.projection,), read * c.projection, read * c.projection)
    y = c.features
    if c.head == "tanh":
        yield CostStep("head: hidden tanh layer", (y,), y * y + y, y * y)
    if c.classes:
        heads = 2 if c.head == "distilled" else 1
        yield CostStep("head: logits", (c.classes,), heads * (y + 1) * c.classes, heads * y * c.classes)


def _patch_head(c: "ViTConfig") -> Iterator[CostStep]:
    n, d, k = c.patches, c.patch_features, c.classes
    yield CostStep("norm of patches", (n, c.width), norm_parameters(c, c.width) if c.norm_final else 0)
    if c.neck:
        yield from _neck(c)
    yield CostStep("head: logits of patches", (n, k), d * k + k, n * d * k)
    yield CostStep("head: logits of pixels", (k, *c.image))


def _neck(c: "ViTConfig") -> Iterator[CostStep]:
    n, d, out = c.patches, c.width, c.neck
    yield CostStep("neck: 1x1 convolution, norm", (out, *c.grid), d * out + 2 * out, n * d * out)
    yield CostStep("neck: 3x3 convolution, norm", (out, *c.grid), 9 * out * out + 2 * out, 9 * n * out * out)


def _map_pool(c: "ViTConfig") -> Iterator[CostStep]:
    t, d, m = c.tokens if c.map_prefix else c.patches, c.width, c.map_mlp_width or c.mlp_width
    full = c.map_style == "siglip"
    params = d + 2 * d * d + d * d + d + (d * d + d + 2 * d if full else 0)
    work = 2 * t * d * d + 2 * t * d + d * d + (d * d if full else 0)
    yield CostStep("attention pooling", (d,), params, work)
    if full:
        yield CostStep("attention pooling: norm, MLP, residual", (d,), 2 * d + 2 * d * m + d + m, 2 * d * m)


def walk_block(c: "ViTConfig", layer: int, ahead: int = 0) -> Iterator[CostStep]:
    """Yields the steps of a block, counted from 1. `ahead` counts leading tokens that have no place in the image."""
    t, d, a, m, inner = c.tokens + ahead, c.width, c.attention_width, c.mlp_width, c.head_size
    if c.position not in ("none", "relative") and c.entry == "every":
        yield CostStep(f"block {layer}: positions ({c.position})", (t, d), _table_parameters(c), _resample_macs(c))
    bias = (3 if c.key_bias else 2) * a * c.qkv_bias
    relative = c.position == "relative" and (layer == 1 or c.entry != "stem")
    offsets = _table_parameters(c) if relative and c.entry == "every" else 0
    offsets += _bias_parameters(c, layer - 1) if c.position_bias in ("table", "decomposed") else 0
    offsets += (2 * norm_parameters(c, inner) if c.norm_qk else 0) + (
        norm_parameters(c, a) if c.norm_inner_attention else 0
    )
    scale = d if c.layer_scale else 0
    wide, hidden = (2 if c.gated else 1) * m, norm_parameters(c, m) if c.norm_inner_mlp else 0
    mlp = d * wide + m * d + (wide + d if c.mlp_bias else 0) + hidden
    for axis, queries, length in _sequences(c, layer, ahead):
        name = f"block {layer}: {axis}"
        work = 2 * queries * length * a + relative * t * (2 * length - 1) * d
        if c.position_bias == "decomposed":
            sides = 2 * c.window_of(layer - 1) or sum(c.grid)
            work += _sequences(c, layer)[0][1] * sides * a
        q_k_v = norm_parameters(c, d) + 3 * d * a + bias
        yield CostStep(f"{name}norm, q k v", (3, c.heads, t, inner), q_k_v, 3 * queries * d * a)
        what = "windowed attention" if c.window_of(layer - 1) else "attention"
        yield CostStep(f"{name}{what}", (c.heads, t, inner), offsets, work)
        out = a * d + d * c.out_bias
        yield CostStep(f"{name}out, residual", (t, d), out + scale, queries * a * d)
        yield CostStep(f"{name}norm, MLP, residual", (t, d), norm_parameters(c, d) + mlp + scale, t * (wide + m) * d)


def _sequences(c: "ViTConfig", layer: int, ahead: int = 0) -> list[tuple[str, int, int]]:
    """Lists the sub-blocks of a block: name, number of queries, and the number of tokens that a query sees: all tokens,
    its window, which may contain padding, or its row and then its column (D.6). The `ahead` tokens are in every
    window."""
    if c.attention == "axial":
        return [("row ", c.tokens, c.grid[1]), ("column ", c.tokens, c.grid[0])]
    if side := c.window_of(layer - 1):
        padded = math.prod(-(-length // side) * side for length in c.grid)
        return [("", padded + padded // (side * side) * ahead, side * side + ahead)]
    return [("", c.tokens + ahead, c.tokens + ahead)]


def _table_parameters(c: "ViTConfig") -> int:
    """Counts the parameters of one position table (D.4)."""
    if c.position == "relative":
        return (2 * c.tokens - 1) * c.head_size
    sides, prefix = sum(c.grid), c.position_rows * c.width
    rows = {
        "learned": math.prod(c.table_grid) * c.width,
        "learned2d": sides * (c.width // 2),
        "learned2d-sum": sides * c.width,
    }
    return rows[c.position] + prefix if c.position in rows else 0


def _resample_macs(c: "ViTConfig") -> int:
    """Counts the multiply-accumulates that resample a table whose grid is not the image's, one axis after the other."""
    (rows, columns), (tall, wide) = c.table_grid, c.grid
    return 0 if c.table_grid == c.grid else tall * columns * (rows + wide) * c.width


def _bias_parameters(c: "ViTConfig", layer: int) -> int:
    """Counts the parameters of one position bias."""
    side = c.window_of(layer)
    rows, columns = (2 * length - 1 for length in ((side, side) if side else c.grid))
    if c.position_bias == "decomposed":
        return (rows + columns) * c.head_size
    return (rows * columns + (3 if c.class_token else 0)) * c.heads

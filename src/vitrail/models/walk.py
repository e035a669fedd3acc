"""A tensor's walk through a network in closed form: shape, parameters and multiply-accumulates, line by line. No torch.

The sums of a walk are the model table. MACs count matrix products and convolutions, padded taps included (the paper's
exaFLOPs leave those out: `padding_macs`); normalisation, softmax and GELU are left out.
"""

import math
from collections.abc import Iterable, Iterator

from vitrail.core.shapes import Pair, times
from vitrail.models.config import ResNetConfig, ViTConfig
from vitrail.models.family import ModelConfig, Step


def walk(config: ModelConfig) -> list[Step]:
    """The steps of one image through the network, from pixels to logits."""
    return list(config.walk())


def parameters(config: ModelConfig) -> int:
    return sum(step.params for step in walk(config))


def macs(config: ModelConfig) -> int:
    """Multiply-accumulates for one image; a FLOP count is twice this."""
    return sum(step.macs for step in walk(config))


def vit_steps(c: ViTConfig) -> Iterator[Step]:
    n, t, d = c.patches, c.tokens, c.width
    yield Step("image", (*c.image, c.channels))
    channels = c.channels
    if c.backbone is not None:
        yield from _backbone(c.backbone)
        channels = c.backbone.features
    inside = math.prod(c.patch) * channels
    yield Step(f"patches {times(c.patch)}", (n, inside))
    yield Step("embeddings E", (n, d), inside * d + d, n * inside * d)
    if c.class_token:
        yield Step("class token", (n + 1, d), d)
    if c.registers:
        yield Step(f"{c.registers} registers", (t, d), c.registers * d)
    if c.position != "none" and c.placed in ("stem", "shared"):
        yield Step(
            f"positions ({c.position}{', shared by all layers' if c.placed == 'shared' else ''})", (t, d), _table(c)
        )
    for layer in range(1, c.depth + 1):
        yield from _block(c, layer)
    if not c.norm_after_pool:
        yield Step("norm", (t, d), 2 * d)
    yield Step("class token's row" if c.pool == "token" else "mean of patches", (d,))
    if c.norm_after_pool:
        yield Step("norm", (d,), 2 * d)
    if c.head == "tanh":
        yield Step("head: hidden tanh layer", (d,), d * d + d, d * d)
    if c.classes:
        yield Step("head: logits", (c.classes,), d * c.classes + c.classes, d * c.classes)


def _block(c: ViTConfig, layer: int) -> Iterator[Step]:
    t, d, m = c.tokens, c.width, c.mlp_width
    if c.position not in ("none", "relative") and c.placed == "every":
        yield Step(f"block {layer}: positions ({c.position})", (t, d), _table(c))
    bias = 3 * d * c.qkv_bias
    relative = c.position == "relative" and (layer == 1 or c.placed != "stem")
    offsets = _table(c) if relative and c.placed == "every" else 0
    for axis, length in _axes(c):
        name = f"block {layer}: {axis}"
        work = 2 * t * length * d + relative * t * (2 * length - 1) * d
        yield Step(f"{name}norm, q k v", (3, c.heads, t, d // c.heads), 2 * d + 3 * d * d + bias, 3 * t * d * d)
        yield Step(f"{name}attention", (c.heads, t, d // c.heads), offsets, work)
        yield Step(f"{name}out, residual", (t, d), d * d + d, t * d * d)
        yield Step(f"{name}norm, MLP, residual", (t, d), 2 * d + 2 * d * m + d + m, 2 * t * d * m)


def _axes(c: ViTConfig) -> list[tuple[str, int]]:
    """Sub-blocks and how many tokens one query sees: all, or its row and then its column (D.6)."""
    if c.attention == "full":
        return [("", c.tokens)]
    rows, columns = c.grid
    return [("row ", columns), ("column ", rows)]


def _table(c: ViTConfig) -> int:
    """Parameters of one position table (D.4)."""
    rows, columns = c.grid
    prefix = c.width if c.class_token and c.position_prefix else 0
    match c.position:
        case "learned":
            return c.patches * c.width + prefix
        case "learned2d":
            return (rows + columns) * (c.width // 2) + prefix
        case "learned2d-sum":
            return (rows + columns) * c.width + prefix
        case "relative":
            return (2 * c.tokens - 1) * (c.width // c.heads)
        case _:
            return 0


def resnet_steps(c: ResNetConfig) -> Iterator[Step]:
    yield Step("image", (*c.image, c.channels))
    yield from _backbone(c)
    f = c.features
    if c.unit == "preactivation":
        yield Step("norm, ReLU", (*c.grid, f), 2 * f)
    yield Step("mean over positions", (f,))
    if c.classes:
        yield Step("head: logits", (c.classes,), f * c.classes + c.classes, f * c.classes)


def _backbone(c: ResNetConfig) -> Iterator[Step]:
    side = 7 if c.root == "7x7" else 3
    stride = 2 if c.root == "7x7" else 1
    grid = (-(-c.image[0] // stride), -(-c.image[1] // stride))
    kernel = side * side * c.channels * c.root_width
    norm = 2 * c.root_width if c.unit == "postactivation" else 0
    yield Step(f"root {c.root} convolution", (*grid, c.root_width), kernel + norm, math.prod(grid) * kernel)
    if c.root == "7x7":
        yield Step("max-pool 3x3", (*c.pooled, c.root_width))
    grid, width = c.pooled, c.root_width
    for stage, count in enumerate(c.blocks):
        for block in range(count):
            out = c.stage_grid(grid, stage) if block == 0 else grid
            yield _unit(
                c,
                f"stage {stage + 1}, block {block + 1}",
                grid,
                out,
                width,
                c.bottleneck(stage),
                stage > 0 and block == 0,
            )
            grid, width = out, 4 * c.bottleneck(stage)


def _unit(c: ResNetConfig, name: str, grid: Pair, out: Pair, width: int, inner: int, strided: bool) -> Step:
    """One bottleneck: 1x1, 3x3 (or axial attention), 1x1, and a projected shortcut where the shape changes."""
    wide = 4 * inner
    before, after = math.prod(grid), math.prod(out)
    projected = width * wide if width != wide or strided else 0
    norms = (
        2 * (width + inner + inner)
        if c.unit == "preactivation"
        else 2 * (inner + inner + wide + (wide if projected else 0))
    )
    middle_params, middle_macs = _middle(c, grid, out, inner)
    kernels = width * inner + middle_params + inner * wide + projected
    work = before * width * inner + middle_macs + after * (inner * wide + projected)
    return Step(name, (*out, wide), kernels + norms, work)


def _middle(c: ResNetConfig, grid: Pair, out: Pair, inner: int) -> tuple[int, int]:
    """Parameters and MACs of a unit's 3x3 convolution, or of the row and column attention that replaces it (D.6)."""
    if c.mixing == "convolution":
        return 9 * inner * inner, math.prod(out) * 9 * inner * inner
    params = work = 0
    for length in (grid[1], grid[0]):
        params += 4 * inner * inner + (2 * length - 1) * (inner // c.axial_heads)
        work += math.prod(grid) * (4 * inner * inner + (4 * length - 1) * inner)
    return params, work


def summed(steps: Iterable[Step]) -> Step:
    """All steps as one line; the shape is the last one's."""
    rows = list(steps)
    return Step("total", rows[-1].shape, sum(s.params for s in rows), sum(s.macs for s in rows))


def padding_macs(config: ResNetConfig) -> int:
    """Multiply-accumulates of one image that only multiply padding."""
    side, stride = (7, 2) if config.root == "7x7" else (3, 1)
    wasted = _on_padding(config, config.image, side, stride) * config.channels * config.root_width
    if config.mixing != "convolution":
        return wasted
    grid = config.pooled
    for stage, count in enumerate(config.blocks):
        inner = config.bottleneck(stage) ** 2
        wasted += _on_padding(config, grid, 3, 2 if stage else 1) * inner
        grid = config.stage_grid(grid, stage)
        wasted += (count - 1) * _on_padding(config, grid, 3, 1) * inner
    return wasted


def _on_padding(config: ResNetConfig, size: tuple[int, int], side: int, stride: int) -> int:
    """Taps of a convolution over a plane that lie outside of it."""
    outputs = math.prod(-(-length // stride) for length in size)
    inside = math.prod(_taps_inside(config.padding == "same", length, side, stride) for length in size)
    return outputs * side * side - inside


def _taps_inside(same: bool, length: int, side: int, stride: int) -> int:
    """Along one axis, over all outputs. The SAME rule puts the odd pixel of padding behind."""
    outputs = -(-length // stride)
    before = max((outputs - 1) * stride + side - length, 0) // 2 if same else side // 2
    starts = (at * stride - before for at in range(outputs))
    return sum(min(start + side, length) - max(start, 0) for start in starts)

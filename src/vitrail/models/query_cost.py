"""The cost of a network with queries in closed form (see vit_cost.py): the encoder, the blocks with queries, and the
predictions. No torch."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitrail.models.family import CostStep
from vitrail.models.vit_cost import kept_by_block, norm_parameters, vit_activation_bytes, walk_block, walk_stem

if TYPE_CHECKING:
    from vitrail.models.query_configs import EoMTConfig, PMTConfig, QueryConfig


def walk_eomt(c: "EoMTConfig") -> Iterator[CostStep]:
    """The steps of one image from pixels to classes and masks."""
    yield from walk_stem(c)
    for layer in range(1, c.depth + 1):
        if layer == c.depth - c.query_blocks + 1:
            yield CostStep(f"{c.queries} queries", (c.tokens + c.queries, c.width), c.queries * c.width)
        yield from walk_block(c, layer, c.queries if layer > c.depth - c.query_blocks else 0)
    yield CostStep("norm", (c.tokens + c.queries, c.width), norm_parameters(c, c.width))
    yield from _predict(c)


def walk_pmt(c: "PMTConfig") -> Iterator[CostStep]:
    """The steps of one image from pixels to classes and masks."""
    t, d, levels = c.tokens, c.width, len(c.tapped)
    yield from walk_stem(c)
    for layer in range(1, c.depth + 1):
        yield from walk_block(c, layer)
    yield CostStep(f"norm of {levels} levels", (levels, t, d), norm_parameters(c, d))
    mlp = 2 * d * d + 2 * d
    yield CostStep(
        "head: norm, MLP, residual, sum", (t, d), levels * (norm_parameters(c, d) + mlp), levels * 2 * t * d * d
    )
    yield CostStep(f"{c.queries} queries", (t + c.queries, d), c.queries * d)
    blocks = c.head_blocks
    for layer in range(1, c.query_blocks + 1):
        for step in walk_block(blocks, layer, c.queries):
            yield CostStep(f"head: {step.name}", step.shape, step.params, step.macs)
    yield CostStep("head: norm", (t + c.queries, d), norm_parameters(c, d))
    yield from _predict(c)


def _predict(c: "QueryConfig") -> Iterator[CostStep]:
    """The prediction of classes and masks: once at the end, and once for each block with masked attention."""
    q, d, k, times = c.queries, c.width, c.classes + 1, 1 + c.masked_blocks
    rows, columns = c.grid
    yield CostStep("head: logits of classes", (q, k), (d + 1) * k, times * q * d * k)
    yield CostStep("head: MLP of masks", (q, d), 3 * (d * d + d), times * 3 * q * d * d)
    for _ in range(c.upscale):
        n, rows, columns = rows * columns, 2 * rows, 2 * columns
        params, work = 4 * d * d + d + 9 * d + 2 * d, 4 * n * d * d + 36 * n * d
        yield CostStep("head: patches, twice as fine", (d, rows, columns), params, times * work)
    yield CostStep("head: logits of masks", (q, rows, columns), 0, times * q * d * rows * columns)


def query_activation_bytes(c: "QueryConfig", width: int, *, recompute: bool) -> int:
    """The activation bytes of the encoder, as if it were trained, of the queries in their blocks, and of a prediction
    before each of these blocks and after the last. Its upscaled patches dominate: four maps for every doubling."""
    encoder = vit_activation_bytes(c.encoder, width, recompute=recompute)
    t, d, q, blocks = c.tokens, c.width, c.queries, c.head_blocks
    if blocks is None:
        kept = c.query_blocks * q * (d if recompute else kept_by_block(c))
    else:
        one = (t + q) * kept_by_block(blocks)
        kept = c.query_blocks * (t + q) * d + one if recompute else c.query_blocks * one
        kept += len(c.tapped) * 5 * t * d
    finest = math.prod(c.grid) << 2 * c.upscale
    maps = sum(4 * d * (math.prod(c.grid) << 2 * level) for level in range(1, c.upscale + 1))
    prediction = maps + 2 * (t + q) * d + 6 * q * d + q * finest
    return encoder + width * (kept + (c.query_blocks + 1) * prediction)

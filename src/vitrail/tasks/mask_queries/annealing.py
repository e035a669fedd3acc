"""Mask annealing (EoMT, 3.3): phases out masked attention during training, block by block.

With L query blocks training has L + 2 equal parts: one for each block, and one before and one after them. The
probability that a block masks a query is 1 before the block's part, falls as (1 - progress)^0.9 within it, and is 0
afterwards. Each draw is a pure function of seed, step, sample, block and query.
"""

from typing import Final

import torch
from torch import Tensor

from vitrail.objectives.patch_ops import to_uniform

POWER: Final = 0.9


def masking_chance(block: int, blocks: int, step: int, steps: int) -> float:
    """The probability that a block uses masked attention for a query at a step."""
    progress = step * (blocks + 2) / steps - (block + 1)  # within the block's own part of training
    return (1 - min(max(progress, 0.0), 1.0)) ** POWER


def count_masked_blocks(blocks: int, step: int, steps: int) -> int:
    """How many of the last blocks still mask with probability above 0.5. Inference masks these blocks meanwhile."""
    return sum(masking_chance(block, blocks, step, steps) > 0.5 for block in range(blocks))


def draw_masked(bits: Tensor, chances: list[float]) -> Tensor:
    """Draws which queries are masked in which block, bool [B, L, Q], from random bits of that shape."""
    draws = to_uniform(bits)
    return torch.stack([draws[:, block] < chance for block, chance in enumerate(chances)], 1)

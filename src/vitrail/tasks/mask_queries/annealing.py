"""Masked attention is annealed away (EoMT, 3.3): block by block, queries cease to look at their own mask alone.

Training is divided into as many parts as there are query blocks, and two more. The chance that a query is masked is 1
up to a block's own part, falls as (1 - progress)^0.9 within it, and is 0 from then on; the first and last parts are no
block's. A query's draw is a pure function of seed, step, sample and block.
"""

from typing import Final

import torch
from torch import Tensor

from vitrail.objectives.patch_ops import to_uniform

POWER: Final = 0.9


def masking_chance(block: int, blocks: int, step: int, steps: int) -> float:
    """That a query of a block attends through its mask at a step."""
    progress = step * (blocks + 2) / steps - (block + 1)  # within the block's own part of training
    return (1 - min(max(progress, 0.0), 1.0)) ** POWER


def count_masked_blocks(blocks: int, step: int, steps: int) -> int:
    """How many of the last blocks are masked more often than not, which is how inference uses the network meanwhile."""
    return sum(masking_chance(block, blocks, step, steps) > 0.5 for block in range(blocks))


def draw_masked(bits: Tensor, chances: list[float]) -> Tensor:
    """Which queries are masked in which block, bool [B, L, Q], from random bits of that shape."""
    draws = to_uniform(bits)
    return torch.stack([draws[:, block] < chance for block, chance in enumerate(chances)], 1)

"""Which patches of a picture are hidden: drawn where the batch lies, as a pure function of (seed, step, epoch, sample).

The numbers are made like those of data/draws.py, by torch, so the host never waits for the device to say which samples
a batch holds. A sample draws the same whatever is with it: micro-batches and processes change nothing. Everything that
a step draws comes from one call, for on an accelerator each of these operations is a launch.
"""

import torch
from torch import Tensor

from vitrail.data.draws import FACTORS, GOLDEN, SHIFTS, keyed, number
from vitrail.data.transforms.batched import shifted, wrapped

STEP = wrapped(int(GOLDEN))
ROOM = 40  # bits for the sample; an epoch's number comes above


def mix(bits: Tensor) -> Tensor:
    """`draws.mix` of int64 numbers. Signed ones wrap like unsigned ones; only their shifts need care."""
    for shift, factor in zip(SHIFTS[:2], FACTORS, strict=True):
        bits = (bits ^ shifted(bits, int(shift))) * wrapped(int(factor))
    return bits ^ shifted(bits, int(SHIFTS[2]))


def numbers(purpose: str, count: int, *, seed: int, step: int, epoch: Tensor, sample: Tensor) -> Tensor:
    """64 random bits in each number, int64 [B, count], of samples [B] in their epochs [B]. No two in a row are equal,
    for `mix` is a bijection."""
    start = wrapped(int(keyed(number(purpose), seed, step)[0]))
    keys = mix(((epoch << ROOM) + sample) * STEP + start)
    return mix(keys[:, None] + torch.arange(1, count + 1, device=keys.device) * STEP)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) as float32: the upper 24 bits."""
    return shifted(bits, 40).float() * 2.0**-24


def below(bits: Tensor, limit: int) -> Tensor:
    """Whole numbers in [0, limit): the upper 63 bits modulo the limit, so the bias is nothing."""
    return shifted(bits, 1) % limit


def permutations(bits: Tensor) -> Tensor:
    """For each row an order of its places, all orders equally likely."""
    return bits.argsort(1)

"""How fresh networks start, as in the reference code: every module says its own part in `initialise`."""

import math

import torch
from torch import Tensor, nn

TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut off at two standard deviations


def lecun_normal_(weight: Tensor) -> Tensor:
    """Truncated normal of variance 1/fan_in, for [out, in, ...] weights."""
    std = math.sqrt(1 / weight[0].numel()) / TRUNCATED_STD
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def initialise(network: nn.Module) -> None:
    """Fresh weights from torch's current seed. Norms first, so that a module can set its own norms otherwise."""
    for module in network.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()
    for module in network.modules():
        if callable(own := getattr(module, "initialise", None)):
            own()

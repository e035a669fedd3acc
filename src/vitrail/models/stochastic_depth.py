"""Stochastic depth (Huang et al. 2016), as torchvision has it; its package would import torch's compiler as well."""

import torch
from torch import Tensor, nn


class StochasticDepth(nn.Module):
    """Drops the whole residual branch of a sample with probability `p` while training; the others are scaled up."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, z: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        if not self.training or self.p == 0.0:
            return z
        kept = torch.empty([z.shape[0]] + [1] * (z.ndim - 1), dtype=z.dtype, device=z.device).bernoulli_(1.0 - self.p)
        return z * (kept.div_(1.0 - self.p) if self.p < 1.0 else kept)

    def extra_repr(self) -> str:
        return f"p={self.p}"

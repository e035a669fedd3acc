"""Clipping by the global norm, as two small functions: the loop folds the factor into the gradients' divisor."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, over all shards: 0-dim, float32, on the device."""
    norm = torch.nn.utils.get_total_norm(list(gradients))
    whole = getattr(norm, "full_tensor", None)
    return (norm if whole is None else cast(Tensor, whole())).float()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by so as not to pass the limit: min(1, limit / (norm + 1e-6)), to the
    letter what torch's clipping does. A limit of 0 clips nothing."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)

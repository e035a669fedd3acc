"""Whether tensors hold numbers: a NaN in a weight file spreads to every answer, so it is found before the first one."""

from collections.abc import Mapping

import torch
from torch import Tensor

# The eight-bit floats are left out: torch has no such test for them, and some have no infinity to find.
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
CHUNK = 1 << 20  # elements looked at together, so that the temporaries of the test stay small beside the model


def first_unsound(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first tensor that holds what no honest weight does, and what that is; None when all are sound."""
    for name, tensor in tensors.items():
        if tensor.dtype in CHECKED and not all(_finite(chunk) for chunk in tensor.reshape(-1).split(CHUNK)):
            return name, "NaN or infinity"
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            return name, "bytes other than 0 and 1 in a boolean tensor"
    return None


def _finite(chunk: Tensor) -> bool:
    return bool(torch.isfinite(chunk).all())

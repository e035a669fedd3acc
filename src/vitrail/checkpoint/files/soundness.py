"""Whether tensors hold numbers: a NaN in a weight file spreads to every answer, so it is found before the first one."""

from collections.abc import Mapping

import torch
from torch import Tensor

# The eight-bit floats are left out: torch has no such test for them, and some have no infinity to find.
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def first_unsound(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first tensor that holds what no honest weight does, and what that is; None when all are sound."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.dtype in CHECKED and not _finite(tensor.detach()):
            return name, "NaN or infinity"
        if tensor.numel() and tensor.dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
            return name, "bytes other than 0 and 1 in a boolean tensor"
    return None


def _finite(tensor: Tensor) -> bool:
    """Through the extremes, which a NaN anywhere turns into NaN: no temporaries, and many times as quick."""
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    least, most = torch.aminmax(numbers)
    return bool(torch.isfinite(least) and torch.isfinite(most))

"""A network at rest: evaluation mode, no gradients, pictures normalised on the device in the type it computes in."""

import contextlib
from collections.abc import Callable, Generator
from typing import get_args

import torch
from torch import Tensor, nn

from vitrail.core.errors import unknown
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.defaults import Precision
from vitrail.models.resting import resting


@contextlib.contextmanager
def at_rest(network: object, device: torch.device, precision: Precision) -> Generator[None]:
    """Puts a module into evaluation mode and every part of it back as it was. A plain callable is taken as it is."""
    if precision not in get_args(Precision):
        raise unknown("precision", str(precision), get_args(Precision))
    mode = resting(network) if isinstance(network, nn.Module) else contextlib.nullcontext()
    # Not inference_mode: a sharded network gathers weights here that training goes on with.
    with mode, torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        yield


def prepared(preprocessing: Preprocessing, device: torch.device, precision: Precision) -> Callable[[Tensor], Tensor]:
    """`preprocessing.normalise` for bytes on the device [B, 3, H, W], with its constants sent there once."""
    mean = torch.tensor(preprocessing.mean, device=device).view(3, 1, 1)
    std = torch.tensor(preprocessing.std, device=device).view(3, 1, 1)
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return lambda pixels: ((pixels.float() / 255 - mean) / std).to(kind)

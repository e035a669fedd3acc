"""Inference precision: the best that the device supports, or the one requested."""

from typing import get_args

import torch
from torch import nn

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.precision import HALF, Precision, PrecisionChoice
from vitrail.models.backbone import Backbone
from vitrail.models.kernels.float8_layers import float8_obstacle


def choose_precision(asked: PrecisionChoice, device: torch.device) -> Precision:
    """Resolves "auto" for a device: bfloat16 on a GPU that supports it natively, float32 elsewhere."""
    if asked not in get_args(PrecisionChoice):
        raise unknown_name("precision", str(asked), get_args(PrecisionChoice))
    if asked != "auto":
        return asked
    return "bfloat16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


def set_precision(network: nn.Module, precision: Precision, device: torch.device) -> None:
    """Converts the weights of a network in evaluation mode, in place. ConfigError if it cannot run in fp8 there."""
    if precision == "fp8":
        reason = float8_obstacle(device)
        if not reason:
            reason = network.float8_obstacle() if isinstance(network, Backbone) else "only plain ViTs support it"
        if reason:
            raise ConfigError(f"this network does not support precision=fp8 here: {reason}; use bfloat16")
    network.to(torch.bfloat16 if precision in HALF else torch.float32)
    if isinstance(network, Backbone):
        network.float8 = precision == "fp8"

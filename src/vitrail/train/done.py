"""What a step leaves."""

from typing import NamedTuple

from torch import Tensor


class Done(NamedTuple):
    """On the device: global sums by name, the gradient's norm, and whether there was an update."""

    names: tuple[str, ...]
    sums: Tensor
    norm: Tensor
    ok: Tensor

"""Polyak averaging of the weights (Section 4.1, with a factor of 0.9999)."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitrail.core.errors import ConfigError
from vitrail.optim.optimiser import copy_, local


class Average:
    """e ← f·e + (1 - f)·w after every step, from e = w at the start, over parameters sharded or whole.

    The average remembers about 1/(1 - f) steps. In a run that is not much longer than that, the initial weights still
    count for f^steps: 37% after 10,000 steps at 0.9999, 95% after 500. A skipped update leaves the parameters as they
    are; the average follows them all the same.
    """

    def __init__(self, params: Mapping[str, Tensor], factor: float) -> None:
        if not 0 <= factor < 1:
            raise ConfigError(f"average={factor} must be at least 0 and below 1")
        self.factor = factor
        self._params = dict(params)
        self._averages = {name: parameter.detach().clone() for name, parameter in self._params.items()}
        self._follow = get_ema_multi_avg_fn(factor)

    @torch.no_grad()
    def update(self) -> None:
        """Follows the parameters by one step."""
        if self._params:
            self._follow(_local(self._averages), _local(self._params), None)

    @contextmanager
    def swap_in(self) -> Generator[None]:
        """Puts the averages in place of the parameters, and the parameters back, to the bit, however the block ends.
        Do not update the averages inside."""
        with torch.no_grad():
            params = _local(self._params)
            kept = [parameter.clone() for parameter in params]
        try:
            with torch.no_grad():
                copy_(params, _local(self._averages))
            yield
        finally:
            with torch.no_grad():
                copy_(params, kept)

    def state(self) -> dict[str, Tensor]:
        """The averages under names like "average/blocks.0.mlp.expand.weight"; the tensors themselves, not copies."""
        return {f"average/{name}": tensor for name, tensor in self._averages.items()}


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors.values()]

"""Stochastic depth is torchvision's, to the bit."""

import pytest
import torch
from torchvision.ops import StochasticDepth as Theirs

from vitrail.models.layers import StochasticDepth


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_as_torchvision_does_it(p: float, dtype: torch.dtype, training: bool) -> None:
    z = torch.randn(64, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = []
    for module in (StochasticDepth(p), Theirs(p, "row")):
        torch.manual_seed(7)
        made.append(module.train(training)(z))
    assert torch.equal(*made)

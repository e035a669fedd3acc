"""Clipping as two functions is torch's clipping as one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.slow import gradients, params, put
from vitrail.optim.optimiser import clip_factor, total_norm


@given(st.integers(0, 50), st.floats(0.01, 1e4), st.sampled_from([1.0, 1e-8]))
def test_torchs_own(step, limit, scale):
    parameters, drawn, limit = params(), [gradient * scale for gradient in gradients(step)], limit * scale
    put(parameters, drawn)
    norm = total_norm(drawn)
    factor = clip_factor(norm, limit)
    clipped = [gradient * factor for gradient in drawn]
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(parameters, limit))
    for ours, parameter in zip(clipped, parameters, strict=True):
        assert torch.equal(ours, parameter.grad)


def test_the_norm_of_all_as_one_vector():
    drawn = gradients(1)
    squares = sum(float(value) ** 2 for gradient in drawn for value in gradient.double().flatten())
    norm = total_norm(drawn)
    assert norm.item() == pytest.approx(squares**0.5, rel=1e-6)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert total_norm([gradient.bfloat16() for gradient in drawn]).dtype == torch.float32
    assert total_norm([]).item() == 0


def test_limits():
    norm = torch.tensor(4.0)
    assert clip_factor(norm, 1.0).item() == pytest.approx(0.25)
    assert clip_factor(norm, 5.0).item() == 1
    assert clip_factor(norm, 0.0).item() == 1
    assert clip_factor(torch.tensor(0.0), 1.0).item() == 1
    assert clip_factor(torch.tensor(float("inf")), 1.0).item() == 0


def test_what_is_not_finite_shows_in_the_norm():
    for bad in (float("nan"), float("inf")):
        drawn = gradients(2)
        drawn[1][0] = bad
        assert not total_norm(drawn).isfinite()

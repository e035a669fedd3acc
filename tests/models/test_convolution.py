"""Weight standardisation in both forms, and the padding rules."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.models.tiny import RESNET
from vitrail.models.layers import RootPool, StandardisedConv, pad_same
from vitrail.models.resnet_config import ResNetConfig


def same(n: int, k: int, s: int) -> tuple[int, int]:
    """Padding before and behind: total = max((⌈n/s⌉ - 1)s + k - n, 0), half of it rounded down in front."""
    total = max((math.ceil(n / s) - 1) * s + k - n, 0)
    return math.floor(total / 2), total - math.floor(total / 2)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_same_padding_follows_the_formula(k: int, s: int) -> None:
    for n in range(1, 18):
        m = 19 - n  # the other axis is padded by its own size
        x = torch.ones(1, 1, n, m)
        padded = pad_same(x, k, s, value=-7.0)
        (top, bottom), (left, right) = same(n, k, s), same(m, k, s)
        assert padded.shape == (1, 1, top + n + bottom, left + m + right)
        assert torch.equal(padded[..., top : top + n, left : left + m], x)
        assert (padded == -7).sum() == padded.numel() - x.numel()
        out = F.conv2d(padded, torch.ones(1, 1, k, k), stride=s)
        assert out.shape[2:] == (math.ceil(n / s), math.ceil(m / s))


@pytest.mark.parametrize(("n", "k", "s", "pads"), [(224, 7, 2, (2, 3)), (112, 3, 2, (0, 1)), (7, 3, 2, (1, 1))])
def test_same_padding_of_the_published_sizes(n: int, k: int, s: int, pads: tuple[int, int]) -> None:
    marked = pad_same(torch.ones(1, 1, n, n), k, s)[0, 0, :, n // 2].nonzero()
    assert (marked[0].item(), pad_same(torch.ones(1, 1, n, n), k, s).shape[2] - 1 - marked[-1].item()) == pads


def test_nothing_to_pad_is_the_same_tensor() -> None:
    x = torch.ones(1, 1, 4, 4)
    assert pad_same(x, 1, 2) is x


def conv(config: ResNetConfig, side: int = 3, stride: int = 1) -> StandardisedConv:
    module = StandardisedConv(config, 4, 6, side, stride).double()
    with torch.no_grad():
        module.weight.copy_(0.02 * torch.randn(6, 4, side, side) + 0.1 * torch.arange(6).reshape(6, 1, 1, 1))
    return module


@pytest.mark.parametrize("eps", [1e-10, 1e-5, 1e-2])
@pytest.mark.parametrize("form", ["std+eps", "sqrt(var+eps)"])
def test_standardised_kernel(form: str, eps: float) -> None:
    module = conv(replace(RESNET, standardisation=form, standardisation_eps=eps))
    w = module.weight.detach().numpy()
    expected = np.zeros_like(w)
    for channel in range(6):
        kernel = w[channel]
        mean = kernel.sum() / kernel.size
        variance = ((kernel - mean) ** 2).sum() / kernel.size  # biased
        expected[channel] = (kernel - mean) / (
            math.sqrt(variance) + eps if form == "std+eps" else math.sqrt(variance + eps)
        )
    np.testing.assert_allclose(module.standardise_kernel().detach().numpy(), expected, atol=1e-12, rtol=0)


def test_the_two_forms_differ() -> None:
    a, b = (replace(RESNET, standardisation=form, standardisation_eps=1e-2) for form in ("std+eps", "sqrt(var+eps)"))
    one, two = conv(a), conv(b)
    two.load_state_dict(one.state_dict())
    assert (one.standardise_kernel() - two.standardise_kernel()).abs().max() > 1e-2


def test_a_kernel_shifted_and_scaled_is_the_same_convolution() -> None:
    module, x = conv(RESNET), torch.randn(1, 4, 5, 6, dtype=torch.float64)
    before = module(x)
    with torch.no_grad():
        module.weight.mul_(3).add_(0.7)
    torch.testing.assert_close(module(x), before, atol=1e-5, rtol=0)


def test_a_constant_kernel_stays_finite() -> None:
    for form in ("std+eps", "sqrt(var+eps)"):
        module = conv(replace(RESNET, standardisation=form))
        with torch.no_grad():
            module.weight.fill_(0.3)
        assert module.standardise_kernel().isfinite().all()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 3, 7])
@pytest.mark.parametrize("size", [(8, 7), (9, 12)])
@pytest.mark.parametrize("padding", ["same", "symmetric"])
def test_convolution_pads_by_its_configs_rule(padding: str, size: tuple[int, int], side: int, stride: int) -> None:
    module = conv(replace(RESNET, padding=padding), side, stride)
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    if padding == "same":
        (top, bottom), (left, right) = (same(n, side, stride) for n in size)
    else:
        top = bottom = left = right = side // 2
    padded = F.pad(x, (left, right, top, bottom))
    expected = F.conv2d(padded, module.standardise_kernel(), stride=stride)
    torch.testing.assert_close(module(x), expected, atol=1e-12, rtol=0)
    assert module.bias is None


def test_the_two_rules_differ_on_even_sizes_only() -> None:
    one, other = conv(replace(RESNET, padding="same"), 3, 2), conv(RESNET, 3, 2)
    other.load_state_dict(one.state_dict())
    odd, even = (torch.randn(1, 4, n, n, dtype=torch.float64) for n in (9, 8))
    torch.testing.assert_close(one(odd), other(odd), atol=1e-12, rtol=0)
    assert one(even).shape == other(even).shape
    assert (one(even) - other(even)).abs().max() > 0.1


def loop_pool(x: torch.Tensor, fill: float, before: int, behind: int) -> torch.Tensor:
    padded = F.pad(x, (before, behind, before, behind), value=fill)
    rows, columns = ((n - 3) // 2 + 1 for n in padded.shape[2:])
    out = torch.empty(*x.shape[:2], rows, columns)
    for r in range(rows):
        for c in range(columns):
            out[..., r, c] = padded[..., 2 * r : 2 * r + 3, 2 * c : 2 * c + 3].amax(dim=(2, 3))
    return out


def test_root_pool_in_its_four_forms() -> None:
    x = -torch.rand(2, 4, 8, 8) - 1  # negative everywhere, as nothing without a ReLU forbids
    infinity = replace(RESNET, pool_padding="infinity")
    assert torch.equal(RootPool(RESNET)(x), loop_pool(x, 0.0, 1, 1))
    assert torch.equal(RootPool(infinity)(x), loop_pool(x, -math.inf, 1, 1))
    assert torch.equal(RootPool(replace(infinity, padding="same"))(x), loop_pool(x, -math.inf, 0, 1))
    assert torch.equal(RootPool(replace(RESNET, padding="same"))(x), loop_pool(x, 0.0, 0, 1))
    zero, minus = RootPool(RESNET)(x), RootPool(infinity)(x)
    edge = torch.zeros(4, 4, dtype=torch.bool)
    edge[0] = edge[:, 0] = True
    assert torch.equal((zero != minus).any(dim=1).any(dim=0), edge)
    assert zero[..., 0, :].abs().max() == 0
    assert torch.equal(RootPool(RESNET)(x.relu()), RootPool(infinity)(x.relu()))


def test_3x3_root_has_no_pool() -> None:
    x = torch.randn(1, 4, 8, 8)
    assert RootPool(replace(RESNET, root="3x3"))(x) is x

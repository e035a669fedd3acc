"""Appendix A: three ways to compute the same attention, and its two 1-D forms on a grid."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.models import attention
from vitrail.models.attention import Attention, Places, attention_weights, relative_logits
from vitrail.models.layers import initialise


def fresh(width: int = 12, heads: int = 3, **options: bool) -> Attention:
    module = Attention(width, heads, **options).double()
    initialise(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module.eval()


def by_hand(module: Attention, z: Tensor, offsets: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Eqs. 5-8 head by head and query by query: outputs [B, T, D] and weights [B, k, T, T]."""
    x = z.numpy()
    batch, tokens, width = x.shape
    size = width // module.heads
    u = module.qkv.weight.detach().numpy().T
    bias = np.zeros(3 * width) if module.qkv.bias is None else module.qkv.bias.detach().numpy()
    weights = np.zeros((batch, module.heads, tokens, tokens))
    joined = np.zeros((batch, tokens, width))
    for b in range(batch):
        for head in range(module.heads):
            own = [slice(part * width + head * size, part * width + (head + 1) * size) for part in range(3)]
            q, k, v = (x[b] @ u[:, part] + bias[part] for part in own)  # Eq. 5
            for i in range(tokens):
                logits = np.zeros(tokens)
                for j in range(tokens):
                    key = k[j] if offsets is None else k[j] + offsets[i - j + tokens - 1].numpy()
                    logits[j] = q[i] @ key / math.sqrt(size)
                row = np.exp(logits - logits.max())
                weights[b, head, i] = row / row.sum()  # Eq. 6
            joined[b, :, own[0]] = weights[b, head] @ v  # Eq. 7
    out = joined @ module.out.weight.detach().numpy().T  # Eq. 8
    return out if module.out.bias is None else out + module.out.bias.detach().numpy(), weights


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"qkv_bias": False, "out_bias": False}])
@pytest.mark.parametrize("relative", [False, True])
def test_equals_equations_5_to_8(options: dict[str, bool], relative: bool) -> None:
    module, z = fresh(**options), torch.randn(2, 5, 12, dtype=torch.float64)
    offsets = torch.randn(9, 4, dtype=torch.float64) if relative else None
    output, weights = by_hand(module, z, offsets)
    places = Places((1, 5), offsets)
    with torch.no_grad():
        np.testing.assert_allclose(module(z, places).numpy(), output, atol=1e-12)
        np.testing.assert_allclose(module.weights(z, places).numpy(), weights, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_fused_equals_explicit(biased: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)
    bias = torch.randn(2, 4, 7, 7, dtype=torch.float64) if biased else None
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(attention_weights(q, k, bias) @ v, fused, atol=1e-12, rtol=0)


def test_weights_are_distributions_over_keys() -> None:
    q, k = 5 * torch.randn(2, 3, 4, 9, 6, dtype=torch.float64)
    weights = attention_weights(q, k)
    assert weights.shape == (3, 4, 9, 9)
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 4, 9, dtype=torch.float64), atol=1e-14, rtol=0)
    assert (weights.sum(dim=-2) - 1).abs().max() > 0.1  # over queries they sum to anything


def test_logits_are_scaled_by_the_root_of_the_head_size() -> None:
    q = torch.eye(4, dtype=torch.float64) * 6
    weights = attention_weights(q, q)
    hot, cold = math.exp(36 / 2), math.exp(0)
    assert weights[0, 0].item() == pytest.approx(hot / (hot + 3 * cold), abs=1e-15)


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_relative_logits_against_a_double_loop(tokens: int) -> None:
    q, offsets = torch.randn(2, 3, tokens, 4, dtype=torch.float64), torch.randn(2 * tokens - 1, 4, dtype=torch.float64)
    slow = torch.zeros(2, 3, tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for j in range(tokens):
            slow[..., i, j] = q[..., i, :] @ offsets[i - j + tokens - 1] / 2  # √4
    torch.testing.assert_close(relative_logits(q, offsets), slow, atol=1e-14, rtol=0)


def test_projection_stacks_q_then_k_then_v() -> None:
    module, z = fresh(), torch.randn(1, 4, 12, dtype=torch.float64)
    with torch.no_grad():
        module.qkv.weight[12:24] = 0
        module.qkv.bias[12:24] = 0
        q, k, v = module.project(z)
    assert q.shape == k.shape == v.shape == (1, 3, 4, 4)
    assert k.abs().max() == 0
    assert q.abs().min() > 0
    assert v.abs().min() > 0


def test_attention_dropout_acts_on_weights_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Tensor, dropout_p: float, **rest: Tensor | None) -> Tensor:
        seen.append(dropout_p)
        return real(*args, dropout_p=0.0, **rest)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    module, z = Attention(12, 3, dropout=0.3), torch.randn(1, 4, 12)
    module.train()(z)
    module.eval()(z)
    assert seen == [0.3, 0.0]


GRID = (3, 5)
FOLDS = {
    axis: tuple(partial(fold, columns=axis == "columns") for fold in (attention.split_lines, attention.merge_lines))
    for axis in ("rows", "columns")
}


@pytest.mark.parametrize("axis", FOLDS)
def test_folding_there_and_back(axis: str) -> None:
    fold, unfold = FOLDS[axis]
    z = torch.randn(2, 15, 4)
    folded = fold(z, GRID)
    assert folded.shape == ((6, 5, 4) if axis == "rows" else (10, 3, 4))
    assert torch.equal(unfold(folded, GRID), z)


def test_folded_sequences_are_the_rows_and_columns_of_the_grid() -> None:
    place = torch.arange(30.0).reshape(2, 15, 1)  # image 1 continues where image 0 ends
    assert FOLDS["rows"][0](place, GRID)[4].flatten().tolist() == [20, 21, 22, 23, 24]
    assert FOLDS["columns"][0](place, GRID)[1].flatten().tolist() == [1, 6, 11]
    assert FOLDS["columns"][0](place, GRID)[5].flatten().tolist() == [15, 20, 25]


@pytest.mark.parametrize("axis", FOLDS)
def test_axial_attention_is_blind_to_other_lines_of_the_grid(axis: str) -> None:
    fold, unfold = FOLDS[axis]
    module, z = fresh(), torch.randn(2, 15, 12, dtype=torch.float64)
    other = z.clone().unflatten(1, GRID)
    where = (slice(None), 1) if axis == "rows" else (slice(None), slice(None), 1)
    other[where] += 1
    with torch.no_grad():
        before = unfold(module(fold(z, GRID)), GRID).unflatten(1, GRID)
        after = unfold(module(fold(other.flatten(1, 2), GRID)), GRID).unflatten(1, GRID)
    changed = (before != after).any(dim=(0, 3))
    expected = torch.zeros(GRID, dtype=torch.bool)
    expected[where[1:]] = True
    assert torch.equal(changed, expected)

"""The heads of contrast and distillation against torch's own layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.distributed.pair import together
from tests.objectives.taught import ALONE
from vitrail.distributed.process_group import World
from vitrail.objectives.projection_heads import BatchNorm, NormedMLP, PrototypeHead, Prototypes, ValidRows, mlp_macs


def rows(valid: Tensor, world: World = ALONE) -> ValidRows:
    return ValidRows.from_mask(valid, world)


def test_a_batch_norm_is_torchs_over_the_rows_that_count() -> None:
    torch.manual_seed(0)
    norm, theirs = BatchNorm(5, affine=True), nn.BatchNorm1d(5)
    with torch.no_grad():
        for own, other in zip(norm.parameters(), theirs.parameters(), strict=True):
            own.copy_(other.normal_())
    x = torch.randn(2, 7, 5) * 3 + 2
    valid = torch.tensor([True, True, False, True, True, False, True])
    x[:, ~valid] = 1e4
    found = norm(x, rows(valid))
    for view in range(2):
        assert torch.allclose(found[view][valid], theirs(x[view][valid]), atol=1e-5)


def test_a_batch_without_any_picture_stays_finite() -> None:
    mlp = NormedMLP(4, 6, 3)
    x = torch.randn(3, 4, requires_grad=True)
    out = mlp(x, rows(torch.zeros(3, dtype=torch.bool)))
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_normed_mlp_is_mocos() -> None:
    torch.manual_seed(0)
    mlp = NormedMLP(4, 6, 6, 3)
    assert [name for name, _ in mlp.named_parameters()] == [
        *(f"layers.{at}.weight" for at in range(3)),
        *(f"norms.{at}.{name}" for at in range(2) for name in ("weight", "bias")),
    ]
    x = torch.randn(8, 4)
    expected = x
    for at in range(3):
        expected = F.batch_norm(F.linear(expected, mlp.layers[at].weight), None, None, training=True)
        expected = expected.relu() if at < 2 else expected
    assert torch.allclose(mlp(x, rows(torch.ones(8, dtype=torch.bool))), expected, atol=1e-5)


def normed(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and gradients of this process's part of a batch, and of the weights in all."""
    torch.manual_seed(0)
    mlp = NormedMLP(4, 6, 3).double()
    x, valid = torch.randn(8, 4, dtype=torch.float64) * 2 + 1, torch.arange(8) != 1
    weights = torch.randn(8, 3, dtype=torch.float64)
    mine, here, by = (part.chunk(world.size)[world.rank] for part in (x, valid, weights))
    mine = mine.clone().requires_grad_()
    out = mlp(mine, rows(here, world))
    torch.where(here[:, None], out**3 * by, 0.0).sum().backward()
    of_weights = world.sum_(torch.cat([p.grad.flatten() for p in mlp.parameters() if p.grad is not None]))
    assert mine.grad is not None
    return out.detach(), mine.grad, of_weights


@pytest.mark.slow
def test_two_processes_norm_as_one_there_and_back() -> None:
    out, of_x, of_weights = normed(ALONE)
    parts = together(normed)
    assert torch.allclose(torch.cat([part[0] for part in parts]), out, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([part[1] for part in parts]), of_x, rtol=0, atol=1e-12)
    assert torch.allclose(parts[1][2], of_weights, rtol=0, atol=1e-12)


def test_prototypes_are_a_weight_normed_layer_of_length_one() -> None:
    torch.manual_seed(0)
    own = Prototypes(4, 6)
    theirs = weight_norm(nn.Linear(4, 6, bias=False))
    with torch.no_grad():
        theirs.parametrizations.weight.original1.copy_(own.weight)
        theirs.parametrizations.weight.original0.fill_(1.0)
    x = torch.randn(3, 4)
    assert torch.allclose(own(x), theirs(x), atol=1e-6)
    before = own(x)
    with torch.no_grad():
        own.weight.mul_(torch.rand(6, 1) + 0.5)
    assert torch.allclose(own(x), before, atol=1e-6)  # lengths do not count


def test_a_prototype_head_answers_with_cosines() -> None:
    torch.manual_seed(0)
    head = PrototypeHead(4, hidden=8, bottleneck=3, outputs=50)
    x = torch.randn(9, 4)
    a, b, c = head.layers
    hidden = F.normalize(c(F.gelu(b(F.gelu(a(x))))), dim=-1)
    assert torch.allclose(head(x), hidden @ F.normalize(head.last.weight, dim=-1).T, atol=1e-6)
    assert head(x).abs().max() <= 1 + 1e-6


def test_in_half_precision_statistics_are_taken_in_float32() -> None:
    torch.manual_seed(0)
    mlp = NormedMLP(4, 6, 3)
    x, all_ = torch.randn(64, 4) + 3, rows(torch.ones(64, dtype=torch.bool))
    exact = mlp(x, all_)
    low = mlp.bfloat16()(x.bfloat16(), all_)
    assert low.dtype == torch.float32
    assert low.mean(0).abs().max() < 1e-6
    assert (low - exact).abs().mean() < 0.05


def test_macs() -> None:
    assert mlp_macs(4, 6, 3) == 4 * 6 + 6 * 3

"""What processes give each other within a forward pass, and the gradients that come back."""

import warnings

import pytest
import torch
from torch import Tensor

from tests.distributed.pair import together
from vitrail.distributed.process_group import World, gather_rows, sum_across

ALONE = World(device=torch.device("cpu"))


def given(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


def collected(world: World) -> tuple[Tensor, Tensor, bool]:
    mine = given(world.rank).requires_grad_()
    flags = torch.tensor([world.rank == 1, True])
    found = gather_rows(mine, world)
    transposed = gather_rows(mine.T, world)  # not contiguous
    assert torch.equal(transposed, torch.cat([given(rank).T for rank in range(world.size)]))
    return found.clone(), gather_rows(flags, world).clone(), found.requires_grad


@pytest.mark.slow
def test_rows_come_in_the_order_of_ranks_without_gradient() -> None:
    for rows, flags, differentiable in together(collected, size=3):
        assert torch.equal(rows, torch.cat([given(rank) for rank in range(3)]))
        assert flags.tolist() == [False, True, True, True, False, True]
        assert not differentiable


def added(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Each process has a loss of its own, of the sum over all: (rank + 1)·Σ sum³."""
    mine = given(world.rank).requires_grad_()
    total = sum_across(mine, world)
    ((world.rank + 1) * total**3).sum().backward()
    assert mine.grad is not None
    return mine.detach(), total.detach(), mine.grad


@pytest.mark.slow
def test_a_sum_is_the_same_everywhere_and_its_gradient_is_that_of_all_losses() -> None:
    whole = [given(rank).requires_grad_() for rank in range(2)]
    total = whole[0] + whole[1]
    (total**3 + 2 * total**3).sum().backward()
    for rank, (mine, found, gradient) in enumerate(together(added)):
        assert torch.equal(mine, given(rank))  # what was put in stays
        assert torch.equal(found, total.detach())
        expected = whole[rank].grad
        assert expected is not None
        assert torch.allclose(gradient, expected, rtol=1e-6)


def test_alone_both_do_nothing() -> None:
    mine = given(0).requires_grad_()
    assert sum_across(mine, ALONE) is mine
    rows = gather_rows(mine, ALONE)
    assert rows.data_ptr() == mine.data_ptr()
    assert not rows.requires_grad


def compiled(world: World) -> tuple[Tensor, Tensor]:
    def work(x: Tensor) -> Tensor:
        return (sum_across(x.square(), world) * gather_rows(x, world)[:2]).sum()

    mine = given(world.rank).requires_grad_()
    with warnings.catch_warnings():
        # Of torch to itself: its compiler makes what it says should not be made.
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
        loss: Tensor = torch.compile(work, fullgraph=True, backend="aot_eager")(mine)
    loss.backward()
    assert mine.grad is not None
    other = given(world.rank).requires_grad_()
    expected = work(other)
    expected.backward()
    assert other.grad is not None
    assert torch.equal(loss, expected)
    return mine.grad, other.grad


@pytest.mark.slow
def test_they_can_be_compiled_without_a_break() -> None:
    for found, expected in together(compiled):
        assert torch.allclose(found, expected, rtol=1e-6)

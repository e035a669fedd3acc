"""The assignment against scipy's, target by target where it is the only one of least cost."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitrail.models.kernels.fused_ops import TRITON
from vitrail.tasks.mask_queries.matching import LARGEST, assign_together, match


def draw_problem(seed: int) -> tuple[Tensor, Tensor]:
    """A few problems of one size, with places that are empty; every third has costs with many ties."""
    rng = np.random.default_rng(seed)
    problems, targets, queries = rng.integers(1, 6), rng.integers(1, 14), rng.integers(1, 14)
    costs = rng.normal(size=(problems, targets, queries)) * 5
    if seed % 3 == 0:
        costs = costs.round().clip(-3, 3)
    present = rng.random((problems, targets)) < rng.choice([0.0, 0.3, 0.7, 1.0])
    return torch.tensor(costs, dtype=torch.float32), torch.tensor(present)


def check_against_scipy(costs: Tensor, present: Tensor, found: Tensor, *, tied: bool = False) -> None:
    assert found.dtype == torch.int64
    assert found.shape == present.shape
    for cost, there, mine in zip(costs.double().numpy(), present.numpy(), found.numpy(), strict=True):
        rows = np.flatnonzero(there)
        truth = np.full(len(there), -1)
        chosen, columns = linear_sum_assignment(cost[rows])
        truth[rows[chosen]] = columns
        matched = np.flatnonzero(mine >= 0)
        assert set(matched) <= set(rows)
        assert len(matched) == len(columns) == len(set(mine[matched]))
        best = cost[rows[chosen], columns].sum()
        assert abs(cost[matched, mine[matched]].sum() - best) <= 1e-6 * max(abs(best), 1)
        assert tied or (mine == truth).all()


@pytest.mark.parametrize("part", range(4))
def test_thousand_problems_match_as_scipy_does(part: int) -> None:
    for seed in range(part * 90, part * 90 + 90):
        costs, present = draw_problem(seed)
        check_against_scipy(costs, present, match(costs, present), tied=seed % 3 == 0)


def test_costs_that_are_no_numbers_are_taken_last() -> None:
    costs = torch.tensor([[[float("nan"), 5.0, 9.0], [float("inf"), 4.0, 9.0], [1.0, 2.0, float("-inf")]]])
    # Three targets need all three queries, so one of each must go to a column with something broken in it.
    found = match(costs, torch.ones(1, 3, dtype=torch.bool))
    assert found.tolist() == [[2, 1, 0]]
    assert match(costs[:, :2], torch.ones(1, 2, dtype=torch.bool)).tolist() == [[2, 1]]
    assert match(torch.full((1, 2, 2), float("nan")), torch.ones(1, 2, dtype=torch.bool)).sort(1)[0].tolist() == [
        [0, 1]
    ]
    assert LARGEST == 1e10


def test_no_targets_and_no_problems() -> None:
    assert match(torch.zeros(3, 0, 4), torch.zeros(3, 0, dtype=torch.bool)).shape == (3, 0)
    assert match(torch.zeros(0, 2, 4), torch.zeros(0, 2, dtype=torch.bool)).shape == (0, 2)
    assert (match(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)) == -1).all()


@pytest.mark.slow
def test_problems_that_advance_together_match_as_scipy_does() -> None:
    for seed in range(24):
        costs, present = draw_problem(seed)
        check_against_scipy(costs, present, assign_together(costs, present), tied=seed % 3 == 0)


def test_operator_is_described_to_the_compiler() -> None:
    from vitrail.tasks.mask_queries.matching import assign

    torch.library.opcheck(assign, draw_problem(7), test_utils=("test_schema", "test_faketensor"))


INTERPRETED = """
import torch
from tests.tasks.mask_queries.test_matching import check_against_scipy, draw_problem
from vitrail.models.kernels import matching
for seed in range(8):
    costs, present = draw_problem(seed)
    check_against_scipy(costs, present, matching.match(costs, present), tied=seed % 3 == 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="no Triton here")
def test_kernel_interpreted_matches_as_scipy_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_kernel_matches_as_scipy_does() -> None:
    for seed in range(300):
        costs, present = draw_problem(seed)
        check_against_scipy(costs, present, match(costs.cuda(), present.cuda()).cpu(), tied=seed % 3 == 0)


@pytest.mark.gpu
def test_kernel_can_be_recorded() -> None:
    costs, present = torch.randn(80, 32, 200, device="cuda"), torch.rand(80, 32, device="cuda") < 0.5
    match(costs, present)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = match(costs, present)
    costs.normal_()
    graph.replay()
    check_against_scipy(costs.cpu(), present.cpu(), found.cpu())

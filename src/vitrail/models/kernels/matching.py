"""Minimum-cost assignment on a GPU: one program solves each problem in its own loop, so nothing waits for the host.

Imported only where a GPU is used. The algorithm is shortest augmenting paths (Jonker and Volgenant 1987; Crouse 2016):
targets are assigned one by one, each along the path of least reduced cost to a free column. The state of a column (its
price, its owner, the owner's price) stays in registers; costs are read row by row.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false

WARP_COLUMNS = 128  # up to here one warp suffices, and its reductions need no shared memory


@triton.jit
def _match_kernel(costs, present, out, targets: tl.constexpr, queries: tl.constexpr, wide: tl.constexpr):
    problem = tl.program_id(0).to(tl.int64)
    costs += problem * targets * queries
    present += problem * targets
    column = tl.arange(0, wide)
    count = tl.program_id(0) * 0
    for row in range(targets):
        count += tl.load(present + row).to(tl.int32)
    there = column < tl.maximum(count, queries)  # columns past the queries are free: their targets stay unmatched
    price = tl.zeros((wide,), tl.float32)
    owner = tl.zeros((wide,), tl.int32) - 1
    owner_price = tl.zeros((wide,), tl.float32)
    for row in range(targets):
        wanted = tl.load(present + row).to(tl.int32)
        shortest = tl.zeros((wide,), tl.float32) + float("inf")
        before = tl.zeros((wide,), tl.int32) - 1  # the previous column on the path to each; -1 for the row itself
        closed = tl.zeros((wide,), tl.int32)
        current = row + 0 * count
        current_price = tl.sum(price, 0) * 0.0
        length = current_price
        at = 0 * count - 1
        sink = tl.where(wanted > 0, at, 0)
        while sink < 0:
            cost = tl.load(costs + current * queries + column, column < queries, other=0.0)
            reached = length + (cost - current_price - price)
            closer = (reached < shortest) & (closed == 0) & there
            shortest = tl.where(closer, reached, shortest)
            before = tl.where(closer, at, before)
            choice = tl.where(there & (closed == 0), shortest, float("inf"))
            length = tl.min(choice, 0)
            at = tl.min(tl.where(choice == length, column, wide - 1), 0)
            closed = tl.where(column == at, 1, closed)
            current = tl.sum(tl.where(column == at, owner, 0), 0)
            current_price = tl.sum(tl.where(column == at, owner_price, 0.0), 0)
            sink = tl.where(current < 0, at, sink)
        change = tl.where(closed > 0, length - shortest, 0.0)
        price -= change
        owner_price += change
        at = tl.where(wanted > 0, sink, -1)
        while at >= 0:
            source = tl.sum(tl.where(column == at, before, 0), 0)
            moved = tl.sum(tl.where(column == source, owner, 0), 0)
            moved_price = tl.sum(tl.where(column == source, owner_price, 0.0), 0)
            owner = tl.where(column == at, tl.where(source < 0, row, moved), owner)
            owner_price = tl.where(column == at, tl.where(source < 0, length, moved_price), owner_price)
            at = source
    tl.store(out + problem * targets + owner, column.to(tl.int64), (owner >= 0) & (column < queries))


def match(costs: Tensor, present: Tensor) -> Tensor:
    """The query of each target, or -1: float32 costs [P, N, Q] and a mask of present targets [P, N] -> int64 [P, N]."""
    problems, targets, queries = costs.shape
    out = torch.full((problems, targets), -1, dtype=torch.int64, device=costs.device)
    if problems and targets:
        wide = 1 << (max(targets, queries) - 1).bit_length()
        warps = 1 if wide <= WARP_COLUMNS else 4
        kernel = cast(Any, _match_kernel)
        there = present.contiguous().to(torch.uint8)
        kernel[(problems,)](
            costs.contiguous(), there, out, targets=targets, queries=queries, wide=wide, num_warps=warps
        )
    return out

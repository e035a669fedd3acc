"""Bipartite (Hungarian) matching of queries and segments at minimum total cost, for many images at once.

On a CPU the problems are solved one after the other. On other devices matching never synchronises with the host: with
Triton each problem is a program (models/kernels/matching.py); without it all problems advance together, step by step.
"""

import math
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.models.kernels.fused_ops import TRITON

Costs: TypeAlias = NDArray[np.float64]

LARGEST: Final = 1e10  # replaces costs that are not finite, so that such pairs are matched last


def match(costs: Tensor, present: Tensor) -> Tensor:
    """Matches each target with a query: costs [P, N, Q] of P problems, and which of the N targets are `present` [P, N],
    to queries int64 [P, N]. It is -1 for an absent target, and for one left over if there are more targets than
    queries."""
    costs = torch.nan_to_num(costs.float(), LARGEST, LARGEST, LARGEST).clamp(-LARGEST, LARGEST)
    return assign(costs, present)


@torch.library.custom_op("vitrail::assign", mutates_args=())
def assign(costs: Tensor, present: Tensor) -> Tensor:
    """`match` for finite costs in float32."""
    if costs.is_cuda and TRITON:
        from vitrail.models.kernels import matching

        return matching.match(costs, present)
    return assign_in_turn(costs, present) if costs.device.type == "cpu" else assign_together(costs, present)


@assign.register_fake
def _(costs: Tensor, present: Tensor) -> Tensor:
    return torch.empty_like(present, dtype=torch.int64)


def assign_in_turn(costs: Tensor, present: Tensor) -> Tensor:
    """Solves one problem after the other, on the host."""
    found = np.full(present.shape, -1, np.int64)
    for cost, there, place in zip(costs.double().numpy(), present.numpy(), found, strict=True):
        rows = np.flatnonzero(there)
        if len(rows) <= cost.shape[1]:
            place[rows] = assign_rows(cost[rows])
        else:  # each query chooses its target
            place[rows[assign_rows(cost[rows].T)]] = np.arange(cost.shape[1])
    return torch.from_numpy(found)


def assign_rows(costs: Costs) -> NDArray[np.int64]:
    """Assigns a column to each row of costs [R, C], R <= C, by shortest augmenting paths (Jonker and Volgenant 1987;
    Crouse 2016).

    Each row first takes its cheapest column, unless an earlier row has it. The remaining rows are added one by one;
    each reassigns the rows along the shortest path to a free column."""
    count, width = costs.shape
    if not count or not width:
        return np.zeros(count, np.int64)
    chosen, columns, owner, left = costs.argmin(1).tolist(), [-1] * count, [-1] * width, list[int]()
    for row, column in enumerate(chosen):
        if owner[column] < 0:
            owner[column], columns[row] = row, column
        else:
            left.append(row)
    if left:
        row_prices, column_prices = costs.min(1), np.zeros(width)
        for row in left:
            add_row(row, costs, row_prices, column_prices, columns, owner)
    return np.array(columns)


def add_row(
    new: int,
    costs: Costs,
    row_prices: Costs,
    column_prices: Costs,
    columns: list[int],
    owner: list[int],
) -> None:
    """Finds the shortest path from a row to a free column (Dijkstra) and reassigns the rows along it, in place."""
    away = column_prices.copy()  # -inf where a column is done, so that it never gets closer again
    shortest, before = np.full(len(away), np.inf), np.full(len(away), -1)
    ahead = shortest.copy()  # as `shortest`, without the columns that are done
    done, row, length = list[int](), new, 0.0
    while True:
        reached: NDArray[Any] = costs[row] - away
        reached += length - row_prices[row]
        closer = reached < shortest
        np.copyto(shortest, reached, where=closer)
        np.copyto(ahead, reached, where=closer)
        before[closer] = row
        column = int(ahead.argmin())
        length = float(ahead[column])
        if owner[column] < 0:
            break
        done.append(column)
        ahead[column], away[column] = np.inf, -np.inf
        row = owner[column]
    row_prices[new] += length
    for other in done:
        change = length - shortest[other]
        row_prices[owner[other]] += change
        column_prices[other] -= change
    row = -1
    while row != new:  # backwards: each row on the path gives its column to the one before
        row = int(before[column])
        owner[column] = row
        column, columns[row] = columns[row], column


def assign_together(costs: Tensor, present: Tensor) -> Tensor:
    """Solves all problems together by shortest augmenting paths (Jonker and Volgenant 1987; Crouse 2016), with as many
    steps as the longest could need."""
    targets, queries = costs.shape[1:]
    if not costs.numel():
        return torch.full_like(present, -1, dtype=torch.int64)
    counts = present.sum(1)
    columns = torch.arange(max(targets, queries), device=costs.device)
    costs = F.pad(costs if costs.device.type == "mps" else costs.double(), (0, len(columns) - queries))
    if targets > queries:
        # The columns after the queries cost 0 and mean "unmatched": one for each target in excess of the queries.
        costs = costs.masked_fill((columns >= counts.clamp(min=queries)[:, None])[:, None], math.inf)
    search = PathSearch(costs)
    left = search.add_undisputed(present)
    counts, order = left.sum(1), left.byte().argsort(dim=1, descending=True, stable=True)
    for turn in range(targets):
        search.add(order[:, turn], turn < counts, longest=targets)
    # Inverts owner (column to target) to target to column; free columns write to an extra place.
    found = costs.new_full((len(costs), targets + 1), -1, dtype=torch.int64)
    found.scatter_(1, torch.where(search.owner < 0, targets, search.owner), columns.expand_as(search.owner))
    return torch.where(found < queries, found, -1)[:, :targets].contiguous()


class PathSearch:
    """The state of P problems, per column [P, C]: its price, the target that owns it, and that target's price."""

    def __init__(self, costs: Tensor) -> None:
        self.costs = costs
        self.price = costs.new_zeros(costs.shape[0], costs.shape[2])
        self.owner = torch.full_like(self.price, -1, dtype=torch.int64)
        self.owner_price = torch.zeros_like(self.price)
        self.problems = torch.arange(len(costs), device=costs.device)

    def add_undisputed(self, present: Tensor) -> Tensor:
        """Gives each column to the first target whose cheapest column it is. Returns the targets that get none."""
        cheapest, chosen = self.costs.min(2)
        targets = present.shape[1]
        rows = torch.arange(targets, device=present.device)
        claims = torch.full_like(self.owner, targets)
        claims.scatter_reduce_(1, chosen, torch.where(present, rows, targets), "amin")
        self.owner = torch.where(claims < targets, claims, -1)
        self.owner_price = torch.where(claims < targets, cheapest.gather(1, claims.clamp(max=targets - 1)), 0.0)
        return present & (self.owner.gather(1, chosen) != rows)

    def add(self, rows: Tensor, wanted: Tensor, *, longest: int) -> None:
        """Adds one target to each problem, `rows` [P], where it is `wanted` [P]. No path has more than `longest`
        steps."""
        sink, length, shortest, before, scanned = self.find_paths(rows, wanted, longest)
        change = torch.where(scanned, length[:, None] - shortest, 0.0)
        self.price -= change
        self.owner_price += change
        at = torch.where(wanted, sink, -1)
        for _ in range(longest):
            moving = at >= 0
            place = at.clamp(min=0)[:, None]
            source = before.gather(1, place)
            start, held = source < 0, source.clamp(min=0)
            owner = torch.where(start, rows[:, None], self.owner.gather(1, held))
            price = torch.where(start, length[:, None], self.owner_price.gather(1, held))
            there = moving[:, None]
            self.owner.scatter_(1, place, torch.where(there, owner, self.owner.gather(1, place)))
            self.owner_price.scatter_(1, place, torch.where(there, price, self.owner_price.gather(1, place)))
            at = torch.where(moving, source[:, 0], -1)

    def find_paths(self, rows: Tensor, wanted: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Searches for the nearest free column (Dijkstra). Returns that column [P], the length of its path [P], the
        lengths to all columns [P, C], their predecessors (-1 for the row itself), and which were scanned."""
        shortest = torch.full_like(self.price, math.inf)
        before = torch.full_like(self.owner, -1)
        scanned = torch.zeros_like(self.owner, dtype=torch.bool)
        length = torch.zeros_like(self.price[:, 0])
        price, at = length, torch.full_like(rows, -1)
        sink = at + (~wanted).long()  # -1 while the search goes on
        for _ in range(longest):
            going = sink < 0
            offset = (length - price)[:, None]
            reached = self.costs[self.problems, rows.clamp(min=0)] - self.price + offset
            closer = (reached < shortest) & ~scanned & going[:, None]
            shortest = torch.where(closer, reached, shortest)
            before = torch.where(closer, at[:, None], before)
            nearest, chosen = shortest.masked_fill(scanned, math.inf).min(1)
            length, at = torch.where(going, nearest, length), torch.where(going, chosen, at)
            place = at.clamp(min=0)[:, None]
            scanned = scanned.scatter(1, place, scanned.gather(1, place) | going[:, None])
            rows, price = self.owner.gather(1, place)[:, 0], self.owner_price.gather(1, place)[:, 0]
            sink = torch.where(going & (rows < 0), at, sink)
        return sink, length, shortest, before, scanned

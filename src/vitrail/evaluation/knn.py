"""Nearest neighbours of frozen features by the cosine of their angle: no training at all, only a vote.

    near = find_nearest(train_features, test_features, k=20)
    classify(near, train_labels, classes, k=20, temperature=0.07)

The k most similar training samples vote with exp(similarity / temperature), or one vote each. Every pair is compared,
in blocks, so that memory does not grow with the product of the two sets. Of equally similar samples the earlier one
counts as nearer, and of equal votes the class of the smaller number wins: the answer does not hang on the blocks.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.distributed.device import widest_float
from vitrail.evaluation.defaults import TEMPERATURE

TESTED: Final = 1024  # test samples at a time ...
COMPARED: Final = 8192  # ... with training samples at a time: 64 MiB of similarities


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The neighbours of N samples, nearest first, on the CPU."""

    similarity: Tensor  # float32 [N, k], the cosine
    index: Tensor  # int64 [N, k], which training sample


def find_nearest(
    train: Tensor,
    test: Tensor,
    k: int,
    *,
    device: torch.device | str = "cpu",
    tested: int = TESTED,
    compared: int = COMPARED,
) -> Neighbours:
    """The k rows of `train` [n, D] that are most similar to each row of `test` [N, D], by the cosine of their angle.
    `tested` rows are compared with `compared` ones at a time."""
    if train.ndim != 2 or test.ndim != 2 or train.shape[1] != test.shape[1]:
        shapes = f"features {list(train.shape)} and {list(test.shape)}"
        raise ConfigError(f"{shapes} cannot be compared: both must be rows of the same width, from one network")
    if not 1 <= k <= len(train):
        raise ConfigError(f"k={k} neighbours of {len(train):,} samples: between 1 and {len(train)} can be asked for")
    # Rounded to float32 from float64, so that copies of a sample are equally similar wherever they stand.
    exact = widest_float(torch.device(device))
    rows = [neighbours(train, part.to(device, exact), k, compared) for part in test.split(tested)]
    return Neighbours(torch.cat([row.similarity for row in rows]), torch.cat([row.index for row in rows]))


def neighbours(train: Tensor, queries: Tensor, k: int, compared: int) -> Neighbours:
    """Of a block of queries [B, D]: the best so far, and one block of training samples after the other against them."""
    queries = F.normalize(queries, dim=1)
    best = queries.new_zeros((len(queries), 0), dtype=torch.float32)
    index = torch.zeros((len(queries), 0), dtype=torch.int64, device=queries.device)
    for start in range(0, len(train), compared):
        block = F.normalize(train[start : start + compared].to(queries), dim=1)
        # What was found before stands in front: its samples come earlier.
        best = torch.cat([best, (queries @ block.T).float()], 1)
        here = torch.arange(start, start + len(block), device=queries.device).expand(len(queries), -1)
        index = torch.cat([index, here], 1)
        place = first_largest(best, min(k, best.shape[1]))
        best, index = best.gather(1, place), index.gather(1, place)
    return Neighbours(best.cpu(), index.cpu())


def first_largest(values: Tensor, k: int) -> Tensor:
    """The places [B, k] of the largest values of each row, in descending order, the first of equal ones first; `topk`
    alone leaves open which of equal ones it takes."""
    found, place = values.topk(k, dim=1)
    unsettled = (values >= found[:, -1:]).sum(1) > k
    if unsettled.any():
        place[unsettled] = values[unsettled].sort(dim=1, descending=True, stable=True).indices[:, :k]
    place = place.sort(dim=1).values
    order = values.gather(1, place).sort(dim=1, descending=True, stable=True).indices
    return place.gather(1, order)


def classify(near: Neighbours, labels: Tensor, classes: int, k: int, temperature: float | None = TEMPERATURE) -> Tensor:
    """Class numbers [N] by the votes of the first k neighbours, whose labels are among `labels` [n]. Without a
    temperature each has one vote."""
    if not 1 <= k <= near.index.shape[1]:
        raise ConfigError(f"k={k}: {near.index.shape[1]} neighbours were looked for")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0")
    rows = zip(near.similarity[:, :k].split(TESTED), near.index[:, :k].split(TESTED), strict=True)
    return torch.cat([elected(similar, labels[index], classes, temperature) for similar, index in rows])


def elected(similarity: Tensor, labels: Tensor, classes: int, temperature: float | None) -> Tensor:
    votes = torch.ones_like(similarity, dtype=torch.float64)
    if temperature is not None:
        exact = similarity.double()
        votes = ((exact - exact[:, :1]) / temperature).exp()  # beside the nearest, so that nothing overflows
    return votes.new_zeros(len(votes), classes).scatter_add_(1, labels, votes).argmax(1)

"""Nearest neighbours of frozen features by cosine similarity: no training, only a vote.

    near = find_nearest(train_features, test_features, k=20)
    vote_classes(near, train_labels, classes, k=20, temperature=0.07)

The k most similar training samples vote with weight exp(similarity / temperature), or equally. All pairs are compared
in blocks, so memory does not grow with the product of the two sets. Ties go to the earlier sample and to the class with
the smaller number, so the result does not depend on the blocks.

A self-supervised run is monitored by the vote of nearest neighbours, by examples of them, and by indicators of
collapse, which are three numbers that need no labels:

    found = measure_collapse(features)    # [N, D]
    found.rank, found.similarity, found.spread

A network that learns without labels can collapse: all images get the same features, or features that vary in only a few
directions. With σ the singular values of the centred features and p = σ / Σσ, the rank is exp(-Σ p log p): D
where all directions are used alike, 1 where one is, whatever the scale and the rotation. The similarity is the mean
cosine between two images, 1 where all look the same. The spread is the standard deviation over images of features
of length 1, the mean over the D of them, times √D: 1 where they point everywhere alike, 0 where they all point one way.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.data.dataset import Labels
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.distributed.process_group import widest_float
from vitrail.evaluation import TEMPERATURE
from vitrail.evaluation.frozen.features import FrozenFeatures
from vitrail.evaluation.metrics import keep_single_labels, label_rows, score_predictions

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
    """The k rows of `train` [n, D] with the highest cosine similarity to each row of `test` [N, D]. `tested` rows are
    compared with `compared` ones at a time."""
    if train.ndim != 2 or test.ndim != 2 or train.shape[1] != test.shape[1]:
        shapes = f"features {list(train.shape)} and {list(test.shape)} cannot be compared"
        raise ConfigError(f"{shapes}: both must be rows of the same width, from one network")
    if not 1 <= k <= len(train):
        raise ConfigError(f"k={k} neighbours of {len(train):,} samples: k must be between 1 and {len(train)}")
    # Rounded from float64 to float32, so that copies of a sample have equal similarity wherever they are.
    exact = widest_float(torch.device(device))
    rows = [compare_block(train, part.to(device, exact), k, compared) for part in test.split(tested)]
    return Neighbours(torch.cat([row.similarity for row in rows]), torch.cat([row.index for row in rows]))


def compare_block(train: Tensor, queries: Tensor, k: int, compared: int) -> Neighbours:
    """Finds the neighbours of a block of queries [B, D], by comparing one block of training samples after the other
    with the best so far."""
    queries = F.normalize(queries, dim=1)
    best = queries.new_zeros((len(queries), 0), dtype=torch.float32)
    index = torch.zeros((len(queries), 0), dtype=torch.int64, device=queries.device)
    for start in range(0, len(train), compared):
        block = F.normalize(train[start : start + compared].to(queries), dim=1)
        # Earlier results come first: their samples have smaller indices.
        best = torch.cat([best, (queries @ block.T).float()], 1)
        here = torch.arange(start, start + len(block), device=queries.device).expand(len(queries), -1)
        index = torch.cat([index, here], 1)
        place = rank_stably(best, min(k, best.shape[1]))
        best, index = best.gather(1, place), index.gather(1, place)
    return Neighbours(best.cpu(), index.cpu())


def rank_stably(values: Tensor, k: int) -> Tensor:
    """The indices [B, k] of the largest values of each row, in descending order, ties by index; the order of ties in
    `topk` alone is undefined."""
    found, place = values.topk(k, dim=1)
    unsettled = (values >= found[:, -1:]).sum(1) > k
    if unsettled.any():
        place[unsettled] = values[unsettled].sort(dim=1, descending=True, stable=True).indices[:, :k]
    place = place.sort(dim=1).values
    order = values.gather(1, place).sort(dim=1, descending=True, stable=True).indices
    return place.gather(1, order)


def vote_classes(
    near: Neighbours, labels: Tensor, classes: int, k: int, temperature: float | None = TEMPERATURE
) -> Tensor:
    """Predicted classes [N] by the votes of the first k neighbours, with labels from `labels` [n]. Without a
    temperature each neighbour has one vote."""
    if not 1 <= k <= near.index.shape[1]:
        raise ConfigError(f"k={k}, but only {near.index.shape[1]} neighbours were searched for")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0")
    found: list[Tensor] = []
    blocks = near.similarity[:, :k].double().split(TESTED), near.index[:, :k].split(TESTED)
    for similar, index in zip(*blocks, strict=True):
        # Relative to the nearest, so that nothing overflows.
        votes = ((similar - similar[:, :1]) / (temperature or torch.inf)).exp()
        found.append(votes.new_zeros(len(votes), classes).scatter_add_(1, labels[index], votes).argmax(1))
    return torch.cat(found)


VOTERS: Final = 20
SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A sample, its similarity, and whether it shares a label; None if one of the two has no label."""

    sample: int
    similarity: float
    same: bool | None


@dataclass(frozen=True, slots=True)
class SampleNeighbours:
    """A sample and its neighbours, nearest first."""

    sample: int
    neighbours: tuple[Neighbour, ...]


def score_vote(
    train: FrozenFeatures, test: FrozenFeatures, classes: int, *, device: torch.device | str = "cpu"
) -> tuple[int, int] | None:
    """How many test images the vote of the 20 nearest training images classifies correctly, and of how many with a
    label; None without labels on either side. Training images with several labels do not vote."""
    labels = keep_single_labels(train.labels)
    known = labels >= 0
    if not classes or not known.any() or not (test.labels >= 0).any():
        return None
    voters = min(VOTERS, int(known.sum()))
    near = find_nearest(train.features[known], test.features, voters, device=device)
    return score_predictions(vote_classes(near, labels[known], classes, voters), test.labels)


def find_similar_samples(
    queries: FrozenFeatures, train: FrozenFeatures, *, itself: bool = False, count: int = SHOWN
) -> tuple[SampleNeighbours, ...]:
    """The nearest training images of each query. With `itself` the queries are training images, and an image is
    not its own neighbour."""
    near = find_nearest(train.features, queries.features, min(count + itself, len(train.samples)))
    known, mine = ([set(row) - {-1} for row in label_rows(one.labels).tolist()] for one in (train, queries))
    found: list[SampleNeighbours] = []
    for at, sample in enumerate(queries.samples.tolist()):
        others: list[Neighbour] = []
        for index, similarity in zip(near.index[at].tolist(), near.similarity[at].tolist(), strict=True):
            same = bool(mine[at] & known[index]) if mine[at] and known[index] else None
            others.append(Neighbour(int(train.samples[index]), similarity, same))
        others = [one for one in others if not (itself and one.sample == sample)]
        found.append(SampleNeighbours(sample, tuple(others[:count])))
    return tuple(found)


def pick_samples(labels: Labels, count: int) -> NDArray[np.int64]:
    """Random but fixed samples to display, each of another class as far as possible."""
    order = np.argsort(hash_keys(hash_word("shown"), np.arange(len(labels))), kind="stable").tolist()
    first = {next(iter(labels[sample]), -1): sample for sample in reversed(order)}
    ranked = sorted(order, key=lambda sample: first[next(iter(labels[sample]), -1)] != sample)
    return np.array(ranked[:count], np.int64)


# Relative to the norm of all features; smaller values are float32 rounding noise, which spreads over all directions.
NOTHING: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseIndicators:
    """Indicators for N features of `width` numbers each. A rank of 0 means that all images have identical features."""

    rank: float
    similarity: float
    spread: float
    width: int


def measure_collapse(features: Tensor, *, device: torch.device | str = "cpu") -> CollapseIndicators:
    """Computes all three indicators for features [N, D] of two images or more."""
    if features.ndim != 2 or len(features) < 2:
        raise ConfigError(f"features of shape {tuple(features.shape)}: give [N, D] with two images or more")
    values, count = features.to(device, widest_float(torch.device(device))), len(features)
    unit = F.normalize(values, dim=1)
    # Of unit vectors, |Σ z|² counts every pair twice and each one with itself.
    similarity = float((unit.sum(0).square().sum() - count) / (count * (count - 1)))
    spread = float(unit.std(0, correction=0).mean()) * math.sqrt(values.shape[1])
    rank, width = effective_rank(values), int(values.shape[1])
    return CollapseIndicators(rank=rank, similarity=similarity, spread=spread, width=width)


def effective_rank(features: Tensor) -> float:
    """The effective rank, from 1 to min(N - 1, D), from the smaller Gram matrix, whose eigenvalues are σ²."""
    centred = features - features.mean(0)
    gram = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    if not gram.isfinite().all():
        return math.nan
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    singular = singular[singular > NOTHING * features.norm()]
    if not len(singular):
        return 0.0
    share = singular / singular.sum()
    return float(torch.special.entr(share).sum().exp())

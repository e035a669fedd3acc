"""What frozen features are worth while a run goes on: a vote of nearest neighbours, and some of those to look at."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.draws import keyed, number
from vitrail.data.labels import Labels
from vitrail.evaluation.knn import classify, find_nearest
from vitrail.evaluation.labelled import single, tally

VOTERS: Final = 20
SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frozen:
    """Features of the pictures of a source that could be read, in its order, on the CPU."""

    features: Tensor  # float32 [N, D]
    samples: Tensor  # int64 [N], their places in the source
    labels: Tensor  # int64 [N]; or [N, M], filled up with -1; -1 where there is none


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A sample, how similar it is, and whether a label is the same: none where one of the two has no label."""

    sample: int
    similarity: float
    same: bool | None


@dataclass(frozen=True, slots=True)
class Company:
    """A sample and those it is nearest to, nearest first."""

    sample: int
    neighbours: tuple[Neighbour, ...]


def vote(train: Frozen, test: Frozen, classes: int, *, device: torch.device | str = "cpu") -> tuple[int, int] | None:
    """How many test pictures the vote of the 20 nearest training pictures says right, and of how many with a label;
    none where there are no labels on either side. A training picture with several labels has no vote."""
    labels = single(train.labels)
    known = labels >= 0
    if not classes or not known.any() or not (test.labels >= 0).any():
        return None
    voters = min(VOTERS, int(known.sum()))
    near = find_nearest(train.features[known], test.features, voters, device=device)
    return tally(classify(near, labels[known], classes, voters), test.labels)


def company(queries: Frozen, train: Frozen, *, itself: bool = False, count: int = SHOWN) -> tuple[Company, ...]:
    """The nearest training pictures of each query. With `itself` the queries are training pictures, too, and a picture
    is no neighbour of its own."""
    most = min(count + itself, len(train.samples))
    near = find_nearest(train.features, queries.features, most)
    found: list[Company] = []
    for at, sample in enumerate(queries.samples.tolist()):
        others = [
            Neighbour(int(train.samples[index]), similarity, same(queries.labels[at], train.labels[index]))
            for index, similarity in zip(near.index[at].tolist(), near.similarity[at].tolist(), strict=True)
            if not (itself and int(train.samples[index]) == sample)
        ]
        found.append(Company(sample, tuple(others[:count])))
    return tuple(found)


def same(one: Tensor, other: Tensor) -> bool | None:
    """Whether two samples share a label."""
    left, right = ({label for label in row.reshape(-1).tolist() if label >= 0} for row in (one, other))
    return bool(left & right) if left and right else None


def to_show(labels: Labels, count: int) -> NDArray[np.int64]:
    """Some samples to look at, always the same ones: by lot, each of another class as far as there are classes."""
    order = np.argsort(keyed(number("shown"), np.arange(len(labels))), kind="stable")
    seen, first, later = set[int](), list[int](), list[int]()
    for sample in order.tolist():
        if len(first) == count:
            break
        label = next(iter(labels[sample]), -1)
        if label in seen:
            later += [sample] if len(later) < count else []
        else:
            seen.add(label)
            first.append(sample)
    return np.array([*first, *later][:count], np.int64)

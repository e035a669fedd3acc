"""Accuracy against compute (4.4, Figure 5): the frontier, a power law fitted to it, and what equal accuracy costs.

law = fitted(frontier(points))          # error = a · C^-b + c
cheaper(vit, resnet)                    # how many times the compute of the first the second needs
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMITS: Final = 200  # values of c that are tried
LEVELS: Final = 25  # accuracies at which two families are compared
FREE: Final = 5  # points from which on the limit c is fitted, too; fewer cannot tell it from the slope


class Cost(NamedTuple):
    """A training: its compute, in whatever unit, and its accuracy as a share."""

    compute: float
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """error = a · C^-b + c."""

    a: float
    b: float
    c: float

    def error(self, compute: float) -> float:
        return self.a * compute**-self.b + self.c

    def accuracy(self, compute: float) -> float:
        return 1 - self.error(compute)


def frontier(points: Iterable[Cost]) -> tuple[Cost, ...]:
    """Those that no cheaper or equally cheap training beats, by rising compute."""
    best, kept = -math.inf, list[Cost]()
    for point in sorted(points, key=lambda one: (one.compute, -one.accuracy)):
        if point.accuracy > best:
            kept.append(point)
            best = point.accuracy
    return tuple(kept)


def fitted(points: Sequence[Cost]) -> Law | None:
    """The power law through points, by least squares of the logarithm of the error. For each limit c that is a line;
    the one with the smallest squares wins, with c = 0 for few points. None for fewer than two, or where the error does
    not fall."""
    known = [point for point in points if point.accuracy < 1 and point.compute > 0]
    if len({point.compute for point in known}) < 2:
        return None
    x = np.log([point.compute for point in known])
    errors = np.array([1 - point.accuracy for point in known])
    limits = np.linspace(0, errors.min(), LIMITS, endpoint=False) if len(known) >= FREE else np.zeros(1)
    best: tuple[float, Law] | None = None
    for limit in limits.tolist():
        slope, height = line(x, np.log(errors - limit))
        law = Law(a=math.exp(height), b=-slope, c=limit)
        # Squares in the errors' own logarithm, so that limits compete on equal terms.
        misses = np.log([law.error(point.compute) for point in known]) - np.log(errors)
        squares = float(misses @ misses)
        if best is None or squares < best[0] - 1e-15:
            best = (squares, law)
    assert best is not None
    return best[1] if best[1].b > 0 else None


def line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and height at 0 of the least squares."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return slope, float(y.mean() - slope * x.mean())


def compute_for(points: Sequence[Cost], accuracy: float) -> float | None:
    """What an accuracy costs along a frontier: between two of its points by the logarithm of the compute. None outside
    of what was reached; nothing is extrapolated."""
    edge = frontier(points)
    for low, high in itertools.pairwise(edge):
        if low.accuracy <= accuracy <= high.accuracy:
            way = (accuracy - low.accuracy) / (high.accuracy - low.accuracy)
            return low.compute * (high.compute / low.compute) ** way
    return None


def cheaper(one: Sequence[Cost], other: Sequence[Cost]) -> float | None:
    """How many times the compute of the first the other needs for the same accuracy: the geometric mean over the
    accuracies that both reach between their cheapest and their dearest point. None where there are none."""
    edges = [frontier(points) for points in (one, other)]
    if not all(edges):
        return None
    low, high = max(edge[0].accuracy for edge in edges), min(edge[-1].accuracy for edge in edges)
    logs: list[float] = []
    for level in np.linspace(low, high, LEVELS).tolist() if low <= high else ():
        first, second = (compute_for(edge, min(max(level, low), high)) for edge in edges)
        if first is not None and second is not None:
            logs.append(math.log(second / first))
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def accuracy_for(points: Sequence[Cost], compute: float) -> float | None:
    """The best that a compute buys along a frontier, between two of its points by the logarithm of the compute; beyond
    its dearest point that one's. None below the cheapest."""
    edge = frontier(points)
    if not edge or compute < edge[0].compute:
        return None
    for low, high in itertools.pairwise(edge):
        if compute <= high.compute:
            way = math.log(compute / low.compute) / math.log(high.compute / low.compute)
            return low.accuracy + way * (high.accuracy - low.accuracy)
    return edge[-1].accuracy

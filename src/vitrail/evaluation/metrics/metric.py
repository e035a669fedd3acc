"""Metrics: objects that count over the batches of a split, and the one loop that feeds them.

    score = score_batches(network, batches, preprocessing, ClassificationMetric(10, device), device=device)

A metric keeps sums or rows that processes can add up, and never averages averages. A task brings its own: a class with
the three methods of `Metric`, whose result names its numbers and the criteria by which the best weights are chosen.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.frozen.features import Precision, inference_context, make_normaliser

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class SupportsAllReduce(Protocol):
    """The processes that sweep a split between them, as `vitrail.distributed` has them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum_(self, tensor: Tensor, /) -> object: ...  # over all processes, in place


class Metric(Protocol[ResultT_co]):
    """Counts what a network's outputs are worth, on the device, without waiting for it."""

    def update(self, outputs: Tensor, batch: Batch, /) -> None:
        """Counts one batch, which is on the metric's device. Places where `batch.valid` is false hold no image and
        count for nothing."""
        ...

    def merge(self, world: SupportsAllReduce, /) -> None:
        """Adds up what all processes counted; each then has the whole."""
        ...

    def result(self) -> ResultT_co:
        """What was counted, on the host."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """A number of a result by which weights are chosen. A difference below the share `rounding` is none."""

    name: str  # in rows of metrics
    title: str = ""  # what people call it; its name where that is the same
    share: bool = False  # between 0 and 1, and written in percent
    larger: bool = True  # larger is better, else smaller
    rounding: float = 0.0

    def is_better(self, value: float, than: float) -> bool:
        rounding = math.copysign(self.rounding, than)
        return value > than * (1 + rounding) if self.larger else value < than * (1 - rounding)


def is_better(new: Mapping[str, float], old: Mapping[str, float | None], criteria: Sequence[Criterion]) -> bool:
    """Whether the first criterion prefers the new numbers; where its two are equal, the next one decides. A number that
    the old ones lack decides nothing."""
    for criterion in criteria:
        value, before = new[criterion.name], old[criterion.name]
        if before is None or value != before:
            return before is not None and criterion.is_better(value, before)
    return False


def score_batches(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    metric: Metric[ResultT],
    *,
    device: torch.device | str,
    world: SupportsAllReduce | None = None,
    precision: Precision = "float32",
    progress: Callable[[int], None] | None = None,
) -> ResultT:
    """The result of a network, compiled, wrapped or plain, over batches of `sweep`. With a `world` each process brings
    its part of them, and all get the result of the whole. `progress` is called with the number of samples so far."""
    device = torch.device(device)
    prepare, done = make_normaliser(preprocessing, device, precision), 0
    with inference_context(network, device, precision):
        for batch in batches:
            moved = batch.to(device)
            metric.update(network(prepare(moved.pixels)), moved)
            done += len(batch)
            if progress is not None:
                progress(done)
    if world is not None and world.size > 1:
        metric.merge(world)
    return metric.result()

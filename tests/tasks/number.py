"""A toy task: one number for each image, which the name of its class says, scored by the mean absolute error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadLabels
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.targets import Geometry, Targets
from vitrail.distributed.process_group import World
from vitrail.evaluation.intervals import Interval, bootstrap
from vitrail.evaluation.metrics import Criterion
from vitrail.report.page import Section, Table
from vitrail.tasks.task import PredictionOptions, Task


class Numbers(Targets):
    """float32 [B], NaN where there is no label."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        values = np.array([*map(float, source.classes), np.nan], np.float32)
        return torch.from_numpy(values[source.labels.rows(samples)])


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberScore:
    errors: dict[int, float]  # by sample

    @property
    def count(self) -> int:
        return len(self.errors)

    def row(self) -> dict[str, Any]:
        values = list(self.errors.values())
        close = sum(value < 1 for value in values) / len(values)
        return {"mae": sum(values) / len(values), "close": close, "worst": max(values), "count": len(values)}


class NumberMetric:
    """Keeps a sum and a count for each sample, so that processes can add them up."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(64, 2, dtype=torch.float64, device=device)

    def update(self, outputs: Tensor, batch: Batch) -> None:
        known = batch.valid & ~batch.target.isnan()
        errors = (outputs[:, 0].double() - batch.target.double()).abs()
        self.rows[batch.sample[known]] = torch.stack([errors, torch.ones_like(errors)], 1)[known]

    def merge(self, world: World) -> None:
        world.sum_(self.rows)

    def result(self) -> NumberScore:
        there = self.rows[:, 1].nonzero()[:, 0].tolist()
        return NumberScore(errors={at: float(self.rows[at, 0]) for at in there})


class NumberTask(Task):
    name = "number"
    targets = Numbers()
    criteria = (
        Criterion(name="mae", title="mean absolute error", larger=False),
        Criterion(name="close", share=True),
    )

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        if not all(name.isdecimal() for name in collection.classes):
            raise BadLabels(f"{collection.name} has classes that are not numbers")
        return ("number",)

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> NumberMetric:
        return NumberMetric(device)

    def report_sections(
        self, score: Any, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        if source is None:
            return []
        rows = [(source.name(at), f"{error:.3f}") for at, error in score.errors.items()]
        return [Table(title="Errors", columns=("image", "error"), rows=rows)]

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> Sequence[Any]:
        raise NotImplementedError


class BoundedTask(NumberTask):
    """With intervals by a bootstrap over images."""

    def intervals(self, score: Any, *, seed: int) -> Mapping[str, Interval | None]:
        errors = np.array(list(score.errors.values()))
        mean = lambda weights: np.array([(errors * weights).sum() / weights.sum()])  # noqa: E731
        return {"mae": bootstrap(mean, len(errors), seed=seed)[0]}

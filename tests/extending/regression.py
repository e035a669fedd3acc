"""A task in one file: a number for each image, as its class is called ("7", or a folder 0.25/)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from vitrail.evaluation.metrics import Criterion
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from vitrail.tasks.task import PredictionOptions, Task, register_task


class Numbers(Targets):
    """float32 [B]."""

    def batch(self, source: ImageDataset, samples: NDArray[np.int64]) -> Tensor:
        values = np.array([float(name) for name in source.classes], np.float32)
        return torch.from_numpy(values[source.labels.rows(samples)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression(ObjectiveConfig):
    task: ClassVar[str] = "regression"

    weight: float = 1.0  # of every error

    def macs_per_image(self, model: ModelConfig) -> float:
        return model.macs

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return SquaredError(network, self, context)


class SquaredError(Objective):
    config: Regression

    def __init__(self, network: Backbone, config: Regression, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        self.config = config

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        return batch.pixels, batch.target, batch.valid

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, target, valid = inputs
        errors = self.network(self.normalise(pixels))[:, 0].float() - target
        return ObjectiveOutput(self.config.weight * torch.where(valid, errors**2, 0.0).sum(), valid.float().sum(), {})


@dataclass(frozen=True, slots=True)
class MeanError:
    error: float
    count: int

    def row(self) -> dict[str, Any]:
        return {"error": self.error, "count": self.count}


class ErrorMetric:
    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # of errors, of images

    def update(self, outputs: Tensor, batch: Batch) -> None:
        errors = torch.where(batch.valid, (outputs[:, 0].float() - batch.target).abs(), 0.0)
        self.sums += torch.stack([errors.double().sum(), batch.valid.sum()])

    def merge(self, world: World) -> None:
        world.sum_(self.sums)

    def result(self) -> MeanError:
        error, count = self.sums.tolist()
        return MeanError(error / count, int(count))


@dataclass(frozen=True, slots=True)
class Number:
    value: float

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def __str__(self) -> str:
        return f"{self.value:.2f}"


class RegressionTask(Task):
    name = "regression"
    objective = Regression
    targets = Numbers()
    criteria = (Criterion(name="error", title="mean error", larger=False),)

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        collection.need_labels()
        try:
            [float(name) for name in collection.classes]
        except ValueError as error:
            raise BadLabels(f"{collection.name}: a regression needs classes that are numbers: {error}") from None
        return ("value",)

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> ErrorMetric:
        return ErrorMetric(device)

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> list[Number]:
        return [Number(value) for value in outputs[:, 0].tolist()]


register_task(RegressionTask())

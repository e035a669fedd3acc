"""A task whose score is not a share, and better the smaller it is: the reading of a gauge."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.targets import ClassTargets, Geometry
from vitrail.evaluation.metrics import Criterion
from vitrail.report.page import Notes, Section
from vitrail.tasks.classification.objective import Classification
from vitrail.tasks.task import PredictionOptions, Task


class GaugeTask(Task):
    name = "gauge"
    objective = Classification
    targets = ClassTargets()
    criteria = (
        Criterion(name="gauge_error", title="error", larger=False),
        Criterion(name="within", title="within 1 °C", share=True),
        Criterion(name="loss", larger=False),
    )

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        return ("temperature",)

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> NoReturn:
        raise NotImplementedError

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> NoReturn:
        raise NotImplementedError

    def report_sections(
        self, score: Any, source: ImageDataset | None, names: Sequence[str], title: str
    ) -> list[Section]:
        return [Notes(title=f"Readings on {title}", lines=[f"{name}: {score}" for name in names])]


def gauge_rows() -> list[dict[str, Any]]:
    """A run that is best in the middle."""
    rows: list[dict[str, Any]] = []
    for step, error in ((10, 12.5), (20, 0.03125), (30, 0.5)):
        rows.append({"kind": "train", "step": step, "loss": error**2, "gauge_error": error})
        scored = {"split": "dev", "score": "gauge_error", "gauge_error": error, "within": 0.75, "loss": error**2}
        rows.append({"kind": "watch", "step": step, **scored, "count": 2000})
    return rows

"""A task of its own: how red, green and blue an image is. It has a text, a file, a drawing, and no classes."""

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.tiny import VIT
from tests.predict.pictures import network
from vitrail.checkpoint.weights import save
from vitrail.core.text import Pair
from vitrail.data.collection import Collection
from vitrail.data.targets import Geometry
from vitrail.evaluation.metrics import Metric
from vitrail.models.build import Model
from vitrail.tasks.task import TASKS, PredictionOptions, Task

NAMES = ("red", "green", "blue")


@dataclass(frozen=True)
class Colour:
    """Three shares from 0 to 1, and the size of the image that they are of."""

    shares: tuple[float, float, float]
    size: Pair

    @property
    def rgb(self) -> tuple[int, int, int]:
        red, green, blue = (round(255 * share) for share in self.shares)
        return (red, green, blue)

    def to_dict(self) -> dict[str, Any]:
        return {"colour": dict(zip(NAMES, self.shares, strict=True)), "size": list(self.size)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {share:.2f}" for name, share in zip(NAMES, self.shares, strict=True))


class ColourTask(Task):
    name = "colour"

    def output_names(self, collection: Collection) -> tuple[str, ...]:
        return NAMES

    def metric(self, outputs: int, device: torch.device, *, extremes: int = 0) -> Metric[Any]:
        raise NotImplementedError

    def predict(self, outputs: Tensor, views: Sequence[Geometry], options: PredictionOptions) -> list[Colour]:
        rows = outputs.sigmoid().tolist()
        return [Colour((row[0], row[1], row[2]), view.whole) for row, view in zip(rows, views, strict=True)]

    def draw(self, prediction: Colour, image: Image.Image) -> Image.Image:
        return Image.blend(image, Image.new("RGB", image.size, prediction.rgb), 0.5)

    def file_of(self, prediction: Colour) -> tuple[str, bytes]:
        file = io.BytesIO()
        Image.new("RGB", (prediction.size[1], prediction.size[0]), prediction.rgb).save(file, "PNG")
        return ".png", file.getvalue()


@contextmanager
def colour_task() -> Generator[None]:
    """The task is known for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, ColourTask.name, ColourTask())
        yield


def colour_network() -> Model:
    model = network(replace(VIT, classes=3), labels=NAMES)
    model.card = replace(model.card, task=ColourTask.name)
    return model


def colour_weights(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save(colour_network(), folder / "colour.safetensors")
    return str(folder / "colour.safetensors")

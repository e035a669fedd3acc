"""What exports are scored by: the task of the weights says what the same answer is, and which number judges both."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tasks.number import NumberTask
from vitrail.checkpoint.bundle import Bundle, Card, get_card
from vitrail.checkpoint.weights import build_fresh, to_bundle
from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.data.preprocessing import Preprocessing
from vitrail.export import ExportImages
from vitrail.export.exportable import make_reference
from vitrail.export.verify import check_export, score_export
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.task import TASKS

PLAIN = Preprocessing(image=(4, 4))
CLASSES = ("0", "3")


def noise() -> ArrayDataset:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    return ArrayDataset(pixels, Labels(np.array([0, 1, 0, 1, -1, 1])), CLASSES)


def bundle(task: str, outputs: int) -> Bundle:
    config = ViTConfig(width=8, depth=1, mlp_width=8, heads=1, image=(4, 4), patch=(2, 2), classes=outputs)
    return Bundle(config=config, tensors={}, card=Card(preprocessing=PLAIN, task=task))


def mean_of(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))[:, None]


def test_a_number_has_an_error_and_no_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    source = noise()
    monkeypatch.setitem(TASKS, "number", NumberTask())
    images = ExportImages(source=source, has_targets=True, batch=4)
    found = score_export(bundle("number", 1), mean_of, lambda images: mean_of(images) - 1, images)
    assert found is not None
    values = [float(mean_of(PLAIN(source.open_image(at).rgb())[None])) for at in range(6)]
    errors = [abs(values[at] - truth) for at, truth in ((0, 0), (1, 3), (2, 0), (3, 3), (5, 3))]
    assert (found.count, found.labelled, found.agree, found.agreement) == (6, 5, None, None)
    assert found.criterion.name == "mae"
    assert found.network == pytest.approx(sum(errors) / 5, rel=1e-5)
    assert found.export == pytest.approx(found.network + found.difference)
    assert found.difference != 0


def test_pixels_agree_in_part() -> None:
    def halves(images: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(images[:, 0]), torch.ones_like(images[:, 0])], 1)

    def other(images: Tensor) -> Tensor:
        outputs = halves(images).clone()
        outputs[:, :, 0] = -outputs[:, :, 0]  # one row of four
        return outputs

    found = score_export(bundle("segmentation", 2), halves, other, ExportImages(source=noise()))
    assert found is not None
    assert (found.count, found.labelled, found.agreement) == (6, 0, 0.75)


def test_only_tasks_with_classes_choose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_fresh(ViTConfig(width=8, depth=1, mlp_width=8, heads=1, image=(4, 4), patch=(2, 2), classes=3))

    def agreement() -> float | None:
        forward = make_reference(to_bundle(made), (4, 4))
        return check_export(to_bundle(made), {(4, 4): forward}, forward, "m", "itself").agreement

    assert agreement() == 1
    made.card = replace(get_card(made), task="number")
    assert agreement() is None  # nobody knows what its outputs are
    monkeypatch.setitem(TASKS, "number", NumberTask())
    assert agreement() is None

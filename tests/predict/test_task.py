"""Predictions come from the task of the weights: a predictor serves one that it has never heard of."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitrail
from tests.models.tiny import VIT
from tests.predict.colour_task import Colour, colour_network, colour_task, colour_weights
from tests.predict.pictures import NETWORKS, drawn, network
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.predict.predictor import Predictor


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with colour_task():
        yield


@pytest.fixture
def asker() -> Predictor[Colour]:
    return Predictor[Colour](colour_network(), device="cpu", batch=4)


def test_a_prediction_is_what_the_task_makes_of_the_outputs(asker: Predictor[Colour]) -> None:
    pictures = drawn(6)
    outputs = asker.logits(torch.stack([asker.prepare(picture) for picture in pictures])).sigmoid()
    found = asker(pictures)
    torch.testing.assert_close(torch.tensor([each.shares for each in found]), outputs)
    assert [each.size for each in found] == [(picture.height, picture.width) for picture in pictures]
    assert asker.task.name == "colour"
    assert asker(pictures[0]) == next(asker.stream(pictures[0]))
    assert asker([]) == []


def test_the_geometry_is_that_of_the_upright_image(asker: Predictor[Colour], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    drawn(1)[0].resize((40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    for given in (tmp_path / "turned.jpg", Image.open(tmp_path / "turned.jpg")):
        assert asker(given).size == (40, 20)
        assert asker.view(given).geometry == asker.preprocessing.geometry((40, 20))


def test_files_carry_their_task(tmp_path: Path) -> None:
    found: Predictor[Colour] = vitrail.Predictor(colour_weights(tmp_path), device="cpu")
    assert found.task.name == "colour"
    assert found.rename_classes(["r", "g", "b"]).task.name == "colour"
    assert isinstance(found(drawn(1)[0]), Colour)


def test_what_is_for_classes_is_refused(asker: Predictor[Colour]) -> None:
    pixels = torch.stack([asker.prepare(picture) for picture in drawn(2)])
    refused: list[Any] = [
        lambda: asker.probabilities(pixels),
        lambda: asker.rank_classes(torch.full((2, 3), 0.3)),
        lambda: asker(drawn(1), topk=2),
        lambda: next(asker.stream(drawn(1), topk=2)),
    ]
    for call in refused:
        with pytest.raises(ConfigError, match="colour"):
            call()
    assert asker.features(drawn(2)).shape == (2, 16)
    assert asker.tokens(drawn(2)).shape == (2, 3, 4, 16)


def test_a_task_that_nobody_registered_is_named() -> None:
    model = network(VIT)
    model.card = replace(model.card, task="portraits")
    with pytest.raises(UnknownName, match="portraits"):
        Predictor(model, device="cpu")


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("multi_label", [False, True])
def test_a_classifier_says_to_the_bit_what_its_probabilities_say(kind: str, multi_label: bool) -> None:
    model = network(NETWORKS[kind])
    model.card = replace(model.card, multi_label=multi_label)
    asker = Predictor(model, device="cpu", threshold=0.4)
    views = [asker.view(picture) for picture in drawn(7)]
    pixels = torch.stack([view.pixels for view in views])
    ranked = asker.rank_classes(asker.probabilities(pixels), topk=3)
    assert list(asker(drawn(7), topk=3)) == ranked
    assert asker.interpret(asker.logits(pixels), [view.geometry for view in views], topk=3) == ranked
    assert asker.task.name == "classification"

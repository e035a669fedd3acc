"""`evaluate` of weights of any task: the same images count, and the numbers are those of the task's metric."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.distributed.pair import together
from tests.tasks.number import BoundedTask, NumberTask
from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import build_fresh
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.dataset import SubsetDataset
from vitrail.data.training_record import KEY, record_training
from vitrail.distributed.process_group import World
from vitrail.evaluation.result import Measure, Result
from vitrail.evaluation.scoring import ScoringOptions, make_subject
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.scoring import score_network
from vitrail.tasks.task import TASKS

SHAPE = ViTConfig(width=64, depth=1, mlp_width=64, heads=1, image=(16, 16), patch=(4, 4), classes=1)
CLASSES = ("0", "3", "10")
COUNT = 14


@pytest.fixture(autouse=True)
def number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "number", NumberTask())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the toy task, and images of noise in a folder for each number; one of them is damaged."""
    path = tmp_path_factory.mktemp("number")
    vitrail.save(network(), path / "net.safetensors")
    rng = np.random.default_rng(0)
    for at in range(COUNT):
        folder = path / "photos" / "test" / CLASSES[at % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{at}.png")
    (path / "photos" / "test" / "3" / "torn.png").write_bytes(b"nothing")
    return path


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def network(**changes: Any) -> Any:
    torch.manual_seed(0)
    made = build_fresh(SHAPE)
    torch.nn.init.normal_(made.head.classifier.weight, std=0.5)  # type: ignore[union-attr]
    made.card = replace(get_card(made), **{"task": "number", "labels": ("number",), **changes})
    return made.eval()


def slow_errors(data: str = "photos") -> dict[str, float]:
    """By the names of the images, one image at a time."""
    model, errors = network(), dict[str, float]()
    source = vitrail.open_collection(data).split("test")
    for at in range(len(source)):
        if "torn" not in source.name(at):
            image = model.card.preprocessing(source.open_image(at).rgb())[None]
            with torch.inference_mode():
                value = float(model(image)[0, 0])
            errors[source.name(at)] = abs(value - float(source.classes[source.labels[at][0]]))
    return errors


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_the_numbers_are_those_of_the_metric(here: Path, batch: int) -> None:
    found, errors = vitrail.evaluate("net.safetensors", "photos", batch=batch, device="cpu"), slow_errors()
    assert (found.split, found.count, found.left_out, found.top1) == ("test", COUNT + 1, 0, None)
    mean = found.measures["mean absolute error"]
    assert mean.value == pytest.approx(sum(errors.values()) / COUNT, rel=1e-5)
    assert (mean.unit, mean.count, mean.low, mean.high) == ("number", COUNT, None, None)
    assert found.measures["worst"].value == pytest.approx(max(errors.values()), rel=1e-5)
    assert found.measures["close"].unit == "share"
    assert [*found.measures] == ["mean absolute error", "close", "worst"]
    assert len(found.unreadable) == 1
    assert "torn.png" in found.unreadable[0]
    assert len(found.notes) == 1


def test_the_command_writes_and_prints_them(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.html"), "--device", "cpu", "--workers", "0"]
    assert main(["evaluate", "net.safetensors", "photos", *words]) == 0
    result, said = Result.read(tmp_path / "r.json"), capsys.readouterr().out
    expected = vitrail.evaluate("net.safetensors", "photos", device="cpu")
    assert result.measures == expected.result.measures
    assert result.config["task"] == "number"
    assert result.details["outputs"] == ["number"]
    assert "torn.png" in result.details["unreadable"][0]
    (line,) = [line for line in said.splitlines() if "mean absolute error" in line]
    assert line.split()[-1] == "none"  # no intervals
    page = (tmp_path / "p.html").read_text("utf-8")
    assert "Errors" in page
    assert "95 % intervals" not in page


def test_a_task_brings_its_own_intervals(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "number", BoundedTask())
    found = vitrail.evaluate("net.safetensors", "photos", seed=3, device="cpu")
    mean, worst = found.measures["mean absolute error"], found.measures["worst"]
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low < mean.value < mean.high
    assert worst.low is None
    assert found.result.config["seed"] == 3


def test_images_seen_in_training_are_left_out(here: Path) -> None:
    source = vitrail.open_collection("photos").split("test")
    seen = SubsetDataset(source, np.arange(0, len(source), 2))
    trained_on = [record_training(seen, out_of=len(source), selection={}, others={})]
    known, errors = network(provenance={KEY: trained_on}), slow_errors()
    rest = [errors[source.name(at)] for at in range(1, len(source), 2) if source.name(at) in errors]
    found = vitrail.evaluate(known, "photos", device="cpu")
    assert (found.count, found.left_out) == (len(source) - len(seen), len(seen))
    assert found.measures["mean absolute error"].value == pytest.approx(sum(rest) / len(rest), rel=1e-5)
    assert found.measures["mean absolute error"].count == len(rest)
    whole = vitrail.evaluate(known, "photos", include_seen=True, device="cpu")
    assert whole.measures["mean absolute error"].count == COUNT


@pytest.mark.parametrize(
    "words",
    [
        ["--real", "real.json"],
        ["--threshold", "0.5"],
        ["--by-number"],
        ["--labels", "missing.txt"],
        ["--answers", "answers.csv"],
    ],
)
def test_options_of_classification_are_refused(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "net.safetensors", "photos", "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words[0] in error
    assert "number" in error
    assert not Path("answers.csv").exists()


def test_outputs_of_another_name_are_refused(here: Path) -> None:
    with pytest.raises(DataError, match="weight"):
        vitrail.evaluate(network(labels=("weight",)), "photos", device="cpu")
    two = build_fresh(replace(SHAPE, classes=2))
    two.card = replace(get_card(two), task="number")
    with pytest.raises(DataError):
        vitrail.evaluate(two, "photos", device="cpu")


def test_an_unknown_task_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match="haruspicy"):
        vitrail.evaluate(network(task="haruspicy"), "photos", device="cpu")


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(place: Path) -> None:
    alone = vitrail.evaluate(place / "net.safetensors", place / "photos", batch=4, device="cpu")
    assert together(evaluate_part, place) == [(alone.result.measures, alone.unreadable)] * 2


def evaluate_part(world: World, place: Path) -> tuple[tuple[Measure, ...], tuple[str, ...]]:
    TASKS["number"] = NumberTask()
    weights, photos = place / "net.safetensors", vitrail.open_collection(place / "photos")
    about = make_subject("net", find_weights(weights), world.device, image_size=None)
    found = score_network(about, photos, "test", ScoringOptions(batch=4), world=world, called="photos")
    return found.result.measures, tuple(found.result.details["unreadable"])

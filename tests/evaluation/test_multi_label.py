"""Mean average precision and F1: scikit-learn's numbers, intervals that hold them, and what `evaluate` does."""

import contextlib
import csv
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.evaluation.test_accuracy import PLAIN, Torn, pictures
from tests.models.tiny import VIT
from tests.predict.pictures import CLASSES, drawn, network
from vitrail.checkpoint.bundle import Card
from vitrail.cli.app import main
from vitrail.core.errors import DataError
from vitrail.data.dataset import Labels, RelabelledDataset
from vitrail.data.loader import eval_batches
from vitrail.evaluation.metrics import ClassificationMetric, score_batches
from vitrail.evaluation.multi_label import MultiLabelScore, score_labels


def made(count: int, classes: int, *, digits: int = 6, seed: int = 0) -> MultiLabelScore:
    """Scores that know something of the truth; few digits give many that are equal."""
    rng = np.random.default_rng(seed)
    truth = rng.random((count, classes)) < np.linspace(0.1, 0.7, classes)
    scores = np.round(np.clip(0.35 * truth + 0.6 * rng.random((count, classes)), 0, 1), digits).astype(np.float32)
    return MultiLabelScore(
        scores=scores,
        truth=truth,
        sample=np.arange(count),
        names=[str(at) for at in range(classes)],
        threshold=0.5,
    )


@pytest.mark.parametrize("digits", [6, 1])
@pytest.mark.parametrize(("count", "classes"), [(3, 2), (200, 7)])
def test_the_numbers_are_those_of_scikit_learn(count: int, classes: int, digits: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    found = made(count, classes, digits=digits, seed=count)
    there = found.truth.any(0)
    values = {measure.name: measure.value for measure in found.measures}
    each = metrics.average_precision_score(found.truth[:, there], found.scores[:, there], average=None)
    assert values["mAP"] == pytest.approx(float(np.mean(each)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("micro", "macro"):
            theirs = metrics.f1_score(found.truth, found.predicted, average=kind, zero_division=np.nan)
            assert values[f"{kind} F1"] == pytest.approx(float(theirs))
    assert values["exact match"] == pytest.approx(metrics.accuracy_score(found.truth, found.predicted))


def test_weights_are_samples_that_count_more_often() -> None:
    found = made(40, 3, digits=1)
    often = np.random.default_rng(1).integers(0, 3, 40)
    rows = np.repeat(np.arange(40), often)
    longer = replace(found, scores=found.scores[rows], truth=found.truth[rows], sample=np.arange(len(rows)))
    np.testing.assert_allclose(found.statistics(often.astype(np.float64)), longer.statistics(np.ones(len(rows))))


@pytest.mark.slow
def test_intervals_hold_the_value_and_are_drawn_from_the_seed() -> None:
    found = made(60, 4)
    for measure in found.measures:
        assert measure.low is not None
        assert measure.high is not None
        assert 0 <= measure.low < measure.value < measure.high <= 1
    assert found.measures == replace(found).measures
    assert found.measures != replace(found, seed=1).measures


def test_an_image_without_labels_is_an_answer_where_there_may_be_several() -> None:
    def scored(labels: Labels) -> MultiLabelScore:
        metric = ClassificationMetric(2, torch.device("cpu"), scores=True)
        network = lambda images: torch.full((len(images), 2), 2.0)  # noqa: E731
        source = RelabelledDataset(Torn(*made_images), labels, "ab")
        with contextlib.suppress(DataError):
            score_batches(network, eval_batches(source, PLAIN, batch=2), PLAIN, metric, device="cpu")
        return score_labels(metric.predictions()[0], labels, "ab", threshold=0.5, seed=0)

    source = pictures(count=4)
    made_images = (source.pictures, source.labels, source.classes)  # the last one of four is torn
    several = scored(Labels.several([[0, 1], [], [1], [1]]))
    assert several.sample.tolist() == [0, 1, 2]
    assert several.truth.tolist() == [[True, True], [False, False], [False, True]]
    one = scored(Labels(np.array([1, -1, 0, 0])))
    assert one.sample.tolist() == [0, 2]
    with pytest.raises(DataError):
        scored(Labels.several([[], [], [], [1]]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = network(VIT)
    assert isinstance(model.card, Card)
    vitrail.save(model, "one.safetensors")
    model.card = replace(model.card, multi_label=True)
    vitrail.save(model, "several.safetensors")
    rows = ["path,labels"]
    for at, image in enumerate(drawn(12)):
        image.save(f"{at}.png")
        rows.append(f"{at}.png,{'|'.join(CLASSES[k] for k in range(5) if (at + k) % (k + 2) == 0)}")
    Path("list.csv").write_text("\n".join(rows))
    return tmp_path


def evaluated(*words: str) -> dict[str, Any]:
    command = ["evaluate", "several.safetensors", "--data", "list.csv", "--device", "cpu", "--workers", "0"]
    assert main([*command, "--out", "result.json", *words]) == 0
    return json.loads(Path("result.json").read_text("utf-8"))


def test_evaluate_scores_each_class_by_itself(place: Path) -> None:
    result = evaluated("--threshold", "0.4", "--answers", "answers.csv", "--page", "page.html")
    assert [measure["name"] for measure in result["measures"]] == ["mAP", "micro F1", "macro F1", "exact match"]
    assert result["config"]["threshold"] == 0.4
    model = vitrail.load("several.safetensors")
    assert isinstance(model.card, Card)
    rows = list(csv.reader(Path("answers.csv").read_text("utf-8").splitlines()))[1:]
    with torch.inference_mode():
        pixels = torch.stack([model.card.preprocessing(image) for image in drawn(12)])
        right = model(pixels).sigmoid()
    for row, expected in zip(rows, right, strict=True):
        np.testing.assert_allclose([float(cell) for cell in row[3:]], expected.numpy(), atol=2e-6)
        assert row[2] == "|".join(name for name, score in zip(CLASSES, expected, strict=True) if score >= 0.4)
    assert "macro F1" in Path("page.html").read_text("utf-8")


@pytest.mark.parametrize(("weights", "threshold"), [("one", "0.3"), ("several", "1.5")])
def test_a_threshold_that_makes_no_sense_is_refused(place: Path, weights: str, threshold: str) -> None:
    command = ["evaluate", f"{weights}.safetensors", "--data", "list.csv", "--device", "cpu", "--workers", "0"]
    assert main([*command, "--threshold", threshold]) == 2

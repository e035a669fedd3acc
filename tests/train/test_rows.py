"""Rows of metrics as text, and the best of them, by what their task says of its numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.gauge import GaugeTask, gauge_rows
from vitrail.api import summarise_training
from vitrail.cli.train.display import describe_briefly, describe_row
from vitrail.cli.train.training import describe_outcome
from vitrail.studies.run_study import read_values
from vitrail.tasks.registry import TASKS
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.run_folder.metric_rows import best_of, describe_score, headline, scores
from vitrail.train.scoring import Best, TrainingResult


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "gauge", GaugeTask())


def watched(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "watch", "step": step, "split": "val", "count": 2000, **more}


def test_a_segmentation_is_described_by_its_own_numbers() -> None:
    row = watched(200, score="miou", miou=0.812, pixel_accuracy=0.951, loss=0.1234)
    assert describe_score(row) == "step 200: val mIoU 81.20%, pixel accuracy 95.10%, loss 0.1234 (2,000 images)"
    assert describe_briefly(row) == "val mIoU 81.20%"


@pytest.mark.usefixtures("gauge")
def test_a_number_that_is_no_share_is_written_as_it_is() -> None:
    row = gauge_rows()[3]
    assert describe_score(row) == "step 20: dev error 0.03125, within 1 °C 75.00%, loss 0.0010 (2,000 images)"
    assert describe_briefly(row) == "dev error 0.03125"
    train = {"steps": 30, "epoch": 1.0, "lr": 1e-3, "images_per_s": 9.0, "left_s": 1.0, **gauge_rows()[0]}
    assert "error 12.500" in describe_row(train)
    assert describe_row(train).count("loss") == 1


@pytest.mark.usefixtures("gauge")
def test_the_best_is_the_smallest_where_smaller_is_better() -> None:
    assert best_of(scores(gauge_rows(), "watch"))["step"] == 20


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(0.5, 1.0), (0.75, 2.0), (0.75, 1.5), (0.5, 0.1)], 2),  # of equal accuracies the lower loss
        ([(0.75, 1.0), (0.75, 1.0)], 0),
        ([(0.75, float("nan")), (0.75, 9.0)], 1),
        ([(0.75, 1.0), (0.75, 1.0 - 1e-9)], 0),  # no more than rounding
    ],
)
def test_the_best_of_accuracies_is_the_largest(rows: list[tuple[float, float]], best: int) -> None:
    found = best_of([watched(at, accuracy=accuracy, loss=loss) for at, (accuracy, loss) in enumerate(rows)])
    assert found["step"] == best


def test_a_row_has_its_number_or_none() -> None:
    accuracy = headline(watched(1, accuracy=0.5))
    assert accuracy is not None
    assert (accuracy.name, accuracy.value, accuracy.text, accuracy.is_accuracy) == ("accuracy", 0.5, "50.00%", True)
    neighbours = headline(watched(1, accuracy=0.5, measure="k-NN"))
    assert neighbours is not None
    assert neighbours.name == "k-NN accuracy"
    assert headline(watched(1, loss=0.5)) is None
    assert headline(watched(1, score="miou", accuracy=0.5)) is None
    assert headline(watched(1, accuracy=float("nan"))) is None


def test_a_number_of_a_task_that_is_not_registered_goes_by_its_name() -> None:
    found = headline(watched(1, score="panoptic_quality", panoptic_quality=0.5))
    assert found is not None
    assert (found.name, found.text) == ("panoptic quality", "0.5")


def finished(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A run that is done and chose its weights."""
    (folder / "command.json").write_text("{}")
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": 30, "steps": 30}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "best.safetensors").touch()
    return folder


@pytest.mark.usefixtures("gauge")
def test_what_is_told_of_a_run_is_of_its_best_weights(tmp_path: Path) -> None:
    folder = finished(tmp_path, gauge_rows())
    lines = describe_run(folder).splitlines()
    assert "  dev: error 0.03125 (2,000 images) with the weights of step 20, the best" in lines
    assert read_values(folder) == {"watch": 0.03125, "gauge_error": 0.03125}


def test_of_a_task_that_is_not_registered_no_weights_are_said_to_be_the_best(tmp_path: Path) -> None:
    told = describe_run(finished(tmp_path, gauge_rows()))
    assert "gauge error 0.5 (2,000 images) with the weights of step 30" in told
    assert "the best" not in told


@pytest.mark.usefixtures("gauge")
@pytest.mark.parametrize(
    ("key", "score", "said"),
    [
        ("dev accuracy", 0.875, "87.50% of dev"),
        ("dev mIoU", 0.875, "dev mIoU 87.50%"),
        ("dev error", 0.875, "dev error 0.875"),
        ("dev error", "exploded", "diverged"),  # what earlier versions wrote
    ],
)
def test_points_of_a_sweep_are_told_by_their_score(tmp_path: Path, key: str, score: float | str, said: str) -> None:
    (tmp_path / "command.json").write_text("{}")
    tried = [{"settings": ["optim.lr=1e-3"], key: score}]
    (tmp_path / "sweep.json").write_text(json.dumps({"tried": tried, "points": 2}))
    assert f"  optim.lr=1e-3: {said}" in describe_run(tmp_path).splitlines()


@pytest.mark.usefixtures("gauge")
@pytest.mark.parametrize("named", [True, False])
def test_the_public_result_has_the_score_of_the_task(tmp_path: Path, named: bool) -> None:
    row = gauge_rows()[-1] if named else watched(30, accuracy=0.5, loss=1.0)
    result = TrainingResult(folder=tmp_path, state="done", step=30, best=Best(), test=row, watch=None, baseline={})
    run = summarise_training(result, ())
    assert (run.score, run.accuracy) == ((0.5, None) if named else (0.5, 0.5))
    assert run.scores == {row["split"]: row}


@pytest.mark.usefixtures("gauge")
def test_a_row_without_a_count_is_described_all_the_same() -> None:
    row = {name: value for name, value in gauge_rows()[-1].items() if name != "count"}
    assert describe_score(row) == "step 30: dev error 0.5, within 1 °C 75.00%, loss 0.2500"
    assert describe_outcome(row) == "error 0.5, within 1 °C 75.00%"

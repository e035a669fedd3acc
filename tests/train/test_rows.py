"""Rows of metrics as text, and the best of them, by what their task says of its numbers."""

from typing import Any

import pytest

from tests.train.gauge import GaugeTask, gauge_rows
from vitrail.cli.live import briefly, line
from vitrail.tasks.registry import TASKS
from vitrail.train.rows import best_of, describe_score, headline, scores


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "gauge", GaugeTask())


def watched(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "watch", "step": step, "split": "val", "count": 2000, **more}


def test_a_segmentation_is_described_by_its_own_numbers() -> None:
    row = watched(200, score="miou", miou=0.812, pixel_accuracy=0.951, loss=0.1234)
    assert describe_score(row) == "step 200: val mIoU 81.20%, pixel accuracy 95.10%, loss 0.1234 (2,000 images)"
    assert briefly(row) == "val mIoU 81.20%"


@pytest.mark.usefixtures("gauge")
def test_a_number_that_is_no_share_is_written_as_it_is() -> None:
    row = gauge_rows()[3]
    assert describe_score(row) == "step 20: dev error 0.03125, within 1 °C 75.00%, loss 0.0010 (2,000 images)"
    assert briefly(row) == "dev error 0.03125"
    train = {"steps": 30, "epoch": 1.0, "lr": 1e-3, "images_per_s": 9.0, "left_s": 1.0, **gauge_rows()[0]}
    assert "error 12.500" in line(train)
    assert line(train).count("loss") == 1


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

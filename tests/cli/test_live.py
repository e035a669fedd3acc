"""What a terminal shows of rows: loss and tallies by name, and no accuracy where there is none."""

from typing import Any

import pytest

from vitrail.cli.live import Panel, line

TRAIN = {
    "kind": "train",
    "step": 20,
    "steps": 100,
    "epoch": 1.5,
    "loss": 1.25,
    "lr": 1e-3,
    "images_per_s": 1234.5,
    "mfu": 0.1,
    "left_s": 60.0,
}
SCORED = {"kind": "watch", "step": 20, "split": "dev", "count": 144, "loss": 0.5}
FEATURES = {"measure": "k-NN", "rank": 12.34, "width": 64, "similarity": 0.5, "spread": 0.7}


@pytest.mark.parametrize(
    ("tallies", "said"),
    [
        ({"accuracy": 0.5}, "loss 1.2500  accuracy 50.0%  lr"),
        ({"hits": 0.25}, "loss 1.2500  hits 25.0%  lr"),
        ({"agreement": 0.125, "spread": 0.9}, "loss 1.2500  agreement 12.5%  spread 0.900  lr"),
        ({"teacher_entropy": 3.21, "kl": 0.5}, "loss 1.2500  teacher entropy 3.210  KL 0.500  lr"),
        ({}, "loss 1.2500  lr"),
    ],
)
def test_progress_tells_the_tallies_that_there_are(tallies: dict[str, float], said: str) -> None:
    assert said in line({**TRAIN, **tallies})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {**SCORED, "accuracy": 0.9, "top5": 0.99},
            "step 20: dev accuracy 90.00%, top-5 99.00%, loss 0.5000 (144 pictures)",
        ),
        (
            {**SCORED, **FEATURES, "accuracy": 0.9},
            "step 20: dev k-NN accuracy 90.00%, loss 0.5000, feature rank 12.3 of 64 (144 pictures)",
        ),
        ({**SCORED, **FEATURES}, "step 20: dev loss 0.5000, feature rank 12.3 of 64 (144 pictures)"),
        (
            {"kind": "look", "step": 20, "split": "train", "count": 5000, **FEATURES},
            "step 20: train feature rank 12.3 of 64 (5,000 pictures)",
        ),
    ],
)
def test_a_score_is_called_by_its_name(row: dict[str, Any], said: str) -> None:
    assert line(row) == said


def test_the_panel_keeps_the_last_score_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Panel()
    monkeypatch.setattr(panel, "told", lambda text: None)
    shown: list[str] = []
    for row in (
        {**SCORED, "accuracy": 0.9},
        {**SCORED, **FEATURES, "accuracy": 0.9},
        {**SCORED, **FEATURES},
        {"kind": "look", "step": 20, "split": "train", "count": 5000, **FEATURES},
    ):
        panel.progress(row)
        shown.append(panel.score)
    assert shown == ["dev 90.00%", "dev k-NN 90.00%", "dev loss 0.5000", "train rank 12.3"]
    panel.drawn({**TRAIN, "hits": 0.1})

"""What a terminal shows of rows: loss and tallies by name, and no accuracy where there is none."""

import io
from typing import Any

import pytest
from rich.console import Console

from vitrail.cli.train.display import PlainDisplay, TrainingPanel, describe_row
from vitrail.train.observer import STEP

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
    assert said in describe_row({**TRAIN, **tallies})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {**SCORED, "accuracy": 0.9, "top5": 0.99},
            "step 20: dev accuracy 90.00%, top-5 99.00%, loss 0.5000 (144 images)",
        ),
        (
            {**SCORED, **FEATURES, "accuracy": 0.9},
            "step 20: dev k-NN accuracy 90.00%, loss 0.5000, feature rank 12.3 of 64 (144 images)",
        ),
        ({**SCORED, **FEATURES}, "step 20: dev loss 0.5000, feature rank 12.3 of 64 (144 images)"),
        (
            {"kind": "look", "step": 20, "split": "train", "count": 5000, **FEATURES},
            "step 20: train feature rank 12.3 of 64 (5,000 images)",
        ),
    ],
)
def test_a_score_is_called_by_its_name(row: dict[str, Any], said: str) -> None:
    assert describe_row(row) == said


def test_the_panel_keeps_the_last_score_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = TrainingPanel()
    monkeypatch.setattr(panel, "log", lambda text: None)
    shown: list[str] = []
    for row in (
        {**SCORED, "accuracy": 0.9},
        {**SCORED, **FEATURES, "accuracy": 0.9},
        {**SCORED, **FEATURES},
        {"kind": "look", "step": 20, "split": "train", "count": 5000, **FEATURES},
    ):
        panel.progress(row)
        shown.append(panel.score)
    expected = ["dev 90.00%", "dev k-NN 90.00%", "dev loss 0.5000", "train rank 12.3"]
    assert shown == [f"{score} at step 20" for score in expected]


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(panel: TrainingPanel) -> str:
    """What stands on an 80-column terminal now."""
    with panel.console.capture() as capture:
        panel.console.print(panel.render())
    return capture.get()


def test_the_bar_moves_with_every_step_and_says_of_which_step_its_numbers_are() -> None:
    clock = Clock()
    panel = TrainingPanel(Console(width=80, force_terminal=False, file=io.StringIO()), clock)
    shown: list[str] = []
    for step in range(31):
        clock.now = float(step)
        panel.advance(STEP, step, 100)
        if step and step % 10 == 0:
            panel.progress({**TRAIN, "step": step, "left_s": 100.0 - step})
        if step == 20:
            panel.progress({**SCORED, "accuracy": 0.9})
        shown.append(drawn(panel))
    assert all(f"step {step}/100" in text for step, text in enumerate(shown))
    assert "left" in shown[0]
    assert "?" in shown[0]
    assert "5%, 1:35 left" in shown[5]  # before any numbers, by the steps so far
    assert "25%, 1:15 left" in shown[25]
    assert all(f"at step {step // 10 * 10} " in text for step, text in enumerate(shown) if step >= 10)
    assert "dev 90.00% at step 20" in shown[29]
    panel.advance(STEP, 0, 100)  # another run of a search: nothing of the last one stands there
    assert "loss" not in drawn(panel)
    assert "dev" not in drawn(panel)


def test_what_comes_between_steps_shows_how_far_it_is_and_that_it_lives() -> None:
    clock = Clock()
    panel = TrainingPanel(Console(width=80, force_terminal=False, file=io.StringIO()), clock)
    first = drawn(panel)
    clock.now = 65.0
    assert "1:05" in drawn(panel)
    frames: set[str] = set()
    for tenth in range(10):
        clock.now = 65.0 + tenth / 10
        frames.add(drawn(panel)[0])
    assert len(frames) > 2  # it turns
    assert first != drawn(panel)
    clock.now = 65.0
    panel.advance("closed form", 0, 1000)
    clock.now = 75.0
    panel.advance("closed form", 320, 1000)
    assert "closed form: 320 of 1,000, 0:10" in drawn(panel)
    panel.advance(STEP, 0, 40)
    assert "closed form" not in drawn(panel)


def test_plain_lines_come_now_and_then_and_hold_no_control_characters() -> None:
    clock, lines = Clock(), list[str]()
    plain = PlainDisplay(lines.append, clock)
    for second in range(60):
        clock.now = float(second)
        plain.advance("closed form", second * 10, 600)
    assert [line.split()[2] for line in lines] == ["100", "200", "300", "400", "500"]
    for second in range(60, 121):
        clock.now = float(second)
        plain.advance(STEP, second - 60, 100)
        if second == 65:
            plain.log("a note")
    assert lines[5:] == ["step: 0 of 100", "a note", *(f"step: {step} of 100" for step in (15, 25, 35, 45, 55))]
    assert all(line.isprintable() for line in lines)

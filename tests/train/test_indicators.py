"""What rows tell of collapse: curves, and a sentence where something looks collapsed and nowhere else."""

import math
from typing import Any

import pytest

from vitrail.report.charts import Charts
from vitrail.train.report.charts import collapse_charts, describe_collapse, newest_feature_row
from vitrail.train.report.page import RunFacts, make_sections

CONFIG = {"objective": {"outputs": 1000}}
MOST = math.log(1000)


def train_row(step: int = 10, **tallies: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1.0, **tallies}


def look(step: int = 10, kind: str = "watch", **more: Any) -> dict[str, Any]:
    sound = {"rank": 20.0, "width": 64, "similarity": 0.3, "spread": 0.8}
    return {"kind": kind, "step": step, "split": "dev", "loss": 1.0, "count": 100, **sound, **more}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([look(rank=1.4)], "a rank of 1.4 of 64"),
        ([look(rank=0.0, similarity=1.0)], "a cosine of 1.00000"),
        ([look(similarity=0.99995)], "a cosine of 0.99995"),
        ([train_row(spread=0.02, agreement=0.1)], "a spread of 0.02"),
        ([train_row(teacher_entropy=0.001, kl=0.0005)], "to one output"),
        ([train_row(teacher_entropy=MOST - 0.001, kl=0.0005)], "to all outputs alike"),
    ],
)
def test_what_looks_collapsed_is_said(rows: list[dict[str, Any]], said: str) -> None:
    found = collapse_charts(rows, None, CONFIG)
    assert found is not None
    assert found.alarming
    assert said in " ".join(found.notes)


@pytest.mark.parametrize(
    "rows",
    [
        [look()],
        [look(10, rank=1.0), look(20)],  # it was, and is no more
        [train_row(teacher_entropy=0.001, kl=0.5)],  # a sharp teacher that the student does not guess
        [train_row(teacher_entropy=3.0, kl=0.001)],
        [train_row(spread=0.9)],
    ],
)
def test_what_is_sound_is_not_alarming(rows: list[dict[str, Any]]) -> None:
    found = collapse_charts(rows, None, CONFIG)
    assert found is not None
    assert (found.notes, found.alarming) == (("Nothing here looks collapsed.",), False)


def test_features_that_are_mostly_common_are_told_apart_from_collapsed_ones() -> None:
    found = collapse_charts([look(similarity=0.995)], None, CONFIG)
    assert found is not None
    assert not found.alarming
    assert "a cosine of 0.9950" in found.notes[0]
    assert not describe_collapse([look(similarity=0.995)], CONFIG)


def test_curves_are_there_for_what_was_measured_and_for_nothing_else() -> None:
    rows = [train_row(teacher_entropy=3.0, kl=0.5), look(10), look(20), look(20, "test")]
    found = collapse_charts(rows, None, CONFIG)
    assert found is not None
    titles = ["Feature rank", "Similarity between images", "Teacher entropy", "KL"]
    assert [chart.title for chart in found.charts] == titles
    assert found.charts[0].series[0].x.tolist() == [10, 20]
    assert (found.charts[0].unit, found.charts[2].unit) == ("of 64", "nats, 6.91 at most")
    assert collapse_charts([train_row(accuracy=0.5)], None, {}) is None
    row = newest_feature_row(rows)
    assert row is not None
    assert row["step"] == 20


def test_a_report_without_labels_has_no_accuracy_but_that_of_neighbours() -> None:
    facts = RunFacts(title="A run", criteria=())

    def titles(rows: list[dict[str, Any]]) -> list[str]:
        parts = [part for part in make_sections(rows, 0, facts) if isinstance(part, Charts)]
        return [chart.title for part in parts for chart in part.charts]

    assert titles([train_row(hits=0.5), look()]) == ["Loss", "Hits", "Feature rank", "Similarity between images"]
    assert titles([train_row(), look(measure="k-NN", accuracy=0.5)])[:2] == ["Loss", "k-NN accuracy"]

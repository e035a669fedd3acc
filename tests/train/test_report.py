"""The report of a run: from whatever rows there are, while it runs and after it ended well or badly."""

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.train.gauge import GaugeTask, gauge_rows
from vitrail.core.atomic_files import WriteFailed
from vitrail.core.errors import BadImage
from vitrail.data.dataset import ArrayDataset, ImageDataset
from vitrail.evaluation.metrics import ClassificationScore, ScoredSample
from vitrail.report import page as page_module
from vitrail.report.charts import Charts, LineChart
from vitrail.report.confusion_matrix import ConfusionSection
from vitrail.report.sections import Galleries, Status, Tiles
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import TASKS
from vitrail.train.report.page import (
    RunFacts,
    cost_rows,
    flatten,
    group_values,
    make_sections,
    make_tiles,
    with_prefix,
    write_report,
)
from vitrail.train.run_folder.metric_rows import read_metrics

FACTS = RunFacts(title="A run")
TUNED = replace(FACTS, config={"weights": "vit-b16"})
SCORE = ClassificationScore(
    count=15,
    correct=15,
    correct5=None,
    loss=0.1,
    unreadable=0,
    confusion=np.diag([5, 5, 5]),
    best=(ScoredSample(0, 0, 0, 0.999, 0.01),),
    worst=(ScoredSample(1, 1, 2, 0.83, 2.0), ScoredSample(2, 2, 2, 0.51, 0.7)),
)


class Shelf(ArrayDataset):
    """Its third image is gone."""

    def read(self, index: int) -> NDArray[np.uint8]:
        if index == 2:
            raise BadImage("gone")
        return super().read(index)


def shelf() -> ImageDataset:
    return Shelf(np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8))


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train_row(step: int, **more: Any) -> dict[str, Any]:
    t = step / 1000
    return {
        "kind": "train",
        "step": step,
        "epoch": t,
        "loss": 2.3 * math.exp(-3 * t),
        "accuracy": 1 - 0.9 * math.exp(-3 * t),
        "lr": 1e-3 * (1 - t / 2),
        "norm": 1.5,
        "images_per_s": 2000.0,
        "mfu": 0.41,
        "memory_gb": 3.2,
        "skipped": 0,
        "tpuv3_core_days": 3e-7,
        "images": 128 * step,
        "exaflops": 1e-5 * step,
        "device_hours": step / 3600,
        "core_days": step / 86400,
        **more,
    }


def whole_run(steps: int = 1000) -> list[dict[str, Any]]:
    rows = [train_row(step) for step in range(10, steps + 1, 10)]
    for step in range(100, steps + 1, 100):
        score = {"split": "dev", "accuracy": 0.9 + step / 20000, "top5": 0.99, "loss": 0.2, "count": 144}
        rows.append({"kind": "watch", "step": step, **score})
        rows.append({"kind": "fewshot", "step": step, "source": "pets", "shots": 5, "accuracy": 0.61, "spread": 0.01})
    rows.append(
        {"kind": "test", "step": steps, "split": "test", "accuracy": 0.95, "top5": None, "loss": 0.21, "count": 360}
    )
    return rows


def full_facts(**more: Any) -> RunFacts:
    return RunFacts(
        **{
            "title": "A small ViT on digits",
            "lead": "Trained from scratch.",
            "steps": 1000,
            "config": {"batch": 128, "optim": {"lr": 1e-3, "betas": [0.9, 0.999]}, "weights": None},
            "environment": {"torch": "2.10"},
            "panels": CLASSIFICATION.report_sections(SCORE, shelf(), ("a", "b", "c"), "test"),
            **more,
        }
    )


def text_of(folder: Path) -> str:
    return (folder / "report.html").read_text("utf-8")


def tiles_of(rows: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    found = next(part for part in make_sections(rows, 0, FACTS) if isinstance(part, Tiles))
    return {tile.label: (tile.value, tile.note) for tile in found.tiles}


def charts_of(rows: list[dict[str, Any]], facts: RunFacts = FACTS) -> dict[str, LineChart]:
    return {c.title: c for part in make_sections(rows, 0, facts) if isinstance(part, Charts) for c in part.charts}


def test_a_whole_run_shows_everything(tmp_path: Path) -> None:
    write_report(written(tmp_path, whole_run()), full_facts(status="done"))
    text = text_of(tmp_path)
    titles = re.findall(r"<h2>(.*?)</h2>|<summary><span>(.*?)</span>", text)
    assert [a or b for a, b in titles] == [
        "Confusion on test",
        "Worst answers",
        "Surest right answers",
        "Cost",
        "Configuration",
        "Environment",
    ]
    for said in (
        "A small ViT on digits",
        "95.00%",
        "342 of 360",
        "said c, 83.0%",
        "0.9,0.999",
        "TPUv3-core-days",
        "pets, 5",
    ):
        assert said in text
    assert text.count("<img") == 2
    assert "not readable now" in text


def test_a_worst_answer_that_is_right_is_not_marked_as_a_mistake(tmp_path: Path) -> None:
    write_report(written(tmp_path, whole_run()), full_facts(status="done"))
    marks = re.findall(r'<figure class="(right|wrong|)">', text_of(tmp_path))
    assert marks == ["wrong", "right", "right"]  # two of the worst, of which the second is right, and the surest


def test_the_numbers_are_those_of_the_rows() -> None:
    tiles = tiles_of(whole_run())
    assert tiles["test accuracy"] == ("95.00%", "342 of 360, 95% interval 92.2–96.8")
    assert tiles["best dev accuracy"] == ("95.00%", "137 of 144, 95% interval 90.3–97.6, top 5: 99.00%, step 1,000")
    assert tiles["images per second"] == ("2,000", "41% of peak")
    assert tiles["petaFLOPs of training"] == ("10", "128k images")
    assert tiles["device time"] == ("16.7 min", "0.012 core-days")


def test_a_fine_tuning_on_a_cpu_has_no_units_of_the_paper() -> None:
    rows = [{name: value for name, value in row.items() if name != "memory_gb"} for row in whole_run()]
    shown = {tile.label: tile.note for tile in make_tiles(rows, TUNED)}
    assert shown["images per second"] == ""
    assert shown["device time"] == ""
    assert not any("FLOPs" in label for label in shown)
    named = dict(cost_rows([row for row in rows if row["kind"] == "train"], TUNED))
    assert not {"core-days", "exaFLOPs of training", "model FLOP/s utilisation, median"} & set(named)
    assert "images seen" in named


def test_charts_hold_what_was_measured() -> None:
    charts = charts_of(whole_run())
    assert list(charts) == ["Loss", "Accuracy", "Learning rate", "Gradient norm", "Images per second", "pets, 5 shots"]
    names = [one.name for one in charts["Accuracy"].series]
    assert names == ["train", "", "dev", "test"]
    assert charts["Accuracy"].series[1].faint
    assert charts["Accuracy"].series[2].y.tolist() == pytest.approx([0.905 + 0.005 * at for at in range(10)])
    assert charts["Loss"].series[1].x.tolist() == [float(step) for step in range(10, 1001, 10)]


@pytest.mark.parametrize("rows", [[], [{"kind": "train", "step": 1}], [{"kind": "watch", "step": 1, "accuracy": None}]])
def test_next_to_nothing_makes_a_page(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_report(written(tmp_path, rows), FACTS)
    assert "running" in text_of(tmp_path)


def test_no_metrics_file_makes_a_page(tmp_path: Path) -> None:
    write_report(tmp_path / "new", RunFacts(title="A run", status="failed", message="The data is gone."))
    assert "The data is gone." in text_of(tmp_path / "new")


def test_every_field_may_be_missing_or_null() -> None:
    for name in train_row(1):
        if name in ("kind", "step"):
            continue
        for rows in (
            [{key: value for key, value in train_row(step).items() if key != name} for step in (10, 20)],
            [train_row(10), train_row(20, **{name: None})],
            [train_row(10), train_row(20, **{name: math.nan}), train_row(30, **{name: math.inf})],
        ):
            make_sections(rows, 0, full_facts())
            assert cost_rows(rows, FACTS)


def test_a_diverged_run_says_so_and_still_draws(tmp_path: Path) -> None:
    rows = [train_row(step) for step in range(10, 500, 10)]
    rows += [train_row(step, loss=math.nan, accuracy=math.nan, norm=math.inf, skipped=12) for step in (500, 510)]
    facts = full_facts(status="diverged", message="Loss not finite since step 498.", command="vitrail replay run")
    write_report(written(tmp_path, rows), facts)
    text = text_of(tmp_path)
    assert 'class="status diverged"' in text
    assert "Loss not finite since step 498." in text
    assert "12 updates were skipped" in text
    assert "vitrail replay run" in text
    assert "nan" not in re.sub(r'src="[^"]*"|<style>.*?</style>', "", text, flags=re.DOTALL).lower()


def test_what_went_wrong_on_the_way_is_listed(tmp_path: Path) -> None:
    facts = full_facts(notes=["The disk was full at step 300."], unreadable=[f"{at}.jpg: cut off" for at in range(60)])
    write_report(written(tmp_path, whole_run()), facts)
    text = text_of(tmp_path)
    assert "The disk was full at step 300." in text
    assert "49.jpg: cut off" in text
    assert "50.jpg" not in text
    assert "10 more." in text


def test_a_running_run_shows_how_far_it_is() -> None:
    rows = [train_row(step) for step in range(10, 260, 10)]
    found = make_sections(rows, 0, full_facts(message="About 3 min are left."))
    status = found[0]
    assert isinstance(status, Status)
    assert status.text == "at step 250 of 1,000. About 3 min are left."
    assert status.filled == 25.0
    assert charts_of(rows, full_facts())["Loss"].across.high == 1000
    assert charts_of(rows, full_facts(status="done"))["Loss"].across.high == 250


def test_an_interrupted_run_names_one_step() -> None:
    """The metrics may be some steps behind the step that was saved."""
    rows = [train_row(step) for step in range(10, 260, 10)]
    message = "stopped by a signal after step 257 of 1,000, saved"
    status = make_sections(rows, 0, full_facts(status="interrupted", message=message, step=257))[0]
    assert isinstance(status, Status)
    assert set(re.findall(r"step (\d+)", status.text)) == {"257"}
    assert status.filled == 25.7


def test_a_resumed_run_is_told_once(tmp_path: Path) -> None:
    """Killed at 60 with a checkpoint at 30: the rows beyond it come again."""
    first = [train_row(step, loss=9.0) for step in range(10, 70, 10)]
    first.insert(4, {"kind": "watch", "step": 40, "split": "dev", "accuracy": 0.1})
    again = [train_row(step, loss=1.0) for step in range(40, 90, 10)]
    again.insert(1, {"kind": "watch", "step": 40, "split": "dev", "accuracy": 0.2})
    rows, lost = read_metrics(written(tmp_path, first + again) / "metrics.jsonl")
    assert lost == 0
    assert [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"] == [
        *((step, 9.0) for step in (10, 20, 30)),
        *((step, 1.0) for step in (40, 50, 60, 70, 80)),
    ]
    assert [row["accuracy"] for row in rows if row["kind"] == "watch"] == [0.2]


def test_torn_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    good = json.dumps(train_row(10)).encode()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(good + b"\n" + good[:40] + b"\n[1]\n{}\n" + json.dumps(train_row(20)).encode() + b"\n" + good[:30])
    rows, lost = read_metrics(path)
    assert [row["step"] for row in rows] == [10, 20]
    assert lost == 3  # the last line may be on its way
    write_report(tmp_path, FACTS)
    assert "3 lines of metrics.jsonl could not be read" in text_of(tmp_path)


@pytest.mark.slow
def test_long_runs_stay_small_and_quick(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [train_row(step, loss=1 + rng.random(), norm=rng.random()) for step in range(1, 5001)]
    folder = written(tmp_path, [*rows, *whole_run()])
    source = ArrayDataset(rng.integers(0, 256, (24, 375, 500, 3), dtype=np.uint8))
    score = replace(
        SCORE,
        confusion=rng.integers(0, 20, (100, 100)),
        best=tuple(ScoredSample(at, 0, 0, 0.9, 0.1) for at in range(12)),
        worst=tuple(ScoredSample(at, 0, 1, 0.9, 3.0) for at in range(12, 24)),
    )
    names = [f"class {at}" for at in range(100)]
    facts = full_facts(panels=CLASSIFICATION.report_sections(score, source, names, "test"))
    write_report(folder, facts)
    assert (folder / "report.html").stat().st_size < 1_000_000
    start = time.process_time()
    write_report(folder, facts)
    assert time.process_time() - start < 2.0  # some 0.2 s where nothing else runs


def test_the_page_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(written(tmp_path, whole_run()), FACTS)
    before = text_of(tmp_path)

    def full(*_: Any) -> Any:
        raise WriteFailed(28, "No space left on device")

    monkeypatch.setattr(page_module, "replace_on_success", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tmp_path, full_facts())
    assert text_of(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_a_nested_config_becomes_names_and_values() -> None:
    found = group_values(
        {"batch": 8, "optim": {"lr": 1e-3, "schedule": {"warmup": 10}, "clip": None}, "mix": {}, "x": True}
    )
    assert [(group.title, list(group.rows)) for group in found] == [
        ("", [("batch", "8"), ("x", "on")]),
        ("optim", [("lr", "0.001"), ("schedule.warmup", "10"), ("clip", "(none)")]),
    ]
    assert flatten({"a": {}, "b": ""}) == [("b", "–")]


def test_units_that_a_person_reads() -> None:
    assert [with_prefix(flops) for flops in (0.0, 47.6e12, 1567e18, 999.9e21)] == [
        ("0", ""),
        ("47.6", "tera"),
        ("1.57", "zetta"),
        ("1,000", "zetta"),
    ]


def test_a_task_shows_its_own_numbers_and_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = GaugeTask()
    monkeypatch.setitem(TASKS, "gauge", task)
    rows = gauge_rows()
    facts = replace(
        FACTS, criteria=task.criteria, panels=task.report_sections(0.03125, None, ("temperature",), "dev, last weights")
    )
    tiles = {tile.label: (tile.value, tile.note) for tile in make_tiles(rows, facts)}
    assert tiles["best dev error"] == ("0.031", "2,000 images, within 1 °C 75.00%, step 20")
    assert tiles["training loss"][1].startswith("error ")
    charts = charts_of(rows, facts)
    assert list(charts) == ["Loss", "Error", "Within 1 °C"]
    assert not charts["Error"].percent
    assert charts["Within 1 °C"].percent
    assert [one.name for one in charts["Error"].series] == ["train", "dev"]
    write_report(written(tmp_path, rows), facts)
    assert "Readings on dev, last weights" in text_of(tmp_path)
    assert "ccuracy" not in text_of(tmp_path)


def test_galleries_say_whose_answers_they_are() -> None:
    found = CLASSIFICATION.report_sections(SCORE, None, ("a", "b", "c"), "test, best weights (step 20)")
    heat, galleries = found
    assert isinstance(heat, ConfusionSection)
    assert isinstance(galleries, Galleries)
    assert heat.title == "Confusion on test, best weights (step 20)"
    assert [one.title for one in galleries.galleries] == [
        "Worst answers, best weights (step 20)",
        "Surest right answers, best weights (step 20)",
    ]
    assert CLASSIFICATION.report_sections(replace(SCORE, confusion=None, best=(), worst=()), None, (), "test") == []

"""A run stands for one set of weights: its score of the end, its report and its files belong to them."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.train.tiny import MODEL, tiny_run
from vitrail.cli.train.training import describe_scores
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.optim.config import Optim, Schedule
from vitrail.studies.run_study import read_values
from vitrail.train import loop
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.scoring import SplitScore, TrainingResult

BEST, END = 10, 20  # steps
ALONE = World(device=torch.device("cpu"))


class Killed(BaseException):
    """What a signal that nothing can catch is outside of a test."""


class Watching:
    def __init__(self, at: Any = None) -> None:
        self.at = at

    def log(self, text: str) -> None: ...

    def progress(self, row: dict[str, Any]) -> None:
        if self.at is not None:
            self.at(row)


class Shown:
    """What the last report of a run showed, and of which step its chosen weights were."""

    scored: SplitScore | None = None
    chosen: int = -1


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Every report is noted; the weights are spoilt before the last scoring, so that the earlier ones are best."""
    found, present, evaluate = Shown(), loop.present, loop.Training.evaluate

    def noted(*args: Any, chosen: int, **others: Any) -> None:
        found.scored, found.chosen = args[2], chosen
        present(*args, chosen=chosen, **others)

    def spoilt(self: loop.Training) -> None:
        if self.step == END:
            state = self.parts.average.state() if self.parts.average is not None else {}
            for tensor in [*self.parts.objective.parameters(), *state.values()]:
                tensor.data.zero_()
        evaluate(self)

    monkeypatch.setattr(loop, "present", noted)
    monkeypatch.setattr(loop.Training, "evaluate", spoilt)
    return found


def choosing(**changes: Any) -> Run:
    run = tiny_run(
        steps=END,
        batch=64,
        micro=64,
        model=replace(MODEL, dropout=0.0, stochastic_depth=0.0),
        data=Data(source="digits", dev=0.1, workers=0),
        evaluation=Scoring(every=BEST),
        keep=Keep(steps=16),
        optim=Optim(lr=1e-2),
        schedule=Schedule(warmup=0),
        mix=Mix(),
        average=0.0,
        log=1,
    )
    return replace(run, **changes)


def go(run: Run, out: Path, at: Any = None) -> TrainingResult:
    return loop.train(run, out=out, world=ALONE, observer=Watching(at))


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def accuracy(weights: Path, split: str) -> float:
    """Of a weight file, counted here."""
    splits = open_splits(choosing().data)
    source = splits.test if split == "test" else splits.watch
    assert source is not None
    network = vitrail.load(weights)
    prepare = network.card.preprocessing  # type: ignore[union-attr]
    images = torch.stack([prepare(source.open_image(at).rgb()) for at in range(len(source))])
    with torch.inference_mode():
        return float(np.mean(network(images).argmax(-1).numpy() == source.labels.values))


@pytest.mark.slow
@pytest.mark.parametrize("average", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_score_of_the_end_and_the_report_are_of_the_best_weights(
    tmp_path: Path, shown: Shown, average: float
) -> None:
    result = go(choosing(average=average), tmp_path / "run")
    out = result.folder
    best, last = accuracy(out / "best.safetensors", "test"), accuracy(out / "last.safetensors", "test")
    assert best != pytest.approx(last, abs=0.02)
    assert result.weights == out / "best.safetensors"
    assert result.test is not None
    assert result.test["accuracy"] == pytest.approx(best)
    assert [(row["step"], row["weights"], row["accuracy"]) for row in rows(out, "test")] == [
        (BEST, "best", result.test["accuracy"])
    ]
    assert shown.scored is not None
    assert (shown.scored.split, shown.scored.step, shown.chosen) == ("test", BEST, BEST)
    confusion: Any = shown.scored.found.confusion  # type: ignore[union-attr]
    assert confusion.trace() / confusion.sum() == pytest.approx(best)
    assert accuracy(out / "best.safetensors", "dev") == pytest.approx(result.best.values["accuracy"])
    values = read_values(out)
    assert (values["watch"], values["accuracy"]) == pytest.approx((result.best.values["accuracy"], best))
    for text in (describe_run(out), "\n".join(describe_scores(result))):
        assert f"{best:.2%}" in text
        assert f"{last:.2%}" not in text


@pytest.mark.slow
def test_without_a_split_for_the_end_a_resumed_run_shows_its_best_weights(tmp_path: Path, shown: Shown) -> None:
    def kill(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 18:
            raise Killed

    run = choosing(data=Data(source="digits", dev=0.1, test="none", workers=0))
    with pytest.raises(Killed):
        go(run, tmp_path / "run", kill)
    result = go(run, tmp_path / "run")
    assert (result.best.step, result.test) == (BEST, None)
    assert shown.scored is not None
    assert (shown.scored.split, shown.scored.step) == ("dev", BEST)
    assert shown.scored.found.accuracy == pytest.approx(result.best.values["accuracy"])  # type: ignore[union-attr]
    assert [row["step"] for row in rows(tmp_path / "run", "watch")] == [BEST, END]  # looked at again, not noted again


@pytest.mark.slow
def test_a_run_that_may_not_choose_stands_for_its_last_weights(tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/best.safetensors").write_bytes(b"of an earlier run here")
    result = go(choosing(data=Data(source="digits", watch="test", workers=0)), tmp_path / "run")
    assert result.weights == tmp_path / "run/last.safetensors"
    assert not (tmp_path / "run/best.safetensors").exists()
    assert result.test is not None
    assert result.test["accuracy"] == pytest.approx(accuracy(result.weights, "test"))
    assert (result.test["step"], result.test["weights"], shown.chosen) == (END, "last", -1)


@pytest.mark.slow
def test_weights_tell_no_score_that_is_of_an_earlier_step(tmp_path: Path, shown: Shown) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    result = go(choosing(), tmp_path / "run", interrupt)
    assert result.state == "interrupted"
    told = [vitrail.load(tmp_path / "run" / name).card.provenance for name in ("best.safetensors", "last.safetensors")]  # type: ignore[union-attr]
    assert [(one["step"], "score" in one) for one in told] == [(BEST, True), (result.step, False)]
    assert shown.scored is not None
    assert shown.scored.step == BEST


@pytest.mark.slow
def test_best_weights_that_are_gone_at_the_end_are_not_claimed(tmp_path: Path, shown: Shown) -> None:
    def remove(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 14:
            (tmp_path / "run/best.safetensors").unlink()

    result = go(choosing(), tmp_path / "run", remove)
    assert result.weights == tmp_path / "run/last.safetensors"
    assert result.test is not None
    assert (result.test["step"], result.test["weights"]) == (END, "last")
    assert result.test["accuracy"] == pytest.approx(accuracy(result.weights, "test"))

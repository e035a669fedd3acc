"""What a run does at its edges: going on after an odd end, numbers that are none, settings that cannot work."""

import json
import os
import signal
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.train.killed import digest_of
from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError, DataError, Diverged, MismatchedWeights, WorkerDied
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes.run_overrides import with_changes
from vitrail.tasks.classification.objective import Classification
from vitrail.train import loop
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run
from vitrail.train.grid.sweep import run_sweep
from vitrail.train.loop import train
from vitrail.train.resume import adapt_to_machine, read_run
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.scoring import TrainingResult

ALONE = World(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watching:
    """Keeps what is told; `at` may do something at a row of metrics."""

    def __init__(self, at: Any = None) -> None:
        self.notes: list[str] = []
        self.at = at

    def log(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, row: dict[str, Any]) -> None:
        if self.at is not None:
            self.at(row)


def go(run: Run, out: Path, watching: Watching | None = None, *, force: bool = False) -> TrainingResult:
    return train(run, out=out, world=ALONE, observer=watching or Watching(), force=force)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


class Killed(BaseException):
    """In a test what a signal that nothing can catch is outside."""


@pytest.mark.slow
def test_the_ledger_counts_every_picture_however_often_a_run_stops(tmp_path: Path) -> None:
    def kill(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 15:
            raise Killed

    run = tiny_run(keep=Keep(steps=7))  # 14 is between two rows of metrics
    with pytest.raises(Killed):
        go(run, tmp_path / "run", Watching(kill))
    go(run, tmp_path / "run")
    train_rows = rows(tmp_path / "run", "train")
    assert [row["images"] for row in train_rows] == [16 * row["step"] for row in train_rows]
    hours = [row["device_hours"] for row in train_rows]
    assert hours == sorted(hours)
    assert vitrail.load(tmp_path / "run/last.safetensors").card.provenance["cost"]["images"] == 640  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_run_killed_when_it_had_just_stopped_early_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(evaluation=Scoring(every=2, patience=2), optim=Optim(lr=1e-6))
    whole = go(run, tmp_path / "whole")
    assert whole.step < 40

    def kill(self: loop.Training, ending: str) -> None:
        self.store.wait()  # its thread, which a real kill would end, must not meet the start that follows
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "finish", kill)
        with pytest.raises(Killed):
            go(run, tmp_path / "cut")
    result = go(run, tmp_path / "cut")
    assert (result.state, result.step) == ("done", whole.step)
    assert "stopped early" in describe_run(tmp_path / "cut")
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_network_that_answers_nan_still_leaves_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its score is not a number; that is kept in words, and none of its answers counts as right."""

    run = tiny_run(steps=4, schedule=Schedule(warmup=0), evaluation=Scoring(every=2), average=0.0)
    forward = loop.Training.evaluate

    def poisoned(self: loop.Training) -> None:
        with torch.no_grad():
            self.parts.objective.network.head.classifier.weight.fill_(3e38)  # type: ignore[union-attr]
        forward(self)

    monkeypatch.setattr(loop.Training, "evaluate", poisoned)
    result = go(run, tmp_path / "run")
    assert result.watch is not None
    assert result.watch["accuracy"] == 0
    assert (tmp_path / "run/last.safetensors").exists()


def test_weights_that_overflow_at_the_end_are_an_explosion_and_no_matter_of_room(tmp_path: Path) -> None:
    run = tiny_run(steps=6, optim=Optim(kind="sgd", lr=1e39), schedule=Schedule(decay="constant"), average=0.0)
    with pytest.raises(Diverged) as caught:
        go(run, tmp_path / "run")
    said = str(caught.value)
    assert "model/network." in said
    assert "holds NaN or infinity" in said
    assert "optim.lr" in said
    assert "room" not in said
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "diverged"
    assert said in describe_run(tmp_path / "run")
    assert "overflowed" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_what_was_saved_before_weights_overflowed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = loop.Training.update

    def last_one_overflows(self: loop.Training, batch: Any) -> None:
        honest(self, batch)
        if self.step == 8:
            with torch.no_grad():
                self.parts.objective.network.head.classifier.weight.fill_(torch.inf)  # type: ignore[union-attr]

    monkeypatch.setattr(loop.Training, "update", last_one_overflows)
    with pytest.raises(Diverged, match=r"the checkpoint of step 4 is intact.*--force.*optim\.clip=1"):
        go(tiny_run(steps=8, average=0.0), tmp_path / "run")
    monkeypatch.undo()
    assert go(tiny_run(steps=8, average=0.0), tmp_path / "run").state == "done"


@pytest.mark.slow
def test_what_force_could_not_do_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    go(tiny_run(steps=8), tmp_path / "run")
    before = [(tmp_path / "run" / name).read_bytes() for name in ("config.json", "command.json")]
    with pytest.raises(MismatchedWeights, match="another network"):
        go(tiny_run(steps=12, model=replace(MODEL, depth=3)), tmp_path / "run", force=True)
    assert [(tmp_path / "run" / name).read_bytes() for name in ("config.json", "command.json")] == before
    assert go(tiny_run(steps=12), tmp_path / "run", force=True).step == 12  # and what it can do is written
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 12


@pytest.mark.slow
def test_a_folder_in_which_nothing_was_trained_takes_the_corrected_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks:9"):
        go(tiny_run(steps=8, optim=Optim(freeze="blocks:9")), tmp_path / "run")
    watching = Watching()
    assert go(tiny_run(steps=8, optim=Optim(freeze="blocks:1")), tmp_path / "run", watching).state == "done"
    assert any("optim.freeze" in note and "nothing" in note for note in watching.notes)


@pytest.mark.slow
def test_a_point_of_a_search_that_explodes_is_the_last_and_the_others_count(tmp_path: Path) -> None:
    run = tiny_run(steps=12, optim=Optim(kind="sgd", lr=0.01), schedule=Schedule(), bad_steps=3, average=0.0)
    watching = Watching()
    found = run_sweep(run, {"optim.lr": (1e30, 0.01)}, out=tmp_path / "run", world=ALONE, observer=watching)
    assert [point.settings for point in found.points] == [("optim.lr=0.01",), ("optim.lr=1e+30",)]
    assert found.points[1].diverged
    assert found.final is not None
    tried = json.loads((tmp_path / "run/sweep.json").read_text())["tried"]
    assert tried[1]["dev accuracy"] == "diverged"
    with pytest.raises(Diverged, match="every point"):
        run_sweep(run, {"optim.lr": (1e30, 2e30)}, out=tmp_path / "none", world=ALONE, observer=watching)


@pytest.mark.slow
def test_a_search_changes_settings_as_the_command_line_does(tmp_path: Path) -> None:
    run = tiny_run(epochs=0.1, steps=0)
    found = run_sweep(run, {"steps": (8, 9)}, out=tmp_path / "run", world=ALONE, change=with_changes)
    assert found.final is not None
    assert found.final.step in (8, 9)


@pytest.mark.slow
def test_the_last_run_of_a_search_has_nothing_to_lose_patience_with(tmp_path: Path) -> None:
    run = tiny_run(steps=8, evaluation=Scoring(every=4, patience=9))
    found = run_sweep(run, {"optim.lr": (0.001,)}, out=tmp_path / "run", world=ALONE)
    assert found.final is not None
    assert found.final.step == 8


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_named_wherever_the_run_is(tmp_path: Path) -> None:
    def kill(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 10:
            os.kill(active_children()[0].pid or 0, signal.SIGKILL)
            time.sleep(1)  # torch raises its error here, far from the loader

    run = tiny_run(data=Data(source="digits", resident="off", workers=1))
    with pytest.raises(WorkerDied, match="a loader process ended"):
        go(run, tmp_path / "run", Watching(kill))
    assert "a loader process ended" in describe_run(tmp_path / "run")
    assert "a loader process ended" in (tmp_path / "run/report.html").read_text()
    assert go(run, tmp_path / "run").state == "done"


@pytest.mark.slow
def test_which_split_is_scored_may_change_and_changed_pictures_are_named_by_their_split(tmp_path: Path) -> None:
    images = tmp_path / "pictures"
    for split in ("train", "val"):
        for label in ("a", "b"):
            (images / split / label).mkdir(parents=True)
            for number in range(8):
                noise = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(noise).save(images / split / label / f"{number}.png")
    run = tiny_run(steps=8, data=Data(source=str(images), workers=0))
    go(run, tmp_path / "run")
    assert go(replace(run, data=replace(run.data, watch="none")), tmp_path / "run").state == "done"
    (images / "val/a/7.png").unlink()
    with pytest.raises(ConfigError, match=r"data\.fingerprint\.val: \S+ -> \S+"):
        go(run, tmp_path / "run")


@pytest.mark.slow
def test_what_was_chosen_for_other_processes_is_chosen_anew(tmp_path: Path) -> None:
    go(tiny_run(steps=8, micro=0), tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert (run.micro, run.sharding) == (16, "none")
    assert adapt_to_machine(run, ["steps=8"], 1) == replace(run, micro=0, sharding="auto", compile="auto")
    assert adapt_to_machine(run, ["micro=16", "sharding = none", "compile=off"], 1) == run
    assert adapt_to_machine(run, ["micro=16", "sharding = none", "compile=off"], 2) == replace(run, micro=8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mix": Mix(mixup=0.2), "batch": 15, "micro": 5}, "mix.stride=1 .* multiple of 2"),
        ({"data": Data(source="digits", repeats=2, workers=0)}, "mix.stride=2"),
        ({"data": Data(source="digits", watch="none"), "evaluation": Scoring(patience=1)}, "data.dev=0.1"),
        ({"data": Data(source="digits", watch="test"), "evaluation": Scoring(patience=1)}, "data.dev=0.1"),
        ({"evaluation": Scoring(fewshot="digits", shots=(5, 5000))}, "5000 shots"),
        ({"model": replace(MODEL, channels=5)}, "5 channels"),
    ],
)
def test_what_cannot_work_is_refused_before_there_is_a_folder(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        go(tiny_run(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "fields", [{"every": -1}, {"patience": -1}, {"shots": ()}, {"shots": (0,)}], ids=lambda fields: next(iter(fields))
)
def test_numbers_of_an_evaluation_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.{next(iter(fields))}"):
        Scoring(**fields)


def test_a_dry_run_says_that_several_labels_want_another_loss(tmp_path: Path) -> None:
    lines = ["path,labels"]
    for number in range(8):
        noise = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'a|b' if number % 2 else 'b'}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    run = tiny_run(steps=3, schedule=Schedule(), data=Data(source=str(tmp_path / "list.csv"), workers=0))
    assert any("several labels" in text for text in dry_run(run, open_splits(run.data), ALONE).warnings)
    both = replace(run, objective=Classification(loss="sigmoid"))
    assert not any("several labels" in text for text in dry_run(both, open_splits(run.data), ALONE).warnings)

"""What a run leaves where it was cut off, or where its folder was taken away, is what it says."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import tiny_run
from vitrail.checkpoint.store.layout import list_checkpoints
from vitrail.cli import main
from vitrail.core.errors import TrainingError
from vitrail.distributed.process_group import World
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.loop import train
from vitrail.train.metrics import Meter

ALONE = World(device=torch.device("cpu"))


class Killed(BaseException):
    """What a signal that nothing can catch is outside of a test."""


class Watching:
    """Does something at rows of a kind and step."""

    def __init__(self, kind: str = "", step: int = 0, act: Any = None) -> None:
        self.kind, self.step, self.act = kind, step, act

    def log(self, text: str) -> None: ...

    def progress(self, row: dict[str, Any]) -> None:
        if (row["kind"], row["step"]) == (self.kind, self.step):
            self.act()


def kill() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def go(run: Run, out: Path, watching: Watching | None = None) -> None:
    train(run, out=out, world=ALONE, observer=watching or Watching())


def await_save(out: Path, step: int) -> None:
    """Checkpoints are written by a thread of their own: waits for the one of this step."""
    while max(list_checkpoints(out / "checkpoints"), default=0) < step or any((out / "checkpoints").glob(".*")):
        time.sleep(0.01)


def rows(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


@pytest.mark.slow
def test_the_first_row_after_a_resume_is_of_all_the_steps_since_the_row_before(tmp_path: Path) -> None:
    run = tiny_run(steps=20, keep=Keep(steps=7))  # a row every 5 steps, so 14 lies between two
    go(run, tmp_path / "whole")
    with pytest.raises(Killed):
        go(run, tmp_path / "cut", Watching("train", 15, kill))
    go(run, tmp_path / "cut")
    learnt = [[(row["step"], row["loss"], row["accuracy"], row["images"]) for row in rows(tmp_path / name, "train")]
              for name in ("whole", "cut")]  # fmt: skip
    assert learnt[0] == learnt[1]


def test_sums_of_another_objective_are_not_added_to() -> None:
    meter = Meter(torch.device("cpu"))
    meter.restore({"total": 3.0, "count": 2.0})
    none, yes = torch.zeros(()), torch.tensor(True)
    meter.add(4, ("total", "count", "hits"), torch.tensor([1.0, 1.0, 1.0]), none, yes)
    assert meter.state() == {"total": 1.0, "count": 1.0, "hits": 1.0}


@pytest.mark.slow
def test_a_run_killed_after_its_last_score_has_it_once(tmp_path: Path) -> None:
    run = tiny_run(steps=8, data=Data(source="digits", dev=0.05, workers=0), evaluation=Scoring(every=4), average=0.0)
    with pytest.raises(Killed):
        go(run, tmp_path / "run", Watching("test", 8, kill))
    assert len(rows(tmp_path / "run", "test")) == 1
    go(run, tmp_path / "run")
    assert len(rows(tmp_path / "run", "test")) == 1
    assert [row["step"] for row in rows(tmp_path / "run", "watch")] == [4, 8]


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.slow
def test_a_folder_that_is_removed_ends_the_run_which_claims_nothing(tmp_path: Path, another: bool) -> None:
    out = tmp_path / "run"

    def remove() -> None:
        await_save(out, 8)
        shutil.rmtree(out)
        if another:
            out.mkdir()  # as by a run that is started again next to this one

    with pytest.raises(TrainingError) as caught:
        go(tiny_run(), out, Watching("train", 10, remove))
    assert str(out) in str(caught.value)
    assert "intact" not in str(caught.value)
    assert list(out.iterdir()) == [] if another else not out.exists()


@pytest.mark.slow
def test_checkpoints_that_are_cleared_are_written_again(tmp_path: Path) -> None:
    run = replace(tiny_run(steps=12), keep=Keep(steps=4))

    def clear() -> None:
        await_save(tmp_path / "run", 8)
        shutil.rmtree(tmp_path / "run/checkpoints")

    go(run, tmp_path / "run", Watching("train", 10, clear))
    assert list(list_checkpoints(tmp_path / "run/checkpoints")) == [12]


@pytest.mark.parametrize("how", [["--set", "model.classes=7"], ["--sweep", "model.classes=7,10"]])
def test_another_number_of_classes_than_the_data_have_is_refused(
    tmp_path: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "digits", *how, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "model.classes=7" in said
    assert "10 classes" in said
    assert not (tmp_path / "run").exists()

"""A new objective is one file with one line of registration (rotations.py): it trains, resumes and is scored."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vitrail
from tests.extending.rotations import Rotations
from vitrail.cli.app import main
from vitrail.objectives.objective import Objective, ObjectiveConfig

SETTINGS = ["objective=Rotations", "schedule.warmup=1", "evaluation.every=12", "log=4"]


def command(folder: Path) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["pretrain", "digits", "--steps", "12", "--out", str(folder), *settings]


def interrupt_at(step: int) -> Callable[[Objective, int], None]:
    def after_step(self: Objective, at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    return after_step


def test_it_is_known_by_name() -> None:
    assert Rotations in ObjectiveConfig.list_registered()


@pytest.mark.slow
def test_it_trains_and_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "after_step", interrupt_at(6))
        assert main(command(tmp_path / "parted")) == 0
    assert main(["pretrain", "--resume", str(tmp_path / "parted")]) == 0
    whole, parted = (vitrail.load(tmp_path / name / "last.safetensors").state_dict() for name in ("whole", "parted"))
    assert whole.keys() == parted.keys()
    assert all(torch.equal(whole[name], parted[name]) for name in whole)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert any("right" in row for row in rows)

"""A time budget: what fits is computed from a pace that is given here, and a resumed run keeps what was chosen."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.cli import main
from vitrail.cli.train import training
from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import World
from vitrail.models.build import build
from vitrail.models.vit_config import ViTConfig
from vitrail.recipes import launch as module
from vitrail.recipes.launch import CPU_MINUTES, TimeBudget, apply_budget, choose_budget, describe_full_run, find_minutes
from vitrail.recipes.run_overrides import with_changes
from vitrail.recipes.run_request import RunCommand, build_plan
from vitrail.train.config import Run
from vitrail.train.data import DataSplits, open_splits
from vitrail.train.dry_run import seconds_per_image

ALONE = World(device=torch.device("cpu"))
CARD = World(device=torch.device("cuda"))
DEPTH = 4
FIXED = ("--set", "keep.steps=5", "--set", "data.workers=0", "--set", "data.part=0.2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    config = ViTConfig(width=16, depth=DEPTH, mlp_width=32, heads=2, patch=(4, 4), image=(8, 8), classes=10)
    torch.manual_seed(0)
    vitrail.save(build(config), path)
    return str(path)


@pytest.fixture
def asked(weights: str) -> RunCommand:
    return RunCommand(verb="finetune", weights=weights, data="digits")


def taking(seconds: float) -> Any:
    """A measurement that finds so many seconds an image."""
    return lambda run, splits, world: seconds


def cut_down(asked: RunCommand, minutes: float, image_s: float) -> tuple[Run, DataSplits, TimeBudget]:
    run = build_plan(asked).run
    splits = open_splits(run.data)
    return run, splits, choose_budget(run, splits, minutes=minutes, image_s=image_s)


def test_a_recipe_that_fits_stays_whole(asked: RunCommand) -> None:
    run, _, found = cut_down(asked, minutes=5, image_s=1e-6)
    assert found.settings == ()
    assert found.steps == found.full_steps == run.steps
    assert found.seconds < 300
    assert describe_full_run(found, asked) == ""


@pytest.mark.parametrize("image_s", [0.02, 0.1, 0.2])
def test_what_is_cut_fits(asked: RunCommand, image_s: float) -> None:
    run, splits, found = cut_down(asked, minutes=5, image_s=image_s)
    cut = with_changes(run, found.settings)
    assert (cut.steps, cut.start) == (found.steps, "closed-form")
    assert cut.optim.lr == pytest.approx(run.optim.lr / 10)
    assert 10 <= cut.steps < run.steps
    assert cut.schedule.warmup < cut.steps
    assert found.seconds <= 300 < found.full_seconds
    frozen = int(cut.optim.freeze.removeprefix("blocks:"))
    assert frozen == (DEPTH // 2 if cut.steps * cut.batch >= len(splits.train) and image_s < 0.2 else DEPTH - 1)


def test_too_little_time_still_trains_a_little_and_says_how_long(asked: RunCommand) -> None:
    _, _, found = cut_down(asked, minutes=0.1, image_s=1.0)
    assert found.steps == module.LEAST_STEPS
    assert found.seconds > 6


def test_what_is_typed_stays(weights: str) -> None:
    asked = RunCommand(
        verb="finetune", weights=weights, data="digits", settings=("optim.freeze=embedding", "start=zero")
    )
    plan, found = apply_budget(build_plan(replace(asked, minutes=1.0)), replace(asked, minutes=1.0), None, ALONE,
                                measure=taking(0.1))  # fmt: skip
    assert found is not None
    assert found.steps < found.full_steps
    assert (plan.run.optim.freeze, plan.run.start) == ("embedding", "zero")
    assert not any(text.startswith("optim.lr") for text in found.settings)  # a head at zero learns at the full rate
    with pytest.raises(ConfigError, match="--minutes 1 and steps"):
        find_minutes(replace(asked, minutes=1.0, settings=("steps=40",)), ALONE, None, started=False)
    with pytest.raises(ConfigError, match="--minutes 1 is for one run"):
        find_minutes(replace(asked, minutes=1.0, sweep=()), ALONE, None, started=False)


def test_the_default_is_for_a_fine_tuning_on_a_cpu_whose_length_nobody_set(asked: RunCommand) -> None:
    def found(world: World = ALONE, *, started: bool = False, **changes: Any) -> float:
        return find_minutes(replace(asked, **changes), world, None, started=started)

    assert found() == CPU_MINUTES
    assert found(CARD) == found(minutes=0.0) == found(settings=("epochs=3",)) == found(recipe="finetune-cifar10") == 0
    assert found(verb="pretrain") == found(sweep=()) == found(started=True) == 0
    assert found(CARD, minutes=2.0) == found(minutes=2.0, verb="pretrain") == 2


def test_a_tiny_network_is_not_even_measured(asked: RunCommand) -> None:
    def never(*args: Any) -> float:
        raise AssertionError

    plan = build_plan(asked)
    assert apply_budget(plan, asked, None, ALONE, measure=never) == (plan, None)


def test_a_pretraining_is_cut_in_length_alone() -> None:
    asked = RunCommand(recipe="digits", minutes=1.0)
    plan, found = apply_budget(build_plan(asked), asked, None, ALONE, measure=taking(0.01))
    assert found is not None
    assert {text.partition("=")[0] for text in found.settings} <= {"steps", "schedule.warmup", "evaluation.every"}
    assert 0 < plan.run.steps < found.full_steps


def test_the_command_for_more_time_asks_for_the_same(asked: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[RunCommand] = []
    monkeypatch.setattr(training, "start_run", lambda options, asked, *rest: heard.append(asked) or 0)
    typed = replace(asked, seed=3, settings=("data.dev=0.2",), minutes=1.0)
    found = cut_down(typed, minutes=1, image_s=0.1)[2]
    assert main(shlex.split(describe_full_run(found, typed).partition("vitrail ")[2])) == 0
    assert heard == [replace(typed, minutes=0.0)]


@pytest.mark.slow
def test_the_choice_is_made_once(asked: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is interrupted, the same command on a machine of another pace, and --resume train the same steps."""
    paces = iter([0.02])
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module.apply_budget, "__kwdefaults__", {"measure": lambda *args: next(paces)})
    out = tmp_path / "run"
    typed = ["finetune", "--from", asked.weights, "--data", "digits", "--minutes", "0.2", "--out", str(out)]
    assert main([*typed, *FIXED]) == 0
    command = json.loads((out / "command.json").read_text())
    steps = command["budget"]["steps"]
    assert json.loads((out / "config.json").read_text())["steps"] == steps < command["budget"]["full_steps"]
    before = (out / "metrics.jsonl").read_text()
    status = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**status, "state": "running"}))  # as after a kill
    assert main(["finetune", "--resume", str(out)]) == 0
    assert main([*typed, *FIXED]) == 0
    assert json.loads((out / "command.json").read_text())["budget"] == command["budget"]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == len(before.splitlines())
    assert main([*typed, *FIXED, "--minutes", "none"]) == 2  # another length is another run


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_minutes_that_make_no_sense_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", f"--minutes={text}"]) == 2
    assert text in capsys.readouterr().err


def test_the_pace_is_measured_without_a_trace(asked: RunCommand) -> None:
    run = build_plan(asked).run
    state = torch.get_rng_state()
    assert 0 < seconds_per_image(run, open_splits(run.data), ALONE) < 60
    assert torch.equal(torch.get_rng_state(), state)

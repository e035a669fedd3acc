"""What a request becomes before its run starts: its settings, its plan, its folder and what the folder records. The
commands and the public functions share it."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import World
from vitrail.recipes.budget import TimeBudget, apply_budget, read_budget
from vitrail.recipes.run_request import RunCommand, RunPlan, build_plan
from vitrail.train.config import Run
from vitrail.train.resume import adapt_to_machine, read_run

RUNS: Final = Path("runs")
SHORT: Final = {"epochs": "epochs", "steps": "steps", "batch": "batch", "lr": "optim.lr"}  # words that are settings
LENGTHS: Final = {"epochs": ("steps",), "steps": ("epochs",)}  # and what they cannot stand next to


def short_settings(settings: Sequence[str], *, option: str = "", setting: str = "", **short: float | None) -> list[str]:
    """The words of SHORT that have a value, as settings; what contradicts `settings` is refused. `option` and `setting`
    stand before the two in messages, as on the command line."""
    given = {name: value for name, value in short.items() if value is not None}
    typed = {text.partition("=")[0].strip(): text for text in settings}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{option}{name} {value:g} must be above 0 and finite")
        for field in (SHORT[name], *LENGTHS.get(name, ())):
            if field in typed:
                both = f"{option}{name} {value:g} and {setting}{typed[field]}"
                raise ConfigError(f"{both} contradict each other; leave one out")
    if given.keys() >= {"epochs", "steps"}:
        both = f"{option}epochs {given['epochs']:g} and {option}steps {given['steps']}"
        raise ConfigError(f"{both} both say how long; leave one out")
    return [f"{SHORT[name]}={value!r}" for name, value in given.items()]


def plan_run(
    asked: RunCommand, out: Path | None, world: World, *, going_on: bool = False
) -> tuple[RunPlan, TimeBudget | None]:
    """The run and its time budget. One that is `going_on` is as its folder says, whatever has become of the recipe."""
    if going_on and asked.sweep is None and out:
        return RunPlan(run=adapt_to_machine(read_run(out), asked.settings, world.size), base=None), read_budget(out)
    return apply_budget(build_plan(asked), asked, out, world)


def free_folder(run: Run) -> Path:
    """runs/NAME, or runs/NAME-2 and so on: without a folder every call starts a new run."""
    name = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in run.name)
    path, number = RUNS / name, 1
    while os.path.lexists(path):
        number += 1
        path = RUNS / f"{name}-{number}"
    return path


def resume_command(asked: RunCommand, out: Path) -> str:
    """The command that resumes a run."""
    return f"vitrail {asked.verb} --resume {shlex.quote(str(out))}"


def record_command(asked: RunCommand, out: Path, budget: TimeBudget | None) -> dict[str, Any]:
    """What the run's folder records of the request."""
    chosen = {} if budget is None else {"budget": asdict(budget)}
    return {**asdict(asked), "go_on": resume_command(asked, out), **chosen}

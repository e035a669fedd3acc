"""Prepares a request before its run starts: its settings, its plan, its time budget, its folder and what the folder
records. Shared by the commands and the public functions.

A time budget determines how many steps fit, and what is cut if the full recipe does not fit:

    budget = choose_budget(run, images, minutes=5, image_s=0.06)
    run = with_changes(run, budget.settings)

The speed is measured once, before the first start. What follows from it is kept in the run's folder as settings, so a
resumed run uses the same settings and nothing is measured again.
"""

import math
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from vitrail.core.errors import ConfigError
from vitrail.core.text import format_duration
from vitrail.distributed.process_group import World
from vitrail.evaluation.speed import training_flops
from vitrail.recipes.run_overrides import setting_names, with_changes
from vitrail.recipes.run_request import RunCommand, RunPlan, build_plan
from vitrail.recipes.warmup import fit_warmup
from vitrail.tasks.registry import task_of
from vitrail.train.closed_form_baseline import LEARNT, SCORED, can_start, find_obstacle
from vitrail.train.config import Run
from vitrail.train.data import DataSplits, open_splits
from vitrail.train.dry_run import seconds_per_image
from vitrail.train.resume import adapt_to_machine, read_run
from vitrail.train.run_folder.files import COMMAND, read_command

RUNS: Final = Path("runs")
SHORT: Final = {"epochs": "epochs", "steps": "steps", "batch": "batch", "lr": "optim.lr"}  # as settings
LENGTHS: Final = {"epochs": ("steps",), "steps": ("epochs",)}  # and the settings that contradict them
CPU_MINUTES: Final = 5.0  # of a fine-tuning without options
LEAST_STEPS: Final = 10
SCORINGS: Final = 5  # along a run that is cut
WHOLE_SCORINGS: Final = 20  # along one that is not
SURE_FLOPS: Final = 2e10  # per second, which any two cores reach
SURE_READ_S: Final = 0.005  # per image
GENTLE: Final = 0.1  # of the learning rate: the head is already good, and the blocks must not ruin it
LENGTH: Final = ("steps", "epochs")

Measure = Callable[[Run, DataSplits, World], float]  # seconds of training per image


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """What was chosen for a number of minutes: `settings` that change the run, empty if the full recipe fits. Seconds
    are estimated from the measured speed, `image_s` per image."""

    minutes: float
    image_s: float
    steps: int
    full_steps: int
    seconds: float
    full_seconds: float
    settings: tuple[str, ...]


def short_settings(settings: Sequence[str], *, option: str = "", setting: str = "", **short: float | None) -> list[str]:
    """The arguments of SHORT that have a value, as settings. ConfigError if one contradicts `settings`. Messages prefix
    the two with `option` and `setting`, as on the command line."""
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
        raise ConfigError(f"{both} both set the length of the run; leave one out")
    return [f"{SHORT[name]}={value!r}" for name, value in given.items()]


def plan_run(
    asked: RunCommand, out: Path | None, world: World, *, going_on: bool = False
) -> tuple[RunPlan, TimeBudget | None]:
    """The run and its time budget. A run that is `going_on` keeps what its folder says, whatever has become of the
    recipe."""
    if going_on and asked.sweep is None and out:
        return RunPlan(run=adapt_to_machine(read_run(out), asked.settings, world.size), base=None), read_budget(out)
    return apply_budget(build_plan(asked), asked, out, world)


def free_folder(run: Run) -> Path:
    """runs/NAME, or runs/NAME-2 and so on: if no folder is given, every call starts a new run."""
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


def apply_budget(
    plan: RunPlan, asked: RunCommand, out: Path | None, world: World, *, measure: Measure = seconds_per_image
) -> tuple[RunPlan, TimeBudget | None]:
    """The plan within its time budget, and the budget; the plan as it is if there is none. A folder that holds the run
    keeps its earlier choices."""
    kept = None if out is None else read_budget(out)
    minutes = find_minutes(asked, world, kept, started=out is not None and (out / COMMAND).exists())
    if not minutes:
        return plan, None
    budget = kept
    if budget is None or budget.minutes != minutes:
        splits = open_splits(plan.run.data, task_of(plan.run.objective))
        if asked.minutes is None:
            images = count_steps(plan.run, splits) * plan.run.batch
            flops = training_flops(plan.run.macs_per_image, images)
            if flops / SURE_FLOPS + images * SURE_READ_S < 60 * minutes:  # fits on any machine
                return plan, None
        image_s = measure(plan.run, splits, world)
        budget = choose_budget(plan.run, splits, minutes=minutes, image_s=image_s, typed=setting_names(asked.settings))
    run = with_changes(plan.run, budget.settings)
    chosen = plan.why if plan.explain is None else plan.explain(run)
    return replace(plan, run=run, why=(*chosen, *explain_budget(budget, run, asked))), budget


def find_minutes(asked: RunCommand, world: World, kept: TimeBudget | None, *, started: bool) -> float:
    """How many minutes a run may take, 0 for any number. By default, fine-tuning on a CPU gets a few minutes if its
    length was not chosen. A run that was already `started` keeps its budget (`kept`), or none."""
    length = sorted(setting_names(asked.settings) & set(LENGTH))
    if asked.minutes and length:
        raise ConfigError(f"--minutes {asked.minutes:g} and {length[0]} both set the length of the run; give one")
    if asked.minutes and asked.sweep is not None:
        raise ConfigError(f"--minutes {asked.minutes:g} is for one run; with --sweep give --set steps=N instead")
    if asked.minutes is not None or length or asked.sweep is not None:
        return asked.minutes or 0.0
    if started:
        return 0.0 if kept is None else kept.minutes
    return CPU_MINUTES if asked.verb == "finetune" and not asked.recipe and world.device.type == "cpu" else 0.0


def choose_budget(
    run: Run, splits: DataSplits, *, minutes: float, image_s: float, typed: Collection[str] = ()
) -> TimeBudget:
    """Chooses what fits, given the seconds that training takes per image. Settings that were `typed` stay.

    A fine-tuning that does not fit starts from the closed form, at a tenth of the learning rate, and trains only the
    upper half of its blocks, or only the last one if that would leave less than an epoch. A backward pass is counted as
    two forward passes, and all blocks as equal."""
    full_steps, limit = count_steps(run, splits), 60 * minutes
    full = image_s * full_steps * run.batch + estimate_scoring(run, splits, image_s, WHOLE_SCORINGS)
    whole = TimeBudget(minutes, image_s, full_steps, full_steps, full, full, ())
    if full <= limit:
        return whole
    scoring = estimate_scoring(run, splits, image_s, SCORINGS)
    settings: dict[str, str] = {}
    share, steps = 1.0, int((limit - scoring) / (image_s * run.batch))
    if run.weights and can_start(run) and not find_obstacle(run, splits):
        settings["start"] = "closed-form"
        if "start" not in typed:
            settings["optim.lr"] = f"{GENTLE * run.optim.lr:g}"
    frozen_by_choice = "optim.freeze" in typed or bool(run.optim.freeze)
    if run.weights and run.model.tokens and run.model.layers > 1 and not frozen_by_choice:
        depth = run.model.layers
        for frozen in (depth // 2, depth - 1):
            share = 1 - 2 * frozen / (3 * depth)
            settings["optim.freeze"] = f"blocks:{frozen}"
            steps = int((limit - scoring) / (share * image_s * run.batch))
            if steps * run.batch >= len(splits.train):
                break
    steps = min(max(steps, LEAST_STEPS), full_steps)
    settings["steps"] = str(steps)
    if run.weights:
        found = (text.partition("=") for text in fit_warmup(run, steps, typed))
        settings |= {name: value for name, _, value in found}
    else:
        settings["schedule.warmup"] = str(round(run.schedule.warmup * steps / full_steps))
    if not run.evaluation.every:
        settings["evaluation.every"] = str(-(-steps // SCORINGS))
    kept = tuple(f"{name}={value}" for name, value in settings.items() if name not in typed)
    return replace(whole, steps=steps, seconds=share * image_s * steps * run.batch + scoring, settings=kept)


def count_steps(run: Run, splits: DataSplits) -> int:
    return run.steps or max(round(run.epochs * len(splits.train) / run.batch), 1)


def estimate_scoring(run: Run, splits: DataSplits, image_s: float, scorings: int) -> float:
    """Seconds for everything except training: forward passes for the closed form and for the scores."""
    watch, test = (0 if source is None else len(source) for source in (splits.watch, splits.test))
    closed = 0
    if run.weights and not find_obstacle(run, splits):
        closed = min(len(splits.train), LEARNT) + min(watch, SCORED) + min(test, SCORED)
    return image_s / 3 * (closed + scorings * watch + test)


def read_budget(out: Path) -> TimeBudget | None:
    """The budget with which the run in a folder was started."""
    found = read_command(out).get("budget") if (out / COMMAND).exists() else None
    if not isinstance(found, dict):
        return None
    values = cast(dict[str, Any], found)
    values["settings"] = tuple(values["settings"])
    return TimeBudget(**values)


def explain_budget(budget: TimeBudget, run: Run, asked: RunCommand) -> tuple[str, ...]:
    """What the budget changes, and why."""
    head = f"time budget {budget.minutes:g} min"
    if asked.minutes is None:
        head += " (the default on a CPU; --minutes N sets another, --minutes none lifts it)"
    if not budget.settings:
        return (f"{head}: the full recipe fits, about {format_duration(budget.full_seconds)}",)
    cuts, changed = [f"{budget.steps:,} of {budget.full_steps:,} steps"], setting_names(budget.settings)
    if "start=closed-form" in budget.settings:
        cuts.append("the head starts from the closed form")
    if "optim.lr" in changed:
        cuts.append(f"a tenth of the learning rate ({run.optim.lr:g})")
    if "optim.freeze" in changed:
        frozen = run.optim.freeze.removeprefix("blocks:")
        cuts.append(f"the first {frozen} of {run.model.layers} blocks are frozen")
    times = f"about {format_duration(budget.seconds)} instead of {format_duration(budget.full_seconds)}"
    return (f"{head}: {', '.join(cuts)}; {times} at {1 / budget.image_s:,.1f} images/s",)


def describe_full_run(budget: TimeBudget | None, asked: RunCommand) -> str:
    """Says what more time would bring, and the command for it; empty if nothing was cut."""
    if budget is None or not budget.settings:
        return ""
    layers = ", with every layer," if "optim.freeze" in setting_names(budget.settings) else ""
    steps = f"trained {budget.steps:,} of the full recipe's {budget.full_steps:,} steps"
    more = f"All of them{layers} take about {format_duration(budget.full_seconds)}: {full_command(asked)}"
    return f"{steps}, for a time budget of {budget.minutes:g} min. {more}"


def full_command(asked: RunCommand) -> str:
    """The command without a budget; it starts a run of its own."""
    words = ["vitrail", asked.verb]
    if asked.verb == "finetune":
        words += [asked.weights, *([asked.data] if asked.data else [])]
        words += ["--recipe", asked.recipe] if asked.recipe else []
    else:
        words += [asked.recipe, *(["--data", asked.data] if asked.data else [])]
    words += ["--image-size", str(asked.image_size)] if asked.image_size else []
    words += ["--patch", str(asked.patch)] if asked.patch else []
    words += ["--task", asked.task] if asked.task else []
    words += ["--decoder", asked.decoder] if asked.decoder else []
    words += ["--seed", str(asked.seed)] if asked.seed is not None else []
    words += [word for text in asked.settings for word in ("--set", text)]
    return shlex.join([*words, "--minutes", "none"])

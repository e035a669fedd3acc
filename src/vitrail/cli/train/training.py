"""`vitrail pretrain` and `vitrail finetune`: how a run is started, resumed and reported."""

import csv
import io
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from vitrail.cli.inputs import resolve_class_names
from vitrail.cli.options.groups import TrainingOptions
from vitrail.cli.options.train import FinetuneOptions, PretrainOptions
from vitrail.cli.progress import bars
from vitrail.cli.train.display import make_observer
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_clock
from vitrail.data.collection import open_collection
from vitrail.distributed.process_group import World, join_world
from vitrail.recipes.budget import TimeBudget, describe_full_run
from vitrail.recipes.launch import free_folder, plan_run, record_command, resume_command, short_settings
from vitrail.recipes.registry import load_recipe
from vitrail.recipes.run_overrides import with_changes
from vitrail.recipes.run_request import RunCommand, RunPlan, build_sweep_grid, read_run_command
from vitrail.tasks.registry import task_of
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run
from vitrail.train.grid.engine import device_slots
from vitrail.train.grid.sweep import (
    SweepResult,
    is_finished,
    list_points,
    name_score,
    relative_cost,
    run_sweep,
    with_all_images,
)
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.loop import train
from vitrail.train.observer import Observer
from vitrail.train.report.page import describe_interval
from vitrail.train.resume import check_same_run
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.run_folder.files import BEST, COMMAND, LAST, is_done, read_command
from vitrail.train.run_folder.metric_rows import describe_numbers, headline
from vitrail.train.scoring import TrainingResult


def build_request(options: TrainingOptions, verb: str, weights: str = "") -> RunCommand:
    """The request as typed; --epochs, --steps, --batch and --lr are settings like those of --set."""
    return RunCommand(
        verb=verb,
        recipe=options.recipe,
        weights=weights,
        data=options.data or "",
        image_size=options.image_size,
        task=options.task,
        seed=options.seed,
        settings=(*options.settings, *short_options(options)),
        sweep=options.sweep,
        minutes=options.minutes,
    )


def short_options(options: TrainingOptions) -> list[str]:
    """The options that are settings by themselves, as --set would give them; a contradiction is refused."""
    return short_settings(
        options.settings,
        epochs=options.epochs,
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        option="--",
        setting="--set ",
    )


def run_training(options: TrainingOptions, asked: RunCommand | None) -> int:
    """Everything after parsing; `asked` is none where the folder says it."""
    out = Path(options.resume) if options.resume else options.out
    if options.resume is not None and out is None:
        raise ConfigError("--resume needs a folder: --resume RUN, or --out RUN --resume")
    changes = (options.settings, options.data, options.image_size, options.seed is not None, options.sweep is not None)
    changes = (*changes, options.labels, options.rename, options.minutes is not None, short_options(options))
    if asked is None and any(changes):
        raise ConfigError("--resume alone uses the run's own settings; give the whole command to change something")
    going_on = asked is None
    if asked is None:
        assert out is not None
        asked = read_run_command(read_command(out))
    elif options.resume is not None and out is not None:
        read_command(out)  # refuses a folder that is not a run
    if options.jobs != 1 and asked.sweep is None:
        raise ConfigError(f"--jobs {options.jobs} is for sweeps; add --sweep, or omit --jobs")
    try:
        status = start_run(options, asked, out, going_on)
        return exit_now(status) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else status
    except KeyboardInterrupt:
        print("stopped immediately", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for a checkpoint that is being written: it is complete or absent


def exit_now(status: int) -> NoReturn:
    """The end of one of several processes. All is written and the group is left; what the interpreter would still take
    down are threads of the group that a mesh holds on to, and now and then that aborts a run that is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start_run(options: TrainingOptions, asked: RunCommand, out: Path | None, going_on: bool) -> int:
    with join_world(options.device) as world, make_observer(world.rank) as watching:
        if options.download and world.is_main:
            download_data(asked.data or load_recipe(asked.recipe).data.source)
        world.barrier()
        asked = add_class_names(asked, options.labels, options.rename)
        plan, budget = plan_run(asked, out, world, going_on=going_on)
        if options.dry_run:
            for text in plan.why:
                watching.log(text)
            return show_forecast(plan, asked, world)
        out = out or world.broadcast(free_folder(plan.run))
        try:
            places = () if options.jobs == 1 else device_slots(options.device, options.jobs)
            return train_or_sweep(
                plan, asked, out, world, budget=budget, force=options.force, observer=watching, places=places
            )
        except KeyboardInterrupt:
            watching.log(
                f"resume with: {resume_command(asked, out)}" if (out / COMMAND).exists() else "nothing has been written"
            )
            raise


def add_class_names(asked: RunCommand, labels: str | None, renames: Sequence[str]) -> RunCommand:
    """--labels and --rename as a setting, so that the run's folder has the names themselves."""
    if labels is None and not renames:
        return asked
    collection = open_collection(asked.data or load_recipe(asked.recipe).data.source)
    names = resolve_class_names(labels, renames, collection.classes, len(collection.classes))
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names or ())
    return replace(asked, settings=(*asked.settings, f"data.names={line.getvalue()}"))


def download_data(source: str) -> None:
    """Downloads what is missing of a named set."""
    with bars(bytes_=True) as progress:
        open_collection(source, download=True, progress=progress)


def show_forecast(plan: RunPlan, asked: RunCommand, world: World) -> int:
    """Prints what to expect of the run and, if requested, of the sweep, which ends with a run on all images."""
    grid = None if asked.sweep is None else build_sweep_grid(asked, plan)
    runs = 1.0 if grid is None else relative_cost(plan.run, grid, world, with_changes)
    run = plan.run if grid is None else with_all_images(plan.run)
    found = dry_run(run, open_splits(run.data, task_of(run.objective)), world, base=plan.base)
    if world.is_main:
        print_table(("what", "to expect"), list(found.figures.items()), title="Dry run: nothing is written", left=2)
        print(f"time: about {format_clock(found.seconds)} for all steps, without scoring")
        if grid is not None:
            whole = f"the sweep, {len(list_points(grid))} points and the last run"
            print(f"time: about {format_clock(runs * found.seconds)} for {whole}, {runs:.1f} times as long")
        for warning in found.warnings:
            print(f"note: {warning}")
    return 0


def train_or_sweep(
    plan: RunPlan,
    asked: RunCommand,
    out: Path,
    world: World,
    *,
    budget: TimeBudget | None,
    force: bool,
    observer: Observer,
    places: Sequence[DeviceSlot],
) -> int:
    command = record_command(asked, out, budget)
    grid = None if asked.sweep is None else build_sweep_grid(asked, plan)
    if is_done(out) and not force:
        if grid is None:
            check_same_run(out, plan.run, world)
        if grid is None or is_finished(plan.run, grid, out=out, world=world, change=with_changes):
            observer.log(describe_run(out))
            return 0
    if grid is not None:
        found = run_sweep(
            plan.run,
            grid,
            out=out,
            world=world,
            command=command,
            force=force,
            observer=observer,
            change=with_changes,
            places=places,
        )
        return show_search(found, asked, out, world)
    result = train(plan.run, out=out, world=world, command=command, force=force, observer=observer, why=plan.why)
    status = show_result(result, asked, world)
    if world.is_main and result.state == "done" and (text := describe_full_run(budget, asked)):
        print(text)
    return status


def show_result(result: TrainingResult, asked: RunCommand, world: World) -> int:
    if world.rank:
        return 0
    if result.state == "interrupted":
        print(f"stopped after step {result.step:,}, saved; resume with: {resume_command(asked, result.folder)}")
        return 0
    for text in describe_scores(result):
        print(text)
    print(f"weights: {result.weights}   report: {result.folder / 'report.html'}")
    for line in suggest_next(result, asked):
        print(line)
    return 0


def suggest_next(result: TrainingResult, asked: RunCommand) -> list[str]:
    """Commands to type next, with the paths of this run."""
    run, data = shlex.quote(str(result.folder)), shlex.quote(asked.data or "DATA")
    if result.test is None and result.watch is None and asked.verb == "pretrain":
        return ["next:", f"  vitrail finetune {run} DATA", f"  vitrail inspect {run} {data}"]
    return [
        "next:",
        f"  vitrail predict {run} {shlex.quote(find_first_image(asked.data) or 'IMAGE.jpg')}",
        f"  vitrail evaluate {run} {data}",
        f"  vitrail serve {run}",
    ]


def find_first_image(source: str) -> str:
    """An image of a folder, or nothing."""
    from vitrail.data.readers.folder import has_image_suffix

    for folder, inside, files in os.walk(source):
        inside.sort()
        if found := sorted(name for name in files if has_image_suffix(name)):
            return os.path.join(folder, found[0])
    return ""


def describe_scores(result: TrainingResult) -> list[str]:
    """The scores of the weights that the run stands for, then those of the last ones where these are others."""
    found: list[str] = []
    watch, chose = result.watch, result.weights.name == BEST
    scores = {row["split"]: row for row in (watch, result.test) if row is not None}
    if chose and (best := result.best.apply_to(watch)) is not None:
        scores[best["split"]] = best
    for split, row in scores.items():
        beaten = result.baseline.get(split)
        beside = f"; without training (vitrail fit) {beaten['accuracy']:.2%}" if beaten else ""
        best = ", the best" if chose and row["step"] == result.best.step else ""
        found.append(f"{split}: {describe_outcome(row)}, step {row['step']:,}{best}{beside}")
    last = None if watch is None else headline(watch)
    if watch is not None and last is not None and chose and watch["step"] != result.best.step:
        found.append(f"last weights: {watch['split']} {last.text}: {result.folder / LAST}")
    return found


def describe_outcome(row: dict[str, Any]) -> str:
    """A score as text; features without a classifier are scored by their neighbours and their rank."""
    rank = f"feature rank {row['rank']:.1f}" if "rank" in row else ""
    first = headline(row)
    if first is None:
        return rank
    count = row.get("count")
    span = f"{describe_interval(first.value, count)}, " if first.is_accuracy and count else ""
    size = f" ({span}{count:,} images)" if count else ""
    return f"{', '.join(describe_numbers(row))}{size}{f', {rank}' if rank else ''}"


def show_search(found: SweepResult, asked: RunCommand, out: Path, world: World) -> int:
    if world.rank:
        return 0
    if found.points:
        head = ("settings", name_score(found.points[0].criterion))
        print_table(head, [(point.name, point.shown) for point in found.points])
    if found.final is None:
        print(f"stopped; resume with: {resume_command(asked, out)}")
        return 0
    return show_result(found.final, asked, world)


def run_pretrain(options: PretrainOptions) -> int:
    if not options.recipe:
        if options.resume is not None:
            return run_training(options, None)
        raise ConfigError("which recipe? `vitrail recipes` lists them")
    return run_training(options, build_request(options, "pretrain"))


def run_finetune(options: FinetuneOptions) -> int:
    options = merge_weight_words(options)
    if not options.weights:
        if options.resume is not None:
            return run_training(options, None)
        raise ConfigError("which weights? vitrail finetune WEIGHTS DATA: a file, a folder, a run, or NAME:TAG")
    if not options.data and not options.recipe:
        raise ConfigError(
            "which images? vitrail finetune WEIGHTS DATA: a folder with one subfolder per class, or another source"
        )
    return run_training(options, build_request(options, "finetune", options.weights))


def merge_weight_words(options: FinetuneOptions) -> FinetuneOptions:
    """WEIGHTS DATA, or --from WEIGHTS and DATA in either form."""
    if not options.start:
        return options
    if options.weights and options.data:
        raise ConfigError(f"--from {options.start} and {options.weights} both name weights; give one")
    return replace(options, weights=options.start, data=options.data or options.weights)

"""`vitrail pretrain` and `finetune` start, resume and report runs; `recipes`, `report` and `replay` show them."""

import csv
import io
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.cli.inputs import resolve_class_names
from vitrail.cli.options import train as declared
from vitrail.cli.options.grammar import pass_options
from vitrail.cli.options.groups import TrainingOptions
from vitrail.cli.progress import bars, exit_after, waiting
from vitrail.cli.train.display import make_observer
from vitrail.core.config_overrides import list_fields, to_plain
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_clock
from vitrail.data.collection import open_collection
from vitrail.data.readers.folder import has_image_suffix
from vitrail.distributed.process_group import World, join_world
from vitrail.recipes import launch
from vitrail.recipes.registry import find_recipe, list_recipes, load_recipe
from vitrail.recipes.run_overrides import with_changes
from vitrail.recipes.run_request import RunCommand, RunPlan, build_sweep_grid, read_run_command
from vitrail.report.contact_sheet import draw_mosaic
from vitrail.tasks.registry import task_of
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run, replay
from vitrail.train.grid import sweep
from vitrail.train.grid.engine import device_slots
from vitrail.train.loop import train
from vitrail.train.observer import Observer
from vitrail.train.report.page import describe_interval
from vitrail.train.resume import check_same_run, read_run
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.run_folder.files import BEST, COMMAND, LAST, is_done, read_command
from vitrail.train.run_folder.metric_rows import describe_numbers, headline
from vitrail.train.scoring import TrainingResult

ANNOTATION_FOLDERS = ("annotations", "labels", "masks", "panoptic", "segmentation")


def run_pretrain(options: declared.PretrainOptions) -> int:
    return run_training(options, "pretrain", options.recipe or None, "which recipe? `vitrail recipes` lists them")


def run_finetune(options: declared.FinetuneOptions) -> int:
    options = merge_weight_words(options)
    if options.weights and not options.data and not options.recipe:
        raise ConfigError("which images? vitrail finetune WEIGHTS DATA: a folder with a subfolder per class, or a set")
    question = "which weights? vitrail finetune WEIGHTS DATA: a file, a folder, a run, or NAME:TAG"
    return run_training(options, "finetune", options.weights, question)


def merge_weight_words(options: declared.FinetuneOptions) -> declared.FinetuneOptions:
    """Reads --from WEIGHTS, the older form, as WEIGHTS; DATA may then be the first word."""
    if not options.start:
        return options
    if options.weights and options.data:
        raise ConfigError(f"--from {options.start} and {options.weights} both name weights; give one")
    return replace(options, weights=options.start, data=options.data or options.weights)


def build_request(options: TrainingOptions, verb: str) -> RunCommand:
    """The request as typed; --epochs, --steps, --batch and --lr become settings, as with --set."""
    settings = (*options.settings, *short_options(options))
    return pass_options(options, RunCommand, verb=verb, data=options.data or "", settings=settings)


def short_options(options: TrainingOptions) -> list[str]:
    """The options that stand for settings, as --set would give them; refuses contradictions."""
    lengths = {name: getattr(options, name) for name in ("epochs", "steps", "batch", "lr")}
    return launch.short_settings(options.settings, **lengths, option="--", setting="--set ")


def run_training(options: TrainingOptions, verb: str, subject: str | None, question: str) -> int:
    """Does everything after parsing. `subject` is a recipe or weights; without one, the run in --resume has it."""
    if subject is None and options.resume is None:
        raise ConfigError(question)
    out = Path(options.resume) if options.resume else options.out
    asked = build_request(options, verb)
    if options.resume is not None:
        if out is None:
            raise ConfigError("--resume needs a folder: --resume RUN, or --out RUN --resume")
        command = read_command(out)  # refuses a folder that is not a run
        if subject is None:
            given = (options.data, options.image_size, options.patch, options.labels, options.rename, options.decoder)
            chosen = (options.seed, options.sweep, options.minutes)
            if any(given) or any(value is not None for value in chosen) or asked.settings:
                raise ConfigError("--resume alone uses the run's own settings; to change some, give the whole command")
            asked = read_run_command(command)
    if options.jobs != 1 and asked.sweep is None:
        raise ConfigError(f"--jobs {options.jobs} is for sweeps; add --sweep, or omit --jobs")
    return exit_after(lambda: start_run(options, asked, out, subject is None), "stopped immediately")


def start_run(options: TrainingOptions, asked: RunCommand, out: Path | None, going_on: bool) -> int:
    with join_world(options.device) as world, make_observer(world.rank) as watching:
        if options.download and world.is_main:
            with bars(bytes_=True) as progress:
                source = asked.data or load_recipe(asked.recipe).data.source
                open_collection(source, download=True, progress=progress)
        world.barrier()
        asked = add_class_names(asked, options.labels, options.rename)
        plan, budget = launch.plan_run(asked, out, world, going_on=going_on)
        if options.dry_run:
            for text in plan.why:
                watching.log(text)
            return show_forecast(plan, asked, world)
        out = out or world.broadcast(launch.free_folder(plan.run))
        try:
            return train_or_sweep(options, plan, asked, out, world, budget, watching)
        except KeyboardInterrupt:
            resume = f"resume with: {launch.resume_command(asked, out)}"
            watching.log(resume if (out / COMMAND).exists() else "nothing has been written")
            raise


def add_class_names(asked: RunCommand, labels: str | None, renames: Sequence[str]) -> RunCommand:
    """Turns --labels and --rename into a setting, so that the run's folder records the names themselves."""
    if labels is None and not renames:
        return asked
    collection = open_collection(asked.data or load_recipe(asked.recipe).data.source)
    names = resolve_class_names(labels, renames, collection.classes, len(collection.classes))
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names or ())
    return replace(asked, settings=(*asked.settings, f"data.names={line.getvalue()}"))


def show_forecast(plan: RunPlan, asked: RunCommand, world: World) -> int:
    """Prints what to expect from the run and, if requested, from the sweep, which ends with a run on all images."""
    grid = None if asked.sweep is None else build_sweep_grid(asked, plan)
    runs = 1.0 if grid is None else sweep.relative_cost(plan.run, grid, world, with_changes)
    run = plan.run if grid is None else sweep.with_all_images(plan.run)
    found = dry_run(run, open_splits(run.data, task_of(run.objective)), world, base=plan.base)
    if world.is_main:
        print_table(("what", "to expect"), list(found.figures.items()), title="Dry run: nothing is written", left=2)
        print(f"time: about {format_clock(found.seconds)} for all steps, without scoring")
        if grid is not None:
            whole = f"the sweep, {len(sweep.list_points(grid))} points and the last run"
            print(f"time: about {format_clock(runs * found.seconds)} for {whole}, {runs:.1f} times as long")
        for warning in found.warnings:
            print(f"note: {warning}")
    return 0


def train_or_sweep(
    options: TrainingOptions,
    plan: RunPlan,
    asked: RunCommand,
    out: Path,
    world: World,
    budget: launch.TimeBudget | None,
    observer: Observer,
) -> int:
    command, run, force = launch.record_command(asked, out, budget), plan.run, options.force
    grid = None if asked.sweep is None else build_sweep_grid(asked, plan)
    if is_done(out) and not force:
        if grid is None:
            check_same_run(out, run, world)
        if grid is None or sweep.is_finished(run, grid, out=out, world=world, change=with_changes):
            observer.log(describe_run(out))
            return 0
    if grid is None:
        result = train(run, out=out, world=world, command=command, force=force, observer=observer, why=plan.why)
        if world.is_main:
            show_result(result, asked)
            if result.state == "done" and (text := launch.describe_full_run(budget, asked)):
                print(text)
        return 0
    places = () if options.jobs == 1 else device_slots(options.device, options.jobs)
    how: dict[str, Any] = {"command": command, "force": force, "observer": observer, "places": places}
    found = sweep.run_sweep(run, grid, out=out, world=world, change=with_changes, **how)
    if world.is_main:
        if found.points:
            head = ("settings", sweep.name_score(found.points[0].criterion))
            print_table(head, [(point.name, point.text) for point in found.points])
        if found.final is None:
            print(f"stopped; resume with: {launch.resume_command(asked, out)}")
        else:
            show_result(found.final, asked)
    return 0


def show_result(result: TrainingResult, asked: RunCommand) -> None:
    if result.state == "interrupted":
        print(f"stopped after step {result.step:,}, saved; resume with: {launch.resume_command(asked, result.folder)}")
        return
    report = f"weights: {result.weights}   report: {result.folder / 'report.html'}"
    print(*describe_scores(result), report, "next:", *suggest_next(result, asked), sep="\n")


def suggest_next(result: TrainingResult, asked: RunCommand) -> list[str]:
    """Commands to type next, with the paths of this run."""
    run, data = shlex.quote(str(result.folder)), shlex.quote(asked.data or "DATA")
    if result.test is None and result.watch is None and asked.verb == "pretrain":
        return [f"  vitrail finetune {run} DATA", f"  vitrail inspect {run} {data}"]
    image = shlex.quote(find_first_image(asked.data) or "IMAGE.jpg")
    return [f"  vitrail predict {run} {image}", f"  vitrail evaluate {run} {data}", f"  vitrail serve {run}"]


def find_first_image(source: str) -> str:
    """The first image in a folder, masks and other annotations aside; empty if there is none."""
    for folder, inside, files in os.walk(source):
        inside[:] = sorted(name for name in inside if not name.lower().startswith(ANNOTATION_FOLDERS))
        if found := sorted(name for name in files if has_image_suffix(name)):
            return os.path.join(folder, found[0])
    return ""


def describe_scores(result: TrainingResult) -> list[str]:
    """The scores of the run's weights, then those of its last weights if they differ."""
    found: list[str] = []
    watch, chose = result.watch, result.weights.name == BEST
    scores = {row["split"]: row for row in (watch, result.test) if row is not None}
    if chose and (best := result.best.apply_to(watch)) is not None:
        scores[best["split"]] = best
    for split, row in scores.items():
        beaten = result.baseline.get(split)
        main = headline(beaten) if beaten else None
        baseline = f"; without training (vitrail fit) {main.text}" if main else ""
        best = ", the best" if chose and row["step"] == result.best.step else ""
        found.append(f"{split}: {describe_outcome(row)}, step {row['step']:,}{best}{baseline}")
    last = None if watch is None else headline(watch)
    if watch is not None and last is not None and chose and watch["step"] != result.best.step:
        found.append(f"last weights: {watch['split']} {last.text}: {result.folder / LAST}")
    return found


def describe_outcome(row: dict[str, Any]) -> str:
    """A score as text. Features without a classifier are scored by nearest neighbours and by their rank."""
    rank = f"feature rank {row['rank']:.1f}" if "rank" in row else ""
    first = headline(row)
    if first is None:
        return rank
    count = row.get("count")
    span = f"{describe_interval(first.value, count)}, " if first.is_accuracy and count else ""
    size = f" ({span}{count:,} images)" if count else ""
    return f"{', '.join(describe_numbers(row))}{size}{f', {rank}' if rank else ''}"


def run_recipes(options: declared.RecipesOptions) -> int:
    """Lists the recipes, or shows the docstring and the flat config of one, in which changed defaults are marked."""
    if options.name is None:
        for group in dict.fromkeys(entry.group for entry in list_recipes().values()):
            rows = [(name, entry.help) for name, entry in list_recipes().items() if entry.group == group]
            print_table(["recipe", "what it is"], rows, title=group, left=2)
        print("vitrail recipes NAME shows the settings of one; each can be changed with --set NAME=VALUE.")
        return 0
    entry = find_recipe(options.name)
    chosen = with_changes(load_recipe(entry.name), options.set)
    if options.json:
        print(json.dumps(to_plain(chosen), indent=2))
        return 0
    print(f"{entry.name}: {entry.text}\n")
    rows = [(line.name, line.text, "" if line.default else "*") for line in list_fields(chosen)]
    print_table(["setting", "value", ""], rows, left=3)
    print("* not the default. Any of these can be changed with --set NAME=VALUE.")
    return 0


def run_report(options: declared.ReportOptions) -> int:
    print(describe_run(options.run))
    return 0


MAX_ROWS = 20
MAX_TILES = 64


def run_replay(options: declared.ReplayOptions) -> int:
    config = read_run(options.run)
    with join_world(options.device) as world, waiting(f"running step {options.step} again"):
        splits = open_splits(config.data, task_of(config.objective))
        found = replay(config, splits, options.run, options.step, world)
    weights = "the initial weights" if found.weights_step < 0 else f"the weights of step {found.weights_step:,}"
    state = "finite" if found.is_finite else "NOT finite"
    print(f"Step {found.step:,} with {weights}: loss {found.loss:.4g}, gradient norm {found.norm:.4g}, {state}")
    bad = sum(not math.isfinite(one.loss) for one in found.images)
    print(f"{len(found.images):,} images, {bad:,} of them with a non-finite loss of their own. Worst first:")
    labels = any(one.label for one in found.images)
    rows = [(one.name, *([one.label] if labels else []), f"{one.loss:.4g}") for one in found.images[:MAX_ROWS]]
    print_table(("image", *(["label"] if labels else []), "loss"), rows, left=1 + labels)
    tiles, numbers = found.images[:MAX_TILES], f"loss {found.loss:.4g}, gradient norm {found.norm:.4g}; worst first"
    footer = f"{len(tiles)} of {len(found.images)} images, augmented and mixed"
    path = options.run / f"replay-{options.step}.png"
    draw_mosaic(f"Step {found.step:,}", numbers, [one.pixels for one in tiles], footer=footer).save(path)
    print(f"The batch as the network saw it: {path}")
    return 0

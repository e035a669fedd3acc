"""What `vitrail vtab` does."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.weights import network
from vitrail.cli.live import duration, make_observer
from vitrail.cli.options.vtab import VtabOptions
from vitrail.cli.progress import bars
from vitrail.cli.training import exit_now
from vitrail.core.atomic_files import write_file
from vitrail.core.console import print_table
from vitrail.core.errors import DataError, TrainingError
from vitrail.core.text import format_size
from vitrail.data.datasets.catalogue import SETS
from vitrail.data.datasets.vtab import find_task
from vitrail.data.datasets.vtab_tasks import TASKS
from vitrail.distributed.process_group import World, joined
from vitrail.evaluation.result import describe_weights
from vitrail.evaluation.speed import tpuv3_core_days, training_flops
from vitrail.recipes.launch import RUNS
from vitrail.studies.paper.vtab import Outcome, Study, base_run, changed, go, pictures_of, so_far
from vitrail.studies.paper.vtab_table import GROUPS, HEADS, html, result, rows
from vitrail.train.grid.engine import device_slots
from vitrail.train.metrics import measure_flops


def run_vtab(options: VtabOptions) -> int:
    tasks = select_tasks(options.tasks)
    bundle = find_weights(options.weights)
    facts = describe_weights(options.weights, network(bundle))
    study = Study(
        base=base_run(options.weights, image_size=options.image_size, seed=options.seed, settings=options.settings),
        out=options.out or RUNS / f"vtab-{Path(options.weights).stem.replace(':', '-')}",
        tasks=tasks,
        root=options.root,
        weights_hash=facts["hash"],
        image_size=options.image_size,
        settings=options.settings,
        go_on=vtab_command(options),
    )
    try:
        status = start_vtab(study, facts, options)
        return exit_now(status) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else status
    except KeyboardInterrupt:
        print(f"stopped at once; go on with: {study.go_on}", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for a checkpoint that is being written: it is whole or not there


def select_tasks(named: Sequence[str]) -> tuple[str, ...]:
    """Tasks by name and by group, in the paper's order."""
    wanted: set[str] = set()
    for name in named or GROUPS:
        group = [task.name for task in TASKS.values() if task.group == name.lower()]
        wanted |= set(group or [find_task(name).name])
    return tuple(name for name in TASKS if name in wanted)


def vtab_command(options: VtabOptions) -> str:
    """The command that goes on."""
    words = ["vitrail", "vtab", options.weights]
    words += ["--tasks", *options.tasks] if options.tasks else []
    for option, value in (("--root", options.root), ("--out", options.out), ("--seed", options.seed)):
        words += [] if value is None else [option, str(value)]
    words += ["--image-size", str(options.image_size)] if options.image_size else []
    words += [word for text in options.settings for word in ("--set", text)]
    words += ["--download"] if options.download else []
    words += [] if options.jobs == 1 else ["--jobs", str(options.jobs)]
    words += [] if options.device == "auto" else ["--device", options.device]
    return shlex.join(words)


def start_vtab(study: Study, facts: dict[str, Any], options: VtabOptions) -> int:
    with joined(options.device) as world:
        if options.dry_run:
            return forecast_vtab(study, world) if world.is_main else 0

        def noted(outcome: Outcome) -> None:
            result(study, outcome, facts).write(study.out / "result.json")
            write_file(study.out / "report.html", html(study, outcome, options.weights).encode())

        if options.download and world.is_main:
            download_tasks(study)
        world.barrier()
        places = () if options.jobs == 1 else device_slots(options.device, options.jobs)
        with make_observer(world.rank) as watching:
            outcome = go(study, world=world, observer=watching, noted=noted, places=places)
        if world.is_main:
            noted(outcome)
            show_vtab(study, outcome)
        check_outcome(study, outcome)
    return 0


def download_tasks(study: Study) -> None:
    """Downloads what is missing and may be had; what is not is said when its task comes."""
    with bars(bytes_=True) as progress:
        for name in study.tasks:
            pictures_of(study, TASKS[name], download=True, progress=progress)


def show_vtab(study: Study, outcome: Outcome) -> None:
    print_table(HEADS, rows(outcome), left=2, title="VTAB-1k: accuracy in per cent, next to the paper's Table 9")
    show_missing(outcome, whole=False)
    if other := changed(study):
        print(f"not the paper's recipe: {'; '.join(other)}")
    print("The thousand images are drawn as VTAB draws them, but are not the very same (docs/data-sets.md).")
    print(f"result: {study.out / 'result.json'}   page: {study.out / 'report.html'}")


def show_missing(outcome: Outcome, *, whole: bool) -> None:
    """What is passed over, a data set once: in a line, or with all that goes where."""
    told: dict[str, list[str]] = {}
    for name in outcome.of("missing"):
        told.setdefault(SETS[TASKS[name].source].folder, []).append(name)
    for names in told.values():
        lines = outcome.reasons[names[0]].splitlines()
        titles = ", ".join(TASKS[name].title for name in names)
        print(f"passed over: {titles}\n    " + "\n    ".join(lines) if whole else f"passed over: {titles}. {lines[0]}")
    if told and not whole:
        print("where to get these and where to put them: the same command with --dry-run")


def check_outcome(study: Study, outcome: Outcome) -> None:
    """Says how to go on; raises where there is something to complain of."""
    if outcome.stopped:
        print(f"stopped and saved; go on with: {study.go_on}")
    failed = outcome.of("failed")
    if failed:
        first = f"{TASKS[failed[0]].title}: {outcome.reasons[failed[0]]}"
        raise TrainingError(f"{len(failed)} of {len(study.tasks)} tasks failed, first {first}")
    if not outcome.scores and not outcome.stopped:
        where = study.root or "$VITRAIL_DATA"
        raise DataError(
            f"none of the data sets is in {where}; --download fetches those that may be fetched, --root says where "
            "they are"
        )


def forecast_vtab(study: Study, world: World) -> int:
    """Which sets are there, and what all of it takes; nothing is trained or kept."""
    done = so_far(study)
    lines: list[list[str]] = []
    left = test = 0
    outcome = Outcome(states=dict(done.states), scores=done.scores)
    for name in study.tasks:
        task = TASKS[name]
        way = ", ".join(word for word, used in (("crop", task.crop), ("flip", task.flip)) if used) or "as it is"
        state = "done"
        if name not in done.scores:
            found = pictures_of(study, task)
            state = "missing" if isinstance(found, str) else "there"
            if isinstance(found, str):
                outcome.states[name], outcome.reasons[name] = "missing", found
            else:
                left, test = left + 1, test + len(found.test or ())
        lines.append([task.title, task.group, state, way, str(task.classes), f"{task.sizes[2]:,}"])
    heads = ("task", "group", "pictures", "augmented by", "classes", "test")
    print_table(heads, lines, left=4, title="A dry run: nothing is trained or kept")
    show_missing(outcome, whole=True)
    run = study.base
    each = run.model.macs
    flops = training_flops(each, left * run.steps * run.batch) + 2 * each * test
    print(
        f"{left} task{'s' * (left != 1)} to train for {run.steps:,} steps of {run.batch} images of "
        f"{format_size(run.augmentation.size)}, and "
        f"{test:,} images to score: {flops / 1e18:.3g} exaFLOPs, {tpuv3_core_days(flops):.3g} TPUv3-core-days"
    )
    seconds = flops / measure_flops(world.device) / world.size
    print(f"time: {duration(seconds)} at the very least, at the rate of a large matrix product here")
    if other := changed(study):
        print(f"not the paper's recipe: {'; '.join(other)}")
    return 0

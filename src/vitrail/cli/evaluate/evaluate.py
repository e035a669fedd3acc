"""`vitrail evaluate` scores weights on a data set, `vitrail vtab` fine-tunes them on the 19 tasks of VTAB-1k."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.onnx_network import is_onnx
from vitrail.checkpoint.weights import build_network
from vitrail.cli.inputs import check_batch, load_subject, read_labels, weights_line
from vitrail.cli.open_data import open_data
from vitrail.cli.options.evaluate import EvaluateOptions, VtabOptions
from vitrail.cli.options.grammar import format_command, pass_options
from vitrail.cli.progress import bars, exit_after
from vitrail.cli.train.display import make_observer
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError, DataError, TrainingError
from vitrail.core.text import format_clock, format_size, pluralise
from vitrail.data.collection import Collection
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS
from vitrail.data.datasets.open_by_name import find_vtab_task
from vitrail.distributed.process_group import World, join_world
from vitrail.evaluation.compare import evaluation_page
from vitrail.evaluation.result import describe_weights, format_interval, format_value
from vitrail.evaluation.scoring import ScoringOptions, choose_split, make_onnx_subject
from vitrail.evaluation.speed import tpuv3_core_days, training_flops
from vitrail.recipes.launch import RUNS
from vitrail.studies.paper import vtab
from vitrail.studies.paper.vtab import VtabOutcome, VtabStudy
from vitrail.tasks.registry import find_task
from vitrail.tasks.scoring import ScoredNetwork, score_network
from vitrail.train.grid.engine import device_slots
from vitrail.train.metrics import measure_flops


class Sizes(NamedTuple):
    """The image size and patch size to score weights at; None for their own."""

    image: int | None
    patch: int | None


def list_sizes(options: EvaluateOptions) -> list[Sizes]:
    """Every combination of the requested image and patch sizes."""
    for option, given in (("--image-size", options.image_size), ("--patch", options.patch)):
        if given and len(set(given)) < len(given):
            raise ConfigError(f"{option} {' '.join(map(str, given))} names a size twice")
    return [Sizes(*one) for one in product(options.image_size or (None,), options.patch or (None,))]


def run_evaluate(options: EvaluateOptions) -> int:
    sizes = list_sizes(options)
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed} must be at least 0")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise ConfigError(f"--threshold {options.threshold:g} must be between 0 and 1")
    check_batch(options)
    outputs = {"--out": options.out, "--page": options.page, "--answers": options.answers}
    taken = dict[Path, str]()
    for option, path in outputs.items():
        if path is not None and (first := taken.setdefault(path.resolve(), option)) != option:
            raise ConfigError(f"{first} and {option} are both {path}; give each a file of its own")
    with join_world(options.device) as world:
        if world.is_main:
            for path in taken:
                check_writable(path)
            if options.download:
                open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data, download=options.download)
        split, _ = choose_split(collection, "test", "val")
        done = score_sizes(options, sizes, collection, split, world)
        if world.is_main:
            for size, one in zip(sizes, done, strict=False):  # fewer of them after an interrupt
                write_outputs(options, one, size if len(sizes) > 1 else None)
            show_scores(options, sizes, done, collection, split)
    return 0 if len(done) == len(sizes) else 130


def score_sizes(
    options: EvaluateOptions, sizes: Sequence[Sizes], collection: Collection, split: str, world: World
) -> list[ScoredNetwork]:
    """Scores the weights at each size; after an interrupt, returns those that are done."""
    done: list[ScoredNetwork] = []
    for size in sizes:
        try:
            done.append(score_size(options, size, collection, split, world))
        except KeyboardInterrupt:
            if not done:
                print("stopped; nothing was scored", file=sys.stderr)
                raise
            print("stopped; not scored:", ", ".join(map(describe_sizes, sizes[len(done) :])), file=sys.stderr)
            break
    return done


def score_size(
    options: EvaluateOptions, size: Sizes, collection: Collection, split: str, world: World
) -> ScoredNetwork:
    load = make_onnx_subject if is_onnx(options.weights) else load_subject
    about = load(options.weights, world.device, image_size=size.image, patch=size.patch, precision=options.precision)
    labels = None if options.labels is None else ()  # read once the task is known to take them
    how = pass_options(options, ScoringOptions, labels=labels, answers=options.answers is not None)
    find_task(get_card(about.network).task).check_scoring(how, about)
    if options.labels is not None:
        how = replace(how, labels=read_labels(options.labels, about.network.config.classes))
    with bars() as bar:
        return score_network(about, collection, split, how, world=world, called=f"{options.data}@{split}", advance=bar)


def describe_sizes(size: Sizes) -> str:
    """The options that give a size."""
    given = (("--image-size", size.image), ("--patch", size.patch))
    return " ".join(f"{option} {value}" for option, value in given if value is not None)


def add_size(path: Path, size: Sizes | None) -> Path:
    """Adds a size to a file name if several are scored: result.json -> result-224.json, result-224-p14.json."""
    if size is None:
        return path
    parts = [str(size.image)] * (size.image is not None) + [f"p{size.patch}"] * (size.patch is not None)
    return path.with_name(f"{path.stem}-{'-'.join(parts)}{path.suffix}")


def write_outputs(options: EvaluateOptions, one: ScoredNetwork, size: Sizes | None) -> None:
    if options.out is not None:
        one.result.write(add_size(options.out, size))
    if options.answers is not None and one.found.answers is not None:
        write_file(add_size(options.answers, size), one.found.answers())
    if options.page is not None:
        text = evaluation_page(one.result, one.found, one.notes, one.scope.lines())
        write_file(add_size(options.page, size), text.encode())


def show_scores(
    options: EvaluateOptions, sizes: Sequence[Sizes], done: Sequence[ScoredNetwork], collection: Collection, split: str
) -> None:
    """Prints the scores."""
    one, count = done[0], len(collection.splits[split])
    size = [f"{format_size(one.about.preprocessing.image)} px"] if len(done) == 1 else []
    print(weights_line(options.weights, one.result.weights, *size, one.result.config["precision"]))
    where = f"{options.data}@{split}" if len(collection.splits) > 1 else options.data
    print(f"{where}: {pluralise(count, 'image')}, {one.found.outputs}")
    print(*one.scope.lines(), "", sep="\n")
    if len(done) == 1:
        show_single(one)
    else:
        show_sizes(done)
    for note in dict.fromkeys(note for each in done for note in each.notes):
        print(f"note: {note}")
    for word, path in (("result", options.out), ("page", options.page), ("answers", options.answers)):
        if path is not None:
            paths = [add_size(path, each) for each in sizes] if len(sizes) > 1 else [path]
            print(f"{word}: {', '.join(map(str, paths))}")


def show_sizes(done: Sequence[ScoredNetwork]) -> None:
    """Prints one row per size; the result files have all metrics."""
    found, patched = done[0].found, any(one.about.patch is not None for one in done)
    heads = [measure.name for measure in found.measures if measure.name in found.brief]
    rows: list[list[str]] = []
    for one in done:
        by_name = {measure.name: measure for measure in one.result.measures}
        rows.append([format_size(one.about.preprocessing.image), *([str(one.about.patch)] if patched else [])])
        for measure in (by_name[name] for name in heads if name in by_name):
            interval = f" ({format_interval(measure)})" if measure.name in found.counting else ""
            rows[-1].append(f"{format_value(measure)}{interval}")
    print_table(["image", *(["patch"] if patched else []), *heads], rows)


def show_single(one: ScoredNetwork) -> None:
    """Prints the metrics with their intervals, and the tables. Counts are marked if they include images that the
    weights were trained on."""
    found, scope = one.found, one.scope
    unknown = "" if any(format_interval(measure) for measure in found.measures) else "none"
    seen = f", {scope.exposure.count:,} seen" if scope.tainted else ""
    rows: list[list[str]] = []
    for measure in found.measures:
        rows.append([measure.name, format_value(measure), format_interval(measure) or unknown])
        if measure.name in found.counting:
            rows[-1].append(f"{round(measure.value * (measure.count or 0)):,} of {measure.count:,}{seen}")
        elif found.counting:
            rows[-1].append("")
    print_table(["measure", "value", "95% interval", *(["images"] if found.counting else [])], rows)
    for table in found.tables:
        print_table(table.columns, table.rows, title=table.title, left=table.left)


def run_vtab(options: VtabOptions) -> int:
    tasks = select_tasks(options.tasks)
    facts = describe_weights(options.weights, build_network(find_weights(options.weights)))
    size, settings = options.image_size, options.settings
    base = vtab.build_base_run(options.weights, image_size=size, seed=options.seed, settings=settings)
    out = options.out or RUNS / f"vtab-{Path(options.weights).stem.replace(':', '-')}"
    resume, hash_ = format_command("vtab", options), facts["hash"]
    study = pass_options(options, VtabStudy, base=base, out=out, tasks=tasks, weights_hash=hash_, go_on=resume)
    return exit_after(lambda: start_vtab(study, facts, options), f"stopped immediately; resume with: {study.go_on}")


def select_tasks(named: Sequence[str]) -> tuple[str, ...]:
    """Resolves names of tasks and groups to tasks, in the paper's order."""
    wanted: set[str] = set()
    for name in named or vtab.GROUPS:
        group = [task.name for task in VTAB_TASKS.values() if task.group == name.lower()]
        wanted |= set(group or [find_vtab_task(name).name])
    return tuple(name for name in VTAB_TASKS if name in wanted)


def start_vtab(study: VtabStudy, facts: dict[str, Any], options: VtabOptions) -> int:
    with join_world(options.device) as world:
        if options.dry_run:
            return forecast_vtab(study, world) if world.is_main else 0

        def present(outcome: VtabOutcome) -> None:
            vtab.build_result(study, outcome, facts).write(study.out / "result.json")
            write_file(study.out / "report.html", vtab.build_page(study, outcome, options.weights).encode())

        if options.download and world.is_main:
            with bars(bytes_=True) as progress:
                for name in study.tasks:  # what is not public is reported with its task
                    vtab.open_task(study, VTAB_TASKS[name], download=True, progress=progress)
        world.barrier()
        places = () if options.jobs == 1 else device_slots(options.device, options.jobs)
        with make_observer(world.rank) as watching:
            outcome = vtab.run_vtab_tasks(study, world=world, observer=watching, present=present, places=places)
        if world.is_main:
            present(outcome)
            show_vtab(study, outcome)
        check_outcome(study, outcome)
    return 0


def show_vtab(study: VtabStudy, outcome: VtabOutcome) -> None:
    title = "VTAB-1k: accuracy in per cent, next to the paper's Table 9"
    print_table(vtab.COLUMNS, vtab.build_rows(outcome), left=2, title=title)
    show_missing(outcome, whole=False)
    if other := study.changes:
        print(f"not the paper's recipe: {'; '.join(other)}")
    print("The 1,000 images are drawn as VTAB draws them, but are not the same images (docs/data-sets.md).")
    print(f"result: {study.out / 'result.json'}   page: {study.out / 'report.html'}")


def show_missing(outcome: VtabOutcome, *, whole: bool) -> None:
    """Prints each skipped data set once, in one line or with instructions."""
    sources: dict[str, list[str]] = {}
    for name in outcome.in_state("missing"):
        sources.setdefault(SETS[VTAB_TASKS[name].source].folder, []).append(name)
    for names in sources.values():
        lines = outcome.reasons[names[0]].splitlines()
        titles = ", ".join(VTAB_TASKS[name].title for name in names)
        print(f"skipped: {titles}\n    " + "\n    ".join(lines) if whole else f"skipped: {titles}. {lines[0]}")
    if sources and not whole:
        print("for where to get them and where to put them, add --dry-run")


def check_outcome(study: VtabStudy, outcome: VtabOutcome) -> None:
    """Prints how to resume; raises if tasks failed or no data were found."""
    if outcome.stopped:
        print(f"stopped and saved; resume with: {study.go_on}")
    failed = outcome.in_state("failed")
    if failed:
        first = f"{VTAB_TASKS[failed[0]].title}: {outcome.reasons[failed[0]]}"
        raise TrainingError(f"{len(failed)} of {len(study.tasks)} tasks failed, first {first}")
    if not outcome.scores and not outcome.stopped:
        place = study.root or "$VITRAIL_DATA"
        raise DataError(f"none of the data sets is in {place}; --download fetches some, --root names their folder")


def forecast_vtab(study: VtabStudy, world: World) -> int:
    """Prints which data sets are available and the total cost; nothing is trained or written."""
    done = vtab.read_progress(study)
    lines: list[list[str]] = []
    left = test = 0
    outcome = VtabOutcome(states=dict(done.states), scores=done.scores)
    for name in study.tasks:
        task = VTAB_TASKS[name]
        way = ", ".join(word for word, used in (("crop", task.crop), ("flip", task.flip)) if used) or "as it is"
        found = "" if name in done.scores else vtab.open_task(study, task)
        state = "done" if not found else "missing" if isinstance(found, str) else "there"
        if not isinstance(found, str):
            left, test = left + 1, test + len(found.test or ())
        elif found:
            outcome.states[name], outcome.reasons[name] = "missing", found
        lines.append([task.title, task.group, state, way, str(task.classes), f"{task.sizes[2]:,}"])
    heads = ("task", "group", "images", "augmented by", "classes", "test")
    print_table(heads, lines, left=4, title="Dry run: nothing is trained or written")
    show_missing(outcome, whole=True)
    run, macs = study.base, study.base.model.macs
    flops = training_flops(macs, left * run.steps * run.batch) + 2 * macs * test
    size = format_size(run.augmentation.size)
    work = f"{pluralise(left, 'task')} to train for {run.steps:,} steps of {run.batch} images of {size}"
    cost = f"{flops / 1e18:.3g} exaFLOPs, {tpuv3_core_days(flops):.3g} TPUv3-core-days"
    print(f"{work}, and {test:,} images to score: {cost}")
    seconds = flops / measure_flops(world.device) / world.size
    print(f"time: {format_clock(seconds)} at the very least, at the speed of a large matrix product here")
    if other := study.changes:
        print(f"not the paper's recipe: {'; '.join(other)}")
    return 0

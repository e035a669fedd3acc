"""What `vitrail evaluate` does."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.checkpoint.bundle import card_of
from vitrail.cli.labels import read_labels
from vitrail.cli.opening import open_data
from vitrail.cli.options.evaluate import EvaluateOptions
from vitrail.cli.progress import bars
from vitrail.cli.subject import check_batch, describe_weights, load_subject
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import World, joined
from vitrail.evaluation.result import Measure, format_interval, format_value
from vitrail.evaluation.scoring import Scope, ScoringOptions, choose_split
from vitrail.tasks.registry import find_task
from vitrail.tasks.scoring import ScoredNetwork, score_network

if TYPE_CHECKING:
    from vitrail.data.collection import Collection


def run_evaluate(options: EvaluateOptions) -> int:
    sizes: Sequence[int | None] = options.image_size or (None,)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--image-size {' '.join(map(str, sizes))} names a size twice")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed} must be at least 0")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise ConfigError(f"--threshold {options.threshold:g} must be between 0 and 1")
    check_batch(options)
    check_distinct({"--out": options.out, "--page": options.page, "--answers": options.answers})
    with joined(options.device) as world:
        for path in (options.out, options.page, options.answers) if world.is_main else ():
            if path is not None:
                check_writable(path)
        if options.download and world.is_main:
            open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data, download=options.download)
        split, _ = choose_split(collection, "test", "val")
        done = score_sizes(options, sizes, collection, split, world)
        if world.is_main:
            for size, one in zip(sizes, done, strict=False):  # fewer of them after an interrupt
                write_outputs(options, one, size if len(sizes) > 1 else None)
            show_scores(options, done, collection, split)
    return 0 if len(done) == len(sizes) else 130


def score_sizes(
    options: EvaluateOptions, sizes: Sequence[int | None], collection: "Collection", split: str, world: World
) -> list[ScoredNetwork]:
    """One for each size, or as many of them as an interrupt left time for."""
    done: list[ScoredNetwork] = []
    for size in sizes:
        try:
            done.append(score_size(options, size, collection, split, world))
        except KeyboardInterrupt:
            if not done:
                print("stopped; nothing was scored or written", file=sys.stderr)
                raise
            rest = " ".join(map(str, sizes[len(done) :]))
            print(f"stopped; for the rest, give the same command with --image-size {rest}", file=sys.stderr)
            break
    return done


def score_size(
    options: EvaluateOptions, size: int | None, collection: "Collection", split: str, world: World
) -> ScoredNetwork:
    about = load_subject(options.weights, world.device, image_size=size)
    how = ScoringOptions(
        precision=options.precision,
        seed=options.seed,
        include_seen=options.include_seen,
        without=options.without,
        deduplicated_by=options.deduplicated_by,
        batch=options.batch,
        workers=options.workers,
        labels=None if options.labels is None else (),  # read once the task is known to take them
        by_number=options.by_number,
        real=options.real,
        threshold=options.threshold,
        answers=options.answers is not None,
    )
    find_task(card_of(about.network).task).check_scoring(how, about)
    if options.labels is not None:
        how = replace(how, labels=read_labels(options.labels, about.network.config.classes))
    with bars() as bar:
        return score_network(about, collection, split, how, world=world, called=f"{options.data}@{split}", advance=bar)


def check_distinct(outputs: dict[str, Path | None]) -> None:
    """Two outputs in one file would leave the later one only."""
    taken = dict[Path, str]()
    for option, path in outputs.items():
        if path is not None and (first := taken.setdefault(path.resolve(), option)) != option:
            raise ConfigError(f"{first} and {option} are both {path}; give each a file of its own")


def add_size(path: Path, size: int | None) -> Path:
    """result.json, or result-224.json where several sizes are scored."""
    return path if size is None else path.with_name(f"{path.stem}-{size}{path.suffix}")


def write_outputs(options: EvaluateOptions, one: ScoredNetwork, size: int | None) -> None:
    if options.out is not None:
        one.result.write(add_size(options.out, size))
    if options.answers is not None and one.found.answers is not None:
        write_file(add_size(options.answers, size), one.found.answers())
    if options.page is not None:
        from vitrail.evaluation.compare import evaluation_page

        text = evaluation_page(one.result, one.found, one.notes, one.scope.lines())
        write_file(add_size(options.page, size), text.encode())


def show_scores(options: EvaluateOptions, done: Sequence[ScoredNetwork], collection: "Collection", split: str) -> None:
    """What a person sees."""
    one, count = done[0], len(collection.splits[split])
    image = "x".join(map(str, one.about.preprocessing.image))
    size = [f"{image} px"] if len(done) == 1 else []
    print(describe_weights(options.weights, one.result.weights, *size, options.precision))
    where = f"{options.data}@{split}" if len(collection.splits) > 1 else options.data
    print(f"{where}: {count:,} {'picture' if count == 1 else 'pictures'}, {one.found.outputs}")
    for line in one.scope.lines():
        print(line)
    if len(done) == 1:
        show_single(one)
    else:
        show_sizes(done)
    for note in dict.fromkeys(note for each in done for note in each.notes):
        print(f"note: {note}")
    several = options.image_size or ()
    for word, path in (("result", options.out), ("page", options.page), ("answers", options.answers)):
        if path is not None:
            paths = [add_size(path, each) for each in several] if len(several) > 1 else [path]
            print(f"{word}: {', '.join(map(str, paths))}")


def show_sizes(done: Sequence[ScoredNetwork]) -> None:
    """A row a size. What would make it too wide for a terminal is in the results."""
    found = done[0].found
    heads = [measure.name for measure in found.measures if measure.name in found.brief]
    rows: list[list[str]] = []
    for one in done:
        by_name = {measure.name: measure for measure in one.result.measures}
        cells = [
            f"{format_value(by_name[name])} ({format_interval(by_name[name])})"
            if name in found.counting
            else format_value(by_name[name])
            for name in heads
            if name in by_name
        ]
        rows.append(["x".join(map(str, one.about.preprocessing.image)), *cells])
    print()
    print_table(["image", *heads], rows)


def describe_count(measure: Measure, scope: Scope) -> str:
    """ "58 of 64", with a mark where images count that were trained on."""
    count = f"{round(measure.value * (measure.count or 0)):,} of {measure.count:,}"
    return f"{count}, {scope.exposure.count:,} seen" if scope.tainted else count


def show_single(one: ScoredNetwork) -> None:
    """The numbers with their intervals, and what to look at."""
    found = one.found
    unknown = "" if any(format_interval(measure) for measure in found.measures) else "none"
    rows = [[measure.name, format_value(measure), format_interval(measure) or unknown] for measure in found.measures]
    columns = ["measure", "value", "95% interval"]
    if found.counting:
        columns.append("pictures")
        for row, measure in zip(rows, found.measures, strict=True):
            row.append(describe_count(measure, one.scope) if measure.name in found.counting else "")
    print()
    print_table(columns, rows)
    for table in found.tables:
        print_table(table.columns, table.rows, title=table.title, left=table.left)

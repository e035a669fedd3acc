"""What `vitrail evaluate` does."""

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.evaluate_multi_label import show_classes, write_scores
from vitrail.cli.labels import read_labels
from vitrail.cli.opening import open_data
from vitrail.cli.options.evaluate import EvaluateOptions
from vitrail.cli.progress import bars
from vitrail.cli.subject import check_batch, headline, subject
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.storage import check_writable, write_file
from vitrail.distributed.world import World, joined
from vitrail.evaluation.assessment import Assessment
from vitrail.evaluation.exposure import Scope
from vitrail.evaluation.multi_label import STATISTICS, MultiLabel
from vitrail.evaluation.result import Measure, shown, spanned
from vitrail.evaluation.scoring import Scored, Scoring, score
from vitrail.evaluation.subject import chosen

if TYPE_CHECKING:
    from vitrail.data.collection import Collection

LISTED = 5  # confusions and classes that are printed
SHARES = ("top-1", "top-5", "ReaL", "exact match")  # which count pictures


def run(options: EvaluateOptions) -> int:
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
        for path in (options.out, options.page, options.answers) if world.first else ():
            if path is not None:
                check_writable(path)
        if options.download and world.first:
            open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data, download=options.download)
        split, _ = chosen(collection, "test", "val")
        done = scored(options, sizes, collection, split, world)
        if world.first:
            for size, one in zip(sizes, done, strict=False):  # fewer of them after an interrupt
                write(options, one, size if len(sizes) > 1 else None)
            show(options, done, collection, split)
    return 0 if len(done) == len(sizes) else 130


def scored(
    options: EvaluateOptions, sizes: Sequence[int | None], collection: "Collection", split: str, world: World
) -> list[Scored]:
    """One for each size, or as many of them as an interrupt left time for."""
    done: list[Scored] = []
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
) -> Scored:
    about = subject(options.weights, world.device, image_size=size)
    outputs = about.network.config.classes
    how = Scoring(
        labels=None if options.labels is None else read_labels(options.labels, outputs),
        by_number=options.by_number,
        real=options.real,
        threshold=options.threshold,
        precision=options.precision,
        seed=options.seed,
        include_seen=options.include_seen,
        without=options.without,
        deduplicated_by=options.deduplicated_by,
        batch=options.batch,
        workers=options.workers,
    )
    with bars() as bar:
        return score(about, collection, split, how, world=world, called=f"{options.data}@{split}", advance=bar)


def check_distinct(outputs: dict[str, Path | None]) -> None:
    """Two outputs in one file would leave the later one only."""
    taken = dict[Path, str]()
    for option, path in outputs.items():
        if path is not None and (first := taken.setdefault(path.resolve(), option)) != option:
            raise ConfigError(f"{first} and {option} are both {path}; give each a file of its own")


def sized(path: Path, size: int | None) -> Path:
    """result.json, or result-224.json where several sizes are scored."""
    return path if size is None else path.with_name(f"{path.stem}-{size}{path.suffix}")


def write(options: EvaluateOptions, one: Scored, size: int | None) -> None:
    source = one.source
    if options.out is not None:
        one.result.write(sized(options.out, size))
    if options.answers is not None:
        names = [source.name(at) for at in range(len(source))]
        if isinstance(one.found, MultiLabel):
            write_scores(sized(options.answers, size), one.found, names)
        else:
            write_answers(sized(options.answers, size), one.found, one.matching.names, names)
    if options.page is not None:
        write_file(sized(options.page, size), page_of(one).encode())


def page_of(one: Scored) -> str:
    if isinstance(one.found, MultiLabel):
        from vitrail.evaluation.multi_label_page import multi_label_page

        return multi_label_page(one.result, one.found, one.notes, one.scope.lines())
    from vitrail.evaluation.presentation import evaluation_page

    return evaluation_page(one.result, one.found, one.source, one.notes, one.scope.lines())


def write_answers(path: Path, found: Assessment, called: Sequence[str], names: Sequence[str]) -> None:
    """A row a picture: its name, what it shows, what was said, how sure, whether that is right; blanks where it could
    not be read or has no label."""
    judged = found.judged
    rows: list[list[str]] = [[name, "", "", "", "", ""] for name in names]
    for at in range(len(judged)):
        said, truth = int(judged.said[at]), int(judged.truth[at])
        right = "yes" if judged.right[at] else "no"
        answer = [called[truth], called[said] if said >= 0 else "", f"{judged.confidence[at]:.6f}", right]
        rows[judged.sample[at]][1:] = [*answer, f"{judged.loss[at]:.6f}"]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["picture", "true", "said", "confidence", "right", "loss"])
    writer.writerows(rows)
    write_file(path, text.getvalue().encode("utf-8", "surrogateescape"))


def show(options: EvaluateOptions, done: Sequence[Scored], collection: "Collection", split: str) -> None:
    """What a person sees."""
    one, count = done[0], len(collection.splits[split])
    image = "x".join(map(str, one.about.preprocessing.image))
    size = [f"{image} px"] if len(done) == 1 else []
    print(headline(options.weights, one.result.weights, *size, options.precision))
    classes = f"{len(collection.classes):,} classes, matched {one.matching.how}" if collection.classes else "no labels"
    where = f"{options.data}@{split}" if len(collection.splits) > 1 else options.data
    print(f"{where}: {count:,} {'picture' if count == 1 else 'pictures'}, {classes}")
    for line in one.scope.lines():
        print(line)
    if len(done) == 1:
        show_one(one)
    else:
        show_sizes(done)
    for note in dict.fromkeys(note for each in done for note in each.notes):
        print(f"note: {note}")
    several = options.image_size or ()
    for word, path in (("result", options.out), ("page", options.page), ("answers", options.answers)):
        if path is not None:
            paths = [sized(path, each) for each in several] if len(several) > 1 else [path]
            print(f"{word}: {', '.join(map(str, paths))}")


def show_sizes(done: Sequence[Scored]) -> None:
    """A row a size. What would make it too wide for a terminal is in the results."""
    heads = [m.name for m in done[0].result.measures if m.name in (*SHARES, *STATISTICS, "ECE", "loss")]
    rows: list[list[str]] = []
    for one in done:
        by_name = {measure.name: measure for measure in one.result.measures}
        cells = [
            f"{shown(by_name[name])} ({spanned(by_name[name])})" if name in SHARES else shown(by_name[name])
            for name in heads
            if name in by_name
        ]
        rows.append(["x".join(map(str, one.about.preprocessing.image)), *cells])
    print()
    print_table(["image", *heads], rows)


def counted(measure: Measure, scope: Scope) -> str:
    """ "58 of 64", with a mark where images count that were trained on."""
    count = f"{round(measure.value * (measure.count or 0)):,} of {measure.count:,}"
    return f"{count}, {scope.exposure.count:,} seen" if scope.tainted else count


def show_one(one: Scored) -> None:
    """The numbers with their intervals, and what to look at."""
    rows = [
        (
            measure.name,
            shown(measure),
            spanned(measure),
            counted(measure, one.scope) if measure.name in SHARES else "",
        )
        for measure in one.result.measures
    ]
    print()
    print_table(["measure", "value", "95% interval", "pictures"], rows)
    if isinstance(one.found, MultiLabel):
        show_classes(one.found)
    else:
        show_mistakes(one.found)


def show_mistakes(found: Assessment) -> None:
    """The most frequent mistakes and the hardest classes."""
    confused = [pair for pair in found.confused(LISTED) if pair.count > 1]
    if confused:
        print_table(
            ["true", "said", "times", "of its class"],
            [(pair.truth, pair.said, f"{pair.count:,}", f"{pair.share:.1%}") for pair in confused],
            title="Most often confused",
            left=2,
        )
    mistaken = [each for each in found.classes if each.right < each.count and each.count > 1]
    hardest = sorted(mistaken, key=lambda each: (each.share, -each.count))[:LISTED]
    if hardest:
        print_table(
            ["class", "right", "pictures", "accuracy"],
            [(each.name, f"{each.right:,}", f"{each.count:,}", f"{each.share:.1%}") for each in hardest],
            title="Hardest classes",
        )

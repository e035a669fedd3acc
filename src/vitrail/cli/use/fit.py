"""`vitrail fit` builds a classifier in closed form; `vitrail embed` writes features to a file."""

import contextlib
import math
import os
import shlex
import time
from pathlib import Path

from vitrail.checkpoint.bundle import rename_classes
from vitrail.checkpoint.weights import to_bundle, write_bundle
from vitrail.cli.inputs import (
    load_batches,
    load_subject,
    open_data,
    resolve_class_names,
    single_process,
    weights_line,
)
from vitrail.cli.options.use import SUFFIX, EmbedOptions, FitOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.distributed.process_group import World, join_world
from vitrail.evaluation.frozen.closed_form_classifier import FittedClassifier, MultiLabelMeasures, fit
from vitrail.evaluation.frozen.embed import EmbeddingSummary, embed
from vitrail.evaluation.frozen.embedding_file import FORMATS
from vitrail.evaluation.frozen.fewshot import PENALTIES
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.result import format_interval, format_value
from vitrail.evaluation.scoring import choose_workers


def run_fit(options: FitOptions) -> int:
    check_fit(options)
    begun = time.monotonic()
    collection = open_data(options.data, download=options.download)
    test = None if options.test is None else open_data(options.test, download=options.download)
    collection.need_labels()  # before the weights are read
    names = resolve_class_names(options.labels, options.rename, collection.classes, len(collection.classes))
    kept = "" if options.no_cache else "; complete features are cached for the next start"
    with single_process(options.device) as device, on_interrupt(f"{options.out} was not written{kept}"):
        about = load_subject(options.weights, device, image_size=options.image_size)
        print(weights_line(options.weights, about.facts, f"{format_size(about.preprocessing.image)} px"))
        counts = ", ".join(f"{len(source):,} of {split}" for split, source in collection.splits.items())
        print(f"{collection.title}: {len(collection.classes):,} classes; images: {counts}", flush=True)
        with bars() as advance:
            made = fit(
                about.network,
                collection,
                test=test,
                penalty=options.l2,
                held_out=options.dev,
                shots=options.shots,
                name=options.weights,
                device=device,
                batches=lambda source: load_batches(options, source, about.preprocessing, device, advance),
                folder=None if options.no_cache else cache_folder("features"),
            )
        out = options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        bundle = to_bundle(made.model)
        write_bundle(bundle if names is None else rename_classes(bundle, names), out)
    how = "from the cache" if made.found else "extracted and cached" if made.kept else "extracted again"
    width = made.head.weight.shape[1]
    print(f"learned from {made.pictures:,} images of {made.split}, {width:,} features each, {how}")
    if made.several is None:
        for line in describe_estimate(made, given=options.l2 is not None):
            print(line)
        show_result(made)
    else:
        show_multi_label(made.several)
    for note in dict.fromkeys((*collection.notes, *made.notes)):
        print(f"note: {note}")
    print(f"network: {out} ({size_of(out)}), in {time.monotonic() - begun:.1f} s")
    print(f"next: vitrail predict {shlex.quote(str(out))} IMAGE...   or   vitrail serve {shlex.quote(str(out))}")
    return 0


def check_fit(options: FitOptions) -> None:
    """Refuses invalid options before anything is read."""
    out = options.out
    if out.suffix != SUFFIX:
        raise ConfigError(f"--out {out}: a network is written as {SUFFIX}; name it {out.with_suffix(SUFFIX)}")
    check_writable(out)
    if Path(options.weights).exists() and out.exists() and out.samefile(options.weights):
        raise ConfigError(f"--out {out} is the file of the weights themselves; give another name")
    if options.l2 is not None and not 0 < options.l2 < math.inf:
        raise ConfigError(f"--l2 {options.l2:g} must be above 0 and finite")
    if not 0 <= options.dev < 1:
        raise ConfigError(f"--dev {options.dev:g} must be at least 0 and below 1")
    if options.shots is not None and options.shots < 1:
        raise ConfigError(f"--shots {options.shots} must be at least 1")


def describe_estimate(made: FittedClassifier, *, given: bool) -> list[str]:
    """The expected accuracy on new images, from held-out ones, and the regularisation."""
    head, held = made.head, made.head.held
    if held is None:
        return [f"estimated accuracy: unknown, no images were held out (l2 {head.penalty:.4g})"]
    count = min(held.count, made.pictures)  # an image held out in several draws counts once
    low, high = wilson_interval(round(held.accuracy * count), count)
    times_ = f" in {held.draws} rounds" if held.draws > 1 else ""
    why = "as given" if given else f"the best of {len(PENALTIES)}"
    return [
        f"estimated accuracy: {held.accuracy:.2%} (95% interval {100 * low:.1f}–{100 * high:.1f}), on "
        f"{held.count:,} images held out{times_} (l2 {head.penalty:.3g}, {why})"
    ]


def size_of(path: Path) -> str:
    count = path.stat().st_size
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def show_multi_label(found: MultiLabelMeasures) -> None:
    """mAP and F1 of images that may have several labels."""
    for measures, of in ((found.held, "held out while it was made"), (found.scored, f"of {found.split}")):
        if measures:
            print(f"each class by itself, {measures[0].count:,} images {of}:")
            rows = [(measure.name, format_value(measure), format_interval(measure)) for measure in measures]
            print_table(["measure", "value", "95% interval"], rows)
    if not found.scored:
        print("not evaluated: no test or val split found; name one with --test DATA")


def show_result(made: FittedClassifier) -> None:
    if made.scored is None:
        print("not evaluated: no test or val split found; name one with --test DATA")
        return
    top1 = made.scored.top1
    print(
        f"{made.scored.split}: accuracy {format_value(top1)} "
        f"(95% interval {format_interval(top1)}, {top1.count:,} images); its "
        f"probabilities are off by {made.scored.error:.2%}"
    )


NAMED = 3  # unreadable images that are named
PATIENCE_S = 3600.0  # a process may be that much longer at its last part than the others


def run_embed(options: EmbedOptions) -> int:
    out = options.out
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out}: embeddings are written as {' or '.join(FORMATS)}; give such a name")
    if options.batch < 0:
        raise ConfigError(f"--batch {options.batch} must be at least 1")
    with join_world(options.device, timeout_s=PATIENCE_S) as world:
        if world.is_main:
            check_writable(out)
            if options.download:
                open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data)
        splits = select_splits(collection, options.split)
        about = load_subject(options.weights, world.device, image_size=options.image_size)
        about.computing_in(options.precision)
        origin = {
            "name": options.weights,
            "network": about.facts["network"],
            "source": collection.name,
            "made_by": "vitrail embed",
        }
        if world.is_main:
            image = format_size(about.preprocessing.image)
            count = sum(map(len, splits.values()))
            print(weights_line(options.weights, about.facts, f"{image} px", options.precision))
            print(f"{collection.title}: {count:,} images of {', '.join(splits)}", flush=True)
        kept = on_interrupt("finished parts are saved; the same command resumes")
        with bars() as bar, kept if world.is_main else contextlib.nullcontext():
            if world.is_main:
                bar("images", 0, sum(map(len, splits.values())))
            tell = (lambda done, total: bar("images", done * world.size, total * world.size)) if world.is_main else None
            done = embed(
                about.network,
                splits,
                out,
                preprocessing=about.preprocessing,
                world=world,
                dtype=options.type,
                precision=options.precision,
                batch=options.batch or (256 if world.device.type == "cuda" else 64),
                workers=options.workers if options.workers >= 0 else shared_workers(world),
                origin=origin,
                force=options.force,
                tell=tell,
            )
        if world.is_main:
            show_embedded(done, options.type)
    return 1 if done.unreadable and not done.pictures else 0


def shared_workers(world: World) -> int:
    """The loader processes of this process: the machine's, shared out."""
    return max(choose_workers() // world.local_size, min(1, (os.cpu_count() or 1) - 1))


def select_splits(collection: Collection, split: str | None) -> dict[str, ImageDataset]:
    if split is None:
        return dict(collection.splits)
    chosen = collection.split(split)
    return {name: source for name, source in collection.splits.items() if source is chosen}


def show_embedded(done: EmbeddingSummary, kind: str) -> None:
    if done.found == done.parts:
        print("nothing to do: up to date")
    elif done.found:
        print(f"resumed: {done.found:,} of {done.parts:,} parts were already done")
    if done.unreadable:
        some = ", ".join(str(one) for one in done.first[:NAMED]) + (", ..." if done.unreadable > NAMED else "")
        skipped = pluralise(done.unreadable, "unreadable image")
        print(f"note: skipped {skipped}, see {done.path}.unreadable.txt: {some}")
    size = size_of(done.path)
    print(f"embeddings: {done.path} ({size}): {done.pictures:,} rows of {done.width:,} {kind} features")

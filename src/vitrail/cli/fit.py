"""What `vitrail fit` does."""

import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from vitrail.checkpoint.bundle import with_names
from vitrail.checkpoint.weights import bundle_of, write_bundle
from vitrail.cli.frozen import count_progress
from vitrail.cli.labels import resolve_class_names
from vitrail.cli.opening import open_data
from vitrail.cli.options.fit import SUFFIX, FitOptions
from vitrail.cli.progress import Advance, bars, on_interrupt
from vitrail.cli.subject import single_process, load_batches, describe_weights, load_subject
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.evaluation.frozen.closed_form_classifier import FittedClassifier, MultiLabelMeasures, fit
from vitrail.evaluation.frozen.fewshot import PENALTIES
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.result import format_interval, format_value
from vitrail.evaluation.scoring import Subject


def run_fit(options: FitOptions) -> int:
    check_fit(options)
    begun = time.monotonic()
    collection = open_data(options.data, download=options.download)
    test = None if options.test is None else open_data(options.test, download=options.download)
    collection.need_labels()  # before the weights are read
    names = resolve_class_names(options.labels, options.rename, collection.classes, len(collection.classes))
    kept = "" if options.no_cache else "; features that are complete are kept for the next start"
    with single_process(options.device) as device, on_interrupt(f"{options.out} was not written{kept}"):
        about = load_subject(options.weights, device, image_size=options.image_size)
        print(describe_weights(options.weights, about.facts, f"{format_size(about.preprocessing.image)} px"))
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
                batches=lambda source: load_images(options, about, source, advance),
                folder=None if options.no_cache else cache_folder("features"),
            )
        out = options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        bundle = bundle_of(made.model)
        write_bundle(bundle if names is None else with_names(bundle, names), out)
    how = "kept from before" if made.found else "extracted and kept" if made.kept else "extracted again"
    width = made.head.weight.shape[1]
    print(f"learnt from {made.pictures:,} images of {made.split}, {width:,} features each, {how}")
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
    """What can be refused before anything is read."""
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


def load_images(options: FitOptions, about: Subject, source: ImageDataset, advance: Advance) -> Iterator[Batch]:
    """The images of a source; how far they are is told on stderr."""
    advance("features", 0, len(source))
    found = load_batches(options, source, about.preprocessing, about.device)
    return count_progress(found, lambda done: advance("features", min(done, len(source)), len(source)))


def describe_estimate(made: FittedClassifier, *, given: bool) -> list[str]:
    """What to expect of new images, by those that were held out, and how strongly the classifier was regularised."""
    head, held = made.head, made.head.held
    if held is None:
        return [f"estimated accuracy: unknown, no images were held out (l2 {head.penalty:.4g})"]
    count = min(held.count, made.pictures)  # an image that is held out in several draws says no more than in one
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
        print("scored: nothing else; a split test or val would be, or name one with --test DATA")


def show_result(made: FittedClassifier) -> None:
    if made.scored is None:
        print("no test images: a subfolder test or val next to train would be scored, or name some with --test DATA")
        return
    top1 = made.scored.top1
    print(
        f"{made.scored.split}: accuracy {format_value(top1)} "
        f"(95% interval {format_interval(top1)}, {top1.count:,} images); its "
        f"probabilities are off by {made.scored.error:.2%} on average"
    )

"""`vitrail fit` builds a classifier or segmenter in closed form; `vitrail embed` writes features to a file."""

import contextlib
import math
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vitrail.checkpoint.bundle import get_card, rename_classes
from vitrail.checkpoint.weights import to_bundle, write_bundle
from vitrail.cli import inputs
from vitrail.cli.inputs import load_batches, load_subject, resolve_class_names, weights_line
from vitrail.cli.open_data import open_data
from vitrail.cli.options.use import SUFFIX, EmbedOptions, FitOptions
from vitrail.cli.progress import Advance, bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_bytes, format_size, join_words, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import MaskTargets
from vitrail.distributed.process_group import join_world
from vitrail.evaluation.frozen.closed_form_classifier import FittedClassifier, MultiLabelMeasures, fit
from vitrail.evaluation.frozen.embed import EmbeddingSummary, embed
from vitrail.evaluation.frozen.embedding_file import FORMATS
from vitrail.evaluation.frozen.fewshot import PENALTIES
from vitrail.evaluation.frozen.ridge_patches import TRIED
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.result import format_interval, format_value
from vitrail.evaluation.scoring import Subject, choose_workers
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import find_task
from vitrail.tasks.segmentation.closed_form import FittedSegmenter, fit_segmenter
from vitrail.tasks.segmentation.task import SEGMENTATION, build_class_table
from vitrail.tasks.task import PRINTED, measure_row

UNSCORED: Final = "not evaluated: no test or val split found; name one with --test DATA"


def run_fit(options: FitOptions) -> int:
    check_fit(options)
    begun = time.monotonic()
    collection = open_data(options.data, download=options.download)
    test = None if options.test is None else open_data(options.test, download=options.download)
    on_pixels = is_about_pixels(options, collection)
    if not on_pixels:
        collection.need_labels()  # before the weights are read
    classes = collection.pixel_classes if on_pixels else collection.classes
    names = resolve_class_names(options.labels, options.rename, classes, len(classes))
    kept = "" if options.no_cache or on_pixels else "; complete features are cached for the next run"
    with inputs.single_process(options.device) as device, on_interrupt(f"{options.out} was not written{kept}"):
        sizes = {"image_size": options.image_size, "patch": options.patch, "channels": options.channels}
        about = load_subject(options.weights, device, precision="float32", **sizes)
        print(weights_line(options.weights, about.facts, f"{format_size(about.preprocessing.image)} px"))
        counts = ", ".join(f"{len(source):,} of {split}" for split, source in collection.splits.items())
        kind = " of pixels" if on_pixels else ""
        print(f"{collection.title}: {len(classes):,} classes{kind}; images: {counts}", flush=True)
        with bars() as advance:
            build = build_segmenter if on_pixels else build_classifier
            made = build(options, about, collection, test, advance)
        out = options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        bundle = to_bundle(made.model)
        write_bundle(bundle if names is None else rename_classes(bundle, names), out)
    if isinstance(made, FittedSegmenter):
        show_segmenter(made, given=options.l2 is not None)
    else:
        show_classifier(made, given=options.l2 is not None)
    for note in dict.fromkeys((*collection.notes, *made.notes)):
        print(f"note: {note}")
    print(f"network: {out} ({format_bytes(out.stat().st_size)}), in {time.monotonic() - begun:.1f} s")
    print(f"next: vitrail predict {shlex.quote(str(out))} IMAGE...   or   vitrail serve {shlex.quote(str(out))}")
    return 0


def is_about_pixels(options: FitOptions, collection: Collection) -> bool:
    """Whether to fit classes of pixels: if --task says so, or if the data have masks but no labels."""
    tasks = (CLASSIFICATION.name, SEGMENTATION.name)
    if options.task and find_task(options.task).name not in tasks:
        raise ConfigError(f"{options.task} cannot be fitted in closed form; use vitrail finetune")
    known = options.task or ("" if CLASSIFICATION.recognises(collection) or not collection.pixel_classes else tasks[1])
    if known != SEGMENTATION.name:
        return False
    collection.need_masks()
    if options.shots is not None:
        raise ConfigError(f"--shots {options.shots} is for classes of whole images, but these are of pixels; omit it")
    return True


def build_classifier(
    options: FitOptions, about: Subject, collection: Collection, test: Collection | None, advance: Advance
) -> FittedClassifier:
    return fit(
        about.network,
        collection,
        test=test,
        penalty=options.l2,
        held_out=options.dev,
        shots=options.shots,
        name=options.weights,
        device=about.device,
        batches=lambda source: load_batches(options, source, about.preprocessing, about.device, advance),
        folder=None if options.no_cache else cache_folder("features"),
    )


def build_segmenter(
    options: FitOptions, about: Subject, collection: Collection, test: Collection | None, advance: Advance
) -> FittedSegmenter:
    def load(source: ImageDataset, preprocessing: Preprocessing) -> Iterator[Batch]:
        return load_batches(options, source, preprocessing, about.device, advance, "images", targets=MaskTargets())

    return fit_segmenter(
        about.network,
        collection,
        test=test,
        penalty=options.l2,
        held_out=options.dev,
        name=options.weights,
        device=about.device,
        batches=load,
    )


def check_fit(options: FitOptions) -> None:
    """Refuses invalid options before anything is read."""
    out = options.out
    if out.suffix != SUFFIX:
        raise ConfigError(f"--out {out}: a network is written as {SUFFIX}; name it {out.with_suffix(SUFFIX)}")
    check_writable(out)
    if Path(options.weights).exists() and out.exists() and out.samefile(options.weights):
        raise ConfigError(f"--out {out} is the weight file itself; give another name")
    if options.l2 is not None and not 0 < options.l2 < math.inf:
        raise ConfigError(f"--l2 {options.l2:g} must be above 0 and finite")
    if not 0 <= options.dev < 1:
        raise ConfigError(f"--dev {options.dev:g} must be at least 0 and below 1")
    if options.shots is not None and options.shots < 1:
        raise ConfigError(f"--shots {options.shots} must be at least 1")


def show_classifier(made: FittedClassifier, *, given: bool) -> None:
    """Prints what the classifier was fitted on, and its scores."""
    how = "from the cache" if made.found else "extracted and cached" if made.kept else "extracted again"
    width = made.head.weight.shape[1]
    print(f"learned from {made.pictures:,} images of {made.split}, {width:,} features each, {how}")
    if made.several is None:
        show_result(made, given=given)
    else:
        show_multi_label(made.several)
    if not (made.scored or (made.several and made.several.scored)):
        print(UNSCORED)


def show_segmenter(made: FittedSegmenter, *, given: bool) -> None:
    """Prints what the segmenter was fitted on, the mean IoU to expect on new images, and its scores."""
    head, held = made.head, made.head.held
    work = f"solved in {made.seconds:.1f} s without the network"
    print(f"learned from {made.pictures:,} images of {made.split}, {made.patches:,} patches each, {work}")
    if held is None:
        print(f"estimated mIoU: unknown, no images were held out (l2 {head.penalty:.4g})")
    else:
        penalty = f"(l2 {head.penalty:.3g}, {'as given' if given else f'the best of {len(TRIED)}'})"
        print(
            f"estimated mIoU: {held.miou:.2%}, on {held.pixels:,} pixels of {held.images:,} images held out {penalty}"
        )
    if made.scored is None:
        print(UNSCORED)
        return
    score, card = made.scored.score, get_card(made.model)
    measures = measure_row(
        score.row(), (*SEGMENTATION.criteria, *SEGMENTATION.extras), made.scored.intervals, score.count
    )
    rows = [(measure.name, format_value(measure), format_interval(measure)) for measure in measures]
    print(f"{made.scored.split}, {score.count:,} images:")
    print_table(["measure", "value", "95% interval"], rows)
    table = build_class_table(score, card.labels or (), "")
    if len(table.rows) <= PRINTED:
        print_table(table.columns, table.rows)
    else:
        print(f"IoU of each of the {len(table.rows):,} classes: vitrail evaluate FILE DATA --page score.html")


def show_result(made: FittedClassifier, *, given: bool) -> None:
    """Prints the accuracy to expect on new images, estimated on held-out ones, and the score."""
    head, held = made.head, made.head.held
    if held is None:
        print(f"estimated accuracy: unknown, no images were held out (l2 {head.penalty:.4g})")
    else:
        count = min(held.count, made.pictures)  # an image held out in several draws counts once
        low, high = wilson_interval(round(held.accuracy * count), count)
        rounds = f" in {held.draws} rounds" if held.draws > 1 else ""
        penalty = f"(l2 {head.penalty:.3g}, {'as given' if given else f'the best of {len(PENALTIES)}'})"
        accuracy = f"{held.accuracy:.2%} (95% interval {100 * low:.1f}–{100 * high:.1f})"
        print(f"estimated accuracy: {accuracy}, on {held.count:,} images held out{rounds} {penalty}")
    if made.scored is not None:
        top1 = made.scored.top1
        about = f"(95% interval {format_interval(top1)}, {top1.count:,} images)"
        error = f"expected calibration error {made.scored.error:.2%}"
        print(f"{made.scored.split}: accuracy {format_value(top1)} {about}; {error}")


def show_multi_label(found: MultiLabelMeasures) -> None:
    """Prints mAP and F1 for images that may have several labels."""
    for measures, of in ((found.held, "held out during fitting"), (found.scored, f"of {found.split}")):
        if measures:
            print(f"each class on its own, {measures[0].count:,} images {of}:")
            rows = [(measure.name, format_value(measure), format_interval(measure)) for measure in measures]
            print_table(["measure", "value", "95% interval"], rows)


NAMED = 3  # unreadable images to name
PATIENCE_S = 3600.0  # how long a process may wait for the last parts of the others


def run_embed(options: EmbedOptions) -> int:
    out = options.out
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out}: embeddings are written as {' or '.join(FORMATS)}; use one of these suffixes")
    inputs.check_batch(options)
    with join_world(options.device, timeout_s=PATIENCE_S) as world:
        if world.is_main:
            check_writable(out)
            if options.download:
                open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data)
        splits = dict(collection.splits)
        if options.split is not None:
            chosen = collection.split(options.split)
            splits = {name: source for name, source in splits.items() if source is chosen}
        about = load_subject(
            options.weights,
            world.device,
            image_size=options.image_size,
            patch=options.patch,
            precision=options.precision,
        )
        origin = {"name": options.weights, "network": about.facts["network"]}
        origin |= {"source": collection.name, "made_by": "vitrail embed"}
        count = sum(map(len, splits.values()))
        if world.is_main:
            size = f"{format_size(about.preprocessing.image)} px"
            print(weights_line(options.weights, about.facts, size, about.precision))
            print(f"{collection.title}: {pluralise(count, 'image')} of {', '.join(splits)}", flush=True)
        workers = max(choose_workers() // world.local_size, min(1, (os.cpu_count() or 1) - 1))  # shared out
        kept = on_interrupt("finished parts are saved; the same command resumes")
        with bars() as bar, kept if world.is_main else contextlib.nullcontext():
            if world.is_main:
                bar("images", 0, count)
            tell = (lambda done, total: bar("images", done * world.size, total * world.size)) if world.is_main else None
            done = embed(
                about.network,
                splits,
                out,
                preprocessing=about.preprocessing,
                world=world,
                dtype=options.type,
                precision=about.precision,
                batch=options.batch or (256 if world.device.type == "cuda" else 64),
                workers=workers if options.workers < 0 else options.workers,
                origin=origin,
                force=options.force,
                tell=tell,
            )
        if world.is_main:
            show_embedded(done, options.type)
    return 1 if done.unreadable and not done.pictures else 0


def show_embedded(done: EmbeddingSummary, kind: str) -> None:
    if done.found == done.parts:
        print("nothing to do: up to date")
    elif done.found:
        print(f"resumed: {done.found:,} of {done.parts:,} parts were already done")
    if done.unreadable:
        skipped = pluralise(done.unreadable, "unreadable image")
        print(f"note: skipped {skipped}, see {done.path}.unreadable.txt: {join_words(done.first[:NAMED])}")
    size = format_bytes(done.path.stat().st_size)
    print(f"embeddings: {done.path} ({size}): {pluralise(done.pictures, 'row')} of {done.width:,} {kind} features")

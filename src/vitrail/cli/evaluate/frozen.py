"""`vitrail fewshot`, `probe` and `knn`: accuracy of frozen features, learned on one split and scored on another."""

import contextlib
import math
import re
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.cli.inputs import load_batches, load_subject, single_process, weights_line
from vitrail.cli.open_data import open_data
from vitrail.cli.options.evaluate import ALL, FewshotOptions, KnnOptions, ProbeOptions
from vitrail.cli.options.groups import FrozenOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.console import print_table
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import format_size, join_words, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.splits import split_stratified
from vitrail.distributed.process_group import World
from vitrail.evaluation import scoring
from vitrail.evaluation.frozen import fewshot, probe
from vitrail.evaluation.frozen.closed_form_classifier import choose_scored_split
from vitrail.evaluation.frozen.features import FrozenFeatures, SquareView, list_missing, load_or_extract
from vitrail.evaluation.frozen.knn import find_nearest, vote_classes
from vitrail.evaluation.metrics import TOP, count_single_labels, keep_single_labels, score_predictions
from vitrail.evaluation.result import Measure, Result, format_interval, format_value, measure_share

SHOTS: Final = (1, 5, 10, 25)
SEEDS: Final = (0, 1, 2)
NEIGHBOURS: Final = (1, 5, 10, 20, 50)
NAMED: Final = 3  # unreadable images that are named
Places: TypeAlias = NDArray[np.int64]  # of samples in their split
Facts: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTask:
    """A data set with samples of one split to learn from and of another to score; with --held-out of the same one."""

    collection: Collection
    train: str
    test: str
    learn: Places
    score: Places
    origin: dict[str, str]  # set and split of a result, where they are not those of the collection
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.collection.title

    @property
    def classes(self) -> tuple[str, ...]:
        return self.collection.classes

    @property
    def learn_source(self) -> ImageDataset:
        return SubsetDataset(self.collection.splits[self.train], self.learn)

    @property
    def score_source(self) -> ImageDataset:
        return SubsetDataset(self.collection.splits[self.test], self.score)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrozenSplits:
    """Features [n, D] to learn from, with one label [n] each; features [N, D] to score, with labels [N] or [N, M]."""

    about: scoring.Subject
    task: FrozenTask
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    source: ImageDataset  # what is scored
    scope: scoring.Scope
    notes: tuple[str, ...]
    unreadable: tuple[str, ...]


def open_tasks(options: FrozenOptions, data: Sequence[str], tests: Sequence[str]) -> list[FrozenTask]:
    """One task per entry of `data`; `tests` names what is scored, one entry each."""
    if options.out is not None:
        check_writable(options.out)
    if len(set(data)) < len(data):
        raise ConfigError(f"{' '.join(data)} names a data set twice")
    if tests and len(tests) != len(data):
        raise ConfigError(f"{len(tests)} --test for {len(data)} data sets; give one each, in the same order, or none")
    if tests and options.held_out is not None:
        raise ConfigError("--test and --held-out both select the test images; give one of them")
    return [open_task(options, *both) for both in zip(data, tests or [None] * len(data), strict=True)]


def open_task(options: FrozenOptions, text: str, test: str | None) -> FrozenTask:
    """The task without training images that are also scored, under any name."""
    collection = open_data(text, download=options.download)
    collection.need_labels()
    train, source = scoring.choose_split(collection, "train")
    origin, name, scored, held = dict[str, str](), train, source, np.arange(0)
    if options.held_out is not None:
        held = split_stratified(source.labels, options.held_out)
        origin = {"split": f"{options.held_out:g} of {train}"}
        if not len(held):
            raise ConfigError(f"--held-out {options.held_out} of {len(source):,} images leaves none to score")
    else:
        other = None if test is None else open_data(test, download=options.download)
        found = choose_scored_split(collection, train, source, other)
        if found is None:
            remedy = "give other labelled images with --test DATA, or hold some out with --held-out 0.5"
            raise DataError(f"{text} has only {', '.join(collection.splits)} to learn from; {remedy}")
        name, scored = found
        title, _, split = name.rpartition("@")
        origin = {"name": title, "split": split} if other is not None else origin
    learn = np.setdiff1d(np.arange(len(source)), held)
    splits = {**collection.splits, name: scored}
    score = held if len(held) else np.arange(len(scored))
    task = FrozenTask(
        collection=replace(collection, splits=splits), train=train, test=name, learn=learn, score=score, origin=origin
    )
    shared = scoring.find_shared(task.learn_source, task.score_source)
    if shared is None:
        return replace(task, notes=(f"{task.title}: too many images to look for copies that are in both parts",))
    if not len(shared):
        return task
    count = pluralise(len(shared), "image")
    if len(shared) == len(learn):
        raise DataError(f"all {count} to train on are also scored ({test or text}); give --test DATA or --held-out")
    note = f"{count} of {task.train} are also scored and are not used for training"
    return replace(task, learn=np.delete(learn, shared), notes=(note,))


@contextlib.contextmanager
def prepare_network(options: FrozenOptions) -> Generator[scoring.Subject]:
    """The network on its device, in the requested precision; prints what it is."""
    with single_process(options.device) as device:
        sizes = {"image_size": options.image_size, "patch": options.patch}
        about = load_subject(options.weights, device, **sizes, precision=options.precision)
        size = f"{format_size(about.preprocessing.image)} px"
        print(weights_line(options.weights, about.facts, size, about.precision))
        yield about


def extract(options: FrozenOptions, about: scoring.Subject, task: FrozenTask) -> FrozenSplits:
    """The features of both parts, cached or new; prints what is evaluated, before the numbers."""
    with bars() as advance:
        name, alone = f"{task.title}@{task.test}", World(device=about.device)
        how = scoring.ScoringOptions(include_seen=options.include_seen)
        unseen, scope = scoring.choose_unseen(task.score_source, name, about, how, alone, advance)
    wanted = task.score if scope.included else task.score[~scope.exposure.seen]
    parts = {split: extract_split(options, about, task, split) for split in dict.fromkeys([task.train, task.test])}
    notes, unreadable = list(task.notes), list[str]()
    for split, part in parts.items():
        source = task.collection.splits[split]
        gone = [source.name(sample) for sample in list_missing(source, part.samples)]
        unreadable += [f"{split}: {name}" for name in gone]
        if gone:
            skipped = pluralise(len(gone), "unreadable image")
            notes.append(f"{split}: skipped {skipped}: {join_words(gone, limit=NAMED)}")
        if part.warning:
            notes.append(part.warning)
    train, test = parts[task.train], parts[task.test]
    test = test.select(torch.isin(test.samples, torch.from_numpy(wanted)))
    train = train.select(torch.isin(train.samples, torch.from_numpy(task.learn)))
    labels = keep_single_labels(train.labels)
    single = labels >= 0
    if several := int((~single).sum()):
        notes.append(f"{several:,} of {task.train} have no label or several, and are not used for training")
    if not single.any():
        raise BadLabels(f"{task.title}@{task.train}: no readable image has exactly one label to learn from")
    found, kept = (all(getattr(part, name) for part in parts.values()) for name in ("reused", "cached"))
    how = "from the cache" if found else "extracted and cached" if kept else "extracted again"
    scored = "held out of it" if task.test == task.train else f"of {task.test}"
    learned = f"learned from {int(single.sum()):,} of {task.train}, scored on {len(test.features):,} {scored}"
    width = f"{train.features.shape[1]:,} features each, {how}"
    print(f"{task.title}: {len(task.classes):,} classes; {learned}; {width}", *scope.lines(), sep="\n")
    return FrozenSplits(
        about=about,
        task=task,
        train=train.features[single],
        train_labels=labels[single],
        test=test.features,
        test_labels=test.labels,
        source=unseen,
        scope=scope,
        notes=tuple(notes),
        unreadable=tuple(unreadable),
    )


def extract_split(options: FrozenOptions, about: scoring.Subject, task: FrozenTask, split: str) -> FrozenFeatures:
    """The features of one split, with progress on stderr."""
    prepared, device, folder = about.preprocessing, about.device, None if options.no_cache else cache_folder("features")
    view, called = (SquareView(prepared.image), "squared, truncated") if options.reference else (prepared, "")
    source, what = task.collection.splits[split], f"features of {task.title}@{split}"
    kept = "" if options.no_cache else "; complete features are cached for the next start"
    with bars() as bar, on_interrupt(f"no score was written{kept}"):
        batches = lambda bare: load_batches(options, bare, view, device, bar, what)  # noqa: E731
        how: dict[str, Any] = {"folder": folder, "precision": about.precision, "view": called}
        return load_or_extract(about.network, source, prepared, device, batches=batches, **how)


def build_result(
    kind: str, options: FrozenOptions, part: FrozenSplits, measures: Iterable[Measure], config: Facts, details: Facts
) -> Result:
    """The result with its provenance: the scored data, and the data learned from."""
    about, task, train, test = part.about, part.task, part.task.learn_source, part.source
    data = scoring.describe_scored_data(about, task.collection, task.test, options.deduplicated_by)
    data |= {"pictures": len(test), "fingerprint": test.fingerprint, "seen": part.scope.facts(), **task.origin}
    learnt = {"name": task.title, "split": task.train, "pictures": len(train), "fingerprint": train.fingerprint}
    view = {"image": list(about.preprocessing.image), "preprocessing": about.preprocessing.to_dict()}
    view |= {"view": "reference" if options.reference else "weights' own", "precision": about.precision}
    view |= {} if about.patch is None else {"patch": about.patch}
    config = {**view, "features": part.train.shape[1], **config}
    data, details = {**data, "train": learnt}, {**details, "unreadable": list(part.unreadable)}
    facts, measures = about.facts, tuple(measures)
    return Result(kind=kind, weights=facts, data=data, measures=measures, config=config, details=details)


def write_results(options: FrozenOptions, results: Sequence[Result], notes: Iterable[str]) -> None:
    """Prints the notes and writes the files: FILE, or FILE-SET for several data sets."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}")
    out = options.out
    if out is None:
        return
    slugs = [re.sub(r"[^\w.-]+", "-", str(result.data["name"])) for result in results]
    names = [out] if len(results) == 1 else [out.with_name(f"{out.stem}-{name}{out.suffix}") for name in slugs]
    if len(set(names)) < len(names):  # two folders of one name
        names = [path.with_name(f"{path.stem}-{at}{path.suffix}") for at, path in enumerate(names, 1)]
    for path, one in zip(names, results, strict=True):
        one.write(path)
    print(f"result: {', '.join(map(str, names))}")


def check_penalty(penalty: float | None) -> None:
    if penalty is not None and not 0 < penalty < math.inf:
        raise ConfigError(f"--penalty {penalty:g} must be above 0 and finite")


def run_fewshot(options: FewshotOptions) -> int:
    if options.sweep and (options.seeds or options.penalty is not None):
        raise ConfigError("--sweep draws nothing and tries every penalty; omit --seeds and --penalty")
    check_penalty(options.penalty)
    for option, values, least in (("--shots", options.shots, 1), ("--seeds", options.seeds, 0)):
        if values and min(values) < least:
            raise ConfigError(f"{option} {min(values)} must be at least {least}")
    tasks = open_tasks(options, options.data, options.test or ())
    shots, notes = feasible_shots(options.shots, tasks)
    with prepare_network(options) as about:
        parts = [extract(options, about, task) for task in tasks]
        results = (score_sweep if options.sweep else score_draws)(options, parts, shots)
    write_results(options, results, [*notes, *(note for part in parts for note in part.notes)])
    return 0


def feasible_shots(asked: Sequence[int] | None, tasks: Sequence[FrozenTask]) -> tuple[list[int], list[str]]:
    """The numbers of shots that every class of every set has images for. A requested one that is impossible is
    an error; a default one is skipped, with a note."""
    shots, notes = list(dict.fromkeys(asked or SHOTS)), list[str]()
    for task in tasks:
        counts = count_single_labels(task.learn_source.labels, len(task.classes))
        least = int(counts.argmin())
        fewest = int(counts[least])
        few = f"{task.title}: class {task.classes[least]!r} has {fewest} images with one label in {task.train}"
        over = [n for n in shots if fewest < n < ALL]
        fitting = [n for n in shots if n not in over]
        if over and (asked or not fitting):
            remedy = f"ask for --shots {' '.join(map(format_shots, fitting)) or fewest}" if fewest else "add images"
            raise BadLabels(f"{few}, {over[0]} shots need {over[0]} of every class; {remedy}")
        if over:
            notes.append(f"{few}, too few for {' and '.join(map(str, over))} shots")
        shots = fitting
    return shots, notes


def score_draws(options: FewshotOptions, parts: Sequence[FrozenSplits], shots: Sequence[int]) -> list[Result]:
    """The current variant: several draws, one penalty."""
    seeds, penalty = list(dict.fromkeys(options.seeds or SEEDS)), options.penalty or fewshot.PENALTY
    rows, results = list[list[str]](), list[Result]()
    for part in parts:
        by_shots, measures = dict[str, list[float]](), list[Measure]()
        features, classes = (part.train, part.train_labels), len(part.task.classes)
        scored = (part.test, part.test_labels)
        for number in shots:
            if number == ALL:  # nothing is drawn
                found = [fewshot.fit_ridge(*features, classes, penalty).accuracy(*scored)]
            else:
                found = fewshot.score_few_shot(features, scored, classes, number, seeds, penalty)
            by_shots[name_measure(number)] = found
            measures.append(measure_shots(part, number, found))
            row = start_row(part, number, measures[-1])
            if len(found) > 1:
                row += [f"{100 * statistics.stdev(found):.2f}", *(f"{100 * accuracy:.2f}" for accuracy in found)]
            elif len(seeds) > 1:
                row += [""] * (1 + len(seeds))
            rows.append(row)
        config = {"variant": "draws", "shots": list(map(format_shots, shots)), "seeds": seeds, "penalty": penalty}
        results.append(build_result("fewshot", options, part, measures, config, {"by_seed": by_shots}))
    by_seed = ["std", *(f"seed {seed}" for seed in seeds)] if len(seeds) > 1 else []
    show_table(["shots", "accuracy", "95% interval", *by_seed], rows, len(parts))
    return results


def score_sweep(options: FewshotOptions, parts: Sequence[FrozenSplits], shots: Sequence[int]) -> list[Result]:
    """The earlier variant: every penalty, and for each number of shots the one with the best mean rank."""

    def sweep(part: FrozenSplits, number: int) -> Mapping[float, float]:
        train, test = (part.train, part.train_labels), (part.test, part.test_labels)
        return fewshot.sweep_penalties(train, test, len(part.task.classes), number)

    grids = {number: [sweep(part, number) for part in parts] for number in shots}
    best = {number: fewshot.choose_penalty(grids[number]) for number in shots}
    rows, results = list[list[str]](), list[Result]()
    for at, part in enumerate(parts):
        found = {number: grids[number][at] for number in shots}
        measures = [measure_shots(part, number, [found[number][best[number]]]) for number in shots]
        for number, measure in zip(shots, measures, strict=True):
            own = [f"{max(found[number].values()):.2%}"] if len(parts) > 1 else []
            rows.append([*start_row(part, number, measure), f"{best[number]:g}", *own])
        config = {"variant": "sweep", "shots": list(map(format_shots, shots)), "penalties": list(fewshot.PENALTIES)}
        chosen = {name_measure(number): best[number] for number in shots}
        config = {**config, "penalty": chosen, "ranked_over": [one.task.title for one in parts]}
        details = {"by_penalty": {name_measure(n): {f"{p:g}": a for p, a in found[n].items()} for n in shots}}
        results.append(build_result("fewshot", options, part, measures, config, details))
    heads = ["shots", "accuracy", "95% interval", "penalty", *(["at its own best"] if len(parts) > 1 else [])]
    show_table(heads, rows, len(parts))
    print("The penalty is chosen on the scored images, as in the reference, so the numbers are slightly optimistic.")
    return results


def measure_shots(part: FrozenSplits, number: int, accuracies: Sequence[float]) -> Measure:
    """The mean accuracy of some draws, with its interval."""
    labels = part.test_labels
    count = int((labels.reshape(len(labels), -1) >= 0).any(1).sum())  # images with a label
    low, high = fewshot.estimate_interval(accuracies, count)
    return Measure(name=name_measure(number), value=statistics.fmean(accuracies), low=low, high=high, count=count)


def start_row(part: FrozenSplits, number: int, measure: Measure) -> list[str]:
    return [part.task.title, format_shots(number), format_value(measure), format_interval(measure)]


def format_shots(number: int) -> str:
    return "all" if number == ALL else str(number)


def name_measure(number: int) -> str:
    """The name of the metric: 5-shot."""
    return "all shots" if number == ALL else f"{number}-shot"


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], sets: int) -> None:
    """Prints a table, with a column for the data set if there are several."""
    if sets > 1:
        print_table(["set", *heads], rows)
    else:
        print_table(heads, [row[1:] for row in rows], left=0)


def run_probe(options: ProbeOptions) -> int:
    check_penalty(options.penalty)
    if options.iterations < 1:
        raise ConfigError(f"--iterations {options.iterations} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract(options, about, task)
    classes, tried, penalty = len(task.classes), dict[float, float](), options.penalty
    if penalty is None:
        penalty, tried = probe.search_penalty(part.train, part.train_labels, classes)
    made = probe.fit_probe(part.train, part.train_labels, classes, penalty, iterations=options.iterations)
    # Without "probe" it would be the accuracy of the network's own head.
    measures = [
        measure_share(f"probe top-{guesses}", *score_predictions(made.top(part.test, guesses), part.test_labels))
        for guesses in ((1, TOP) if classes > TOP else (1,))
    ]
    rows = [(measure.name, format_value(measure), format_interval(measure)) for measure in measures]
    print_table(["measure", "accuracy", "95% interval"], rows)
    how = f"the best of {len(tried)} on a tenth of {task.train}" if tried else "as given"
    end = f"loss {made.loss:.4f}, largest entry of the gradient {made.gradient:.1e}"
    print(f"penalty {penalty:g}, {how}; {made.iterations} iterations, {end}")
    notes = list(part.notes)
    if not made.converged:
        notes.append(f"not converged: gradient above {probe.TOLERANCE:g}; give more --iterations or a larger --penalty")
    if tried and penalty in (min(tried), max(tried)):
        notes.append("the best penalty is the last one tried; a better one may lie beyond it: give --penalty")
    details: dict[str, Any] = {"dev_accuracy": {f"{value:g}": accuracy for value, accuracy in tried.items()}}
    details |= {name: getattr(made, name) for name in ("iterations", "loss", "gradient", "converged")}
    config = {"penalty": penalty, "penalties": [] if options.penalty is not None else list(probe.PENALTIES)}
    write_results(options, [build_result("probe", options, part, measures, config, details)], notes)
    return 0


def run_knn(options: KnnOptions) -> int:
    if not options.temperature > 0:
        raise ConfigError(f"--temperature {options.temperature:g} must be above 0")
    if options.neighbours and min(options.neighbours) < 1:
        raise ConfigError(f"-k {min(options.neighbours)} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract(options, about, task)
        numbers = list(dict.fromkeys(options.neighbours or [k for k in NEIGHBOURS if k <= len(part.train)]))
        if max(numbers) > len(part.train):
            raise ConfigError(f"-k {max(numbers)} exceeds the {len(part.train):,} training images; give a smaller one")
        near = find_nearest(part.train, part.test, max(numbers), device=about.device)
    rows, measures = list[list[str]](), list[Measure]()
    for k in numbers:
        row = [f"{k}"]
        for name, temperature in ((f"{k}-nn", options.temperature), (f"{k}-nn plain", None)):
            votes = vote_classes(near, part.train_labels, len(task.classes), k, temperature)
            measures.append(measure_share(name, *score_predictions(votes, part.test_labels)))
            row += [format_value(measures[-1]), format_interval(measures[-1])]
        rows.append(row)
    print_table(["k", "weighted", "95% interval", "plain", "95% interval"], rows, left=0)
    config = {"k": numbers, "temperature": options.temperature, "similarity": "cosine"}
    write_results(options, [build_result("knn", options, part, measures, config, {})], part.notes)
    return 0

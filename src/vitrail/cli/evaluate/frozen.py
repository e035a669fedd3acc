"""`vitrail fewshot`, `probe` and `knn`: accuracy of frozen features, learned on one split and scored on another."""

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.cli.inputs import load_batches, load_subject, open_data, single_process, weights_line
from vitrail.cli.options.evaluate import ALL, FewshotOptions, KnnOptions, ProbeOptions
from vitrail.cli.options.groups import FrozenOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.console import print_table
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import join_words, pluralise
from vitrail.data.collection import Collection, unify_classes
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch
from vitrail.data.splits import split_stratified
from vitrail.evaluation.frozen.features import FrozenFeatures, SquareView, list_missing, load_or_extract
from vitrail.evaluation.frozen.fewshot import (
    PENALTIES,
    PENALTY,
    choose_penalty,
    estimate_interval,
    fit_ridge,
    score_few_shot,
    sweep_penalties,
)
from vitrail.evaluation.frozen.knn import find_nearest, vote_classes
from vitrail.evaluation.frozen.probe import PENALTIES as PROBE_PENALTIES
from vitrail.evaluation.frozen.probe import TOLERANCE, fit_probe, search_penalty
from vitrail.evaluation.metrics import TOP, count_single_labels, keep_single_labels, score_predictions
from vitrail.evaluation.result import Measure, Result, format_interval, format_value, measure_share
from vitrail.evaluation.scoring import (
    Scope,
    Subject,
    choose_split,
    choose_unseen,
    count_images,
    describe_scored_data,
    find_shared,
)

NAMED: Final = 3  # unreadable images that are named


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTask:
    """A data set with a split to learn from and one to score; or one split with some samples held out to score."""

    collection: Collection
    train: str
    test: str
    held: "NDArray[np.int64] | None" = None
    elsewhere: tuple[str, str] | None = None  # the set and the split that are scored, where --test names them
    shared: "NDArray[np.int64] | None" = None  # samples of train that are also scored, and therefore not learned from
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.collection.title

    @property
    def classes(self) -> tuple[str, ...]:
        return self.collection.classes

    def learnt_from(self) -> ImageDataset:
        source = self.collection.splits[self.train]
        left = [part for part in (self.held, self.shared) if part is not None and len(part)]
        return SubsetDataset(source, np.setdiff1d(np.arange(len(source)), np.concatenate(left))) if left else source

    def scored(self) -> ImageDataset:
        source = self.collection.splits[self.test]
        return source if self.held is None else SubsetDataset(source, self.held)

    def scored_places(self) -> "NDArray[np.int64]":
        """Where the samples to score are in their split."""
        return np.arange(len(self.collection.splits[self.test])) if self.held is None else self.held


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrozenSplits:
    """Features [n, D] to learn from, with one label [n] each; features [N, D] to score, with labels [N] or [N, M]."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    source: ImageDataset  # what is scored
    scope: Scope
    found: bool  # whether all of them were cached
    kept: bool  # whether all of them are cached now
    notes: tuple[str, ...]
    unreadable: tuple[str, ...]


def open_tasks(options: FrozenOptions, data: Sequence[str], tests: Sequence[str]) -> list[FrozenTask]:
    """One task per entry of `data`; `tests` names what is scored, one entry each."""
    if options.out is not None:
        check_writable(options.out)
    if len(set(data)) < len(data):
        raise ConfigError(f"{' '.join(data)} names a data set twice")
    if tests and len(tests) != len(data):
        raise ConfigError(
            f"{len(tests)} --test for {len(data)} data sets; give one for each, in the same order, or none"
        )
    if tests and options.held_out is not None:
        raise ConfigError("--test and --held-out both say what is scored; give one of them")
    both = zip(data, tests or [None] * len(data), strict=True)
    return [drop_shared(open_task(options, text, test), test or text) for text, test in both]


def drop_shared(task: FrozenTask, called: str) -> FrozenTask:
    """The task without training images that are also scored, under any name."""
    source = task.collection.splits[task.train]
    places = np.arange(len(source)) if task.held is None else np.setdiff1d(np.arange(len(source)), task.held)
    shared = find_shared(SubsetDataset(source, places), task.scored())
    if shared is None:
        note = f"{task.title}: too many images to look for those to score among those to learn from"
        return replace(task, notes=(note,))
    if not len(shared):
        return task
    if len(shared) == len(places):
        raise DataError(
            f"all {count_images(len(shared))} to learn from are among those to score ({called}); name others with "
            "--test SOURCE, or hold some out: --held-out 0.5"
        )
    note = f"{count_images(len(shared))} of {task.train} are also scored and are not learned from"
    return replace(task, shared=places[shared], notes=(note,))


def open_task(options: FrozenOptions, text: str, test: str | None) -> FrozenTask:
    collection = open_data(text, download=options.download)
    collection.need_labels()
    train, source = choose_split(collection, "train")
    if options.held_out is not None:
        held = split_stratified(source.labels, options.held_out)
        if not len(held):
            raise ConfigError(f"--held-out {options.held_out} of {len(source):,} images leaves none to score")
        return FrozenTask(collection=collection, train=train, test=train, held=held)
    if test is not None:
        other = open_data(test, download=options.download)
        other.need_labels()
        split, scored = choose_split(other, "test", "val")
        name = f"{other.title}@{split}"
        both, _ = unify_classes(collection.name, {train: source, name: scored})
        there = (other.title, split)
        return FrozenTask(collection=replace(collection, splits=both), train=train, test=name, elsewhere=there)
    name = next((split for split in ("test", "val") if split in collection.splits and split != train), None)
    if name is None:
        raise DataError(
            f"{text} has only {', '.join(collection.splits)}: images to learn from and others to score are needed; "
            f"name those to score with --test DATA, or hold some out: --held-out 0.5"
        )
    if not collection.splits[name].classes:
        raise BadLabels(f"{text}: {name} has no labels to score by; name other images with --test DATA")
    return FrozenTask(collection=collection, train=train, test=name)


@contextlib.contextmanager
def prepare_network(options: FrozenOptions) -> Generator[Subject]:
    """The network on its device, in the requested precision."""
    with single_process(options.device) as device:
        about = load_subject(options.weights, device, image_size=options.image_size)
        about.computing_in(options.precision)
        yield about


def extract_splits(options: FrozenOptions, about: Subject, task: FrozenTask) -> FrozenSplits:
    """The features of both parts, cached or new."""
    with bars() as advance:
        unseen, scope = choose_unseen(
            task.scored(),
            f"{task.title}@{task.test}",
            weights=options.weights,
            provenance=about.provenance,
            include_seen=options.include_seen,
            advance=advance,
        )
    wanted = task.scored_places() if scope.included else task.scored_places()[~scope.exposure.seen]
    splits = dict.fromkeys([task.train, task.test])
    parts = {
        split: extract_split(options, about, task.collection.splits[split], f"{task.title}@{split}") for split in splits
    }
    notes, unreadable = list(task.notes), list[str]()
    for split, part in parts.items():
        source = task.collection.splits[split]
        gone = [source.name(sample) for sample in list_missing(source, part.samples)]
        unreadable += [f"{split}: {name}" for name in gone]
        if gone:
            notes.append(
                f"{split}: skipped {pluralise(len(gone), 'unreadable image')}: {join_words(gone, limit=NAMED)}"
            )
        if part.warning:
            notes.append(part.warning)
    train, test = parts[task.train], parts[task.test]
    scored = torch.isin(test.samples, torch.from_numpy(wanted))
    learnt = torch.ones(len(train.samples), dtype=torch.bool)
    for part in (task.held, task.shared):
        if part is not None:
            learnt &= ~torch.isin(train.samples, torch.from_numpy(part))
    labels = keep_single_labels(train.labels)
    several = int((learnt & (labels < 0)).sum())
    if several:
        notes.append(f"{several:,} of {task.train} have no label or several, and are not learned from")
    learnt &= labels >= 0
    if not learnt.any():
        raise BadLabels(f"{task.title}@{task.train}: no readable image has exactly one label to learn from")
    return FrozenSplits(
        train=train.features[learnt],
        train_labels=labels[learnt],
        test=test.features[scored],
        test_labels=test.labels[scored],
        source=unseen,
        scope=scope,
        found=all(part.reused for part in parts.values()),
        kept=all(part.cached for part in parts.values()),
        notes=tuple(notes),
        unreadable=tuple(unreadable),
    )


def extract_split(options: FrozenOptions, about: Subject, source: ImageDataset, called: str) -> FrozenFeatures:
    """The features of one split, with progress on stderr."""
    view = SquareView(about.preprocessing.image) if options.reference else about.preprocessing

    kept = "" if options.no_cache else "; complete features are cached for the next start"
    with bars() as bar, on_interrupt(f"no score was written{kept}"):

        def pictures(bare: ImageDataset) -> Iterator[Batch]:
            bar(f"features of {called}", 0, len(bare))
            found = load_batches(options, bare, view, about.device)
            return count_progress(found, lambda done: bar(f"features of {called}", min(done, len(bare)), len(bare)))

        return load_or_extract(
            about.network,
            source,
            about.preprocessing,
            about.device,
            batches=pictures,
            folder=None if options.no_cache else cache_folder("features"),
            precision=options.precision,
            view="squared, truncated" if options.reference else "",
        )


def count_progress(batches: Iterable[Batch], tell: Callable[[int], None]) -> Iterator[Batch]:
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        tell(done)


def show_setup(
    options: FrozenOptions, about: Subject, task: FrozenTask, features: FrozenSplits, *, first: bool = True
) -> None:
    """Prints what is evaluated, before the numbers."""
    if first:
        image = "x".join(map(str, about.preprocessing.image))
        print(weights_line(options.weights, about.facts, f"{image} px", options.precision))
    scored = "held out of it" if task.held is not None else f"of {task.test}"
    how = "from the cache" if features.found else "extracted and cached" if features.kept else "extracted again"
    print(
        f"{task.title}: {len(task.classes):,} classes; learned from {len(features.train):,} of {task.train}, scored on "
        f"{len(features.test):,} {scored}; {features.train.shape[1]:,} features each, {how}"
    )
    for line in features.scope.lines():
        print(line)


def build_result(
    kind: str,
    options: FrozenOptions,
    about: Subject,
    task: FrozenTask,
    features: FrozenSplits,
    measures: Iterable[Measure],
    *,
    config: Mapping[str, Any],
    details: Mapping[str, Any],
) -> Result:
    """The result with its provenance: the scored data, and the data learned from."""
    train, test = task.learnt_from(), features.source
    data = describe_scored_data(about, task.collection, task.test, options.deduplicated_by)
    data |= {"pictures": len(test), "fingerprint": test.fingerprint, "seen": features.scope.facts()}
    if task.held is not None:
        data["split"] = f"{options.held_out:g} of {task.test}"
    if task.elsewhere is not None:
        data |= {"name": task.elsewhere[0], "split": task.elsewhere[1]}
    learnt = {"name": task.title, "split": task.train, "pictures": len(train), "fingerprint": train.fingerprint}
    common = {
        "image": list(about.preprocessing.image),
        "preprocessing": about.preprocessing.to_dict(),
        "view": "reference" if options.reference else "weights' own",
        "precision": options.precision,
        "features": features.train.shape[1],
    }
    return Result(
        kind=kind,
        weights=about.facts,
        data={**data, "train": learnt},
        measures=tuple(measures),
        config={**common, **config},
        details={**details, "unreadable": list(features.unreadable)},
    )


def write_results(options: FrozenOptions, results: Sequence[Result], notes: Iterable[str]) -> None:
    """Prints the notes and writes the files: FILE, or FILE-SET for several data sets."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}")
    out = options.out
    if out is None:
        return
    names = [out] if len(results) == 1 else [out.with_name(f"{out.stem}-{slugify(r)}{out.suffix}") for r in results]
    if len(set(names)) < len(names):  # two folders of one name
        names = [path.with_name(f"{path.stem}-{at}{path.suffix}") for at, path in enumerate(names, 1)]
    for path, one in zip(names, results, strict=True):
        one.write(path)
    print(f"result: {', '.join(map(str, names))}")


def slugify(result: Result) -> str:
    return re.sub(r"[^\w.-]+", "-", str(result.data["name"]))


SHOTS: Final = (1, 5, 10, 25)
SEEDS: Final = (0, 1, 2)


def run_fewshot(options: FewshotOptions) -> int:
    check_fewshot(options)
    tasks = open_tasks(options, options.data, options.test or ())
    shots, notes = feasible_shots(options.shots, tasks)
    with prepare_network(options) as about:
        parts = list[FrozenSplits]()
        for at, task in enumerate(tasks):
            parts.append(extract_splits(options, about, task))
            show_setup(options, about, task, parts[-1], first=at == 0)
        both = list(zip(tasks, parts, strict=True))
        results = (
            score_sweep(options, about, both, shots) if options.sweep else score_draws(options, about, both, shots)
        )
    notes += [note for part in parts for note in part.notes]
    write_results(options, results, notes)
    return 0


def check_fewshot(options: FewshotOptions) -> None:
    """Refuses invalid options before anything is read."""
    if options.sweep and (options.seeds or options.penalty is not None):
        raise ConfigError("--sweep draws nothing and tries every penalty; leave --seeds and --penalty out")
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    for option, values, least in (("--shots", options.shots, 1), ("--seeds", options.seeds, 0)):
        if values and min(values) < least:
            raise ConfigError(f"{option} {min(values)} must be at least {least}")


def feasible_shots(asked: Sequence[int] | None, tasks: Sequence[FrozenTask]) -> tuple[list[int], list[str]]:
    """The numbers of shots that every class of every set has images for. A requested one that is impossible is
    an error; a default one is skipped, with a note."""
    shots, notes = list(dict.fromkeys(asked or SHOTS)), list[str]()
    for task in tasks:
        counts = count_single_labels(task.learnt_from().labels, len(task.classes))
        least = int(counts.argmin())
        fewest = int(counts[least])
        few = f"{task.title}: class {task.classes[least]!r} has {fewest} images with one label in {task.train}"
        over = [n for n in shots if fewest < n < ALL]
        fitting = [n for n in shots if n not in over]
        if over and (asked or not fitting):
            remedy = f"ask for --shots {' '.join(map(format_shots, fitting)) or fewest}" if fewest else "give it images"
            raise BadLabels(f"{few}, {over[0]} shots need {over[0]} of every class; {remedy}")
        if over:
            notes.append(f"{few}, too few for {' and '.join(map(str, over))} shots")
        shots = fitting
    return shots, notes


def score_draws(
    options: FewshotOptions, about: Subject, both: Sequence[tuple[FrozenTask, FrozenSplits]], shots: Sequence[int]
) -> list[Result]:
    """The current variant: several draws, one penalty."""
    seeds, penalty = list(dict.fromkeys(options.seeds or SEEDS)), options.penalty or PENALTY
    rows, results = list[list[str]](), list[Result]()
    for task, part in both:
        count, by_shots, measures = count_labelled(part), dict[str, list[float]](), list[Measure]()
        for number in shots:
            found = accuracies(part, len(task.classes), number, seeds, penalty)
            low, high = estimate_interval(found, count)
            name = name_measure(number)
            by_shots[name] = found
            measures.append(Measure(name=name, value=statistics.fmean(found), low=low, high=high, count=count))
            row = [task.title, format_shots(number), format_value(measures[-1]), format_interval(measures[-1])]
            if len(found) > 1:
                row += [f"{100 * statistics.stdev(found):.2f}", *(f"{100 * accuracy:.2f}" for accuracy in found)]
            elif len(seeds) > 1:  # all shots: nothing is drawn
                row += [""] * (1 + len(seeds))
            rows.append(row)
        config = {"variant": "draws", "shots": list(map(format_shots, shots)), "seeds": seeds, "penalty": penalty}
        details = {"by_seed": by_shots}
        results.append(build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    by_seed = ["std", *(f"seed {seed}" for seed in seeds)] if len(seeds) > 1 else []
    show_table(["shots", "accuracy", "95% interval", *by_seed], rows, len(both))
    return results


def score_sweep(
    options: FewshotOptions, about: Subject, both: Sequence[tuple[FrozenTask, FrozenSplits]], shots: Sequence[int]
) -> list[Result]:
    """The earlier variant: every penalty, and for each number of shots the one with the best mean rank."""
    grids = {
        number: [
            sweep_penalties(p.train, p.train_labels, p.test, p.test_labels, len(task.classes), number)
            for task, p in both
        ]
        for number in shots
    }
    best = {number: choose_penalty(grids[number]) for number in shots}
    rows, results = list[list[str]](), list[Result]()
    for at, (task, part) in enumerate(both):
        count, measures = count_labelled(part), list[Measure]()
        for number in shots:
            value = grids[number][at][best[number]]
            low, high = estimate_interval([value], count)
            measures.append(Measure(name=name_measure(number), value=value, low=low, high=high, count=count))
            rows.append(
                [
                    task.title,
                    format_shots(number),
                    format_value(measures[-1]),
                    format_interval(measures[-1]),
                    f"{best[number]:g}",
                ]
            )
            if len(both) > 1:
                rows[-1].append(f"{max(grids[number][at].values()):.2%}")
        config = {
            "variant": "sweep",
            "shots": list(map(format_shots, shots)),
            "penalties": list(PENALTIES),
            "penalty": {name_measure(number): best[number] for number in shots},
            "ranked_over": [one.title for one, _ in both],
        }
        details = {"by_penalty": {name_measure(n): {f"{p:g}": a for p, a in grids[n][at].items()} for n in shots}}
        results.append(build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    heads = ["shots", "accuracy", "95% interval", "penalty", *(["at its own best"] if len(both) > 1 else [])]
    show_table(heads, rows, len(both))
    print("The penalty is chosen on the images that are scored, as the reference did; so the numbers flatter a little.")
    return results


def accuracies(part: FrozenSplits, classes: int, number: int, seeds: Sequence[int], penalty: float) -> list[float]:
    """The accuracy of each draw; with all images there is only one."""
    if number == ALL:
        return [fit_ridge(part.train, part.train_labels, classes, penalty).accuracy(part.test, part.test_labels)]
    return score_few_shot(part.train, part.train_labels, part.test, part.test_labels, classes, number, seeds, penalty)


def format_shots(number: int) -> str:
    return "all" if number == ALL else str(number)


def name_measure(number: int) -> str:
    """The name of the metric: 5-shot."""
    return "all shots" if number == ALL else f"{number}-shot"


def count_labelled(part: FrozenSplits) -> int:
    """The number of images with a label."""
    rows = part.test_labels if part.test_labels.ndim == 2 else part.test_labels[:, None]
    return int((rows >= 0).any(1).sum())


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], sets: int) -> None:
    """Prints a table, with a column for the data set if there are several."""
    if sets > 1:
        print_table(["set", *heads], rows)
    else:
        print_table(heads, [row[1:] for row in rows], left=0)


def run_probe(options: ProbeOptions) -> int:
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    if options.iterations < 1:
        raise ConfigError(f"--iterations {options.iterations} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract_splits(options, about, task)
        show_setup(options, about, task, part)
    classes, tried = len(task.classes), dict[float, float]()
    penalty: float | None = options.penalty
    if penalty is None:
        penalty, tried = search_penalty(part.train, part.train_labels, classes)
    made = fit_probe(part.train, part.train_labels, classes, penalty, iterations=options.iterations)
    measures = list[Measure]()
    for guesses in (1, TOP):
        if guesses == 1 or classes > TOP:
            right, count = score_predictions(made.top(part.test, guesses), part.test_labels)
            # Of the network's own head it would be the plain one.
            measures.append(measure_share(f"probe top-{guesses}", right, count))
    print_table(
        ["measure", "accuracy", "95% interval"], [(m.name, format_value(m), format_interval(m)) for m in measures]
    )
    how = f"the best of {len(tried)} on a tenth of {task.train}" if tried else "as given"
    print(
        f"penalty {penalty:g}, {how}; {made.iterations} iterations, loss {made.loss:.4f}, "
        f"largest entry of the gradient {made.gradient:.1e}"
    )
    notes = list(part.notes)
    if not made.converged:
        notes.append(f"it has not converged: that is above {TOLERANCE:g}; give more --iterations or a larger --penalty")
    if tried and penalty in (min(tried), max(tried)):
        notes.append("the best penalty is the last that was tried; a better one may lie beyond: --penalty")
    details = {
        "dev_accuracy": {f"{tried_one:g}": accuracy for tried_one, accuracy in tried.items()},
        "iterations": made.iterations,
        "loss": made.loss,
        "gradient": made.gradient,
        "converged": made.converged,
    }
    config = {"penalty": penalty, "penalties": [] if options.penalty is not None else list(PROBE_PENALTIES)}
    done = build_result("probe", options, about, task, part, measures, config=config, details=details)
    write_results(options, [done], notes)
    return 0


NEIGHBOURS: Final = (1, 5, 10, 20, 50)


def run_knn(options: KnnOptions) -> int:
    if not options.temperature > 0:
        raise ConfigError(f"--temperature {options.temperature:g} must be above 0")
    if options.neighbours and min(options.neighbours) < 1:
        raise ConfigError(f"-k {min(options.neighbours)} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract_splits(options, about, task)
        show_setup(options, about, task, part)
        numbers = list(dict.fromkeys(options.neighbours or [k for k in NEIGHBOURS if k <= len(part.train)]))
        if max(numbers) > len(part.train):
            raise ConfigError(f"-k {max(numbers)}: there are {len(part.train):,} images to be neighbours")
        near = find_nearest(part.train, part.test, max(numbers), device=about.device)
    rows, measures = list[list[str]](), list[Measure]()
    for k in numbers:
        row = [f"{k}"]
        for name, temperature in ((f"{k}-nn", options.temperature), (f"{k}-nn plain", None)):
            said = vote_classes(near, part.train_labels, len(task.classes), k, temperature)
            right, count = score_predictions(said, part.test_labels)
            measures.append(measure_share(name, right, count))
            row += [format_value(measures[-1]), format_interval(measures[-1])]
        rows.append(row)
    print_table(["k", "weighted", "95% interval", "plain", "95% interval"], rows, left=0)
    config = {"k": numbers, "temperature": options.temperature, "similarity": "cosine"}
    done = build_result("knn", options, about, task, part, measures, config=config, details={})
    write_results(options, [done], part.notes)
    return 0

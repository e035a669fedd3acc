"""Features of frozen networks for `vitrail fewshot`, `probe` and `knn`: the splits to learn from and to score."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.cli.inputs import load_batches, load_subject, open_data, single_process, weights_line
from vitrail.cli.options.groups import FrozenOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import format_size, join_words, pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.splits import split_stratified
from vitrail.evaluation.frozen.closed_form_classifier import choose_scored_split
from vitrail.evaluation.frozen.features import FrozenFeatures, SquareView, list_missing, load_or_extract
from vitrail.evaluation.metrics import keep_single_labels
from vitrail.evaluation.scoring import Scope, Subject, choose_split, choose_unseen, find_shared

NAMED: Final = 3  # unreadable images that are named
Places: TypeAlias = NDArray[np.int64]  # of samples in their split


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

    task: FrozenTask
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    source: ImageDataset  # what is scored
    scope: Scope
    how: str  # whether they were cached
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
    train, source = choose_split(collection, "train")
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
            needed = "images to learn from and others with labels to score are needed"
            remedy = "name those to score with --test DATA, or hold some out: --held-out 0.5"
            raise DataError(f"{text} has only {', '.join(collection.splits)}: {needed}; {remedy}")
        name, scored = found
        title, _, split = name.rpartition("@")
        origin = {"name": title, "split": split} if other is not None else origin
    learn = np.setdiff1d(np.arange(len(source)), held)
    splits = {**collection.splits, name: scored}
    score = held if len(held) else np.arange(len(scored))
    task = FrozenTask(
        collection=replace(collection, splits=splits), train=train, test=name, learn=learn, score=score, origin=origin
    )
    shared = find_shared(task.learn_source, task.score_source)
    if shared is None:
        note = f"{task.title}: too many images to look for those to score among those to learn from"
        return replace(task, notes=(note,))
    if not len(shared):
        return task
    count = pluralise(len(shared), "image")
    if len(shared) == len(learn):
        remedy = "name others with --test SOURCE, or hold some out: --held-out 0.5"
        raise DataError(f"all {count} to learn from are among those to score ({test or text}); {remedy}")
    note = f"{count} of {task.train} are also scored and are not learned from"
    return replace(task, learn=np.delete(learn, shared), notes=(note,))


@contextlib.contextmanager
def prepare_network(options: FrozenOptions) -> Generator[Subject]:
    """The network on its device, in the requested precision; prints what it is."""
    with single_process(options.device) as device:
        about = load_subject(options.weights, device, image_size=options.image_size)
        about.computing_in(options.precision)
        size = f"{format_size(about.preprocessing.image)} px"
        print(weights_line(options.weights, about.facts, size, options.precision))
        yield about


def extract_splits(options: FrozenOptions, about: Subject, task: FrozenTask) -> FrozenSplits:
    """The features of both parts, cached or new."""
    with bars() as advance:
        source, name, seen = task.score_source, f"{task.title}@{task.test}", options.include_seen
        unseen, scope = choose_unseen(
            source, name, weights=about.name, provenance=about.provenance, include_seen=seen, advance=advance
        )
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
        notes.append(f"{several:,} of {task.train} have no label or several, and are not learned from")
    if not single.any():
        raise BadLabels(f"{task.title}@{task.train}: no readable image has exactly one label to learn from")
    found, kept = (all(getattr(part, name) for part in parts.values()) for name in ("reused", "cached"))
    return FrozenSplits(
        task=task,
        train=train.features[single],
        train_labels=labels[single],
        test=test.features,
        test_labels=test.labels,
        source=unseen,
        scope=scope,
        how="from the cache" if found else "extracted and cached" if kept else "extracted again",
        notes=tuple(notes),
        unreadable=tuple(unreadable),
    )


def extract_split(options: FrozenOptions, about: Subject, task: FrozenTask, split: str) -> FrozenFeatures:
    """The features of one split, with progress on stderr."""
    view = SquareView(about.preprocessing.image) if options.reference else about.preprocessing
    what = f"features of {task.title}@{split}"
    kept = "" if options.no_cache else "; complete features are cached for the next start"
    with bars() as bar, on_interrupt(f"no score was written{kept}"):
        return load_or_extract(
            about.network,
            task.collection.splits[split],
            about.preprocessing,
            about.device,
            batches=lambda bare: load_batches(options, bare, view, about.device, bar, what),
            folder=None if options.no_cache else cache_folder("features"),
            precision=options.precision,
            view="squared, truncated" if options.reference else "",
        )

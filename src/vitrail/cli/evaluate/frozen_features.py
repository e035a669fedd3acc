"""Features of frozen networks for `vitrail fewshot`, `probe` and `knn`: the splits to learn from and to score."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.cli.inputs import load_batches, load_subject, open_data, single_process
from vitrail.cli.options.groups import FrozenOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.atomic_files import cache_folder, check_writable
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.text import join_words, pluralise
from vitrail.data.collection import Collection, unify_classes
from vitrail.data.dataset import ImageDataset, SubsetDataset
from vitrail.data.loader import Batch
from vitrail.data.splits import split_stratified
from vitrail.evaluation.frozen.features import FrozenFeatures, SquareView, list_missing, load_or_extract
from vitrail.evaluation.metrics import keep_single_labels
from vitrail.evaluation.scoring import (
    Scope,
    Subject,
    choose_split,
    choose_unseen,
    count_images,
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
        raise ConfigError("--test and --held-out both select the test images; give one of them")
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

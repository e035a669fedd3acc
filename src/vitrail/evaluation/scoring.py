"""The network to score, the images that count, and what a task's evaluation works with.

    outcome = setting.run(metric, targets)        # every image once
    EvaluationOutcome(outputs="21 classes of pixels", lead=..., measures=(...,))

Images that the weights were trained on do not count unless requested. Which images count, how they are read, the result
file, the page and the printed output are the same for all tasks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoint.bundle import Bundle, get_card
from vitrail.checkpoint.onnx_network import open_onnx
from vitrail.checkpoint.weights import build_network as network_of
from vitrail.checkpoint.weights import replace_head_and_resize
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.precision import Precision, PrecisionChoice
from vitrail.core.text import pluralise
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset, Labels, RelabelledDataset, SubsetDataset, total_bytes
from vitrail.data.loader import Batch, Views, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.splits import Selection, drop_listed
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.training_record import (
    MOST_BYTES,
    MOST_IMAGES,
    Exposure,
    Hashes,
    find_exposure,
    hash_contents,
    interleave,
)
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.evaluation.metrics import REMEDY, Metric, score_batches
from vitrail.evaluation.result import Measure, check_deduplication, describe_data, describe_weights
from vitrail.models.build import Model
from vitrail.models.inference import choose_precision, set_precision
from vitrail.report.page import Section, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A network on its device, and how its images are prepared."""

    name: str
    network: Model
    preprocessing: Preprocessing
    device: torch.device
    facts: Mapping[str, Any]  # for a result: the weights as stored in the file, whatever size and dtype they run in
    patch: int | None = None  # if it differs from the file's
    precision: Precision = "float32"  # of inference
    numbers: str = ""  # the precision of an ONNX file, which is its own

    @property
    def labels(self) -> tuple[str, ...] | None:
        return get_card(self.network).labels

    @property
    def multi_label(self) -> bool:
        return get_card(self.network).multi_label

    @property
    def provenance(self) -> dict[str, Any]:
        return get_card(self.network).provenance


def make_subject(
    name: str,
    bundle: Bundle,
    device: torch.device,
    *,
    image_size: int | None,
    patch: int | None = None,
    channels: int | None = None,
    precision: PrecisionChoice = "float32",
) -> Subject:
    """The network of a bundle on its device, resized if an image size, a patch size or channels are given, in the
    requested precision."""
    chosen = choose_precision(precision, device)
    resized = replace_head_and_resize(bundle, image_size=image_size, patch=patch, channels=channels)
    network = network_of(resized)
    # Now, not when the result is written: a training run may replace the file in between.
    facts = describe_weights(name, network if resized is bundle else network_of(bundle))
    preprocessing = get_card(network).preprocessing
    set_precision(network.to(device), chosen, device)
    about: dict[str, Any] = {"name": name, "preprocessing": preprocessing, "device": device, "facts": facts}
    return Subject(network=network, patch=patch, precision=chosen, **about)


def make_onnx_subject(
    name: str,
    device: torch.device,
    *,
    image_size: int | None,
    patch: int | None,
    precision: PrecisionChoice = "auto",
) -> Subject:
    """The network of an ONNX file. Images are prepared on the device and then moved to the CPU, where it runs."""
    found = open_onnx(name, image_size=image_size, patch=patch)
    found.check_precision(precision)
    network = cast("Model", found)
    about: dict[str, Any] = {"name": name, "preprocessing": get_card(network).preprocessing, "device": device}
    return Subject(network=network, facts=describe_weights(name, network), numbers=found.precision, **about)


def choose_split(collection: Collection, *names: str) -> tuple[str, ImageDataset]:
    """The first of the named splits that exists; the only split, whatever its name."""
    if len(collection.splits) == 1:
        return next(iter(collection.splits.items()))
    if name := next((name for name in names if name in collection.splits), ""):
        return name, collection.splits[name]
    first, known = next(iter(collection.splits)), ", ".join(collection.splits)
    raise DataError(f"{collection.name} has the splits {known}; choose one: {collection.name}@{first}")


def describe_scored_data(about: Subject, collection: Collection, split: str, path: Path | None) -> dict[str, Any]:
    """The images of a result, including the `path` of --deduplicated-by."""
    source = collection.splits[split]
    selection = None if path is None else Selection.load(path)
    try:
        known = check_deduplication(source, selection, about.provenance)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return describe_data(collection.title, split, source, deduplicated=known, selection=selection)


def iterate_batches(
    source: ImageDataset,
    views: Preprocessing | Views,
    device: torch.device,
    *,
    batch: int = 0,
    workers: int = 0,
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """Every image once, prepared. A `batch` of 0 depends on the device, negative `workers` on the cores."""
    return eval_batches(source, views, targets=targets, **choose_loading(source, device, batch, workers))


def choose_loading(
    source: ImageDataset, device: torch.device, batch: int, workers: int, world: int = 1
) -> dict[str, Any]:
    """The batch size, workers and pinning of `eval_batches`. The batch size of a process does not depend on the number
    of processes, because products over other rows may round differently."""
    if batch < 0:
        raise ConfigError(f"batch {batch} must be at least 1")
    size, on_gpu = batch or (256 if device.type == "cuda" else 64), device.type == "cuda"
    workers = workers if workers >= 0 else choose_workers()
    return {"batch": min(size, max(len(source), 1)) * world, "workers": workers, "pin": on_gpu}


def choose_workers() -> int:
    """The number of loader processes; one core is left for the network."""
    return max(min((os.cpu_count() or 1) - 1, 8), 0)


Advance: TypeAlias = Callable[[str, int, int | None], None]  # what is being done, how much of it is done, of how much


def ignore_progress(what: str, done: int, total: int | None) -> None:
    """Ignores progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """How a network is scored. `batch` and `workers` only affect the time it takes. With `windows` ("fit" or "full")
    classes of pixels are scored by sliding windows, in each image's own size. The last five are for classification:
    `labels` name the outputs instead of the card; `by_number` matches class 7 to output 7 whatever their names; `real`
    is the file of ReaL labels; `answers` says whether the prediction for each image is needed."""

    seed: int = 0  # of the bootstrap
    include_seen: bool = False
    without: Path | None = None
    deduplicated_by: Path | None = None
    batch: int = 0
    workers: int = 0
    windows: str | None = None
    labels: tuple[str, ...] | None = None
    by_number: bool = False
    real: Path | None = None
    threshold: float | None = None
    answers: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} must be at least 0")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold {self.threshold:g} must be between 0 and 1")

    def list_special(self) -> list[str]:
        """The given options that not every task accepts, as the command line calls them."""
        special = ("labels", "by_number", "real", "threshold", "answers")
        return [f"--{name.replace('_', '-')}" for name in special if getattr(self, name) not in (None, False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Which of the given images are scored."""

    given: int
    exposure: Exposure
    included: bool  # whether images used in training are scored
    dropped: int = 0  # skipped because of --without
    without: str = ""  # the hash of its selection

    @property
    def seen(self) -> int | None:
        """How many of the given images were used in training; None if unknown."""
        return None if not self.exposure.count and "" in self.exposure.unrecorded else self.exposure.count

    @property
    def tainted(self) -> bool:
        """Whether the score includes images used in training."""
        return self.included and bool(self.exposure.count)

    def facts(self) -> dict[str, Any]:
        """For a result."""
        unrecorded = [name or "the weights" for name in self.exposure.unrecorded]
        facts: dict[str, Any] = {"given": self.given, "seen": self.seen, "seen_are_scored": self.tainted}
        without = {"dropped": self.dropped, "without": self.without} if self.without else {}
        return facts | {"unrecorded": unrecorded} | without

    def lines(self) -> list[str]:
        """For people."""
        given, seen = pluralise(self.given, "image"), self.exposure.count
        lines = [f"{pluralise(self.dropped, 'image')} skipped as copies (--without)"] if self.without else []
        if self.tainted:
            lines.append(f"WARNING: {seen:,} of the {given} scored here were used in training")
        elif seen:
            lines.append(f"{seen:,} of {given} were used in training; scoring the {self.given - seen:,} held out")
        elif self.seen is not None:
            lines.append(f"none of the {given} was used in training")
        else:
            lines.append("unknown whether the weights have seen these images: they have no record of that")
        names = [name or "these weights" for name in self.exposure.unrecorded if name or self.seen is not None]
        return lines + ([f"not recorded: the training images of {', '.join(names)}"] if names else [])


def choose_unseen(
    source: ImageDataset, called: str, about: Subject, how: ScoringOptions, world: World, advance: Advance
) -> tuple[ImageDataset, Scope]:
    """The images to score: without those of --without, and without those used in training unless they are requested.
    DataError if none are left. All processes call it."""
    given, rule = len(source), ""
    if how.without is not None:
        source, selection = drop_listed(source, how.without, option="--without ")
        rule = selection.hash

    def hash_in_parallel(one: ImageDataset) -> Hashes:
        def show(done: int) -> None:
            if world.is_main:
                advance("which images were seen", done, len(one))

        return interleave(world.gather(hash_contents(one, rank=world.rank, world=world.size, advance=show)))

    exposure, dropped = find_exposure(about.provenance, source, hash_in_parallel), given - len(source)
    scope = Scope(given=len(source), exposure=exposure, included=how.include_seen, dropped=dropped, without=rule)
    if how.include_seen or not exposure.count:
        return source, scope
    if exposure.count == len(source):
        used = f"all {pluralise(len(source), 'image')} of {called} were used to train {about.name}"
        remedy = "give images that it has not seen, or add --include-seen"
        raise DataError(f"{used}, so a score would say nothing about new images; {remedy}")
    return SubsetDataset(source, np.flatnonzero(~exposure.seen)), scope


def find_shared(train: ImageDataset, test: ImageDataset) -> "NDArray[np.int64] | None":
    """The indices of the images of `train` that are also in `test`; None if there are too many to compare."""
    if any(len(one) > MOST_IMAGES or total_bytes(one) > MOST_BYTES for one in (train, test)):
        return None
    learnt, scored = hash_contents(train), hash_contents(test)
    return np.flatnonzero(np.isin(learnt, scored[scored != 0]))


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class EvaluationSetting:
    """A network and the images of a split that it is scored on. Every process has one."""

    about: Subject
    collection: Collection  # its split contains only the images that count
    split: str
    how: ScoringOptions
    world: World
    advance: Advance
    ledger: UnreadableLog = field(default_factory=UnreadableLog)  # unreadable images of this process

    @property
    def source(self) -> ImageDataset:
        return self.collection.splits[self.split]

    def relabel(self, labels: Labels, classes: Sequence[str]) -> "EvaluationSetting":
        """The same images with other labels."""
        splits = {**self.collection.splits, self.split: RelabelledDataset(self.source, labels, classes)}
        return replace(self, collection=replace(self.collection, splits=splits))

    def run(self, metric: Metric[ResultT], targets: Targets) -> ResultT:
        """The metric's result over all images; the same in all processes."""
        world, source, about, how = self.world, self.source, self.about, self.how
        network, views, device = about.network, about.preprocessing, world.device

        def show(done: int) -> None:
            if world.is_main:
                self.advance("images", min(done * world.size, len(source)), len(source))

        show(0)
        loading = choose_loading(source, device, how.batch, how.workers, world.size)
        batches = eval_batches(
            source, views, targets=targets, rank=world.rank, world=world.size, ledger=self.ledger, **loading
        )
        try:
            return score_batches(
                network, batches, views, metric, device=device, world=world, precision=about.precision, progress=show
            )
        except DataError as error:  # nothing could be scored
            reason = next((f"{entry}; " for entry in self.ledger.known.values()), "")
            raise DataError(str(error).replace(REMEDY, f"{reason}{REMEDY}")) from None

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """The unreadable images and targets of all processes; each must ask, after the metric has run."""
        parts = self.world.gather(list(self.ledger.known.values()))
        return tuple(sorted(str(entry) for part in parts for entry in part))


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationOutcome:
    """The outcome of a task's evaluation: the measures, and what is printed, written and shown with them."""

    lead: str  # what was scored, at the top of the page: "360 images, 10 classes"
    measures: tuple[Measure, ...]
    outputs: str = ""  # the outputs, printed after the number of images: "10 classes, matched by name"
    brief: tuple[str, ...] = ()  # the measures in a table of several image sizes
    counting: tuple[str, ...] = ()  # the measures that are shares of images, also printed as "58 of 64"
    captions: Mapping[str, str] = field(default_factory=dict[str, str])  # short explanations of measures
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the config of the result
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the result
    outputs_notes: tuple[str, ...] = ()  # on how outputs were matched to classes
    notes: tuple[str, ...] = ()  # on which images counted
    tables: tuple[Table, ...] = ()  # printed below the measures
    sections: Callable[[], Sequence[Section]] = tuple  # of the page
    answers: Callable[[], bytes] | None = None  # the prediction for each image, as CSV

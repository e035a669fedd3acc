"""Which images a run sees: the training split, the one that is watched, the one for the end.

What the weights of a run will say of the images they were trained on.

Batches on the device: from loader processes, or from a set that lies there whole; and what is swept for scores.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from vitrail.checkpoint.bundle import record_renaming
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data import loader
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset, total_bytes
from vitrail.data.device_dataset import DeviceDataset, fits_on_device
from vitrail.data.loader import Batch, EvalView, Views
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.splits import Selection, dev_split, share_split
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.training_record import KEY as KEY
from vitrail.data.training_record import (
    MOST_BYTES,
    MOST_IMAGES,
    Hashes,
    find_exposure,
    hash_contents,
    interleave,
    record_training,
)
from vitrail.data.transforms.augmentation import Augmentation, check_geometries
from vitrail.data.transforms.batched import find_unsupported
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.task import Task
from vitrail.train.config import Data
from vitrail.train.observer import Advance, ignore_advance


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplits:
    """The splits of a run by their part in it. `classes` are the names of the network's outputs, none without labels.
    `chooses` says whether the watched one may choose the best weights: one without labels cannot, and the split that is
    scored at the end may not. `without` is what was left out of the training split."""

    title: str
    class_names: tuple[str, ...]
    train: ImageDataset
    watch: ImageDataset | None
    test: ImageDataset | None
    watch_name: str  # the name of the split, "" for none
    test_name: str
    notes: tuple[str, ...] = ()
    others: dict[str, ImageDataset] = field(
        default_factory=dict[str, ImageDataset]
    )  # all splits but the one to train on
    without: Selection | None = None
    renamed: dict[str, Any] = field(default_factory=dict[str, Any])  # what the data call the classes, if otherwise
    out_of: int = 0  # images of the split that the training images were chosen from

    @property
    def can_select_best(self) -> bool:
        return self.watch is not None and bool(self.class_names) and self.watch_name != self.test_name

    @property
    def fingerprint(self) -> dict[str, str]:
        """Of each split, whether it is scored or not: another order, another label or another file is another one."""
        parts = {"train": self.train, **self.others}
        return {name: part.fingerprint[:16] for name, part in parts.items()}

    @property
    def content(self) -> dict[str, str]:
        """A digest of what the images of each split contain: other bytes under the same names are other images."""
        parts = {"train": self.train, **self.others}
        return {name: part.content_digest for name, part in parts.items()}

    @property
    def provenance(self) -> dict[str, Any]:
        """What weights tell of these images: against which sets, by name and fingerprint, copies were left out; and
        the names of the classes in the data, if they are others."""
        if self.without is None or self.without.rule.get("name") != "dedup":
            return self.renamed
        return {
            **self.renamed,
            "deduplicated": {"selection": self.without.hash, "against": self.without.rule.get("against", {})},
        }


def open_splits(data: Data, task: Task | None = CLASSIFICATION) -> DataSplits:
    """Opens the source and cuts it up as the config says. One that lacks the targets of the task is refused; without a
    task the images are enough."""
    if not data.source:
        raise ConfigError("there are no images to train on; name DATA behind the recipe, or set data.source")
    collection = open_collection(data.source)
    return split_collection(collection, data, task)


def split_collection(collection: Collection, data: Data, task: Task | None = CLASSIFICATION) -> DataSplits:
    whole = find_split(collection, data.train)
    known = collection.classes if task is None else task.output_names(collection)
    train, without = select_training_images(collection, data)
    dev: ImageDataset | None = None
    if data.dev:
        rest, held = dev_split(train, data.dev)
        if not len(held.indices):
            raise DataError(f"data.dev={data.dev} of {len(train)} images leaves none to choose by; hold out more")
        train, dev = rest.apply(train), held.apply(train)
    parts = {**collection.splits, **({} if dev is None else {"dev": dev})}
    usual = ("dev", "val") if dev else ("val",)
    if data.watch == "any":
        watched = choose_split("auto", parts, (*usual, "test"), "data.watch")
    else:
        watched = choose_split(data.watch, parts, usual, "data.watch")
    tested = choose_split(data.test, parts, ("test",), "data.test")
    names = output_names(collection, data, known)
    return DataSplits(
        title=collection.title,
        class_names=names,
        renamed=record_renaming(known, names),
        train=train,
        watch=parts[watched] if watched else None,
        test=parts[tested] if tested else None,
        watch_name=watched,
        test_name=tested,
        notes=collection.notes,
        others={name: part for name, part in parts.items() if part is not whole},
        without=without,
        out_of=len(whole),
    )


def output_names(collection: Collection, data: Data, known: tuple[str, ...]) -> tuple[str, ...]:
    """What the outputs are called: as the run says, or as the data do."""
    if data.names and len(data.names) != len(known):
        raise ConfigError(f"data.names has {len(data.names):,} names, but {collection.name} has {len(known):,} classes")
    return data.names or known


def select_training_images(collection: Collection, data: Data) -> tuple[ImageDataset, Selection | None]:
    """What there is to learn from, before a part of it is held out, and what was left out of it."""
    train, without = find_split(collection, data.train), None
    if data.without:
        train, without = drop_duplicates(train, data.without)
    return take_share(train, data) if data.part < 1 else train, without


def drop_duplicates(train: ImageDataset, file: str) -> tuple[ImageDataset, Selection]:
    """Without what `vitrail data dedup` wants left out, and its selection."""
    try:
        without = Selection.load(Path(file))
    except DataError as error:  # which names the file
        raise DataError(f"data.without={error}") from None
    if not without.drop:
        raise DataError(f"data.without={file} says which images to take, and none to leave out")
    try:
        left = without.apply(train)
    except DataError as error:
        raise DataError(f"data.without={file}: {error}") from None
    if not len(left):
        raise DataError(f"data.without={file} leaves none of {len(train):,} images to train on")
    return left, without


def take_share(train: ImageDataset, data: Data) -> ImageDataset:
    try:
        return share_split(train, data.part, seed=data.part_seed).apply(train)
    except BadLabels as error:
        raise DataError(f"data.part={data.part} of {len(train):,} training images: {error}") from None


def find_split(collection: Collection, name: str) -> ImageDataset:
    """The named split; a collection of one split, whatever it is called, is meant whole."""
    if len(collection.splits) == 1:
        return next(iter(collection.splits.values()))
    return collection.split(name)


def choose_split(asked: str, parts: dict[str, ImageDataset], usual: tuple[str, ...], field: str) -> str:
    if asked == "auto":
        return next((name for name in usual if name in parts), "")
    if asked in ("", "none"):
        return ""
    if asked not in parts:
        raise ConfigError(
            f"{field}={asked} is not a split here; use {', '.join(parts)}, none or auto (--set {field}=auto)"
        )
    return asked


def hold_out_nothing(data: Data) -> Data:
    """The same data with nothing held out: the last run of a search (Section 4.1)."""
    return replace(data, dev=0.0, watch="none" if data.watch == "dev" else data.watch)


READING: Final = "reading the images"


def record_training_images(
    data: Data, splits: DataSplits, world: World, saved: SavedCheckpoint | None, advance: Advance = ignore_advance
) -> list[dict[str, Any]]:
    """One record, or several where a resumed run was made to train on other images than before: all of them count. The
    processes share the work, and a run that resumes with the same images keeps what it had."""
    before: list[dict[str, Any]] = [] if saved is None else saved.facts.get(KEY, [])
    same = any(
        (record["fingerprint"], record["digest"]) == (splits.train.fingerprint, splits.train.content_digest)
        for record in before
    )
    if world.broadcast(same):
        return before
    selection = {
        "source": data.source,
        "split": data.train,
        "part": data.part,
        "part_seed": data.part_seed,
        "dev": data.dev,
        "without": "" if splits.without is None else splits.without.hash,
    }
    made = record_training(
        splits.train,
        out_of=splits.out_of or len(splits.train),
        selection=selection,
        others=splits.others,
        hashing=lambda source: hash_images(source, world, advance),
    )
    return [*before, made]


def warn_of_seen_images(
    splits: DataSplits,
    records: list[dict[str, Any]],
    start: Mapping[str, Any],
    world: World,
    tell: Callable[[str], None],
) -> None:
    """Says which images that the run is scored on were trained on: by the run itself, or by the weights it starts from,
    whose provenance is `start`. A set that is too large to record is not read for it."""
    provenance = {**start, KEY: records}
    for name, part in ((splits.watch_name, splits.watch), (splits.test_name, splits.test)):
        if part is None or len(part) > MOST_IMAGES or total_bytes(part) > MOST_BYTES:
            continue
        count = find_exposure(provenance, part, lambda source: hash_images(source, world)).count
        if count:
            tell(
                f"{count:,} of the {len(part):,} images of {name} are trained on, too, or were by the weights that the "
                "run starts from: its score says less about new images; `vitrail data dedup` finds such copies"
            )


def hash_images(source: ImageDataset, world: World, advance: Advance = ignore_advance) -> Hashes:
    """The content hashes of a source; the processes share the reading."""
    tell = lambda done: advance(READING, done, len(source))  # noqa: E731
    return interleave(world.gather(hash_contents(source, rank=world.rank, world=world.size, advance=tell)))


SHARE = 0.25  # of a GPU's free memory that images may take
HOST_BYTES = 1 << 30  # what they may take of the host's
KEPT_BYTES = 1 << 28  # images of evaluation that stay on the device between two scorings
MOST_WORKERS = 16


def resident_budget(device: torch.device) -> int:
    """Bytes that a resident set may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE)
    return HOST_BYTES


def can_reside(
    source: ImageDataset, augmentations: Sequence[Augmentation], device: torch.device, targets: Targets = CLASS_LABELS
) -> tuple[bool, str]:
    """Whether a set can lie on the device and be augmented there, and why."""
    can, reason = fits_on_device(source, resident_budget(device), targets)
    for augmentation in augmentations:
        if can and (lacking := find_unsupported(augmentation)):
            return False, lacking
    return can, reason


def count_workers(data: Data, world: World) -> int:
    """Loader processes for this process."""
    if data.workers >= 0:
        return data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = cores // world.local_size
    return min(mine, MOST_WORKERS) if world.device.type == "cuda" else min(max(mine - 1, 1), 4)


class TrainBatches:
    """The training batches of this process, from any step on."""

    def __init__(
        self,
        source: ImageDataset,
        augmentations: tuple[Augmentation, ...],
        data: Data,
        *,
        batch: int,
        seed: int,
        world: World,
        ledger: UnreadableLog,
        targets: Targets = CLASS_LABELS,
    ) -> None:
        self.source, self.augmentations, self.data = source, augmentations, data
        self.batch, self.seed, self.world, self.ledger = batch, seed, world, ledger
        if targets.moves:
            check_geometries(augmentations)
        self.targets = targets
        self.resident: DeviceDataset | None = None
        self.batches: Iterator[Batch] | None = None  # held on to: they know what a process read that dies

    def stream(self, start: int, stop: int) -> Iterator[Batch]:
        """Global steps `start` to `stop - 1`, this process's part of each."""
        world, device = self.world, self.world.device
        if self.data.resident == "on":
            if self.resident is None:
                self.resident = DeviceDataset(self.source, device=device, ledger=self.ledger, targets=self.targets)
            yield from self.resident.train_batches(
                self.augmentations,
                batch=self.batch,
                seed=self.seed,
                start=start,
                stop=stop,
                rank=world.rank,
                world=world.size,
                repeats=self.data.repeats,
            )
            return
        self.batches = loader.train_batches(
            self.source,
            self.augmentations,
            batch=self.batch,
            seed=self.seed,
            start=start,
            stop=stop,
            rank=world.rank,
            world=world.size,
            repeats=self.data.repeats,
            workers=count_workers(self.data, world),
            pin=device.type == "cuda",
            ledger=self.ledger,
            targets=self.targets,
        )
        for batch in self.batches:
            yield batch.to(device)


class EvalBatches:
    """A split to score, batch by batch; one that is small stays on the device after the first time."""

    def __init__(
        self,
        source: ImageDataset,
        views: Preprocessing | Views,
        data: Data,
        *,
        batch: int,
        world: World,
        ledger: UnreadableLog,
        targets: Targets = CLASS_LABELS,
    ) -> None:
        self.source, self.data, self.targets = source, data, targets
        self.views = EvalView(views) if isinstance(views, Preprocessing) else views
        self.batch, self.world, self.ledger = batch * world.size, world, ledger
        pixels = sum(height * width for height, width in self.views.sizes)
        self.small = len(source) * 3 * pixels <= KEPT_BYTES * (16 if world.device.type == "cuda" else 1)
        self.kept: list[Batch] | None = None
        self.batches: Iterator[Batch] | None = None  # held on to: they know what a process read that dies

    def __iter__(self) -> Iterator[Batch]:
        if self.kept is not None:
            yield from self.kept
            return
        kept: list[Batch] = []
        world = self.world
        self.batches = loader.eval_batches(
            self.source,
            self.views,
            batch=self.batch,
            rank=world.rank,
            world=world.size,
            workers=0 if self.small and self.data.resident == "on" else count_workers(self.data, world),
            pin=world.device.type == "cuda",
            ledger=self.ledger,
            targets=self.targets,
        )
        for batch in self.batches:
            moved = batch.to(world.device)
            if self.small:
                kept.append(moved)
            yield moved
        if self.small:
            self.kept = kept

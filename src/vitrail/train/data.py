"""The images of a run: the splits it trains and scores on, their provenance, and their batches on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from vitrail.checkpoint.bundle import record_renaming
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.processes import available_cores
from vitrail.data import loader, training_record
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset, total_bytes
from vitrail.data.device_dataset import DeviceDataset, fits_on_device
from vitrail.data.loader import Batch, BatchStream, EvalView, Views
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.splits import Selection, dev_split, drop_listed, share_split
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.training_record import KEY, MOST_BYTES, MOST_IMAGES
from vitrail.data.transforms.augmentation import Augmentation, check_geometries
from vitrail.data.transforms.batched import find_unsupported
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import targets_of
from vitrail.tasks.task import Task
from vitrail.train.config import Data, ResolvedRun
from vitrail.train.observer import Advance, ignore_advance
from vitrail.train.run_folder.files import Tell

READING: Final = "reading the images"
GPU_SHARE = 0.25  # of a GPU's free memory that resident images may take
HOST_BYTES = 1 << 30  # of the host's memory
KEPT_BYTES = 1 << 28  # of evaluation images that stay on the device between two scores
MAX_WORKERS = 16
LEAST_SHARED = 5_000  # from this many images on, loader processes read what will lie on a device


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplits:
    """The splits of a run by role. `class_names` are the names of the network's outputs, empty without labels;
    `without` is the selection that was removed from the training split."""

    title: str
    class_names: tuple[str, ...]
    train: ImageDataset
    watch: ImageDataset | None
    test: ImageDataset | None
    watch_name: str  # name of the watched split, "" for none
    test_name: str
    notes: tuple[str, ...] = ()
    others: Mapping[str, ImageDataset] = field(default_factory=dict[str, ImageDataset])  # all but the training split
    without: Selection | None = None
    renamed: dict[str, Any] = field(default_factory=dict[str, Any])  # the data's own class names, if different
    out_of: int = 0  # images of the split that the training images were chosen from

    @property
    def can_select_best(self) -> bool:
        """Whether the watched split may choose the best weights: it needs labels, and must not be the test split."""
        return self.watch is not None and bool(self.class_names) and self.watch_name != self.test_name

    @property
    def scored_splits(self) -> dict[str, ImageDataset]:
        """The watched split and the test split, by name, as far as they exist."""
        splits = {self.watch_name: self.watch, self.test_name: self.test}
        return {name: split for name, split in splits.items() if split is not None}

    @property
    def fingerprint(self) -> dict[str, str]:
        """A fingerprint per split, scored or not. It changes with the order, the labels and the files."""
        return {name: split.fingerprint[:16] for name, split in {"train": self.train, **self.others}.items()}

    @property
    def content(self) -> dict[str, str]:
        """A digest of the images' contents per split: different bytes under the same names are different images."""
        return {name: split.content_digest for name, split in {"train": self.train, **self.others}.items()}

    @property
    def provenance(self) -> dict[str, Any]:
        """For the weights: which sets the images were deduplicated against, and the data's own class names if they
        differ."""
        if self.without is None or self.without.rule.get("name") != "dedup":
            return self.renamed
        against = {"selection": self.without.hash, "against": self.without.rule.get("against", {})}
        return {**self.renamed, "deduplicated": against}


def open_splits(data: Data, task: Task | None = CLASSIFICATION) -> DataSplits:
    """Opens the source and splits it as configured. DataError if it lacks the targets of the task; without a task the
    images are enough."""
    if not data.source:
        raise ConfigError("there are no images to train on; name DATA after the recipe, or set data.source")
    return split_collection(open_collection(data.source), data, task)


def split_collection(collection: Collection, data: Data, task: Task | None = CLASSIFICATION) -> DataSplits:
    whole = find_split(collection, data.train)
    known = collection.classes if task is None else task.output_names(collection)
    names = data.names or known
    if len(names) != len(known):
        raise ConfigError(f"data.names has {len(names):,} names, but {collection.name} has {len(known):,} classes")
    train, without = select_training_images(collection, data)
    parts = dict(collection.splits)
    if data.dev:
        rest, held = dev_split(train, data.dev)
        if not len(held.indices):
            raise DataError(f"data.dev={data.dev} of {len(train)} images leaves none to choose by; hold out more")
        parts["dev"] = held.apply(train)
        train = rest.apply(train)
    usual = (*(("dev",) if data.dev else ()), "val", *(("test",) if data.watch == "any" else ()))
    watch = choose_split("auto" if data.watch == "any" else data.watch, parts, usual, "data.watch")
    test = choose_split(data.test, parts, ("test",), "data.test")
    return DataSplits(
        title=collection.title,
        class_names=names,
        renamed=record_renaming(known, names),
        train=train,
        watch=parts.get(watch),
        test=parts.get(test),
        watch_name=watch,
        test_name=test,
        notes=collection.notes,
        others={name: part for name, part in parts.items() if part is not whole},
        without=without,
        out_of=len(whole),
    )


def select_training_images(collection: Collection, data: Data) -> tuple[ImageDataset, Selection | None]:
    """The training split without duplicates (`data.without`) and cut to `data.part`, before a dev split is held out;
    and the selection that was dropped."""
    train, without = find_split(collection, data.train), None
    if data.without:
        train, without = drop_listed(train, Path(data.without), option="data.without=")
    if data.part < 1:
        try:
            train = share_split(train, data.part, seed=data.part_seed).apply(train)
        except BadLabels as error:
            raise DataError(f"data.part={data.part} of {len(train):,} training images: {error}") from None
    return train, without


def find_split(collection: Collection, name: str) -> ImageDataset:
    """The split of that name, or the only split of a collection, whatever its name."""
    return next(iter(collection.splits.values())) if len(collection.splits) == 1 else collection.split(name)


def choose_split(requested: str, parts: Mapping[str, ImageDataset], usual: tuple[str, ...], field: str) -> str:
    """The name of a split; "" for none. "auto" takes the first of the usual names that exists."""
    if requested == "auto":
        return next((name for name in usual if name in parts), "")
    if requested in ("", "none"):
        return ""
    if requested not in parts:
        names = f"{', '.join(parts)}, none or auto"
        raise ConfigError(f"{field}={requested} is not a split here; use {names} (--set {field}=auto)")
    return requested


def hold_out_nothing(data: Data) -> Data:
    """The same data without a dev split: for the last run of a sweep (Section 4.1)."""
    return replace(data, dev=0.0, watch="none" if data.watch == "dev" else data.watch)


def record_training_images(
    data: Data, splits: DataSplits, world: World, saved: SavedCheckpoint | None, advance: Advance = ignore_advance
) -> list[dict[str, Any]]:
    """Records which images the weights are trained on: one record, or several if a resumed run was forced to train on
    other images, in which case all of them count. The processes share the work. A run resumed with the same images
    keeps its record."""
    before: list[dict[str, Any]] = [] if saved is None else saved.facts.get(KEY, [])
    current = (splits.train.fingerprint, splits.train.content_digest)
    if world.broadcast(any((record["fingerprint"], record["digest"]) == current for record in before)):
        return before
    selection = {"source": data.source, "split": data.train, "part": data.part, "part_seed": data.part_seed}
    selection |= {"dev": data.dev, "without": "" if splits.without is None else splits.without.hash}
    hashing = lambda source: hash_images(source, world, advance)  # noqa: E731
    chosen: dict[str, Any] = {"selection": selection, "others": splits.others, "hashing": hashing}
    out_of = splits.out_of or len(splits.train)
    return [*before, training_record.record_training(splits.train, out_of=out_of, **chosen)]


def warn_of_seen_images(splits: DataSplits, provenance: Mapping[str, Any], world: World, log: Tell) -> None:
    """Reports scored images that are also trained on, by the run itself or by the weights it starts from, according to
    their provenance. Skips splits that are too large to record."""
    for name, split in splits.scored_splits.items():
        if len(split) > MOST_IMAGES or total_bytes(split) > MOST_BYTES:
            continue
        count = training_record.find_exposure(provenance, split, lambda source: hash_images(source, world)).count
        if count:
            seen = f"{count:,} of the {len(split):,} images of {name} are also trained on, by this run or its start"
            log(f"{seen}: their score says less about new images; `vitrail data dedup` finds such copies")


def hash_images(source: ImageDataset, world: World, advance: Advance = ignore_advance) -> training_record.Hashes:
    """The content hashes of a dataset; the processes share the reading."""
    report = lambda done: advance(READING, done, len(source))  # noqa: E731
    mine = training_record.hash_contents(source, rank=world.rank, world=world.size, advance=report)
    return training_record.interleave(world.gather(mine))


def can_reside(
    source: ImageDataset, augmentations: Sequence[Augmentation], device: torch.device, targets: Targets = CLASS_LABELS
) -> tuple[bool, str]:
    """Whether a dataset fits on the device and can be augmented there, and why not."""
    limit = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else HOST_BYTES
    can, reason = fits_on_device(source, limit, targets)
    missing = next(filter(None, map(find_unsupported, augmentations)), "") if can else ""
    return (False, missing) if missing else (can, reason)


def count_workers(data: Data, world: World) -> int:
    """Loader processes for this process."""
    if data.workers >= 0:
        return data.workers
    mine = available_cores() // world.local_size
    return min(mine, MAX_WORKERS) if world.device.type == "cuda" else min(max(mine - 1, 1), 4)


class TrainBatches:
    """The training batches of this process, from any step on: from loader processes, or from a dataset that lies on the
    device."""

    def __init__(
        self, run: ResolvedRun, source: ImageDataset, views: Sequence[Augmentation], world: World, ledger: UnreadableLog
    ) -> None:
        targets = targets_of(run.objective)
        if targets.moves:
            check_geometries(views)
        self.run, self.source, self.views, self.world = run, source, views, world
        self.reading: dict[str, Any] = {"ledger": ledger, "targets": targets}
        self.resident: DeviceDataset | None = None
        self.batches: Iterator[Batch] | None = None  # a reference, because they know what a dead process was reading

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's part of the global steps `start` to `stop - 1`."""
        run, world, device = self.run, self.world, self.world.device
        shared: dict[str, int] = {"rank": world.rank, "world": world.size, "repeats": run.data.repeats}
        stream = BatchStream(batch=run.batch, seed=run.seed, start=start, stop=stop, **shared)
        if run.data.resident == "on":
            if self.resident is None:
                # Reading a few images takes less time than starting processes.
                workers = count_workers(run.data, world) if len(self.source) > LEAST_SHARED else 0
                self.resident = DeviceDataset(self.source, device=device, workers=workers, **self.reading)
            yield from self.resident.train_batches(self.views, stream)
            return
        workers, pin = count_workers(run.data, world), device.type == "cuda"
        self.batches = loader.train_batches(self.source, self.views, stream, workers=workers, pin=pin, **self.reading)
        for batch in self.batches:
            yield batch.to(device)


class EvalBatches:
    """A split to score, batch by batch; a small one stays on the device after the first pass."""

    def __init__(
        self, data: Data, source: ImageDataset, views: Preprocessing | Views, batch: int, world: World, **reading: Any
    ) -> None:
        """`reading` holds a ledger and targets, which are passed to the loader."""
        self.source, self.world, self.batch = source, world, batch * world.size
        self.views = EvalView(views) if isinstance(views, Preprocessing) else views
        cuda, pixels = world.device.type == "cuda", sum(height * width for height, width in self.views.sizes)
        self.is_small = len(source) * 3 * pixels <= KEPT_BYTES * (16 if cuda else 1)
        workers = 0 if self.is_small and data.resident == "on" else count_workers(data, world)
        self.loading: dict[str, Any] = {"workers": workers, "pin": cuda, **reading}
        self.kept: list[Batch] | None = None
        self.batches: Iterator[Batch] | None = None  # a reference, because they know what a dead process was reading

    def __iter__(self) -> Iterator[Batch]:
        if self.kept is not None:
            yield from self.kept
            return
        kept: list[Batch] = []
        shared = {"batch": self.batch, "rank": self.world.rank, "world": self.world.size}
        self.batches = loader.eval_batches(self.source, self.views, **shared, **self.loading)
        for batch in self.batches:
            moved = batch.to(self.world.device)
            if self.is_small:
                kept.append(moved)
            yield moved
        self.kept = kept if self.is_small else None

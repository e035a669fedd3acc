"""Batches for training and evaluation, each a pure function of its step.

    for batch in train_batches(dataset, augmentation, BatchStream(batch=256, start=1000)): ...  # endless, from there on
    for batch in eval_batches(dataset, preprocessing, batch=256): ...                           # every sample once

Training step s reads samples sB to sB + B - 1 of consecutive epochs: no batch is short and no sample is dropped. The
DataLoader requests whole steps from its processes, so the batches do not depend on the number of processes, and a run
needs only its step to resume its data.
"""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitrail.core.errors import BadImage, ConfigError, DataError, WorkerDied
from vitrail.core.text import Pair
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import EncodedImage
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import CounterRng, EpochOrder, StreamPositions
from vitrail.data.targets import CLASS_LABELS, Geometry, Target, Targets, TargetSegments, map_target
from vitrail.data.transforms.augmentation import Augmentation, Augmentations, TrainViews, check_geometries
from vitrail.data.unreadable_log import UnreadableLog, UnreadableSample

OTHER_SIZE: Final = "is of another size than the first image"
PATIENCE_S = 600.0  # if a batch takes longer, the storage hangs


@dataclass(frozen=True, slots=True)
class EvalView:
    """The view for evaluation: preprocessing only, nothing random. With `same_size` every image must already have the
    size that preprocessing gives."""

    preprocessing: Preprocessing
    same_size: bool = False

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return (self.preprocessing.image,)

    def __call__(self, image: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        if self.same_size and image.size != self.preprocessing.image:
            raise BadImage(OTHER_SIZE)
        return (self.preprocessing.pixels(image.rgb()),)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        return (self.preprocessing.geometry(whole),)


class Views(Protocol):
    """Makes one or more views of an image, uint8 [3, H, W] each. All randomness comes from the draws. Geometries say
    where the pixels come from in an upright image of size `whole`, for targets that move with them."""

    @property
    def sizes(self) -> tuple[Pair, ...]: ...
    def __call__(self, image: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]: ...
    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The B places of a step. A place that is not `valid` has no image: unreadable, or past the end of the dataset."""

    step: int
    views: tuple[Tensor, ...]  # uint8 [B, 3, H, W] each
    targets: tuple[Target, ...]  # [B, ...]: one per view if targets move with the pixels, else one
    sample: Tensor  # int64 [B], the index in the dataset; -1 past the end
    epoch: Tensor  # int64 [B]
    valid: Tensor  # bool [B]
    unreadable: tuple[UnreadableSample, ...] = ()

    @property
    def pixels(self) -> Tensor:
        """The first view."""
        return self.views[0]

    @property
    def target(self) -> Tensor:
        """The target of the first view, if it is one tensor."""
        target = self.targets[0]
        assert isinstance(target, Tensor)
        return target

    @property
    def segments(self) -> TargetSegments:
        """The target of the first view, if it is segments."""
        target = self.targets[0]
        assert isinstance(target, TargetSegments)
        return target

    def __len__(self) -> int:
        return len(self.sample)

    def pin_memory(self) -> "Batch":
        """Copies the batch to pinned memory. The DataLoader calls this."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        """Copies the batch to a device. Copies to the host are synchronous, so that they cannot be read too early."""
        ahead = torch.device(device).type != "cpu"
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=ahead))

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        views, targets = tuple(map(move, self.views)), tuple(map_target(target, move) for target in self.targets)
        sample, epoch, valid = map(move, (self.sample, self.epoch, self.valid))
        return replace(self, views=views, targets=targets, sample=sample, epoch=epoch, valid=valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """The steps of a process from `start` on, endless or up to `stop`. Each process reads one contiguous part of every
    global batch, so that global batches are the same on any number of processes. With `repeats` every sample comes
    several times in a row, each time with new draws (repeated augmentation)."""

    batch: int
    seed: int = 0
    start: int = 0
    stop: int | None = None
    rank: int = 0
    world: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        batch, rank, world = self.batch, self.rank, self.world
        if batch < 1 or not 0 <= rank < world:
            raise ConfigError(f"batch={batch}, rank={rank}, world={world} must be at least 1 and 0 <= rank < world")
        if batch % world:
            fit = f"use {batch - batch % world or world} or a multiple of {world}"
            raise ConfigError(f"a global batch of {batch} cannot be split over {world} processes; {fit}")

    @property
    def local(self) -> int:
        return self.batch // self.world

    def places(self, step: int) -> NDArray[np.int64]:
        """The stream positions of this process's part of a step [B / world]."""
        first = step * self.batch + self.rank * self.local
        return np.arange(first, first + self.local, dtype=np.int64)


class StepDataset(Dataset[Batch]):
    """Maps a step to its batch; this runs in the loader processes. If `shuffled`, one epoch follows another, each in
    its own order. Otherwise every sample comes once, and the last batch may have places without an image, so that all
    batches have the same shape and all processes have the same number of batches."""

    def __init__(
        self, source: ImageDataset, views: Views, stream: BatchStream, targets: Targets, *, shuffled: bool
    ) -> None:
        targets.check(source)
        self.source, self.views, self.stream, self.targets = source, views, stream, targets
        self.order = EpochOrder(len(source), stream.seed, stream.repeats) if shuffled else None
        # The pid and current sample of each loader process, shared so that it outlives the process.
        self.reading = torch.full((1, 2), -1, dtype=torch.int64)

    def __getitem__(self, step: int) -> Batch:
        places = self.stream.places(step)
        zeros = np.zeros_like(places)
        at, exists = StreamPositions(epoch=zeros, sample=places, repeat=zeros), places < len(self.source)
        if self.order is not None:
            at, exists = self.order.locate(places), np.ones(len(places), np.bool_)
        views = tuple(torch.empty((len(exists), 3, *size), dtype=torch.uint8) for size in self.views.sizes)
        draws = at.draws(self.stream.seed, len(views))
        moving: list[list[Any]] = [[None] * len(exists) for _ in views] if self.targets.moves else []
        valid, unreadable = exists.copy(), list[UnreadableSample]()
        info = get_worker_info()
        mine = self.reading[0 if info is None else info.id]
        mine[0] = os.getpid()
        for place in np.flatnonzero(exists):
            sample = int(at.sample[place])
            mine[1] = sample
            found = self.fill(sample, [view[place] for view in views], [draw.row(int(place)) for draw in draws])
            if isinstance(found, str):
                valid[place] = False
                unreadable.append(UnreadableSample(sample, self.source.name(sample), found))
                continue
            for row, target in zip(moving, found, strict=True):
                row[place] = target
        mine[1] = -1
        for view in views:
            view[torch.from_numpy(~valid)] = 0
        targets: tuple[Target, ...] = tuple(map(self.targets.stack, moving, self.views.sizes))
        targets = targets or (self.targets.batch(self.source, np.where(exists, at.sample, 0)),)
        sample, epoch, ok = map(torch.from_numpy, (np.where(exists, at.sample, -1), at.epoch, valid))
        return Batch(
            step=step, views=views, targets=targets, sample=sample, epoch=epoch, valid=ok, unreadable=tuple(unreadable)
        )

    def fill(self, sample: int, views: list[Tensor], draws: list[CounterRng]) -> list[Any] | str:
        """Writes a sample's views into their places. Returns its targets, one per view, if they move with the pixels,
        or the reason if the sample is unreadable."""
        try:
            image = EncodedImage(self.source.read(sample))
            for place, pixels in zip(views, self.views(image, draws), strict=True):
                place.copy_(pixels)
            if not self.targets.moves:
                return []
            target = self.targets.read(self.source, sample, image.size)
            return [self.targets.view(target, geometry) for geometry in self.views.geometries(image.size, draws)]
        except (BadImage, OSError) as error:
            return str(getattr(error, "strerror", None) or error)


RUNNING: Final[WeakSet[StepDataset]] = WeakSet()  # loaders whose processes are alive


def train_batches(
    source: ImageDataset,
    augmentations: Augmentations | Views,
    stream: BatchStream,
    *,
    workers: int = 0,
    pin: bool = False,
    ledger: UnreadableLog | None = None,
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """Yields the training batches of a stream. With several augmentations each batch has several views."""
    if not len(source):
        raise DataError("a dataset without images cannot be trained on")
    if isinstance(augmentations, Augmentation):
        augmentations = (augmentations,)
    if isinstance(augmentations, Sequence):
        if targets.moves:
            check_geometries(augmentations)
        augmentations = TrainViews(tuple(augmentations))
    steps = itertools.count(stream.start) if stream.stop is None else range(stream.start, stream.stop)
    return load_batches(StepDataset(source, augmentations, stream, targets, shuffled=True), steps, workers, pin, ledger)


def eval_batches(
    source: ImageDataset,
    views: Preprocessing | Views,
    *,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    pin: bool = False,
    ledger: UnreadableLog | None = None,
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """Yields every sample once. All processes get the same number of batches, all of the same shape."""
    plain = EvalView(views) if isinstance(views, Preprocessing) else views
    once = StepDataset(source, plain, BatchStream(batch=batch, rank=rank, world=world), targets, shuffled=False)
    return load_batches(once, range(-(-len(source) // batch)), workers, pin, ledger)


def load_batches(
    steps: StepDataset, wanted: "range | itertools.count[int]", workers: int, pin: bool, ledger: UnreadableLog | None
) -> Iterator[Batch]:
    """Runs the steps in this process or in `workers` others, and yields the batches in order."""
    steps.reading = torch.full((max(workers, 1), 2), -1, dtype=torch.int64).share_memory_()
    RUNNING.add(steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # the caller chooses the number
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # known and harmless
        loader: DataLoader[Batch] = DataLoader(
            steps,
            batch_size=None,
            sampler=wanted,
            num_workers=workers,
            pin_memory=pin,
            timeout=PATIENCE_S if workers else 0,
            generator=torch.Generator(),  # keeps the global one untouched
            worker_init_fn=leave_process_group,
        )
        batches = iter(loader)
    ledger = UnreadableLog() if ledger is None else ledger
    try:
        for batch in batches:
            ledger.note(batch.unreadable)
            yield batch
    except RuntimeError as error:
        raise describe_death(error, steps) from error


def leave_process_group(_worker: int) -> None:
    """Puts a loader process into its own process group, so that a signal to the run's group (Ctrl-C in a terminal,
    `timeout`) does not end it while the run finishes its step. The process notices by itself if the run is killed."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def name_dead_worker(error: BaseException) -> BaseException:
    """Converts an error that reports a killed loader process to WorkerDied with the samples being read, and returns any
    other unchanged. Torch raises the error wherever the main thread happens to be, rarely in this module."""
    if not isinstance(error, RuntimeError):
        return error
    pid = {int(number) for number in re.findall(r"pid (\d+)", str(error))}
    found = (describe_death(error, steps) for steps in list(RUNNING) if pid & set(steps.reading[:, 0].tolist()))
    return next((known for known in found if known is not error), error)


def describe_death(error: RuntimeError, steps: StepDataset) -> Exception:
    """Returns WorkerDied with the samples being read if the error is about a loader process, else the error itself."""
    message = str(error)
    if "DataLoader" not in message or "Caught" in message:  # an exception inside a process is a bug: raise it as it is
        return error
    pids = {int(number) for group in re.findall(r"pids?(?:\(s\))? ([\d, ]+)", message) for number in group.split(",")}
    rows = [(int(pid), int(sample)) for pid, sample in steps.reading.tolist()]
    mine = [sample for pid, sample in rows if pid in pids] or [sample for _, sample in rows]
    reading = ", ".join(steps.source.name(sample) for sample in mine if sample >= 0)
    when = f"while reading {reading}" if reading else "while it read no image"
    return WorkerDied(f"a loader process ended or hung {when} ({' '.join(message.split())})")

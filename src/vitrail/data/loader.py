"""Batches for training and evaluation, each a pure function of its step.

    for batch in stream(source, augmentation, batch=256, seed=0, start=1000): ...   # endless, from step 1000 on
    for batch in sweep(source, preprocessing, batch=256): ...                       # every sample once

Step s of a training stream reads samples sB to sB + B - 1 of one epoch after another: no batch is short, no sample is
dropped. A `torch.utils.data.DataLoader` asks its processes for whole steps, so the number of processes changes nothing,
and what a run must remember of its data is the step.
"""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from vitrail.data.targets import CLASS_LABELS, Geometry, Targets
from vitrail.data.transforms.augmentation import Augmentation, augment_views, check_geometries
from vitrail.data.unreadable_log import UnreadableLog, UnreadableSample

PATIENCE_S = 600.0  # a batch that takes longer means a store that hangs


class Views(Protocol):
    """From an image to one or more views of it, uint8 [3, H, W] each; what is random in them comes from the draws. The
    geometries say where the pixels come from in an upright image of size `whole`, for targets that follow them."""

    @property
    def sizes(self) -> tuple[Pair, ...]: ...
    def __call__(self, picture: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]: ...
    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]: ...


@dataclass(frozen=True, slots=True)
class TrainViews:
    """The views of training. The image is decoded once for all of them."""

    augmentations: tuple[Augmentation, ...]

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return tuple(augmentation.size for augmentation in self.augmentations)

    def __call__(self, picture: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        return augment_views(self.augmentations, picture, draws)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        return tuple(each.geometry(whole, drawn) for each, drawn in zip(self.augmentations, draws, strict=True))


@dataclass(frozen=True, slots=True)
class EvalView:
    """The view of evaluation: the preprocessing alone, nothing drawn."""

    preprocessing: Preprocessing

    @property
    def sizes(self) -> tuple[Pair, ...]:
        return (self.preprocessing.image,)

    def __call__(self, picture: EncodedImage, draws: Sequence[CounterRng]) -> tuple[Tensor, ...]:
        return (self.preprocessing.pixels(picture.rgb()),)

    def geometries(self, whole: Pair, draws: Sequence[CounterRng]) -> tuple[Geometry, ...]:
        return (self.preprocessing.geometry(whole),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B places of a step. Where `valid` is false there is no image: unreadable, or past the end of a sweep."""

    step: int
    views: tuple[Tensor, ...]  # uint8 [B, 3, H, W] each
    targets: tuple[Tensor, ...]  # [B, ...]: one for each view where they move with the pixels, else one
    sample: Tensor  # int64 [B], the place in the source; -1 past the end
    epoch: Tensor  # int64 [B]
    valid: Tensor  # bool [B]
    unreadable: tuple[UnreadableSample, ...] = ()

    @property
    def pixels(self) -> Tensor:
        """The first view."""
        return self.views[0]

    @property
    def target(self) -> Tensor:
        """What the first view is to be learnt as."""
        return self.targets[0]

    def __len__(self) -> int:
        return len(self.sample)

    def pin_memory(self) -> "Batch":
        """In memory that an accelerator can fetch from by itself; the DataLoader asks for this."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        """On another device. Copies to the host are waited for: they could be read before they are there."""
        ahead = torch.device(device).type != "cpu"
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=ahead))

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            step=self.step,
            views=tuple(move(view) for view in self.views),
            targets=tuple(move(target) for target in self.targets),
            sample=move(self.sample),
            epoch=move(self.epoch),
            valid=move(self.valid),
            unreadable=self.unreadable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """The part of every global batch that this process reads: a run of neighbours, so that a global batch is the same
    on 1 process or 64."""

    batch: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(f"batch={self.batch}, rank={self.rank}, world={self.world} make no share of a batch")
        if self.batch % self.world:
            raise ConfigError(
                f"a global batch of {self.batch} cannot be split over {self.world} processes; "
                f"use {self.batch - self.batch % self.world or self.world} or a multiple of {self.world}"
            )

    @property
    def local(self) -> int:
        return self.batch // self.world

    def places(self, step: int) -> NDArray[np.int64]:
        """Where this process's part of a step lies in the stream [B / world]."""
        first = step * self.batch + self.rank * self.local
        return np.arange(first, first + self.local, dtype=np.int64)


class StepDataset(Dataset[Batch]):
    """Step in, batch out. This is all that a loader process runs."""

    def __init__(
        self, source: ImageDataset, views: Views, share: BatchShare, seed: int, repeats: int, targets: Targets
    ) -> None:
        targets.check(source)
        self.source, self.views, self.share, self.seed, self.repeats = source, views, share, seed, repeats
        self.targets = targets
        # What each loader process is reading: its pid and the sample. Shared, so that it outlives the process.
        self.reading = torch.full((1, 2), -1, dtype=torch.int64)

    def watch(self, workers: int) -> None:
        self.reading = torch.full((max(workers, 1), 2), -1, dtype=torch.int64).share_memory_()

    def at(self, step: int) -> tuple[StreamPositions, NDArray[np.bool_]]:
        """What stands at a step's places, and which of them exist."""
        raise NotImplementedError

    def __getitem__(self, step: int) -> Batch:
        at, exists = self.at(step)
        views = tuple(torch.empty((len(exists), 3, *size), dtype=torch.uint8) for size in self.views.sizes)
        draws = [
            CounterRng.for_samples(
                seed=self.seed, epoch=at.epoch, sample=at.sample, view=at.repeat * len(views) + number
            )
            for number in range(len(views))
        ]
        blanks = [self.targets.blank(size) for size in self.views.sizes] if self.targets.moves else []
        moving = tuple(blank.repeat(len(exists), *[1] * blank.ndim) for blank in blanks)
        valid, unreadable = exists.copy(), list[UnreadableSample]()
        info = get_worker_info()
        mine = self.reading[0 if info is None else info.id]
        mine[0] = os.getpid()
        for place in np.flatnonzero(exists):
            sample = int(at.sample[place])
            mine[1] = sample
            into = [view[place] for view in views], [target[place] for target in moving]
            fault = self.fill(sample, *into, [draw.row(int(place)) for draw in draws])
            if fault is not None:
                valid[place] = False
                unreadable.append(UnreadableSample(sample, self.source.name(sample), fault))
        mine[1] = -1
        for view in views:
            view[torch.from_numpy(~valid)] = 0
        for target, blank in zip(moving, blanks, strict=True):
            target[torch.from_numpy(~valid)] = blank
        return Batch(
            step=step,
            views=views,
            targets=moving or (self.targets.batch(self.source, np.where(exists, at.sample, 0)),),
            sample=torch.from_numpy(np.where(exists, at.sample, -1)),
            epoch=torch.from_numpy(at.epoch),
            valid=torch.from_numpy(valid),
            unreadable=tuple(unreadable),
        )

    def fill(self, sample: int, views: list[Tensor], targets: list[Tensor], draws: list[CounterRng]) -> str | None:
        """Puts a sample's views where they belong, and its targets where those move; the reason where that fails."""
        try:
            picture = EncodedImage(self.source.read(sample))
            for place, pixels in zip(views, self.views(picture, draws), strict=True):
                place.copy_(pixels)
            if targets:
                target = self.targets.read(self.source, sample, picture.size)
                for place, geometry in zip(targets, self.views.geometries(picture.size, draws), strict=True):
                    place.copy_(self.targets.view(target, geometry))
        except BadImage as error:
            fault = str(error)
        except OSError as error:
            fault = error.strerror or str(error)
        else:
            return None
        return fault


RUNNING: Final[WeakSet[StepDataset]] = WeakSet()  # those whose processes may die at any moment


class TrainSteps(StepDataset):
    """Training: shuffled epochs, one after the other."""

    def at(self, step: int) -> tuple[StreamPositions, NDArray[np.bool_]]:
        at = EpochOrder(len(self.source), self.seed).locate(self.share.places(step), self.repeats)
        return at, np.ones(len(at.sample), np.bool_)


class EvalSteps(StepDataset):
    """Evaluation: every sample once, in its own order. The last batch has places without an image, so that all batches
    have one shape and all processes the same number of them."""

    def at(self, step: int) -> tuple[StreamPositions, NDArray[np.bool_]]:
        places = self.share.places(step)
        nought = np.zeros_like(places)
        return StreamPositions(epoch=nought, sample=places, repeat=nought), places < len(self.source)


def train_batches(
    source: ImageDataset,
    augmentations: Augmentation | Sequence[Augmentation] | Views,
    *,
    batch: int,
    seed: int,
    start: int = 0,
    stop: int | None = None,
    rank: int = 0,
    world: int = 1,
    repeats: int = 1,
    workers: int = 0,
    pin: bool = False,
    ledger: UnreadableLog | None = None,
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """The training batches from step `start` on, without end or up to `stop`. With `repeats` every sample comes so many
    times in a row, each time drawn again (repeated augmentation); with several views each batch has them all."""
    if not len(source):
        raise DataError("a source without images cannot be trained on")
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} must be at least 1")
    if isinstance(augmentations, Augmentation):
        augmentations = (augmentations,)
    if isinstance(augmentations, Sequence):
        if targets.moves:
            check_geometries(augmentations)
        augmentations = TrainViews(tuple(augmentations))
    share = BatchShare(batch=batch, rank=rank, world=world)
    steps = itertools.count(start) if stop is None else range(start, stop)
    endless = TrainSteps(source, augmentations, share, seed, repeats, targets)
    return load_batches(endless, steps, workers=workers, pin=pin, ledger=ledger)


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
    """Every sample once. All processes get the same number of batches of the same shape."""
    plain = EvalView(views) if isinstance(views, Preprocessing) else views
    share = BatchShare(batch=batch, rank=rank, world=world)
    once = EvalSteps(source, plain, share, 0, 1, targets)
    return load_batches(once, range(-(-len(source) // batch)), workers=workers, pin=pin, ledger=ledger)


def load_batches(
    steps: StepDataset, wanted: "range | itertools.count[int]", *, workers: int, pin: bool, ledger: UnreadableLog | None
) -> Iterator[Batch]:
    """Runs the steps, in this process or in `workers` others, and hands the batches over in order."""
    steps.watch(workers)
    RUNNING.add(steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # how many is the caller's choice
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # nothing new
        loader: DataLoader[Batch] = DataLoader(
            steps,
            batch_size=None,
            sampler=wanted,
            num_workers=workers,
            collate_fn=return_unchanged,
            pin_memory=pin,
            timeout=PATIENCE_S if workers else 0,
            generator=torch.Generator(),  # else it would draw from the global one
            worker_init_fn=leave_process_group,
        )
        batches = iter(loader)
    ledger = UnreadableLog() if ledger is None else ledger
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            raise describe_death(error, steps) from error
        ledger.note(batch.unreadable)
        yield batch


def leave_process_group(worker: int) -> None:
    """A loader process ends when its run does, and not by a signal to the whole group, as a terminal or `timeout` sends
    it: the run has a step to finish then. So it has a group of its own; where a run is killed, it notices."""
    del worker
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def return_unchanged(batch: Any) -> Any:
    """A step is a batch already."""
    return batch


def name_dead_worker(error: BaseException) -> BaseException:
    """Torch tells of a loader process that was killed by an exception wherever the main thread happens to be, seldom
    in here: the same error as WorkerDied, with the samples, where it is one of those."""
    if not isinstance(error, RuntimeError):
        return error
    pid = {int(number) for number in re.findall(r"pid (\d+)", str(error))}
    found = (describe_death(error, steps) for steps in list(RUNNING) if pid & set(steps.reading[:, 0].tolist()))
    return next((known for known in found if known is not error), error)


def describe_death(error: RuntimeError, steps: StepDataset) -> Exception:
    """The same error with the samples that were being read, where it tells of a loader process."""
    told = str(error)
    if "DataLoader" not in told or "Caught" in told:  # an exception raised inside a process is a bug: it comes as it is
        return error
    pids = {int(number) for group in re.findall(r"pids?(?:\(s\))? ([\d, ]+)", told) for number in group.split(",")}
    rows = [(int(pid), int(sample)) for pid, sample in steps.reading.tolist()]
    mine = [sample for pid, sample in rows if pid in pids] or [sample for _, sample in rows]
    reading = ", ".join(steps.source.name(sample) for sample in mine if sample >= 0)
    when = f"while reading {reading}" if reading else "while it read no image"
    return WorkerDied(f"a loader process ended or hung {when} ({' '.join(told.split())})")

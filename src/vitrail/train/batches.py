"""Batches on the device: from loader processes, or from a set that lies there whole; and what is swept for scores."""

import os
from collections.abc import Iterator, Sequence

import torch

from vitrail.data import loader
from vitrail.data.dataset import ImageDataset
from vitrail.data.device_dataset import DeviceDataset, fits
from vitrail.data.loader import Batch, Plain, Views
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.transforms.augmentation import Augmentation, check_geometries
from vitrail.data.transforms.batched import unsupported
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.train.config import Data

SHARE = 0.25  # of a GPU's free memory that images may take
HOST_BYTES = 1 << 30  # what they may take of the host's
KEPT_BYTES = 1 << 28  # images of evaluation that stay on the device between two scorings
MOST_WORKERS = 16


def room(device: torch.device) -> int:
    """Bytes that a resident set may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE)
    return HOST_BYTES


def may_reside(
    source: ImageDataset, augmentations: Sequence[Augmentation], device: torch.device, targets: Targets = CLASS_LABELS
) -> tuple[bool, str]:
    """Whether a set can lie on the device and be augmented there, and why."""
    can, reason = fits(source, room(device), targets)
    for augmentation in augmentations:
        if can and (lacking := unsupported(augmentation)):
            return False, lacking
    return can, reason


def worker_count(data: Data, world: World) -> int:
    """Loader processes for this process."""
    if data.workers >= 0:
        return data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = cores // world.local_size
    return min(mine, MOST_WORKERS) if world.device.type == "cuda" else min(max(mine - 1, 1), 4)


class Feed:
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
            workers=worker_count(self.data, world),
            pin=device.type == "cuda",
            ledger=self.ledger,
            targets=self.targets,
        )
        for batch in self.batches:
            yield batch.to(device)


class Sweep:
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
        self.views = Plain(views) if isinstance(views, Preprocessing) else views
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
            workers=0 if self.small and self.data.resident == "on" else worker_count(self.data, world),
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

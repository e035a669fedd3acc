"""A network at rest that is to be scored, the split that it is scored on, and how images reach it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoint.bundle import Bundle, card_of
from vitrail.checkpoint.weights import network as network_of
from vitrail.checkpoint.weights import operate
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch, Views, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.splits import Selection
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.evaluation.frozen.features import Precision
from vitrail.evaluation.result import describe_data, check_deduplication, describe_weights
from vitrail.models.build import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A network at rest on its device, and how its images are prepared."""

    name: str
    network: Model
    preprocessing: Preprocessing
    device: torch.device
    facts: Mapping[str, Any]  # for a result, of what is in the file, whatever size and type it is used in

    def computing_in(self, precision: Precision) -> None:
        """Turns the weights to bfloat16 where they are to be."""
        if precision == "bfloat16":
            self.network.to(torch.bfloat16)

    @property
    def labels(self) -> tuple[str, ...] | None:
        return card_of(self.network).labels

    @property
    def multi_label(self) -> bool:
        return card_of(self.network).multi_label

    @property
    def provenance(self) -> dict[str, Any]:
        return card_of(self.network).provenance


def make_subject(name: str, bundle: Bundle, device: torch.device, *, image_size: int | None) -> Subject:
    """The network of a bundle on its device, at another size where one is given."""
    network = network_of(operate(bundle, image_size=image_size))
    # Now, not when the result is written: a run that is training may have replaced the file by then.
    facts = describe_weights(name, network if image_size is None else network_of(bundle))
    network = network.to(device)
    return Subject(
        name=name,
        network=network,
        preprocessing=card_of(network).preprocessing,
        device=device,
        facts=facts,
    )


def choose_split(collection: Collection, *names: str) -> tuple[str, ImageDataset]:
    """The first of the named splits that is there; the only one, whatever it is called."""
    if len(collection.splits) == 1:
        return next(iter(collection.splits.items()))
    for name in names:
        if name in collection.splits:
            return name, collection.splits[name]
    raise DataError(
        f"{collection.name} has the splits {', '.join(collection.splits)}; say which one: {collection.name}@"
        f"{next(iter(collection.splits))}"
    )


def describe_scored_data(about: Subject, collection: Collection, split: str, path: Path | None) -> dict[str, Any]:
    """What a result says of its images, the `path` of --deduplicated-by included."""
    source = collection.splits[split]
    selection = None if path is None else Selection.load(path)
    try:
        known = check_deduplication(source, selection, about.provenance)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return describe_data(collection.title, split, source, deduplicated=known, selection=selection)


def iterate_batches(
    source: ImageDataset,
    preprocessing: Preprocessing | Views,
    device: torch.device,
    *,
    batch: int = 0,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    ledger: UnreadableLog | None = None,
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """Every image once, prepared. A process's batch has one size, however many processes there are: a product over
    other rows may round otherwise, and the numbers are to be the same. A `batch` of 0 is chosen by the device, a
    negative number of `workers` by the cores."""
    if batch < 0:
        raise ConfigError(f"batch {batch} must be at least 1")
    size = batch or (256 if device.type == "cuda" else 64)
    return eval_batches(
        source,
        preprocessing,
        batch=min(size, max(len(source), 1)) * world,
        rank=rank,
        world=world,
        workers=workers if workers >= 0 else choose_workers(),
        pin=device.type == "cuda",
        ledger=ledger,
        targets=targets,
    )


def choose_workers() -> int:
    """One core is left for the network."""
    return max(min((os.cpu_count() or 1) - 1, 8), 0)

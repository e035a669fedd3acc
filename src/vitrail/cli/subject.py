"""What the commands that look at weights have in common: WEIGHTS, --data, the device, and how pictures reach it."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import load
from vitrail.cli.progress import bars
from vitrail.core.errors import DataError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.ledger import Ledger
from vitrail.data.loader import Batch, sweep
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.source import Source
from vitrail.models.build import Model
from vitrail.train.folder.layout import BEST, LAST, STATUS


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "weights", metavar="WEIGHTS", help="a file, a folder or a tag, in any format that vitrail reads"
    )
    parser.add_argument(
        "--image-size", type=int, default=None, metavar="N", help="pixels a side; positions are resized"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="SOURCE[@SPLIT]", required=True, help="a folder, a file, or a set by name")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="pictures at once (default: by the device)")
    parser.add_argument("--workers", type=int, default=-1, metavar="N", help="loader processes (default: by the cores)")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A network at rest on its device, and how its pictures are prepared."""

    name: str
    network: Model
    preprocessing: Preprocessing
    device: torch.device

    @property
    def labels(self) -> tuple[str, ...] | None:
        card: Any = self.network.card
        return card.labels if isinstance(card, Card) else None


def subject(args: argparse.Namespace, device: torch.device) -> Subject:
    """The network that was asked for. A run's folder stands for its best weights, or its last."""
    path = Path(args.weights)
    if (path / STATUS).exists():
        path = next((path / name for name in (BEST, LAST) if (path / name).exists()), path)
    network = load(str(path) if path.exists() else args.weights, image_size=args.image_size).to(device)
    card: Any = network.card
    return Subject(name=args.weights, network=network, preprocessing=card.preprocessing, device=device)


def opened(args: argparse.Namespace) -> Collection:
    with bars(bytes_=True) as progress:
        return open_collection(args.data, download=args.download, progress=progress)


def chosen(collection: Collection, *names: str) -> tuple[str, Source]:
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


def batches(
    args: argparse.Namespace,
    source: Source,
    preprocessing: Preprocessing,
    device: torch.device,
    *,
    rank: int = 0,
    world: int = 1,
    ledger: Ledger | None = None,
) -> Iterator[Batch]:
    """Every picture once, prepared."""
    size = args.batch or (256 if device.type == "cuda" else 64)
    workers = args.workers if args.workers >= 0 else default_workers()
    return sweep(
        source,
        preprocessing,
        batch=min(size, max(-(-len(source) // world), 1)) * world,
        rank=rank,
        world=world,
        workers=workers,
        pin=device.type == "cuda",
        ledger=ledger,
    )


def default_workers() -> int:
    """One core is left for the network."""
    return max(min((os.cpu_count() or 1) - 1, 8), 0)

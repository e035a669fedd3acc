"""What the commands that look at weights have in common: WEIGHTS, DATA, the device, and how images reach it."""

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from vitrail.checkpoint.find_weights import find_weights
from vitrail.cli.options.groups import LoadingOptions
from vitrail.cli.progress import reading, waiting
from vitrail.core.console import millions
from vitrail.core.errors import ConfigError
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch, Views
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import joined
from vitrail.evaluation.scoring import Subject, iterate_batches, make_subject


@contextlib.contextmanager
def single_process(device: str) -> Generator[torch.device]:
    """The device of a command that is one process: several would do the same work and write the same files."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this command is one process: start it without torchrun")
    with joined(device) as world:
        yield world.device


def describe_weights(name: str, facts: Mapping[str, Any], *about: str) -> str:
    """The first line of what a command says: "w.npz: ViT, 5.72M parameters, 224x224 px, float32"."""
    size = f"{millions(facts['parameters'])} parameters"
    return f"{name}: {', '.join([facts['network'], size, *about])}"


def load_subject(weights: str, device: torch.device, *, image_size: int | None) -> Subject:
    """The network that was asked for. A run's folder stands for its best weights, or its last."""
    with reading(weights):
        bundle = find_weights(weights)
    with waiting("preparing the network"):
        return make_subject(weights, bundle, device, image_size=image_size)


def load_batches(
    options: LoadingOptions, source: ImageDataset, preprocessing: Preprocessing | Views, device: torch.device
) -> Iterator[Batch]:
    """Every image once, prepared, as the options say."""
    check_batch(options)
    return iterate_batches(source, preprocessing, device, batch=options.batch, workers=options.workers)


def check_batch(options: LoadingOptions) -> None:
    if options.batch < 0:
        raise ConfigError(f"--batch {options.batch} must be at least 1")

"""How commands read WEIGHTS, --labels and --rename."""

import contextlib
import csv
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.checkpoint.find_weights import find_weights
from vitrail.cli.options.groups import WeightsOptions
from vitrail.cli.progress import Advance, reading, waiting
from vitrail.core.atomic_files import read_text
from vitrail.core.console import format_millions
from vitrail.core.errors import BadLabels, ConfigError, DataError, unknown_name
from vitrail.core.precision import PrecisionChoice
from vitrail.data.class_names import BUNDLED_SETS, read_class_names
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch, Views
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS, Targets
from vitrail.distributed.process_group import join_world
from vitrail.evaluation.scoring import Subject, ignore_progress, iterate_batches, make_subject
from vitrail.train.observer import count_batches

if TYPE_CHECKING:
    from vitrail.predict.predictor import Predictor


@contextlib.contextmanager
def single_process(device: str) -> Generator[torch.device]:
    """The device of a command that runs in one process; several would do the same work and write the same files."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this command runs in one process; start it without torchrun")
    with join_world(device) as world:
        yield world.device


def weights_line(name: str, facts: Mapping[str, Any], *about: str) -> str:
    """The first line that a command prints: "w.npz: ViT, 5.72M parameters, 224x224 px, float32"."""
    size = f"{format_millions(facts['parameters'])} parameters"
    return f"{name}: {', '.join([facts['network'], size, *about])}"


def load_subject(
    weights: str,
    device: torch.device,
    *,
    image_size: int | None,
    patch: int | None = None,
    channels: int | None = None,
    precision: PrecisionChoice = "float32",
) -> Subject:
    """Loads the requested network. A run's folder stands for its best weights, or else its last."""
    with reading(weights):
        bundle = find_weights(weights)
    with waiting("preparing the network"):
        sizes: dict[str, Any] = {"image_size": image_size, "patch": patch, "channels": channels}
        return make_subject(weights, bundle, device, precision=precision, **sizes)


def load_batches(
    options: WeightsOptions,
    source: ImageDataset,
    preprocessing: Preprocessing | Views,
    device: torch.device,
    advance: Advance = ignore_progress,
    what: str = "features",
    targets: Targets = CLASS_LABELS,
) -> Iterator[Batch]:
    """Yields every image once, prepared, in batches as the options say; `advance` shows the progress."""
    check_batch(options)
    loading = {"batch": options.batch, "workers": options.workers}
    batches = iterate_batches(source, preprocessing, device, targets=targets, **loading)
    return count_batches(batches, what, len(source), advance)


def check_batch(options: WeightsOptions) -> None:
    if options.batch < 0:
        raise ConfigError(f"--batch {options.batch} must be at least 1")


def resolve_class_names(
    labels: str | None, renames: Sequence[str], names: Sequence[str] | None, num_classes: int
) -> tuple[str, ...] | None:
    """Applies --labels and --rename to the given class names; None without either option."""
    if labels is None and not renames:
        return None
    if labels is not None:
        names = read_labels(labels, num_classes)
    if not renames:
        return tuple(names or ())
    if names is None:
        raise ConfigError(f"--rename {renames[0]}: these weights have no class names; name all classes with --labels")
    changes = parse_renames(renames)
    for old in changes:
        if old not in names:
            raise unknown_name("class", old, names)
    new = tuple(changes.get(name, name) for name in names)
    if twice := sorted({name for name in changes.values() if new.count(name) > 1}):
        raise ConfigError(f"--rename gives the name {twice[0]!r} to {new.count(twice[0])} classes; names must differ")
    return new


def rename_predictor(asker: "Predictor[Any]", labels: str | None, renames: Sequence[str]) -> "Predictor[Any]":
    """The predictor with the class names of --labels and --rename."""
    from vitrail.checkpoint.bundle import get_card

    names = resolve_class_names(labels, renames, get_card(asker.network).labels, len(asker.labels))
    return asker if names is None else asker.rename_classes(names)


def read_labels(text: str, num_classes: int) -> tuple[str, ...]:
    """Reads one name per class, from a file or from a bundled list."""
    from vitrail.tasks.classification.metrics import read_names

    if text not in BUNDLED_SETS or Path(text).exists():
        return read_names(Path(text), num_classes)
    names = read_class_names(text)
    if len(names) != num_classes:
        raise BadLabels(f"--labels {text} has {len(names):,} names, but there are {num_classes:,} classes")
    return names


def parse_renames(texts: Sequence[str]) -> dict[str, str]:
    """Parses OLD=NEW pairs and files of pairs into {old: new}."""
    found: dict[str, str] = {}
    for text in texts:
        pairs = [text.partition("=")[::2]] if "=" in text and not Path(text).exists() else read_rename_file(Path(text))
        for old, new in pairs:
            if found.setdefault(old.strip(), new.strip()) != new.strip() or not old.strip() or not new.strip():
                raise ConfigError(f"--rename {text}: {old.strip()!r} needs one new name; write OLD=NEW")
    return found


def read_rename_file(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    except (DataError, csv.Error) as error:
        why = str(error) if isinstance(error, DataError) else f"{path} is not a comma-separated list of names"
        raise DataError(f"--rename {why}; give OLD=NEW or a file") from None
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError(f"--rename {path}: line {number} has {len(row)} columns; each line is old,new")
    return [(row[0], row[1]) for row in rows]

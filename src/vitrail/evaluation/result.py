"""A result as a file: the measures, weights, images, settings, machine and date.

    result = Result(kind="evaluate", weights=weights_facts("w.safetensors", model), data=..., measures=(...,))
    result.write(Path("result.json"))

The file records everything that decides whether two numbers are comparable; `vitrail compare` reads it. It also records
the environment: versions, machine, devices, and the commit of the working tree.
"""

import json
import math
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from vitrail import __version__
from vitrail.core.atomic_files import read_text, write_file
from vitrail.core.errors import DataError, VitrailError, describe_error, unknown_name
from vitrail.evaluation.intervals import Interval, wilson_interval

if TYPE_CHECKING:
    from vitrail.data.dataset import ImageDataset
    from vitrail.data.splits import Selection
    from vitrail.models.backbone import Backbone


FORMAT: Final = "vitrail result 1"
ROUNDED: Final = 6  # digits of numbers that are only displayed
Unit: TypeAlias = Literal["share", "img/s", "ms", "bytes", "count", "number"]  # a share is shown as a percentage


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One number with its interval, if there is one, and the number of samples behind it."""

    name: str  # "top-1", "5-shot", "Natural"
    value: float
    low: float | None = None
    high: float | None = None
    count: int | None = None
    unit: Unit = "share"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise unknown_name("unit", self.unit, get_args(Unit))
        if not all(math.isfinite(number) for number in (self.value, self.low or 0.0, self.high or 0.0)):
            raise DataError(f"{self.name} is {self.value} ({self.low} to {self.high}), which is not a number to report")


def measure_share(name: str, right: int, count: int) -> Measure:
    """A share with Wilson's interval."""
    low, high = wilson_interval(right, count)
    return Measure(name=name, value=right / count, low=low, high=high, count=count)


def make_measure(name: str, value: float, interval: Interval | None, count: int, unit: Unit) -> Measure:
    low, high = (None, None) if interval is None else interval
    return Measure(name=name, value=value, low=low, high=high, count=count, unit=unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Plain data throughout. `details` hold more: per class, per seed, curves."""

    kind: str  # the command: evaluate, fewshot, probe, knn, vtab, cost
    weights: Mapping[str, Any]
    data: Mapping[str, Any]
    measures: tuple[Measure, ...]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=lambda: describe_environment())
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
        body = {"format": FORMAT, **asdict(self)}
        write_file(path, json.dumps(body, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Reads a file that `write` wrote; DataError if it is not one."""
        try:
            body = json.loads(read_text(path))
            if body.pop("format") != FORMAT:
                raise ValueError("another format")
            measures = tuple(Measure(**row) for row in body.pop("measures"))
            found = cls(measures=measures, **body)
            for name in ("weights", "data", "config", "details", "environment", "kind", "made"):
                kind = str if name in ("kind", "made") else dict
                if not isinstance(getattr(found, name), kind):
                    raise ValueError(f"its {name} is not a {'text' if kind is str else 'table'}")
            return found
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (RecursionError, KeyError, ValueError, TypeError, AttributeError, VitrailError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else describe_error(error)
            why = "it is nested too deeply" if isinstance(error, RecursionError) else why
            raise DataError(f"{path} is not a vitrail result: {why}") from None


def describe_weights(name: str, network: "Backbone") -> dict[str, Any]:
    """The name, hash, kind and size of a network, and its provenance."""
    from vitrail.checkpoint.bundle import get_card
    from vitrail.data.training_record import shorten_provenance
    from vitrail.evaluation.frozen.features import hash_network

    config = network.config
    return {
        "name": name,
        "hash": hash_network(network),
        "network": type(config).__name__.removesuffix("Config"),
        "image": list(config.image),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "provenance": shorten_provenance(get_card(network).provenance),
    }


def describe_data(
    name: str, split: str, source: "ImageDataset", *, deduplicated: bool | None, selection: "Selection | None" = None
) -> dict[str, Any]:
    """The images of a split. `deduplicated` is whether copies of them were excluded from training, None if unknown;
    `selection` is what excluded them."""
    return {
        "name": name,
        "split": split,
        "pictures": len(source),
        "fingerprint": source.fingerprint,
        "deduplicated": deduplicated,
        **({} if selection is None else {"deduplicated_by": selection.hash, "method": selection.rule.get("method")}),
    }


def check_deduplication(
    source: "ImageDataset", selection: "Selection | None", provenance: Mapping[str, Any]
) -> bool | None:
    """Whether copies of these images were excluded from training (4.1): by a selection of `vitrail data dedup` made
    against them, else as the weights record, else None (unknown)."""
    if selection is None:
        return read_deduplication(provenance, source.fingerprint)
    against = selection.rule.get("against")
    if selection.rule.get("name") != "dedup" or not isinstance(against, dict):
        name = selection.rule.get("name", "")
        raise DataError(f"the selection {name!r} is not from `vitrail data dedup`; give its drop.json")
    known: dict[str, str] = against
    if source.fingerprint not in known.values():
        others = ", ".join(known) or "nothing but the training set itself"
        these = f"these images (fingerprint {source.fingerprint[:12]}); run `vitrail data dedup` against them"
        raise DataError(f"that selection was made against {others}, but not against {these}")
    from vitrail.data.training_record import list_records

    _, records = next(list_records(provenance))
    recorded = {str(record.get("selection", {}).get("without", "")) for record in records}
    if recorded and selection.hash not in recorded:
        given, remedy = selection.hash[:12], "train with --set data.without=FILE, or drop --deduplicated-by"
        raise DataError(f"the weights record that this selection ({given}) was not excluded in training; {remedy}")
    return True


def read_deduplication(provenance: Mapping[str, Any], fingerprint: str) -> bool | None:
    """Whether weights record that copies of the images with this fingerprint were excluded from their training, and
    from that of the weights they started from; None if unknown."""
    recorded = provenance.get("deduplicated")
    if not isinstance(recorded, dict):
        return recorded if isinstance(recorded, bool) else None
    against: dict[str, str] = cast("dict[str, Any]", recorded).get("against", {})
    if fingerprint not in against.values():
        return None
    before: Mapping[str, Any] | None = provenance.get("from")
    return True if before is None else read_deduplication(before, fingerprint)


def format_value(measure: Measure) -> str:
    """A value as tables show it: 70.10%, 1.234, 5,717,416."""
    return format_number(measure.value, measure.unit)


def format_interval(measure: Measure) -> str:
    """The interval without the unit: 67.19–72.86; empty if there is none."""
    if measure.low is None or measure.high is None:
        return ""
    low, high = (format_number(value, measure.unit).removesuffix("%") for value in (measure.low, measure.high))
    return f"{low}–{high}"


def format_number(value: float, unit: Unit) -> str:
    if unit == "number":
        return f"{value:,.4g}" if abs(value) >= 1000 else f"{value:.4f}"
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    return {"share": "{:.2%}", "count": "{:,.0f}", "img/s": "{:,.1f}", "ms": "{:,.2f}"}[unit].format(value)


GIT_SECONDS: Final = 5.0


def describe_environment() -> dict[str, Any]:
    """Versions, machine, devices and commit, as plain data."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    other = "mps" if torch.backends.mps.is_available() else "cpu"
    versions = {"vitrail": __version__, "python": platform.python_version(), "torch": torch.__version__}
    machine = {"platform": platform.platform(), "host": socket.gethostname(), "cpus": os.cpu_count()}
    names = [torch.cuda.get_device_name(number) for number in range(devices)] or [other]
    tree = describe_working_tree(Path.cwd())
    return {**versions, "cuda": torch.version.cuda, **machine, "devices": names, "git": tree}


def describe_working_tree(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder and whether it has changes; None without git, or if git does not answer."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = commit and _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)} if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git without locks, so that reading does not modify the tree; None if it fails."""
    try:
        command, environment = ["git", "-C", str(folder), *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        options: dict[str, Any] = {"text": True, "errors": "replace", "stdin": subprocess.DEVNULL, "env": environment}
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""A result as a file: what was measured, of which weights, on which pictures, how, on what, and when.

    result = Result(kind="evaluate", weights=weights_facts("w.safetensors", model), data=..., measures=(...,))
    result.write(Path("result.json"))

Whoever finds such a file can tell whether two numbers may stand in one table: `vitrail compare` lays them there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from vitrail.core.errors import DataError, unknown
from vitrail.core.storage import replacing
from vitrail.data.source import Source
from vitrail.evaluation.environment import environment
from vitrail.evaluation.identity import network_hash

FORMAT: Final = "vitrail result 1"
Unit: TypeAlias = Literal["share", "img/s", "ms", "bytes", "count", "number"]  # a share is shown as a percentage


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One number with its interval, where there is one, and how many samples it is of."""

    name: str  # "top-1", "5-shot", "Natural"
    value: float
    low: float | None = None
    high: float | None = None
    count: int | None = None
    unit: Unit = "share"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise unknown("unit", self.unit, get_args(Unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Plain data throughout. `details` are for a reader who wants more: per class, per seed, curves."""

    kind: str  # the command: evaluate, fewshot, probe, knn, vtab, cost
    weights: Mapping[str, Any]
    data: Mapping[str, Any]
    measures: tuple[Measure, ...]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=environment)
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        body = {"format": FORMAT, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(body, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Result":
        """What `write` wrote."""
        try:
            body = json.loads(path.read_text("utf-8"))
            if body.pop("format") != FORMAT:
                raise ValueError("another format")
            measures = tuple(Measure(**row) for row in body.pop("measures"))
            return cls(measures=measures, **body)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no result of vitrail: {error}") from None


def weights_facts(name: str, network: torch.nn.Module) -> dict[str, Any]:
    """Of the network: what it was called, its hash, its kind and size, and what its card says of its making."""
    config: Any = network.config
    card: Any = network.card
    return {
        "name": name,
        "hash": network_hash(network),
        "network": type(config).__name__.removesuffix("Config"),
        "image": list(config.image),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "provenance": card.provenance if card is not None else {},
    }


def data_facts(name: str, split: str, source: Source, *, deduplicated: bool | None) -> dict[str, Any]:
    """Of the pictures. `deduplicated` is whether copies of them were taken out of what the network was trained on:
    none where nobody knows."""
    return {
        "name": name,
        "split": split,
        "pictures": len(source),
        "fingerprint": source.fingerprint,
        "deduplicated": deduplicated,
    }

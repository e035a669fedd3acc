"""What a foreign format cannot hold: a JSON file beside the weights, tied to them by checksum."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from vitrail.checkpoint.bundle import Card, describe, described
from vitrail.core.errors import ConfigError, CorruptWeights, WeightsError, reason_of
from vitrail.models.family import ModelConfig


def sidecar_of(weights: Path) -> Path:
    return weights.with_name(weights.name + ".vitrail.json")


def write_sidecar(weights: Path, config: ModelConfig, card: Card, unheld: list[str]) -> Path:
    """Config and card in full, the fields that made it necessary, and the checksum of the file they belong to."""
    path = sidecar_of(weights)
    data = {"format": 1, "weights": file_digest(weights), "unheld": unheld, **describe(config, card)}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return path


def read_sidecar(weights: Path) -> tuple[ModelConfig, Card] | None:
    """The sidecar's word on a weight file, or None where there is none; one that belongs to another file is refused."""
    path = sidecar_of(weights)
    if not path.is_file():
        return None
    data = read_json(path)
    if data.get("weights") != file_digest(weights):
        raise CorruptWeights(f"{path}: belongs to another version of {weights.name}; remove it or restore the weights")
    if data.get("format") != 1:
        raise WeightsError(f"{path}: written by a newer vitrail (format {data.get('format')!r}); upgrade vitrail")
    try:
        return described(data)
    except ConfigError as error:
        raise CorruptWeights(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small text file."""
    try:
        if path.stat().st_size > 64 * 2**20:
            raise CorruptWeights(f"{path}: {path.stat().st_size} bytes are too many for a description")
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptWeights(f"{path}: cannot be read as JSON ({reason_of(error)})") from None
    if not isinstance(data, dict):
        raise CorruptWeights(f"{path}: expected a JSON object")
    return cast(dict[str, Any], data)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

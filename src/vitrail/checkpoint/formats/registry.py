"""All foreign formats, and how files are recognised."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from vitrail.checkpoint import formats
from vitrail.checkpoint.formats.format import Format, Settings
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.checkpoint.formats.unsupported_families import refuse_unsupported
from vitrail.core.errors import ExportRefused, MismatchedWeights, unknown_name
from vitrail.models.family import ModelConfig


def _collect() -> Iterator[Format]:
    for module in pkgutil.walk_packages(formats.__path__, f"{formats.__name__}."):
        if module.name != __name__:
            yield from getattr(importlib.import_module(module.name), "FORMATS", ())


FORMATS: dict[str, Format] = {row.name: row for row in sorted(_collect(), key=lambda row: (row.order, row.name))}
SHORT = {"hf": "huggingface", "google": "npz", "bit": "npz-bit"}


def find_format(name: str, config: ModelConfig | None = None) -> Format:
    """A format by name. The name of a library selects the one of its formats that claims the network."""
    name = SHORT.get(name, name)
    rows = [row for row in FORMATS.values() if row.library == name]
    if name not in FORMATS and not rows:
        raise unknown_name("weight format", name, ["vitrail", *FORMATS, *SHORT])
    claimed = [row for row in rows if config is not None and row.claims(config)]
    return claimed[0] if claimed else FORMATS.get(name) or rows[-1]


def format_of(known: Format, config: ModelConfig) -> Format:
    """The format of a recognised file whose config is known: tensor names alone may fit several of a library."""
    try:
        known.table(config)
    except ExportRefused:
        return find_format(known.library, config)
    return known


def recognise(path: Path, tensors: Tensors, settings: Settings = None) -> tuple[Format, Tensors]:
    """The format with these tensor names, and the tensors under that format's current names. A config.json of
    transformers rules out other libraries, since its models may name tensors like timm's."""
    refuse_unsupported(path, tensors, settings)
    stated = {name: (settings or {}).get(name) for name in ("model_type", "architecture")}
    for name, value in stated.items():
        if value is not None and not isinstance(value, str):
            raise MismatchedWeights(f"{path}: config.json says {name}={value!r}, expected a name")
    for known in FORMATS.values():
        if stated["model_type"] and not stated["architecture"] and known.library != "huggingface":
            continue
        modern = known.modern(tensors, settings)
        if known.recognises(set(modern), settings):
            return known, modern
    kind = next((f" of {name} {value!r}" for name, value in stated.items() if value), "")
    named = f"tensors like {', '.join(list(tensors)[:3])}{kind}"
    raise MismatchedWeights(f"{path}: {named} match no format that vitrail knows")

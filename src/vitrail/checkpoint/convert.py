"""`convert`: converts weights from any format to any other, tensor by tensor, with a parity report on the result."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from vitrail.checkpoint.bundle import Bundle, rename_classes, sidecar_path, write_sidecar
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.format import Format
from vitrail.checkpoint.formats.huggingface import folder as huggingface
from vitrail.checkpoint.formats.key_table import Tensors, export_tensors
from vitrail.checkpoint.formats.registry import find_format
from vitrail.checkpoint.formats.timm import vit as timm
from vitrail.checkpoint.parity_check import ParityReport, check_parity
from vitrail.checkpoint.weights import write_bundle
from vitrail.core.errors import ConfigError, ExportRefused, WeightsError
from vitrail.data.training_record import list_records
from vitrail.models.family import ModelConfig

OWN = "vitrail"
FILE_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion wrote, what the format could not hold, and the parity report."""

    source: Path
    target: Path
    format: str
    config: ModelConfig
    sidecar: Path | None
    lost_fields: list[str]
    parity: ParityReport
    inferred: str | None = None  # what the source did not state, and how it was read


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    unofficial: bool = False,
    name: Callable[[Bundle], Sequence[str] | None] | None = None,
    **facts: Any,
) -> Conversion:
    """Reads weights in any format and writes them in another. `to` is needed if the target's name does not imply a
    format. `dtype` converts the numbers: a float16 file is half as long. `name` gives new class names; None keeps the
    old.

    A `.npz` is in Google's layout, a `.safetensors` our own, a folder Hugging Face's. `to="timm"` or `"torchvision"`
    with `.safetensors` or `.pth` writes their state dict, and `to="timm"` with a folder writes one that timm's hub code
    reads. `unofficial` writes a `.npz` even if Google's own code would read it as another network.
    """
    bundle = read_bundle(source, **facts)
    if dtype is not None:
        bundle = replace(bundle, tensors={name: tensor.to(dtype) for name, tensor in bundle.tensors.items()})
    names = None if name is None else name(bundle)
    if names is not None:
        bundle = rename_classes(bundle, names)
    return export(bundle, Path(target), to, source=Path(source), unofficial=unofficial)


def export(
    bundle: Bundle, target: Path, to: str | None = None, *, source: Path = Path(), unofficial: bool = False
) -> Conversion:
    """Writes a bundle, reads it back, and compares the two with each other and, if it is installed, with the other
    library."""
    name = format_for(target, to)
    if not target.parent.is_dir():
        raise WeightsError(f"{target}: the folder {target.parent} does not exist; make it first")
    sidecar, lost_fields = None, list[str]()
    if name == OWN:
        write_bundle(bundle, target)
    else:
        known = find_format(name, bundle.config)
        name = known.name
        if not unofficial:
            known.refuse_unreadable(bundle.config)
        sidecar, lost_fields = _write_foreign(bundle, target, known)
    parity, inferred = check_parity(bundle, read_bundle(target), name, target), bundle.card.provenance.get("inferred")
    return Conversion(source, target, name, bundle.config, sidecar, lost_fields, parity, inferred)


def format_for(target: Path, to: str | None) -> str:
    """The format that a target's name implies, checked against `to`."""
    suffix = target.suffix
    if to is None:
        formats = {".safetensors": OWN, ".npz": "npz", "": huggingface.NAME}
        if suffix not in formats:
            raise ConfigError(f"{target}: {suffix} does not determine a format; add --to timm or --to torchvision")
        return formats[suffix]
    files = (".safetensors", ".pth", ".bin")
    known = OWN if to == OWN else find_format(to).library
    special = {OWN: files[:1], huggingface.NAME: ("",), timm.NAME: ("", *files)}
    allowed = (".npz",) if known.startswith("npz") else special.get(known, files)
    if to != OWN and suffix not in FILE_SUFFIXES:
        suffix = ""  # a folder may be called vit-1.0
    if suffix not in allowed:
        named = ", ".join(repr(a) if a else "a folder" for a in allowed)
        raise ConfigError(f"{target}: format {to!r} goes into {named}")
    return to


def _write_foreign(bundle: Bundle, target: Path, known: Format) -> tuple[Path | None, list[str]]:
    """Writes tensors, the format's own config files, and a sidecar for what neither holds, atomically."""
    tensors = known.finish(export_tensors(known.table(bundle.config), bundle.tensors), bundle.config)
    folder = target.suffix not in FILE_SUFFIXES
    if target.exists() and folder != target.is_dir():
        found, wanted = ("file", "folder") if folder else ("folder", "file")
        raise ExportRefused(f"{target}: is a {found}; this format is written as a {wanted}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        draft = Path(scratch) / target.name
        weights = draft
        if folder:
            draft.mkdir()
            weights = draft / "model.safetensors"
            _write_settings(bundle, draft, known)
        _write_tensors(tensors, weights)
        lost_fields = _find_lost_fields(bundle, draft)
        final = target / weights.name if folder else target
        if lost_fields:
            write_sidecar(weights, bundle.config, bundle.card, lost_fields)
        sidecar_path(final).unlink(missing_ok=True)
        if folder:
            target.mkdir(exist_ok=True)
        for file in sorted(draft.iterdir()) if folder else (draft, sidecar_path(draft)):
            if file.exists():
                shutil.move(file, (target if folder else target.parent) / file.name)
    return (sidecar_path(final) if lost_fields else None), lost_fields


def _write_tensors(tensors: Tensors, path: Path) -> None:
    try:
        if path.suffix == ".npz":  # numpy has no bfloat16; float32 holds the same numbers
            plain = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in plain.items()}
            np.savez(path, **arrays)
        elif path.suffix == ".safetensors":
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(tensors, path)
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be written ({error.strerror or error})") from None


def _write_settings(bundle: Bundle, folder: Path, known: Format) -> None:
    card, dtype = bundle.card, str(next(iter(bundle.tensors.values())).dtype).removeprefix("torch.")
    files: dict[str, Any] = {}
    assert known.settings is not None, known
    network = known.settings(bundle.config)
    if known.library == huggingface.NAME:
        files["config.json"] = huggingface.build_settings(network, bundle.config, card.labels, dtype, card.multi_label)
        files["preprocessor_config.json"] = huggingface.build_preprocessor(card.preprocessing, network)
    else:
        files["config.json"] = timm.build_settings(network, bundle.config, card.preprocessing, card.labels)
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _find_lost_fields(bundle: Bundle, draft: Path) -> list[str]:
    """Fields that a reader of the bare format gets wrong, or needs as an argument (a non-square grid, heads)."""
    mine = bundle.config
    for given in ((), ("image",), ("heads",), ("image", "heads"), ("heads", "rotary")):
        try:
            seen = read_bundle(draft, **{name: getattr(mine, name) for name in given if hasattr(mine, name)})
        except WeightsError:
            continue
        theirs, names = seen.config, [f.name for f in fields(mine)]
        out = [n for n in names if n in given or getattr(mine, n) != getattr(theirs, n, None)]
        card_fields = ("preprocessing", "multi_label", "task", "labels")
        out += [name for name in card_fields if getattr(bundle.card, name) != getattr(seen.card, name)]
        recorded = any(records for _, records in list_records(bundle.card.provenance))
        return out + (["training images"] if recorded else [])
    return [f.name for f in fields(mine) if getattr(mine, f.name) != f.default]

"""Finds weights by a path, the folder of a run, the name of bundled weights, or public weights as NAME:TAG.

A file is recognised by its content: one of our own, or a foreign file or folder in any format of the registry.
"""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from vitrail.checkpoint import download_weights as hub
from vitrail.checkpoint import known_weights as registry
from vitrail.checkpoint.bundle import (
    CLASSIFICATION,
    PANOPTIC,
    Bundle,
    Card,
    name_imagenet,
    parse_description,
    read_json,
    read_sidecar,
)
from vitrail.checkpoint.files.read_weights import RawWeights, read_weights
from vitrail.checkpoint.formats.format import Format
from vitrail.checkpoint.formats.huggingface import folder as huggingface
from vitrail.checkpoint.formats.key_table import Tensors, TensorShapes, copy, expected_shapes, import_tensors
from vitrail.checkpoint.formats.registry import find_format, format_of, recognise
from vitrail.checkpoint.formats.timm import vit as timm
from vitrail.checkpoint.known_weights import BUNDLED, bundled_file, is_bundled
from vitrail.core.atomic_files import similar_paths
from vitrail.core.errors import ConfigError, ExportRefused, MismatchedWeights, WeightsNotFound, unknown_name
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import FAMILIES, ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, adapt_config, hybrid_backbone, resolve_name, slug

INDEX = "model.safetensors.index.json"  # for weights in several files
# The last two are a run's: its folder stands for its best weights, or the last.
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin", "model.npz", "best.safetensors", "last.safetensors")


def read_bundle(path: str | Path, settings: dict[str, Any] | None = None, **facts: Any) -> Bundle:
    """Reads config, tensors and card of any weights, by path or by the name of bundled weights. `settings` replace the
    config.json of a file without one, and `facts` override config fields."""
    path = bundled_file(str(path)) if is_bundled(path) else Path(path)
    known = sorted({field.name for config in FAMILIES.values() for field in fields(config)})
    for name in facts:
        if name not in known:
            raise unknown_name("config field", name, known)
    folder = path if path.is_dir() else None
    if folder is not None:
        path = next((folder / name for name in (*FOLDER_FILES, INDEX) if (folder / name).is_file()), folder)
        if path == folder:
            names = ", ".join(FOLDER_FILES)
            raise MismatchedWeights(f"{folder}: no weight file in this folder; expected one of {names}")
        settings = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    raw = read_weights(path) if path.name != INDEX else _read_pieces(path)
    try:
        if raw.description is not None:
            config, card = parse_description(raw.description)
            config = adapt_config(config, **facts)
            table = [copy(name, name) for name in expected_shapes(raw.path, config, raw.tensors)]
            return Bundle(config=config, tensors=import_tensors(raw.path, config, table, raw.tensors), card=card)
        return _foreign(raw, settings, folder, facts)
    except (ConfigError, ExportRefused) as error:
        raise MismatchedWeights(f"{path}: {error}") from None


def _read_pieces(index: Path) -> RawWeights:
    """Reads weights in several files next to an index, which says which tensor is in which file."""
    listed: Any = read_json(index).get("weight_map")
    places = cast(dict[str, Any], listed) if isinstance(listed, dict) else {}
    files = sorted({str(file) for file in places.values()})
    if not files or not all(re.fullmatch(r"[\w.-]+\.safetensors", file) for file in files):
        raise MismatchedWeights(f"{index}: lists no .safetensors files of this folder")
    tensors: Tensors = {}
    for file in files:
        piece = read_weights(index.parent / file).tensors
        tensors |= {name: tensor for name, tensor in piece.items() if places.get(name) == file}
    if left := places.keys() - tensors.keys():
        raise MismatchedWeights(f"{index}: tensor {min(left)!r} is in none of its files; the folder is not whole")
    return RawWeights(path=index, container="safetensors", tensors=tensors)


def _foreign(raw: RawWeights, settings: dict[str, Any] | None, folder: Path | None, facts: dict[str, Any]) -> Bundle:
    known, tensors = recognise(raw.path, raw.tensors, settings)
    inferred = None
    if sidecar := read_sidecar(raw.path):
        config, card = sidecar
        known = format_of(known, config)
        tensors = known.modern(raw.tensors, settings)
    else:
        config = known.infer(TensorShapes(path=raw.path, tensors=tensors, settings=settings, facts=facts))
        card = name_imagenet(_card(known, config, settings, folder), config.classes)
        inferred = known.describe_inferred(config)
    config = adapt_config(config, **facts)
    ours = import_tensors(raw.path, config, known.table(config), tensors)
    provenance = {**card.provenance, "imported_from": known.name, "file": raw.path.name}
    provenance |= {"inferred": inferred} if inferred else {}
    return Bundle(config=config, tensors=ours, card=replace(card, provenance=provenance))


def _card(known: Format, config: ModelConfig, settings: dict[str, Any] | None, folder: Path | None) -> Card:
    """Preprocessing and classes as the folder states them, or the format's defaults."""
    task = PANOPTIC if config.has_queries else CLASSIFICATION
    card = Card(preprocessing=known.preprocessing(config), task=task)
    if settings is None or folder is None:
        return card
    labels = huggingface.read_labels(settings, config.classes) or timm.read_labels(settings, config.classes)
    prepared = timm.read_preprocessing(settings, config.image)
    if known.library == huggingface.NAME and (said := _read_processor(folder)) is not None:
        prepared = huggingface.read_preprocessor(said, config.image, config.size_step)
    several = settings.get("problem_type") == huggingface.MULTI_LABEL and bool(config.classes)
    return replace(card, preprocessing=prepared or card.preprocessing, labels=labels, multi_label=several)


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """The image preprocessing of a Hugging Face folder: a file of its own, or a part of a file that covers text,
    too."""
    alone, both = folder / "preprocessor_config.json", folder / "processor_config.json"
    if alone.is_file() or not both.is_file():
        return read_json(alone) if alone.is_file() else None
    inner: Any = read_json(both).get("image_processor")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else None


def find_weights(text: str | Path, **facts: Any) -> Bundle:
    """Reads weights by path, those of a run by its folder, bundled ones by name, or public ones as NAME:TAG. `facts`
    override config fields of the file."""
    if is_bundled(text) or Path(text).exists():
        return read_bundle(text, **facts)
    name, _, tag = str(text).partition(":")
    if not tag:
        near, bundled = similar_paths(str(text), *BUNDLED), ", ".join(BUNDLED)
        fault = f"{text}: no such weight file or folder; {near}public weights are written NAME:TAG"
        raise WeightsNotFound(f"{fault}, and {bundled} comes with vitrail")
    return load_public(name, tag, **facts)


def load_public(name: str, tag: str, **facts: Any) -> Bundle:
    """Public weights as a bundle, with the numerics they were trained in and the preprocessing they expect."""
    entry = registry.find_public_weights(slug(resolve_name(name)), tag)
    path = hub.fetch(hub.apply_pin(entry))
    bundle = read_bundle(path, known_settings(entry), **{**trained_numerics(entry), **facts})
    resize = None if entry.crop is None else max(round(entry.image / entry.crop), entry.image)
    look: Any = {"mean": entry.mean, "std": entry.std, "interpolation": entry.interpolation, "resize": resize}
    preprocessing = Preprocessing(image=(entry.image, entry.image), **look)
    card = Card(preprocessing=preprocessing, provenance={"weights": entry.repo, "tag": tag})
    return name_licence(replace(bundle, card=name_imagenet(card, bundle.config.classes)), entry)


def name_licence(bundle: Bundle, entry: registry.PublicWeights) -> Bundle:
    """Adds the licence to the bundle's card, and the terms, if there are any, which are also printed to stderr."""
    if entry.access != "open":
        hub.write_line(f"warning: {entry.name} is {entry.access} ({entry.licence}): {entry.terms}")
    licence = {"licence": entry.licence, **({"terms": entry.terms} if entry.terms else {})}
    return replace(bundle, card=replace(bundle.card, provenance=bundle.card.provenance | licence))


def known_settings(entry: registry.PublicWeights) -> dict[str, Any] | None:
    """The config.json that files in the format of transformers require, from the facts in the table."""
    build = None if entry.repo.startswith("timm/") else find_format("huggingface", entry.config).settings
    return None if build is None else build(entry.config)


def trained_numerics(entry: registry.PublicWeights) -> dict[str, Any]:
    """The numerics that the tensors do not show. timm's names hide that Google's hybrids standardise weights in their
    own way, and that what timm stores as CLIP's head is a projection."""
    config, numerics = ZOO[entry.network], dict(entry.numerics)
    shows_size = isinstance(config, ViTConfig) and (config.position != "none" or config.position_bias != "none")
    numerics |= {} if shows_size else {"image": (entry.image, entry.image)}
    numerics |= {"classes": 0} if numerics.get("projection") else {}
    if isinstance(config, ViTConfig) and config.backbone is not None:
        numerics["backbone"] = hybrid_backbone(config.backbone.blocks)
    return numerics

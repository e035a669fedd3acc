"""Weights by every name that they have: a path, a run's folder, the name of bundled ones, or NAME:TAG."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.bundle import Bundle, Card, name_imagenet
from vitrail.checkpoint.bundled_weights import SHIPPED, is_shipped
from vitrail.checkpoint.import_weights import read_bundle
from vitrail.checkpoint.public import download_weights as hub
from vitrail.checkpoint.public import registry
from vitrail.checkpoint.public.download_weights import apply_pin
from vitrail.core.atomic_files import similar_paths
from vitrail.core.errors import WeightsNotFound
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.zoo import backbone, model_config, resolve, slug


def find_weights(text: str | Path, **facts: Any) -> Bundle:
    """Weights by path, those of a run by its folder, those that come with the package by name, or public ones as
    NAME:TAG; `facts` are config fields that the caller knows better than the file."""
    if is_shipped(text) or Path(text).exists():
        return read_bundle(text, **facts)
    name, _, tag = str(text).partition(":")
    if not tag:
        raise WeightsNotFound(
            f"{text}: no such weight file or folder; {similar_paths(str(text), *SHIPPED)}public weights are written "
            f"NAME:TAG, and {', '.join(SHIPPED)} comes with vitrail"
        )
    return public(name, tag, **facts)


def public(name: str, tag: str, **facts: Any) -> Bundle:
    """Public weights as a bundle, with the numerics they were trained in and the preprocessing they expect."""
    entry = registry.find(slug(resolve(name)), tag)
    bundle = read_bundle(hub.fetch(apply_pin(entry)), **{**_trained_numerics(entry, name), **facts})
    card = Card(preprocessing=_preprocessing(entry), provenance={"weights": f"{entry.repo}", "tag": tag})
    return replace(bundle, card=name_imagenet(card, bundle.config.classes))


def _trained_numerics(entry: registry.PublicWeights, name: str) -> dict[str, Any]:
    """Google's weights were trained with the tanh GELU and their own standardisation; timm's names hide that."""
    if entry.origin == "google-bit":
        return {"standardisation_eps": 1e-10, "image": (entry.image, entry.image)}
    if entry.origin != "google-vit":
        return {}
    config: Any = model_config(name)
    if config.backbone is None:
        return {"gelu": "tanh"}
    return {"gelu": "tanh", "backbone": backbone(config.backbone.blocks)}


def _preprocessing(entry: registry.PublicWeights) -> Preprocessing:
    half = entry.normalisation == "half"
    return Preprocessing(
        image=(entry.image, entry.image),
        resize=max(round(entry.image / entry.crop), entry.image),
        interpolation=entry.interpolation,
        mean=HALF if half else IMAGENET_MEAN,
        std=HALF if half else IMAGENET_STD,
    )

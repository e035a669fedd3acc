"""`create_model`: a network by name, fresh or with public weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.naming import name_imagenet
from vitrail.checkpoint.public import hub, registry
from vitrail.checkpoint.public.pins import pinned
from vitrail.checkpoint.shipped import SHIPPED, is_shipped
from vitrail.checkpoint.source import read_bundle
from vitrail.checkpoint.weights import fresh, network, operate
from vitrail.core.errors import ConfigError, WeightsNotFound
from vitrail.core.shapes import Pair
from vitrail.core.storage import similar_paths
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.build import Model
from vitrail.models.resize import Numerics
from vitrail.models.timm_names import find_timm_name, translate_keywords
from vitrail.models.zoo import backbone, model_config, resolve, slug


def create_model(
    name: str,
    pretrained: bool = False,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    weights: str | None = None,
    numerics: Numerics = "reference",
    **replacements: Any,
) -> Model:
    """A network by the paper's notation ("ViT-B/16") or slug ("vit_b_16"); timm's names and keywords are understood,
    too ("vit_base_patch16_224.augreg_in21k", `num_classes`, `img_size`, `pretrained=True`).

    Without `weights` it is fresh, initialised as in the reference, with 1000 classes unless said otherwise, and in
    training mode, as torch's modules are. With the tag of public weights they are downloaded into the cache; `classes`,
    `image_size` and the mode are as in `load`.
    Any other keyword replaces a config field.
    """
    own = {"classes": classes, "image_size": image_size}
    replacements = translate_keywords({**{name: value for name, value in own.items() if value}, **replacements})
    classes, image_size = replacements.pop("classes", classes), replacements.pop("image_size", image_size)
    if (theirs := find_timm_name(name)) is not None:
        name, image_size = theirs.name, image_size or theirs.image
        weights = weights or (theirs.tag if pretrained else None)
    if pretrained and not weights:
        known = ", ".join(registry.tags(slug(resolve(name)))) or "none is public"
        raise ConfigError(f"pretrained=True does not say which weights of {name}; give weights=TAG, one of: {known}")
    if weights is None:
        return fresh(model_config(name, classes=classes, image_size=image_size, **replacements))
    return network(operate(public(name, weights, **replacements), classes, image_size, numerics)).train(bool(classes))


def find_weights(text: str | Path) -> Bundle:
    """Weights by path, those of a run by its folder, those that come with the package by name, or public ones as
    NAME:TAG."""
    if is_shipped(text) or Path(text).exists():
        return read_bundle(text)
    name, _, tag = str(text).partition(":")
    if not tag:
        raise WeightsNotFound(
            f"{text}: no such weight file or folder; {similar_paths(str(text), *SHIPPED)}public weights are written "
            f"NAME:TAG, and {', '.join(SHIPPED)} comes with vitrail"
        )
    return public(name, tag)


def public(name: str, tag: str, **facts: Any) -> Bundle:
    """Public weights as a bundle, with the numerics they were trained in and the preprocessing they expect."""
    entry = registry.find(slug(resolve(name)), tag)
    bundle = read_bundle(hub.fetch(pinned(entry)), **{**_trained_numerics(entry, name), **facts})
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

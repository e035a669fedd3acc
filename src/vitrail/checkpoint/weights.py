"""`load`, `save` and `create_model`: a network from any weights, to one self-describing file, or by name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from vitrail.checkpoint import known_weights as registry
from vitrail.checkpoint.bundle import PANOPTIC, Bundle, Card, describe, get_card
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.find_weights import find_weights, load_public
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.backbone import unwrap_backbone
from vitrail.models.build import Model, build, build_from, network_class, tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryConfig, query_config
from vitrail.models.vit_config import Numerics
from vitrail.models.zoo import (
    adapt_config,
    create_config,
    find_timm_name,
    network_name,
    resolve_name,
    slug,
    translate_sizes,
)

HEADS: Final = ("linear", "patches", "eomt", "pmt")  # kinds of new heads
# Encoder fields that change training only, or only what comes after the last block.
FREE: Final = ("dropout", "attention_dropout", "stochastic_depth", "pool", "norm_after_pool", "head", "classes")


def load(
    weights: str | Path,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    patch: int | Pair | None = None,
    channels: int | None = None,
    numerics: Numerics | None = None,
    dtype: torch.dtype = torch.float32,
    **facts: Any,
) -> Model:
    """The network of any weights that vitrail reads: a file in any format, a folder with one, a run's folder (its best
    weights, or its last), public weights as NAME:TAG ("ViT-B/16:augreg_in21k", downloaded into the cache), or the name
    of bundled ones ("vitrail-cifar10"). What cannot be found raises WeightsNotFound.

    The network is in evaluation mode, or in training mode if `classes` gives it an untrained head. (Lightning and
    custom loops train a network in the mode it is in.)

    `classes` and `image_size` are the fine-tuning surgery of 3.2: the whole head is replaced by one linear layer
    initialised to zero, and positions are resampled to the new grid in the given numerics. With `head="patches"` that
    layer reads every patch and the network returns logits per pixel; weights with such a head get a new one of the same
    kind, unless `head="linear"` is given. With `head="eomt"` or "pmt", the network gets a fresh head of queries that
    predict classes and masks; weights that already have queries keep them, and only their class layer is new.

    `patch` sets another patch size at the same image size, which it must divide: kernels are resized by the
    pseudo-inverse of the resize of patches, positions to the new grid (FlexiViT). Load the original each time, because
    every further resize loses detail. `channels` sets another number of channels: a single one takes the sum of the
    kernels, more take them in turn, scaled; preprocessing is adapted.

    Any other keyword replaces a config field: one that a bare state dict does not state (`heads=12`), or one that
    training needs (`dropout=0.1`).
    """
    kind = pop_head_kind(classes, facts)
    bundle = find_weights(weights, **facts)
    bundle = replace_head_and_resize(bundle, classes, image_size, numerics, kind=kind, patch=patch, channels=channels)
    return build_network(bundle, dtype).train(bool(classes))


def build_network(bundle: Bundle, dtype: torch.dtype = torch.float32) -> Model:
    """Builds the module around a bundle's tensors, in evaluation mode. Tensors of the right type are not copied."""
    model = build_from(bundle.config, {name: tensor.to(dtype) for name, tensor in bundle.tensors.items()})
    model.card = bundle.card
    return model.eval()


def replace_head_and_resize(
    bundle: Bundle,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    numerics: Numerics | None = None,
    *,
    kind: str | None = None,
    patch: int | Pair | None = None,
    channels: int | None = None,
) -> Bundle:
    """Fine-tuning surgery (3.2) on a bundle. Positions and patches are resampled in float32 at least. With `classes` it
    gets a new head initialised to zero: a linear layer on the image (`kind="linear"`) or on its patches ("patches"), by
    default on what the old head read. With `kind` "eomt" or "pmt" it becomes a network with queries, whose head is
    drawn from a fixed seed. A network that has queries gets a new class layer, unless `kind` says otherwise."""
    asked: dict[str, Any] = {"image_size": image_size, "patch": patch, "channels": channels}
    if sizes := {name: value for name, value in asked.items() if value is not None}:
        if patch is not None and not hasattr(bundle.config, "patch"):
            raise ConfigError(f"patch={patch}: {network_name(bundle.config)} has no patches")
        config = adapt_config(bundle.config, **sizes)
        half = (torch.float16, torch.bfloat16)
        exact = {name: t.float() if t.dtype in half else t for name, t in bundle.tensors.items()}
        tensors = network_class(bundle.config).resize_tensors(exact, bundle.config, config, numerics)
        card = bundle.card.adapt_channels(config.channels)
        bundle = Bundle(config=config, tensors=tensors, card=card if image_size is None else card.resize(config.image))
    if classes is None:
        return bundle
    kind = kind or (bundle.config.family if bundle.config.has_queries else None)
    if kind == "eomt" or kind == "pmt":
        wanted = query_config(bundle.config, kind, classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            fresh = build(wanted).state_dict()
        return graft_encoder(bundle, wanted, fresh)
    old = bundle.config.encoder or bundle.config
    on_patches = old.has_patch_head if kind is None else kind == "patches"
    config = adapt_config(old, **(old.patch_head(classes) if on_patches else old.linear_head(classes)))
    shapes, like = tensor_shapes(config), next(iter(bundle.tensors.values()))
    new = {name: like.new_zeros(shape) for name, shape in shapes.items() if name.startswith("head.")}
    tensors = {name: tensor for name, tensor in bundle.tensors.items() if name in shapes} | new
    card = bundle.card.without_labels(keep_task=old.has_patch_head and config.has_patch_head)
    return Bundle(config=config, tensors=tensors, card=card)


def graft_encoder(bundle: Bundle, config: ModelConfig, fresh: Mapping[str, Tensor]) -> Bundle:
    """Puts the weights of a ViT into a network with queries: all tensors that both have outside the head and, if the
    bundle has queries of the same kind, those of the head except the class layer. Missing tensors come from `fresh`, a
    network of that config; a class layer that replaces another is zero (3.2). ConfigError if the encoder would compute
    something else with these tensors."""
    check_encoder(bundle.config, config)
    like, old = next(iter(bundle.tensors.values())), bundle.config
    same = old.family == config.family
    last = tuple(f"{name}." for name in config.last_layers)
    tensors: Tensors = {}
    for name, new in fresh.items():
        known = bundle.tensors.get(name)
        kept = (same or not name.startswith("head.")) and not name.startswith(last)
        if known is not None and kept and known.shape == new.shape:
            tensors[name] = known
        elif known is not None and not name.startswith("head."):
            raise ConfigError(f"tensor {name!r} is {list(known.shape)} in the weights; {list(new.shape)} is needed")
        else:
            zero = same and name.startswith(last)
            tensors[name] = torch.zeros_like(new, dtype=like.dtype) if zero else new.detach().to(like.dtype)
    card = bundle.card.without_labels(keep_task=old.has_queries)
    return Bundle(config=config, tensors=tensors, card=card if old.has_queries else replace(card, task=PANOPTIC))


def check_encoder(old: ModelConfig, config: ModelConfig) -> None:
    """Raises ConfigError unless the encoder of a network with queries computes the same in inference as that of its
    weights."""
    assert isinstance(config, QueryConfig)
    theirs = query_config(old, "eomt" if config.family == "eomt" else "pmt", config.classes).encoder
    for name in (field.name for field in fields(theirs) if field.name not in FREE):
        if (given := getattr(config, name)) != (wanted := getattr(theirs, name)):
            fact = f"the weights have an encoder with {name}={wanted!r}, but the network has {given!r}"
            raise ConfigError(f"{fact}; leave model.{name} to the weights")


def resize_like(bundle: Bundle, config: ModelConfig) -> Bundle:
    """Adapts a bundle to the image size, patch size and channels of a config; its head is kept."""
    patch: Pair | None = getattr(config, "patch", None)
    return replace_head_and_resize(bundle, image_size=config.image, patch=patch, channels=config.channels)


def pop_head_kind(classes: int | None, facts: dict[str, Any]) -> str | None:
    """Removes the kind of a new head from config fields: the other fields describe the given weights, and this one the
    result."""
    return facts.pop("head") if classes is not None and facts.get("head") in HEADS else None


def save(
    model: torch.nn.Module,
    path: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    labels: list[str] | tuple[str, ...] | None = None,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Writes a network to one self-describing file. Fields that are not given come from the card it was loaded with."""
    names = None if labels is None else tuple(labels)
    write_bundle(to_bundle(model, preprocessing=preprocessing, labels=names, provenance=provenance), path)


def write_bundle(bundle: Bundle, path: str | Path) -> None:
    write_sealed(Path(path), bundle.tensors, describe(bundle.config, bundle.card))


def to_bundle(model: torch.nn.Module, **changes: Any) -> Bundle:
    """A network and its card, with changes to the card's fields, as data. Compiled and parallel wrappers are
    unwrapped."""
    inner = unwrap_backbone(model)
    given = {name: value for name, value in changes.items() if value is not None}
    card, classes = replace(get_card(inner), **given), inner.config.classes
    if card.labels is not None and len(card.labels) != classes:
        if "labels" in given:
            raise ConfigError(f"{len(card.labels)} labels for {classes} classes")
        card = replace(card, labels=None, multi_label=False)  # the head has been replaced
    tensors = {name: tensor.detach() for name, tensor in cast(Tensors, inner.state_dict()).items()}
    return Bundle(config=inner.config, tensors=tensors, card=card)


def build_fresh(config: ModelConfig) -> Model:
    """A network with new weights, and a card for training on pixels in [-1, 1]."""
    model = build(config)
    model.card = Card(preprocessing=Preprocessing(image=config.image)).adapt_channels(config.channels)
    return model


def create_model(
    name: str | ModelConfig,
    pretrained: bool = False,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    weights: str | None = None,
    numerics: Numerics | None = None,
    **replacements: Any,
) -> Model:
    """A network by the paper's notation ("ViT-B/16") or slug ("vit_b_16"), or by a config of yours; timm's names and
    keywords are understood, too ("vit_base_patch16_224.augreg_in21k", `num_classes`, `img_size`, `pretrained=True`).

    Without `weights` it is fresh: initialised as in the reference, with 1000 classes by default, and in training mode,
    like torch's modules. If `weights` is the tag of public weights, they are downloaded into the cache; `classes`,
    `image_size`, `patch`, `channels` and the mode are as in `load`. Any other keyword replaces a config field.
    """
    changes = translate_sizes(classes, image_size, replacements)
    if not isinstance(name, str):
        if pretrained or weights:
            raise ConfigError("public weights are looked up by the name of a network; give a name, not a config")
        return build_fresh(adapt_config(name, **changes))
    theirs = find_timm_name(name)
    if theirs is not None and pretrained:
        weights = weights or theirs.tag
    if pretrained and not weights:
        ours = name if theirs is None else theirs.name
        known = ", ".join(registry.list_tags(slug(resolve_name(ours)))) or "none are public"
        raise ConfigError(f"pretrained=True does not say which weights of {ours}; give weights=TAG, one of: {known}")
    if weights is None:
        return build_fresh(create_config(name, **changes))
    if theirs is not None:
        name = theirs.name
        changes.setdefault("image_size", theirs.image)
    classes, image_size = changes.pop("classes", None), changes.pop("image_size", None)
    kind, sizes = pop_head_kind(classes, changes), {name: changes.pop(name, None) for name in ("patch", "channels")}
    bundle = load_public(name, weights, **changes)
    bundle = replace_head_and_resize(bundle, classes, image_size, numerics, kind=kind, **sizes)
    return build_network(bundle).train(bool(classes))

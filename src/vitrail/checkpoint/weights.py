"""`load` and `save`: a network from any weights, and one file that says everything about it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from vitrail.checkpoint.bundle import Bundle, Card, card_of, describe
from vitrail.checkpoint.files.seal import write_sealed
from vitrail.checkpoint.find import find_weights
from vitrail.checkpoint.formats.table import Tensors
from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.backbone import backbone
from vitrail.models.build import Model, build, build_from, network_class
from vitrail.models.family import ModelConfig
from vitrail.models.resize import Numerics
from vitrail.models.zoo import adapted


def load(
    weights: str | Path,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    numerics: Numerics = "reference",
    dtype: torch.dtype = torch.float32,
    **facts: Any,
) -> Model:
    """The network of any weights that vitrail reads: a file in any format, a folder with one, a run's folder (its best
    weights, or its last), public weights as NAME:TAG ("ViT-B/16:augreg_in21k", downloaded into the cache), or the name
    of bundled ones ("vitrail-cifar10"). What cannot be found raises WeightsNotFound.

    The network is in evaluation mode, or in training mode where `classes` gives it a head that has yet to learn.
    (Lightning and loops of one's own train a network in the mode it is in.)

    `classes` and `image_size` are the fine-tuning surgery of 3.2: the whole head is thrown away for one linear layer at
    zero, and positions are resampled to the new grid in the given numerics. Any other keyword replaces a config field:
    what a bare state dict does not say (`heads=12`), or what training wants otherwise (`dropout=0.1`).
    """
    return network(operate(find_weights(weights, **facts), classes, image_size, numerics), dtype).train(bool(classes))


def network(bundle: Bundle, dtype: torch.dtype = torch.float32) -> Model:
    """The module around a bundle's tensors, in evaluation mode; those already of the right type are not copied."""
    model = build_from(bundle.config, {name: tensor.to(dtype) for name, tensor in bundle.tensors.items()})
    model.card = bundle.card
    return model.eval()


def operate(
    bundle: Bundle, classes: int | None = None, image_size: int | Pair | None = None, numerics: Numerics = "reference"
) -> Bundle:
    """Fine-tuning surgery (3.2) on a bundle. Positions are resampled in float32 at least."""
    if image_size is not None:
        bundle = replace(bundle, tensors={name: _exact(tensor) for name, tensor in bundle.tensors.items()})
        config = adapted(bundle.config, image_size=image_size)
        bundle = replace(
            bundle, config=config, tensors=_resized(bundle, config, numerics), card=bundle.card.resized(config.image)
        )
    if classes is not None:
        bundle = _new_head(bundle, classes)
    return bundle


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _resized(bundle: Bundle, config: ModelConfig, numerics: Numerics) -> Tensors:
    return network_class(bundle.config).resize_tensors(bundle.tensors, bundle.config, config, numerics)


def _new_head(bundle: Bundle, classes: int) -> Bundle:
    old = bundle.config
    config = adapted(old, **old.linear_head(classes))
    weight, bias = f"{old.head_layer}.weight", f"{old.head_layer}.bias"
    tensors = {name: tensor for name, tensor in bundle.tensors.items() if not name.startswith("head.")}
    if classes:
        like = next(iter(tensors.values()))
        tensors |= {weight: like.new_zeros(classes, old.features), bias: like.new_zeros(classes)}
    return Bundle(config=config, tensors=tensors, card=bundle.card.without_labels())


def save(
    model: torch.nn.Module,
    path: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    labels: list[str] | tuple[str, ...] | None = None,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Write a network to one self-describing file. What is not given is taken from the card it was loaded with."""
    write_bundle(bundle_of(model, preprocessing=preprocessing, labels=labels, provenance=provenance), path)


def write_bundle(bundle: Bundle, path: str | Path) -> None:
    write_sealed(Path(path), bundle.tensors, describe(bundle.config, bundle.card))


def bundle_of(
    model: torch.nn.Module,
    *,
    preprocessing: Preprocessing | None = None,
    labels: list[str] | tuple[str, ...] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Bundle:
    """A network and its card as data; compiled and parallel wrappers are looked through."""
    inner = backbone(model)
    config = inner.config
    old = card_of(inner)
    names = old.labels if labels is None else tuple(labels)
    if labels is None and names is not None and len(names) != config.classes:
        names = None  # the head was replaced since
    if names is not None and len(names) != config.classes:
        raise ConfigError(f"{len(names)} labels for {config.classes} classes")
    card = Card(
        preprocessing=preprocessing or old.preprocessing,
        labels=names,
        provenance=old.provenance if provenance is None else provenance,
        multi_label=old.multi_label and (old.labels is None or names is not None),
    )
    tensors = {name: tensor.detach() for name, tensor in cast(Tensors, inner.state_dict()).items()}
    return Bundle(config=config, tensors=tensors, card=card)


def fresh(config: ModelConfig) -> Model:
    """A network with new weights, and the card of one that is trained on pixels in [-1, 1]."""
    model = build(config)
    model.card = Card(preprocessing=Preprocessing(image=config.image))
    return model

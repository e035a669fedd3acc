"""`create_model`: a network by name or config, fresh or with public weights."""

from typing import Any

from vitrail.checkpoint.find import public
from vitrail.checkpoint.public import registry
from vitrail.checkpoint.weights import fresh, head_changes, network, operate, take_head
from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.models.build import Model
from vitrail.models.family import ModelConfig
from vitrail.models.named import create_config, translate_sizes
from vitrail.models.resize import Numerics
from vitrail.models.timm_names import find_timm_name
from vitrail.models.zoo import adapted, resolve, slug


def create_model(
    name: str | ModelConfig,
    pretrained: bool = False,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    weights: str | None = None,
    numerics: Numerics = "reference",
    **replacements: Any,
) -> Model:
    """A network by the paper's notation ("ViT-B/16") or slug ("vit_b_16"), or by a config of yours; timm's names and
    keywords are understood, too ("vit_base_patch16_224.augreg_in21k", `num_classes`, `img_size`, `pretrained=True`).

    Without `weights` it is fresh, initialised as in the reference, with 1000 classes unless said otherwise, and in
    training mode, as torch's modules are. With the tag of public weights they are downloaded into the cache; `classes`,
    `image_size` and the mode are as in `load`.
    Any other keyword replaces a config field.
    """
    changes = translate_sizes(classes, image_size, replacements)
    if not isinstance(name, str):
        if pretrained or weights:
            raise ConfigError("public weights are found by the name of their network; give that, not a config")
        return fresh(adapted(name, **changes))
    theirs = find_timm_name(name)
    if theirs is not None and pretrained:
        weights = weights or theirs.tag
    if pretrained and not weights:
        ours = name if theirs is None else theirs.name
        known = ", ".join(registry.tags(slug(resolve(ours)))) or "none is public"
        raise ConfigError(f"pretrained=True does not say which weights of {ours}; give weights=TAG, one of: {known}")
    if weights is None:
        return fresh(create_config(name, **changes))
    if theirs is not None:
        name = theirs.name
        changes.setdefault("image_size", theirs.image)
    classes, image_size = changes.pop("classes", None), changes.pop("image_size", None)
    kind = take_head(classes, changes)
    bundle = public(name, weights, **changes)
    head = head_changes(bundle.config, classes, kind)
    return network(operate(bundle, None, image_size, numerics, head=head)).train(bool(classes))

"""`create_model`: a network by name, fresh or with public weights."""

from typing import Any

from vitrail.checkpoint.find import public
from vitrail.checkpoint.public import registry
from vitrail.checkpoint.weights import fresh, network, operate
from vitrail.core.errors import ConfigError
from vitrail.core.shapes import Pair
from vitrail.models.build import Model
from vitrail.models.resize import Numerics
from vitrail.models.timm_names import find_timm_name, translate_keywords
from vitrail.models.zoo import model_config, resolve, slug


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

"""`create_config`: what a network is, by its name, ours or timm's. No torch."""

from typing import Any

from vitrail.core.shapes import Pair
from vitrail.models.family import ModelConfig
from vitrail.models.timm_names import find_timm_name, translate_keywords
from vitrail.models.zoo import model_config


def create_config(
    name: str, *, classes: int | None = None, image_size: int | Pair | None = None, **replacements: Any
) -> ModelConfig:
    """The config of a network by the names and keywords that `create_model` takes, without the network: its shape, its
    cost (`parameters`, `macs`, `tokens`) and every field, as frozen data.

    Any other keyword replaces a config field. `create_model` builds what a config describes.
    """
    changes = translate_sizes(classes, image_size, replacements)
    if (theirs := find_timm_name(name)) is None:
        return model_config(name, **changes)
    if not {"image", "image_size"} & changes.keys():
        changes["image_size"] = theirs.image
    return model_config(theirs.name, **changes)


def translate_sizes(classes: int | None, image_size: int | Pair | None, replacements: dict[str, Any]) -> dict[str, Any]:
    """All that changes a named config, by our names; what is given twice is refused."""
    own = {"classes": classes, "image_size": image_size}
    return translate_keywords({**{key: value for key, value in own.items() if value is not None}, **replacements})

"""timm's names and keywords for the networks that both have: `vit_base_patch16_224`, `num_classes`. No torch."""

import re
from typing import Any, Final, NamedTuple

from vitrail.core.errors import ConfigError
from vitrail.models.zoo import ZOO

SIZES: Final = {
    "tiny": "Ti",
    "small": "S",
    "base": "B",
    "large": "L",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
}
VIT: Final = re.compile(rf"(?:vit|deit)_({'|'.join(SIZES)})_patch(\d+)_(\d+)")
HYBRID: Final = re.compile(rf"vit_({'|'.join(SIZES)})_r50_s(\d+)_(\d+)")
BIT_NAME: Final = re.compile(r"resnetv2_(\d+x\d+)_bit")

# timm's keyword to our config field.
KEYWORDS: Final = {
    "num_classes": "classes",
    "img_size": "image_size",
    "in_chans": "channels",
    "patch_size": "patch",
    "embed_dim": "width",
    "num_heads": "heads",
    "drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "stochastic_depth",
    "reg_tokens": "registers",
}
# What timm's other keywords are called here.
HINTS: Final = {
    "global_pool": "pool='mean' or pool='token'",
    "mlp_ratio": "mlp_width, the width itself",
    "checkpoint_path": "vitrail.load(path)",
    "features_only": "model.forward_intermediates(images, layers)",
    "no_embed_class": "position_prefix=False",
    "fc_norm": "norm_after_pool",
    "dynamic_img_size": "nothing: images of other sizes are read as they are",
}


class Named(NamedTuple):
    """What a name of timm's stands for: our name, its image size where it says one, and the tag of its weights."""

    name: str
    image: int | None
    tag: str


def find_timm_name(name: str) -> Named | None:
    """Our name for one of timm's; none where it is not a name of timm's that we have a network for."""
    bare, _, tag = name.removeprefix("timm/").partition(".")
    if found := VIT.fullmatch(bare):
        ours, image = f"ViT-{SIZES[found[1]]}/{found[2]}", int(found[3])
    elif found := HYBRID.fullmatch(bare):
        ours, image = f"R50+ViT-{SIZES[found[1]]}/{found[2]}", int(found[3])
    elif found := BIT_NAME.fullmatch(bare):
        ours, image = f"BiT-R{found[1]}", None
    else:
        return None
    if ours not in ZOO:
        return None
    # Public weights for another size than 224 carry it at the end of their tag.
    larger = f"_{image}" if tag and image not in (None, 224) else ""
    return Named(ours, image, f"{tag}{larger}" if tag else "")


def translate_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """timm's keywords as config fields; those that have no field of the same meaning are answered with what has."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in HINTS:
            raise ConfigError(f"{name}={value!r} is timm's; here it is {HINTS[name]}")
        ours = KEYWORDS.get(name, name)
        if ours in out or (ours != name and ours in given):
            raise ConfigError(f"give {ours} or timm's {name}, not both")
        out[ours] = value
    return out

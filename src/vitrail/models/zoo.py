"""Every network by name: Table 1, Figure 4's slim Base, the hybrids and BiT ResNets, small ones, and those of later
weight families (families.toml). No torch.

A name is the paper's own notation ("ViT-B/16", "DINOv2-B/14") or its slug ("vit_b_16", "dinov2_b_14"). Where two
networks differ by case or a sign alone, the slug spells it out: ViT-b/32 is `vit_slim_b_32`, of ViT-g/14 and ViT-G/14
the latter is `vit_gigantic_14`, and DINOv3-S+/16 is `dinov3_s_plus_16`. timm's names and keywords work for the networks
that both have: `vit_base_patch16_224`, `num_classes`.
"""

import re
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final, NamedTuple

from vitrail.core.errors import ConfigError, UnknownName, unknown_name
from vitrail.core.text import Pair, pair
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

# width, depth, MLP width, heads. B, L, H: Table 1; Ti, S: the same authors' later "How to train your ViT"; g, G:
# "Scaling Vision Transformers".
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "Ti": (192, 12, 768, 3), "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12), "L": (1024, 24, 4096, 16), "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16), "G": (1664, 48, 8192, 16),
}  # fmt: skip
PATCHES = (8, 14, 16, 32)

# For 28 to 64 px images; at 32 px and patch 4 there are 64 tokens.
SMALL_SHAPES = {"Nano": (96, 6, 192, 3), "Micro": (192, 9, 384, 3), "Mini": (256, 7, 512, 4)}
SMALL_PATCHES = (2, 4, 8)

R50 = (3, 4, 6, 3)
BIT: dict[str, tuple[tuple[int, ...], float]] = {
    "R50x1": (R50, 1), "R50x2": (R50, 2), "R101x1": ((3, 4, 23, 3), 1), "R152x1": ((3, 8, 36, 3), 1),
    "R152x2": ((3, 8, 36, 3), 2), "R152x4": ((3, 8, 36, 3), 4), "R200x3": ((3, 24, 36, 3), 3),
}  # fmt: skip
MINI_BIT: dict[str, tuple[int, ...]] = {"mini-R14": (1, 1, 1, 1), "mini-R26": (2, 2, 2, 2)}


def vit_config_of(shape: str, patch: int) -> ViTConfig:
    width, depth, mlp_width, heads = (SHAPES | SMALL_SHAPES)[shape]
    image = 32 if shape in SMALL_SHAPES else 224
    return ViTConfig(width=width, depth=depth, mlp_width=mlp_width, heads=heads, patch=pair(patch), image=pair(image))


def axial(shape: str, patch: int) -> ViTConfig:
    """Axial-ViT (D.6): row attention and MLP, then column attention and MLP, tokens kept on their grid."""
    return replace(vit_config_of(shape, patch), attention="axial", class_token=False, pool="mean")


def hybrid_backbone(blocks: tuple[int, ...], image: Pair = (224, 224)) -> ResNetConfig:
    """The hybrid's ResNet, with the numerics of the released hybrids."""
    return ResNetConfig(
        blocks=blocks,
        image=image,
        classes=0,
        unit="postactivation",
        norm_eps=1e-6,
        standardisation="std+eps",
        standardisation_eps=1e-5,
        padding="same",
        pool_padding="infinity",
    )


def hybrid(shape: str, stride: int) -> ViTConfig:
    """R50+ViT: /32 reads stage 4 (option i), /16 drops stage 4 and puts its blocks into stage 3 (option ii)."""
    blocks = {32: R50, 16: (3, 4, 9)}[stride]
    return replace(vit_config_of(shape, 16), patch=(1, 1), backbone=hybrid_backbone(blocks))


def mini_hybrid(shape: str, blocks: tuple[int, ...]) -> ViTConfig:
    """A hybrid for 28 to 64 px: a 3x3 root, half width, total stride 4."""
    small = replace(hybrid_backbone(blocks, (32, 32)), root="3x3", factor=0.5, groups=8)
    return replace(vit_config_of(shape, 4), patch=(1, 1), backbone=small)


def bit(name: str) -> ResNetConfig:
    blocks, factor = BIT[name]
    return ResNetConfig(blocks=blocks, factor=factor)


def mini_bit(name: str) -> ResNetConfig:
    """A BiT ResNet for 28 to 64 px: a 3x3 root without pooling, half width."""
    return ResNetConfig(blocks=MINI_BIT[name], factor=0.5, root="3x3", groups=8, image=(32, 32))


def axial_resnet50() -> ResNetConfig:
    """AxialResNet50 (D.6): R50 with row and column attention in the place of its 3x3 convolutions."""
    return replace(bit("R50x1"), mixing="axial")


ZOO: dict[str, ModelConfig] = {
    **{f"ViT-{shape}/{patch}": vit_config_of(shape, patch) for shape in SHAPES for patch in PATCHES},
    # Of Figure 4: Base with every hidden dimension halved; the heads keep their 64 dimensions, so six.
    "ViT-b/32": replace(vit_config_of("B", 32), width=384, mlp_width=1536, heads=6),
    **{f"ViT-{shape}/{patch}": vit_config_of(shape, patch) for shape in SMALL_SHAPES for patch in SMALL_PATCHES},
    **{f"Axial-ViT-B/{patch}": axial("B", patch) for patch in (16, 32)},
    **{f"R50+ViT-{shape}/{stride}": hybrid(shape, stride) for shape in ("B", "L") for stride in (16, 32)},
    "mini-R11+ViT-Nano/4": mini_hybrid("Nano", (1, 1, 1)),
    "mini-R20+ViT-Micro/4": mini_hybrid("Micro", (2, 2, 2)),
    **{f"BiT-{name}": bit(name) for name in BIT},
    **{f"BiT-{name}": mini_bit(name) for name in MINI_BIT},
    "AxialResNet50": axial_resnet50(),
    **{name: network.config for family in WEIGHT_FAMILIES.values() for name, network in family.networks.items()},
}
SPELT_OUT = {
    "ViT-b/32": "vit_slim_b_32",
    **{f"ViT-G/{patch}": f"vit_gigantic_{patch}" for patch in PATCHES},
    **{name: one.slug for family in WEIGHT_FAMILIES.values() for name, one in family.networks.items() if one.slug},
}


def slug(name: str) -> str:
    """ "r50_vit_b_16" for "R50+ViT-B/16", "dinov3_s_plus_16" for "DINOv3-S+/16"."""
    return SPELT_OUT.get(name) or re.sub(r"[^a-z0-9.]+", "_", name.lower().replace("+/", "_plus/")).strip("_")


SLUGS: dict[str, str] = {slug(name): name for name in ZOO}
# Names of weight families for networks that are the paper's.
ALIASES = {slug(name): ours for family in WEIGHT_FAMILIES.values() for name, ours in family.aliases.items()}


def resolve_name(name: str) -> str:
    """The paper's notation for a name given either way."""
    if name in ZOO:
        return name
    plain = slug(name)
    if found := SLUGS.get(plain) or ALIASES.get(plain):
        return found
    raise UnknownName(f"{unknown_name('model', name, [*ZOO, *SLUGS])} `vitrail models` lists all")


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern, in either notation and any case; a bare word matches anywhere."""
    return [name for name in ZOO if matches(pattern, name, slug(name))]


def matches(pattern: str, *names: str) -> bool:
    """Whether one of the names matches a shell pattern in any case; a bare word matches anywhere."""
    wanted = pattern.lower() if any(c in pattern for c in "*?[") else f"*{pattern.lower()}*"
    return any(fnmatchcase(name.lower(), wanted) for name in names)


def model_config(name: str, **changes: Any) -> ModelConfig:
    """The named config with changes as `adapt_config` takes them."""
    return adapt_config(ZOO[resolve_name(name)], **changes)


def adapt_config(
    config: ModelConfig, *, classes: int | None = None, image_size: int | Pair | None = None, **replacements: Any
) -> ModelConfig:
    """A config with another head size, image size or any other field; dependent fields change together."""
    known, changes = [field.name for field in fields(config)], dict(replacements)
    for name, value in replacements.items():
        if name not in known:
            raise unknown_name("config field", name, known)
        changes[name] = pair(value) if name in ("image", "patch") else value
    if image_size is not None:
        if "image" in changes:
            raise ConfigError("give image_size or image, not both")
        changes["image"] = pair(image_size)
    if classes is not None:
        changes["classes"] = classes
    config.settle(changes)
    return replace(config, **changes)


def network_name(config: ModelConfig) -> str:
    """The paper's notation if a named network has the same shape, whatever its head or pooling; else a description of
    the shape. Of several with that shape, the one with the same tokens and pooling, or the first. A network with
    queries is named after its encoder: "EoMT of ViT-S/16"."""
    if isinstance(config, QueryConfig):
        return f"{config.design} of {network_name(config.encoder)}"
    return max(
        _names_by_shape().get(config.shape, ()), key=lambda name: _count_alike(ZOO[name], config), default=config.title
    )


@cache
def _names_by_shape() -> dict[tuple[object, ...], list[str]]:
    found: dict[tuple[object, ...], list[str]] = {}
    for name, known in ZOO.items():
        found.setdefault(known.shape, []).append(name)
    return found


def _count_alike(one: ModelConfig, other: ModelConfig) -> int:
    """How much two networks of the same shape share of what their families differ in."""
    if not isinstance(one, ViTConfig) or not isinstance(other, ViTConfig):
        return 0
    same = one.class_token == other.class_token, one.registers == other.registers
    return sum(same) + ((one.pool == "map") == (other.pool == "map"))


def with_known_fields(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with those of the changes that its family has a field for: a ResNet has no dropout."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in changes.items() if name in known})


SIZES: Final = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g", "gigantic": "G"}
VIT: Final = re.compile(rf"(?:vit|deit)_({'|'.join(SIZES)})_patch(\d+)_(\d+)")
HYBRID: Final = re.compile(rf"vit_({'|'.join(SIZES)})_r50_s(\d+)_(\d+)")
BIT_NAME: Final = re.compile(r"resnetv2_(\d+x\d+)_bit")

# timm's keyword to our config field.
KEYWORDS: Final = {
    "num_classes": "classes", "img_size": "image_size", "in_chans": "channels", "patch_size": "patch",
    "embed_dim": "width", "num_heads": "heads", "reg_tokens": "registers", "drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout", "drop_path_rate": "stochastic_depth",
}  # fmt: skip
# What timm's other keywords are called here.
HINTS: Final = {
    "global_pool": "pool='mean' or pool='token'", "mlp_ratio": "mlp_width, the width itself",
    "no_embed_class": "position_prefix=False", "fc_norm": "norm_after_pool", "checkpoint_path": "vitrail.load(path)",
    "features_only": "model.forward_intermediates(images, layers)",
    "dynamic_img_size": "nothing: images of other sizes are read as they are",
}  # fmt: skip


class TimmName(NamedTuple):
    """What a name of timm's stands for: our name, its image size where it says one, and the tag of its weights."""

    name: str
    image: int | None
    tag: str


def _list_timm_names() -> dict[str, TimmName]:
    """timm's names for networks of the weight families, with a tag and without."""
    found: dict[str, TimmName] = {}
    for row in (row for family in WEIGHT_FAMILIES.values() for row in family.weights):
        name: str = row["timm"]
        found[name] = TimmName(row["network"], row["image"], row["tag"])
        found.setdefault(name.partition(".")[0], TimmName(row["network"], row["image"], ""))
    return found


TIMM_NAMES: Final = _list_timm_names()


def find_timm_name(name: str) -> TimmName | None:
    """Our name for one of timm's; none where it is not a name of timm's that we have a network for."""
    theirs = name.removeprefix("timm/")
    bare, _, tag = theirs.partition(".")
    if found := VIT.fullmatch(bare):
        ours, image = f"ViT-{SIZES[found[1]]}/{found[2]}", int(found[3])
    elif found := HYBRID.fullmatch(bare):
        ours, image = f"R50+ViT-{SIZES[found[1]]}/{found[2]}", int(found[3])
    elif found := BIT_NAME.fullmatch(bare):
        ours, image = f"BiT-R{found[1]}", None
    else:  # which GELU CLIP's weights were trained with is known here, whatever their network is called
        plain = theirs.replace("_quickgelu_", "_")
        known = TIMM_NAMES.get(plain) or TIMM_NAMES.get(plain.partition(".")[0])
        return known and known._replace(tag=known.tag or tag)
    if ours not in ZOO:
        return None
    # Public weights for another size than 224 carry it at the end of their tag.
    larger = f"_{image}" if tag and image not in (None, 224) else ""
    return TimmName(ours, image, f"{tag}{larger}" if tag else "")


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

"""Networks of a few thousand weights that keep the kind of the large ones."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.lanes import rest_slow
from vitrail.models.build import Model, build
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary, Windows
from vitrail.models.zoo import adapt_config, hybrid_backbone

# Neither the image, the grid nor a patch is square, and no two sizes are equal, so that a swapped axis shows.
VIT = ViTConfig(width=16, depth=2, mlp_width=24, heads=2, image=(6, 12), patch=(2, 3), classes=5)
RESNET = ResNetConfig(blocks=(1, 2), factor=0.125, groups=4, image=(20, 28), classes=5)
BACKBONE = replace(hybrid_backbone((1, 2), (20, 28)), factor=0.125, groups=4)
HYBRID = replace(VIT, image=(20, 28), patch=(1, 1), backbone=BACKBONE)

POSITIONS: list[dict[str, Any]] = [
    {"position": "none"},
    *(
        {"position": kind, "placement": placement}
        for kind in ("learned", "learned2d", "learned2d-sum", "sincos2d", "relative")
        for placement in ("stem", "every", "shared")
    ),
]
OTHERS: dict[str, dict[str, Any]] = {
    "registers": {"registers": 3},
    "registers, class token without position": {"registers": 2, "position_prefix": False},
    "class token without position": {"position_prefix": False},
    "mean": {"pool": "mean"},
    "mean, no class token": {"pool": "mean", "class_token": False},
    "mean, registers, norm last": {"pool": "mean", "norm_after_pool": True, "registers": 2},
    "tanh": {"head": "tanh"},
    "tanh without classes": {"head": "tanh", "classes": 0},
    "no head": {"head": "none", "classes": 0},
    "patches": {"head": "patches"},
    "patches, mean, no class token": {"head": "patches", "pool": "mean", "class_token": False},
    "patches, registers, norm last": {"head": "patches", "pool": "mean", "norm_after_pool": True, "registers": 2},
    "patches, axial": {"head": "patches", "attention": "axial", "class_token": False, "pool": "mean"},
    "patches, relative": {"head": "patches", "position": "relative"},
    "no qkv bias": {"qkv_bias": False},
    "erf": {"gelu": "erf"},
    "one channel": {"channels": 1},
    "axial": {"attention": "axial", "class_token": False, "pool": "mean"},
    "axial, learned2d in every layer": {
        "attention": "axial",
        "class_token": False,
        "pool": "mean",
        "position": "learned2d",
        "placement": "every",
    },
    "relative with registers": {"position": "relative", "registers": 2, "placement": "shared"},
    "2d sum, registers, no prefix": {"position": "learned2d-sum", "registers": 2, "position_prefix": False},
}
NO_CLASS_TOKEN: dict[str, Any] = {"class_token": False, "pool": "mean"}
UNIT = Rotary(coordinates="unit")
FAMILIES: dict[str, dict[str, Any]] = {
    "dinov2, registers": {
        "layer_scale": 1e-5,
        "registers": 2,
        "position_prefix": False,
        "pool": "token+mean",
        "gelu": "erf",
        "position_resample": "bicubic",
    },
    "dinov2, gated": {"layer_scale": 1.0, "gated": True, "position_resample": "bicubic-offset"},
    "dinov3": {"rotary": UNIT, "registers": 2, "position": "none", "key_bias": False, "layer_scale": 1e-5},
    "dinov3, gated, no biases": {
        "rotary": UNIT,
        "registers": 1,
        "position": "none",
        "qkv_bias": False,
        "gated": True,
        "norm_qk": True,
        "norm": "rms",
        "head_width": 4,
    },
    "rotary, mixed": {"rotary": Rotary(mixed=True, base=10.0), "layer_scale": 1e-5, "position_prefix": False},
    "clip": {
        "norm_stem": "tokens",
        "gelu": "quick",
        "projection": 10,
        "patch_bias": False,
        "norm_eps": 1e-5,
        "position_resample": "bicubic-sharp",
        "head": "none",
        "classes": 0,
    },
    "siglip": {"class_token": False, "pool": "map", "position_resample": "bilinear"},
    "sbb": {
        "class_token": False,
        "registers": 2,
        "register_positions": True,
        "pool": "map",
        "map_prefix": False,
    },
    "pe": {
        "pool": "map",
        "map_heads": 4,
        "map_mlp_width": 20,
        "projection": 10,
        "norm_stem": "tokens",
        "rotary": Rotary(order="xy", layout="pairs", offset=1.0, reference=(2, 3)),
    },
    "eva02": {
        "rotary": Rotary(layout="pairs", base=1e4, reference=(2, 2)),
        "gated": True,
        "norm_inner_mlp": True,
        "norm_inner_attention": True,
        "key_bias": False,
        "pool": "mean",
        "norm_after_pool": True,
    },
    "eva02, post-norm": {"norm_order": "res-post", "key_bias": False},
    "beit": {
        "position": "none",
        "position_bias": "table",
        "key_bias": False,
        "layer_scale": 0.1,
        "pool": "mean",
        "norm_after_pool": True,
    },
    "beit, shared table": {"position_bias": "shared-table", "layer_scale": 0.1, "norm_final": False, "pool": "mean"},
    "aimv2": {
        "class_token": False,
        "pool": "map",
        "map_style": "aimv2",
        "norm": "rms",
        "gated": True,
        "norm_stem": "patches",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
    },
    "sam": {
        **NO_CLASS_TOKEN,
        "position_bias": "decomposed",
        "windows": Windows(size=2, whole=(1,)),
        "neck": 6,
        "norm_final": False,
        "position_resample": "bilinear-antialias",
    },
    "vitdet": {
        **NO_CLASS_TOKEN,
        "windows": Windows(size=2),
        "position_bias": "decomposed",
        "position_grid": (2, 2),
        "head": "patches",
    },
    "bias table without class token": {**NO_CLASS_TOKEN, "position_bias": "table"},
    "deit, distilled": {"head": "distilled", "registers": 1, "register_positions": True},
    "two class tokens": {"class_tokens": 2, "registers": 2, "layer_scale": 1e-5},
    "two class tokens and the mean": {"class_tokens": 2, "pool": "token+mean", "head": "tanh"},
}
RESNETS: dict[str, ModelConfig] = {
    "bit": RESNET,
    "bit, infinite pool padding": replace(RESNET, pool_padding="infinity"),
    "bit, same padding": replace(RESNET, padding="same", pool_padding="infinity"),
    "bit, 3x3 root": replace(RESNET, root="3x3", image=(9, 7)),
    "bit without head": replace(RESNET, classes=0),
    "bit of three stages": replace(RESNET, blocks=(1, 1, 1), standardisation="std+eps", standardisation_eps=1e-5),
    "post-activation": replace(BACKBONE, classes=5),
    "axial resnet": replace(RESNET, mixing="axial", axial_heads=2),
    "axial resnet, odd grid": replace(RESNET, mixing="axial", axial_heads=4, image=(26, 18)),
    "hybrid": HYBRID,
    "hybrid, 3x3 root": adapt_config(replace(HYBRID, backbone=replace(BACKBONE, root="3x3")), image_size=(8, 10)),
    "hybrid, patch 2x1": replace(HYBRID, image=(32, 28), patch=(2, 1), backbone=replace(BACKBONE, image=(32, 28))),
    "hybrid, patches": replace(HYBRID, head="patches"),
    "hybrid, relative": replace(HYBRID, position="relative"),
    "hybrid, axial": replace(HYBRID, attention="axial", class_token=False, pool="mean"),
}
FEW = ("learned, stem", "relative, every", "sincos2d, shared", "registers", "mean, no class token", "tanh", "patches")
FEW += ("axial", "bit", "axial resnet", "hybrid")
FEW += ("dinov2, registers", "dinov3", "rotary, mixed", "siglip", "eva02", "beit", "sam", "deit, distilled")
VARIANTS: dict[str, ModelConfig] = {
    **{", ".join(changes.values()): replace(VIT, **changes) for changes in POSITIONS},
    **{name: replace(VIT, **changes) for name, changes in (OTHERS | FAMILIES).items()},
    **RESNETS,
}
STANDING_FOR_ALL = ("dinov2, registers", "dinov3", "siglip", "eva02", "sam")  # of FAMILIES, in the fast lane
LATER = {name for family in WEIGHT_FAMILIES.values() for name in family.networks}  # in the zoo, not in the paper
SOME = rest_slow(VARIANTS, *FEW)  # the names, one of each kind in the fast lane


def small(config: ModelConfig) -> ModelConfig:
    """A network of the zoo at two layers and a sixteenth of its width; heads, patch, stages and units stay."""
    if isinstance(config, ResNetConfig):
        return _small_resnet(config)
    width = 4 * config.heads
    image = (2 * config.patch[0], 3 * config.patch[1])
    inner = None if config.backbone is None else _small_resnet(config.backbone)
    return replace(
        config,
        width=width,
        depth=2,
        mlp_width=width * config.mlp_width // config.width,
        classes=min(config.classes, 5),
        image=image if inner is None else inner.image,
        backbone=inner,
        head_width=min(config.head_width, 4),
        map_heads=min(config.map_heads, config.heads),
        map_mlp_width=min(config.map_mlp_width, width),
        projection=min(config.projection, 10),
        neck=min(config.neck, 6),
        windows=config.windows and Windows(size=2, whole=(1,)),
        rotary=config.rotary and replace(config.rotary, shift=0.0, jitter=0.0, rescale=0.0),  # the same in training
        position_grid=config.position_grid and (2, 2),
    )


def _small_resnet(config: ResNetConfig) -> ResNetConfig:
    return replace(
        config,
        blocks=(*(1 for _ in config.blocks[1:]), 2),  # a unit that projects in each stage, and one that does not
        factor=config.factor / 16,
        groups=2,
        axial_heads=2,
        image=(64, 96) if config.root == "7x7" else (16, 24),  # the last map is 2x3, so that attention has a choice
        classes=min(config.classes, 5),
    )


def tiny(config: ModelConfig) -> ModelConfig:
    """Smaller still, and the same for all networks of one structure: two heads, two stages of one block."""
    config = small(config)
    if isinstance(config, ResNetConfig):
        return _tiny_resnet(config)
    inner = None if config.backbone is None else _tiny_resnet(config.backbone)
    patch = (2, 3) if inner is None else (1, 1)
    image, depth = ((6, 12), 2) if inner is None else (inner.image, 1)
    sizes = {"width": 16, "depth": depth, "mlp_width": 24, "heads": 2, "patch": patch, "image": image}
    return replace(config, **sizes, map_heads=min(config.map_heads, 2), backbone=inner)


def _tiny_resnet(config: ResNetConfig) -> ResNetConfig:
    return replace(config, blocks=(1, 1), factor=1 / 16, image=(16, 24) if config.root == "7x7" else (4, 6))


def awake(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Model:
    """A network in which nothing is zero: a fresh one has a zero head and, in hybrids, zero scales."""
    model = build(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def images(config: ModelConfig, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, config.channels, *config.image, dtype=dtype)


def count(model: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())

"""timm's state dicts: ViTs (`vit_*`, `deit_*`), hybrids (`vit_*_r50_s*`) and BiT ResNets (`resnetv2_*_bit`).

timm computes with the exact GELU, and standardises kernels by sqrt(var + 1e-8) in both families.
"""

from dataclasses import replace
from functools import singledispatch
from typing import Any, get_args

from vitrail.checkpoint.formats.key_table import (
    KeyEntry,
    TensorShapes,
    as_pointwise,
    block_entries,
    copy,
    infer_heads,
    infer_image,
    weight_and_bias,
)
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

NAME = "timm"
BLOCK = {
    "norm_attention": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "norm_mlp": "norm2",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}


def recognises(names: set[str]) -> bool:
    return "patch_embed.proj.weight" in names or {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names


@singledispatch
def build_table(config: ModelConfig) -> list[KeyEntry]:
    raise ExportRefused(f"timm has no such network: {config.title}")


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config behind a timm state dict, with timm's numerics."""
    if "patch_embed.proj.weight" not in shapes:
        return _infer_resnet(shapes)
    backbone = (
        _infer_backbone(shapes, "patch_embed.backbone.") if "patch_embed.backbone.stem.conv.weight" in shapes else None
    )
    width, channels, *patch = shapes.get("patch_embed.proj.weight", 4)
    mlp_width = shapes.get("blocks.0.mlp.fc1.weight", 2)[0]
    token, rows = "cls_token" in shapes, shapes.get("pos_embed", 3)[1]
    ground, stride = (patch[0], patch[1]), 1
    if backbone is not None:
        channels, stride = shapes.get("patch_embed.backbone.stem.conv.weight", 4)[1], backbone.stride
        ground = (patch[0] * stride, patch[1] * stride)
    size, prefix = infer_image(shapes, rows, ground, token)
    after = "fc_norm.weight" in shapes
    args: dict[str, Any] = dict((shapes.settings or {}).get("model_args") or {})
    heads = args.get("num_heads")
    act = args.get("act_layer", "gelu")
    if act not in ("gelu", "gelu_tanh"):
        raise MismatchedWeights(f"{shapes.path}: act_layer {act!r} is not a GELU; known: gelu, gelu_tanh")
    return ViTConfig(
        width=width,
        depth=shapes.count("blocks.{}.norm1.weight"),
        mlp_width=mlp_width,
        heads=heads if type(heads) is int else infer_heads(shapes, width, mlp_width),
        image=size,
        patch=(patch[0], patch[1]),
        channels=channels,
        classes=shapes.get("head.weight", 2)[0] if "head.weight" in shapes else 0,
        head="linear" if "head.weight" in shapes else "none",
        pool="mean" if after or not token or args.get("global_pool") == "avg" else "token",
        class_token=token,
        registers=shapes.get("reg_token", 3)[1] if "reg_token" in shapes else 0,
        position_prefix=bool(prefix) or not token,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        backbone=None if backbone is None else replace(backbone, image=size, channels=channels),
        gelu="tanh" if act == "gelu_tanh" else "erf",
        norm_after_pool=after,
    )


@build_table.register
def _vit_table(c: ViTConfig) -> list[KeyEntry]:
    if c.head == "tanh":
        raise ExportRefused(
            "timm has no hidden tanh layer: field head='tanh' cannot be held; use head='linear', npz or torchvision"
        )
    if c.has_patch_head:
        raise ExportRefused(
            "timm's heads read one vector of an image: field head='patches' cannot be held; use vitrail's"
        )
    if c.position != "learned" or c.placed != "stem" or c.attention != "full":
        field = f"position={c.position!r} at {c.placed!r}" if c.attention == "full" else f"attention={c.attention!r}"
        raise ExportRefused(
            f"timm's ViT takes learned positions at the stem and full attention: field {field} cannot be held"
        )
    if c.registers and c.class_token and c.position_prefix:
        raise ExportRefused(
            "timm gives positions to class token and registers alike: field position_prefix=True cannot be held"
        )
    rows = [copy("class_token", "cls_token")] if c.class_token else []
    rows += [copy("registers", "reg_token")] if c.registers else []
    rows += [copy("position.tables.0.table", "pos_embed")]
    if c.backbone is not None:
        rows += _trunk_table(c.backbone, "embedding.backbone.", "patch_embed.backbone.")
    rows += weight_and_bias("embedding.projection", "patch_embed.proj")
    blocks = block_entries(c.depth, "blocks.{}.", BLOCK)
    rows += [entry for entry in blocks if c.qkv_bias or not entry.ours.endswith("qkv.bias")]
    rows += weight_and_bias("norm", "fc_norm" if c.norm_after_pool else "norm")
    return rows + (weight_and_bias("head.classifier", "head") if c.classes else [])


@build_table.register
def _resnet_table(c: ResNetConfig) -> list[KeyEntry]:
    rows = _trunk_table(c, "trunk.", "")
    if c.unit == "preactivation":
        rows += weight_and_bias("norm", "norm")
    if c.classes:
        rows += [as_pointwise("head.weight", "head.fc.weight"), copy("head.bias", "head.fc.bias")]
    return rows


def _trunk_table(c: ResNetConfig, ours: str, theirs: str) -> list[KeyEntry]:
    if c.mixing != "convolution":
        raise ExportRefused(f"timm has no axial ResNet: field mixing={c.mixing!r} cannot be held")
    if c.root != "7x7":
        raise ExportRefused(f"timm's BiT has a 7x7 root: field root={c.root!r} cannot be held")
    if not c.blocks:
        raise ExportRefused("timm keeps a root without stages under other names: field blocks=() cannot be held")
    rows = [copy(f"{ours}root.weight", f"{theirs}stem.conv.weight")]
    if c.unit == "postactivation":
        rows += weight_and_bias(f"{ours}norm_root", f"{theirs}stem.norm")
    for stage, count in enumerate(c.blocks):
        for block in range(count):
            here, there = f"{ours}stages.{stage}.{block}.", f"{theirs}stages.{stage}.blocks.{block}."
            for part in (1, 2, 3):
                rows += [copy(f"{here}conv{part}.weight", f"{there}conv{part}.weight")]
                rows += weight_and_bias(f"{here}norm{part}", f"{there}norm{part}")
            if block == 0:
                rows += [copy(f"{here}project.weight", f"{there}downsample.conv.weight")]
                rows += (
                    weight_and_bias(f"{here}norm_project", f"{there}downsample.norm")
                    if c.unit == "postactivation"
                    else []
                )
    return rows


def _infer_backbone(shapes: TensorShapes, prefix: str) -> ResNetConfig:
    """A trunk in timm's names: blocks a stage, width factor, and which of the two units it is built from."""
    stages = shapes.count(prefix + "stages.{}.blocks.0.conv1.weight")
    post = f"{prefix}stem.norm.weight" in shapes
    return ResNetConfig(
        blocks=tuple(shapes.count(f"{prefix}stages.{s}.blocks.{{}}.conv1.weight") for s in range(stages)),
        factor=shapes.get(f"{prefix}stem.conv.weight", 4)[0] / 64,
        channels=shapes.get(f"{prefix}stem.conv.weight", 4)[1],
        classes=0,
        unit="postactivation" if post else "preactivation",
        standardisation_eps=1e-8,
        padding="same" if post else "symmetric",
        pool_padding="infinity" if post else "zero",
    )


def _infer_resnet(shapes: TensorShapes) -> ResNetConfig:
    trunk = _infer_backbone(shapes, "")
    return replace(trunk, classes=shapes.get("head.fc.weight", 4)[0] if "head.fc.weight" in shapes else 0)


BIT_NAMES: dict[tuple[tuple[int, ...], float], str] = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}
HYBRID_NAMES: dict[tuple[int, ...], str] = {(3, 4, 9): "vit_base_r50_s16_224", (3, 4, 6, 3): "vit_large_r50_s32_224"}


@singledispatch
def architecture(c: ModelConfig) -> tuple[str, dict[str, Any]]:
    """timm's `create_model` arguments for a config: an architecture name, and what differs from it."""
    raise ExportRefused(f"timm has no such network: {c.title}")


@architecture.register
def _(c: ResNetConfig) -> tuple[str, dict[str, Any]]:
    name = BIT_NAMES.get((c.blocks, c.factor))
    if name is None:
        raise ExportRefused(
            f"timm has no name for a BiT of field blocks={c.blocks} at factor={c.factor}; write a file instead"
        )
    return name, {"in_chans": c.channels, "num_classes": c.classes}


@architecture.register
def _(c: ViTConfig) -> tuple[str, dict[str, Any]]:
    common: dict[str, Any] = {"in_chans": c.channels, "num_classes": c.classes}
    args: dict[str, Any] = {
        "img_size": list(c.image),
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": (c.mlp_width + 0.5) / c.width,  # timm rounds the product down
        "qkv_bias": c.qkv_bias,
        "class_token": c.class_token,
        "no_embed_class": bool(c.registers) or (c.class_token and not c.position_prefix),
        "reg_tokens": c.registers,
        "global_pool": "token" if c.pool == "token" else "avg",
        "fc_norm": c.norm_after_pool,
        "act_layer": "gelu" if c.gelu == "erf" else "gelu_tanh",
    }
    if c.backbone is None:
        patch = c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch)
        return "vit_base_patch16_224", {**args, "patch_size": patch, **common}
    if c.backbone.blocks not in HYBRID_NAMES:
        raise ExportRefused(f"timm has no name for a hybrid of field blocks={c.backbone.blocks}; write a file instead")
    return HYBRID_NAMES[c.backbone.blocks], {**args, **common}


def build_settings(c: ModelConfig, p: Preprocessing, class_names: tuple[str, ...] | None) -> dict[str, Any]:
    """The `config.json` of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads."""
    name, args = architecture(c)
    classes = args.pop("num_classes")
    pretrained: dict[str, Any] = {
        "input_size": [c.channels, *c.image],
        "mean": list(p.mean),
        "std": list(p.std),
        "interpolation": "box" if p.interpolation == "area" else p.interpolation,
        "crop_pct": 1.0 if p.resize is None else min(p.image) / p.resize,
        "crop_mode": "squash" if p.resize is None else "center",
        "num_classes": classes,
        "fixed_input_size": bool(c.tokens),  # timm hands `img_size` to such networks, and a ResNet takes none
    }
    out: dict[str, Any] = {
        "architecture": name,
        "num_classes": classes,
        "model_args": args,
        "pretrained_cfg": pretrained,
    }
    return out | ({"label_names": list(class_names)} if class_names else {})


def read_preprocessing(settings: dict[str, Any], image: Pair) -> Preprocessing | None:
    """What a timm folder's config.json says of images; None where it says nothing that we can do. ConfigError where
    it asks for something absurd."""
    cfg = settings.get("pretrained_cfg", {})
    try:
        squash = cfg.get("crop_mode") == "squash"
        resize = None if squash else round(min(image) / float(cfg["crop_pct"]))
        said = {name: cfg[name] for name in ("interpolation", "mean", "std")}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    if said["interpolation"] not in get_args(Interpolation) or (resize is not None and 0 < resize < min(image)):
        return None
    return Preprocessing.from_dict({"image": image, "resize": resize, **said})


def read_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    names: Any = settings.get("label_names")
    return tuple(str(n) for n in names) if isinstance(names, list) and len(names) == classes else None

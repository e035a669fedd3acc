"""timm's state dicts: ViTs (`vit_*`, `deit_*`), hybrids (`vit_*_r50_s*`) and BiT ResNets (`resnetv2_*_bit`).

timm computes with the exact GELU, and standardises kernels by sqrt(var + 1e-8) in both families.
"""

from dataclasses import replace
from typing import Any, get_args

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, TensorShapes, copy, weight_and_bias
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config

NAME = "timm"
BLOCK = keys.name_layers("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2") | {"attention.qkv": "attn.qkv"}
DOWNSAMPLE = {"project": "downsample.conv", "norm_project": "downsample.norm"}


def recognises(names: set[str], settings: Settings) -> bool:
    return "patch_embed.proj.weight" in names or {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config behind a timm state dict, with timm's numerics."""
    if "patch_embed.proj.weight" not in shapes:
        classes = shapes.get("head.fc.weight", 4)[0] if "head.fc.weight" in shapes else 0
        return replace(_infer_trunk(shapes, ""), classes=classes)
    args: dict[str, Any] = dict((shapes.settings or {}).get("model_args") or {})
    heads, act = args.get("num_heads"), args.get("act_layer", "gelu")
    if act not in ("gelu", "gelu_tanh"):
        raise MismatchedWeights(f"{shapes.path}: act_layer {act!r} is not a GELU; known: gelu, gelu_tanh")
    heads = heads if type(heads) is int else None
    sizes = keys.infer_sizes(shapes, "patch_embed.proj", "blocks.{}.", BLOCK, "head", heads)
    token, after, (high, wide) = "cls_token" in shapes, "fc_norm.weight" in shapes, sizes["patch"]
    hybrid = "patch_embed.backbone.stem.conv.weight" in shapes
    backbone = _infer_trunk(shapes, "patch_embed.backbone.") if hybrid else None
    stride = backbone.stride if backbone else 1
    size, prefix = keys.infer_image(shapes, shapes.get("pos_embed", 3)[1], (high * stride, wide * stride), token)
    sizes |= {"gelu": "tanh"} if act == "gelu_tanh" else {}
    if backbone is not None:
        sizes |= {"backbone": replace(backbone, image=size), "channels": backbone.channels}
    return ViTConfig(
        **sizes,
        image=size,
        class_token=token,
        position_prefix=bool(prefix) or not token,
        pool="mean" if after or not token or args.get("global_pool") == "avg" else "token",
        norm_after_pool=after,
        registers=shapes.get("reg_token", 3)[1] if "reg_token" in shapes else 0,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
    )


def build_table(config: ModelConfig) -> list[KeyEntry]:
    if isinstance(config, ResNetConfig):
        rows = _trunk_table(config, "trunk.", "")
        rows += weight_and_bias("norm", "norm") if config.unit == "preactivation" else []
        return rows + (_head_table() if config.classes else [])
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"timm has no such network: {config.title}")
    c = config
    if c.head in ("tanh", "patches"):
        kind = "hidden tanh layer" if c.head == "tanh" else "head on patches"
        raise ExportRefused(f"timm has no {kind}: field head={c.head!r} cannot be held; use head='linear' or vitrail's")
    if c.position != "learned" or c.entry != "stem" or c.attention != "full":
        field = f"position={c.position!r} at {c.entry!r}" if c.attention == "full" else f"attention={c.attention!r}"
        raise ExportRefused(f"timm's ViT has learned positions at the stem and full attention, not field {field}")
    if c.registers and c.class_token and c.position_prefix:
        raise ExportRefused("timm gives registers the class token's position, so not field position_prefix=True")
    rows = [copy("class_token", "cls_token")] if c.class_token else []
    rows += [copy("registers", "reg_token")] if c.registers else []
    rows += [copy("position.tables.0.table", "pos_embed")]
    rows += _trunk_table(c.backbone, "embedding.backbone.", "patch_embed.backbone.") if c.backbone else []
    rows += weight_and_bias("embedding.projection", "patch_embed.proj")
    blocks = keys.block_entries(c.depth, "blocks.{}.", BLOCK)
    rows += [entry for entry in blocks if c.qkv_bias or not entry.ours.endswith("qkv.bias")]
    rows += weight_and_bias("norm", "fc_norm" if c.norm_after_pool else "norm")
    return rows + (weight_and_bias("head.classifier", "head") if c.classes else [])


def _head_table() -> list[KeyEntry]:
    """A matrix here, a 1x1 convolution there."""
    weight = KeyEntry("head.weight", ("head.fc.weight",), lambda t: (t[:, :, None, None],), lambda ts: ts[0].flatten(1))
    return [weight, copy("head.bias", "head.fc.bias")]


def _trunk_table(c: ResNetConfig, ours: str, theirs: str) -> list[KeyEntry]:
    if c.mixing != "convolution":
        raise ExportRefused(f"timm has no axial ResNet: field mixing={c.mixing!r} cannot be held")
    if c.root != "7x7":
        raise ExportRefused(f"timm's BiT has a 7x7 root: field root={c.root!r} cannot be held")
    if not c.blocks:
        raise ExportRefused("timm keeps a root without stages under other names: field blocks=() cannot be held")
    rows = keys.kernel(f"{ours}root", f"{theirs}stem.conv")
    rows += weight_and_bias(f"{ours}norm_root", f"{theirs}stem.norm") if c.unit == "postactivation" else []
    return rows + keys.unit_entries(c, ours, theirs + "stages.{0}.blocks.{1}.", DOWNSAMPLE)


def _infer_trunk(shapes: TensorShapes, prefix: str) -> ResNetConfig:
    """A trunk in timm's names: blocks a stage, width factor, and which of the two units it is built from."""
    width, channels, *_ = shapes.get(f"{prefix}stem.conv.weight", 4)
    hybrid = {"unit": "postactivation", "padding": "same", "pool_padding": "infinity"}
    unit: Any = hybrid if f"{prefix}stem.norm.weight" in shapes else {}
    blocks = shapes.count_units(prefix + "stages.{}.blocks.{}.conv1.weight")
    unit |= {"channels": channels, "standardisation_eps": 1e-8}
    return ResNetConfig(blocks=blocks, factor=width / 64, classes=0, **unit)


# By blocks: the depth in timm's name, and its widths.
BIT_NAMES: dict[tuple[int, ...], tuple[int, tuple[float, ...]]] = {
    (3, 4, 6, 3): (50, (1, 3)), (3, 4, 23, 3): (101, (1, 3)), (3, 8, 36, 3): (152, (2, 4)),
}  # fmt: skip
HYBRID_NAMES: dict[tuple[int, ...], str] = {(3, 4, 9): "vit_base_r50_s16_224", (3, 4, 6, 3): "vit_large_r50_s32_224"}


def architecture(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """timm's `create_model` arguments for a config: an architecture name, and what differs from it."""
    common: dict[str, Any] = {"in_chans": config.channels, "num_classes": config.classes}
    if isinstance(config, ResNetConfig):
        depth, widths = BIT_NAMES.get(config.blocks, (0, ()))
        if config.factor not in widths:
            fields = f"blocks={config.blocks} at factor={config.factor}"
            raise ExportRefused(f"timm has no name for a BiT of field {fields}; write a file instead")
        return f"resnetv2_{depth}x{config.factor:.0f}_bit", common
    c = vit_config(config, "timm")
    args: dict[str, Any] = {"img_size": list(c.image), "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads}
    args |= {"qkv_bias": c.qkv_bias, "class_token": c.class_token, "reg_tokens": c.registers}
    args |= {
        "mlp_ratio": (c.mlp_width + 0.5) / c.width,  # timm rounds the product down
        "no_embed_class": bool(c.registers) or (c.class_token and not c.position_prefix),
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


def network_settings(config: ModelConfig) -> dict[str, Any]:
    name, args = architecture(config)
    return {"architecture": name, "model_args": args}


def build_settings(
    network: dict[str, Any], c: ModelConfig, p: Preprocessing, class_names: tuple[str, ...] | None
) -> dict[str, Any]:
    """The `config.json` of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads."""
    args = dict(network["model_args"])
    classes = args.pop("num_classes")
    pretrained: dict[str, Any] = {"input_size": [c.channels, *c.image], "mean": list(p.mean), "std": list(p.std)}
    pretrained |= {
        "interpolation": "box" if p.interpolation == "area" else p.interpolation,
        "crop_pct": 1.0 if p.resize is None else min(p.image) / p.resize,
        "crop_mode": "squash" if p.resize is None else "center",
        "num_classes": classes,
        "fixed_input_size": bool(c.tokens),  # timm hands `img_size` to such networks, and a ResNet takes none
    }
    out = network | {"num_classes": classes, "model_args": args, "pretrained_cfg": pretrained}
    return out | ({"label_names": list(class_names)} if class_names else {})


def read_preprocessing(settings: dict[str, Any], image: Pair) -> Preprocessing | None:
    """What a timm folder's config.json says of images; None where it says nothing that we can do. ConfigError where
    it asks for something absurd."""
    cfg = settings.get("pretrained_cfg", {})
    try:
        resize = None if cfg.get("crop_mode") == "squash" else round(min(image) / float(cfg["crop_pct"]))
        said = {name: cfg[name] for name in ("interpolation", "mean", "std")}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    if said["interpolation"] not in get_args(Interpolation) or (resize is not None and 0 < resize < min(image)):
        return None
    return Preprocessing.from_dict({"image": image, "resize": resize, **said})


def read_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    names: Any = settings.get("label_names")
    return tuple(str(n) for n in names) if isinstance(names, list) and len(names) == classes else None


FORMATS = (
    Format(
        name=NAME,
        library=NAME,
        order=50,
        recognises=recognises,
        table=build_table,
        infer=infer,
        preprocessing=imagenet_crop,
        settings=network_settings,
    ),
)

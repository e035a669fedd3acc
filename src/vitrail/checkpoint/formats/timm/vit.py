"""timm's state dicts: the ViTs of vision_transformer.py and deit.py (`vit_*`, `deit*`, `flexivit_*`, `aimv2_*`,
`beit3_*`), hybrids (`vit_*_r50_s*`) and BiT ResNets (`resnetv2_*_bit`).

timm uses the exact GELU, and standardises kernels by sqrt(var + 1e-8) in both families. A state dict does not name the
activation, so files of OpenAI's CLIP and of later SigLIPs need their config.json, or gelu="quick" or gelu="tanh".
"""

import re
from dataclasses import replace
from typing import Any, get_args

import torch

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings, clip_crop, half_crop, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, copy, weight_and_bias
from vitrail.checkpoint.formats.timm import parts
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import HYBRID, VIT

NAME = "timm"
DOWNSAMPLE = {"project": "downsample.conv", "norm_project": "downsample.norm"}
FREE = (
    "backbone", "class_tokens", "register_positions", "layer_scale", "gated", "norm", "norm_order", "norm_stem",
    "norm_final", "norm_qk", "norm_inner_attention", "norm_inner_mlp", "out_bias", "mlp_bias", "patch_bias",
    "map_mlp_width", "map_prefix", "projection",
)  # fmt: skip
# What only the name of an architecture says.
NUMERICS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"_quickgelu_", {"gelu": "quick"}),
    (r"_clip_|^beit3_|^aimv2_", {"norm_eps": 1e-5}),
    (r"_patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt", {"gelu": "tanh"}),
    (r"_rpn_", {"norm_order": "res-post"}),
    (r"^flexivit", {"position_resample": "bilinear"}),
    (r"^test_vit3", {"map_prefix": True}),
)


def recognises(names: set[str], settings: Settings) -> bool:
    vit = {parts.STEM, "blocks.0.attn.proj.weight"} <= names
    return vit or {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Stacks gates as in DINOv2, or splits them as in AIMv2, whose norms have no biases."""
    if parts.STEM not in tensors:
        return dict(tensors)
    return parts.store_gates(tensors, split="blocks.0.norm1.bias" not in tensors)


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config of a timm state dict, with timm's numerics."""
    if parts.STEM not in shapes:
        classes = shapes.get("head.fc.weight", 4)[0] if "head.fc.weight" in shapes else 0
        return replace(_infer_trunk(shapes, ""), classes=classes)
    args, name = parts.read_args(shapes), parts.read_architecture(shapes)
    fields = parts.infer_layers(shapes)
    hybrid = "patch_embed.backbone.stem.conv.weight" in shapes
    backbone = _infer_trunk(shapes, "patch_embed.backbone.") if hybrid else None
    if "head_dist.weight" in shapes:
        fields |= {"head": "distilled", "registers": shapes.get("dist_token", 3)[1]}
    elif "dist_token" in shapes:  # without its head a second class token: timm takes the mean of both
        fields |= {"class_tokens": 2}
    if "patch_embed.norm.weight" in shapes:
        fields |= {"norm_stem": "patches"}
    stride = backbone.stride if backbone else 1
    ground = {"patch": (fields["patch"][0] * stride, fields["patch"][1] * stride)}
    fields |= parts.infer_positions(shapes, fields | ground)
    fields |= {
        "gelu": parts.read_gelu(shapes, args, gated=fields["gated"]),
        "norm_eps": 1e-5 if _has_wide_eps(fields) else 1e-6,
    }
    seen = fields["class_token"] and fields["layer_scale"] and (fields.get("position_prefix") or fields["registers"])
    fields |= {"pool": parts.infer_pool(shapes, fields, "token+mean" if seen else "")}
    fields |= _infer_pooled(shapes, fields, args)
    if fields["gated"] and fields["pool"] == "map":
        raise MismatchedWeights(f"{shapes.path}: attention pooling with a gated MLP is not one of vitrail's networks")
    if backbone is not None:
        fields |= {"backbone": replace(backbone, image=fields["image"]), "channels": backbone.channels}
    said: dict[str, Any] = {
        field: value for form, said in NUMERICS if re.search(form, name) for field, value in said.items()
    }
    said |= {"gelu": fields["gelu"]} if "act_layer" in args else {}
    said |= {"norm_eps": 1e-6} if "norm_layer" in args else {}  # of every norm that timm has a name for
    config = ViTConfig(**fields | said)
    # The paper's networks are resampled as in the reference, whichever library stores them.
    paper = config.pool != "map" and (not name or bool(VIT.fullmatch(name) or HYBRID.fullmatch(name)))
    plain = paper and all(getattr(config, part) == getattr(keys.PAPER, part) for part in config.parts)
    return config if plain or "position_resample" in said else replace(config, position_resample="bicubic")


def _infer_pooled(shapes: TensorShapes, fields: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Whether pooling reads the tokens in front of the patches; by default it does not."""
    prefix = fields["class_token"] or fields["registers"]
    whole = args.get("pool_include_prefix", False)
    if prefix and whole and fields["pool"] == "mean":
        fault = "pool_include_prefix=True of its model_args takes the mean of all tokens"
        raise MismatchedWeights(f"{shapes.path}: {fault}, and vitrail takes that of the patches alone")
    return {"map_prefix": bool(whole)} if prefix and fields["pool"] == "map" else {}


def _has_wide_eps(fields: dict[str, Any]) -> bool:
    """Whether published networks with these layers have eps=1e-5: CLIP, BEiT-3, AIMv2."""
    clip, aim = fields["norm_stem"] == "tokens", fields["norm"] == "rms" and fields["gated"]
    return clip or aim or (fields["norm_inner_attention"] and fields["norm_inner_mlp"])


def build_table(config: ModelConfig) -> list[KeyEntry]:
    if isinstance(config, ResNetConfig):
        rows = _trunk_table(config, "trunk.", "")
        rows += weight_and_bias("norm", "norm") if config.unit == "preactivation" else []
        return rows + (_head_table() if config.classes else [])
    c = parts.require_fields("timm's ViT", config, free=FREE)
    if c.registers and c.class_token and c.position_prefix and not c.register_positions and c.position == "learned":
        raise ExportRefused("timm has no place for field position_prefix=True next to registers; use another format")
    parts.refuse_second_matrix("timm's ViT", c)
    headless = c.pool == "token" and c.position_prefix and not (c.registers or c.classes or c.projection)
    if c.class_tokens > 2 or (c.class_tokens == 2 and not headless):
        what = f"field class_tokens={c.class_tokens}"
        raise ExportRefused(f"timm has a second class token in DeiT without a head alone: no place for {what}")
    names = parts.NAMES | {"norm": "fc_norm" if c.norm_after_pool else "norm"}
    names |= {"norm_stem": "patch_embed.norm"} if c.norm_stem == "patches" else {}
    names |= {"registers": "dist_token", "head.distilled": "head_dist"} if c.head == "distilled" else {}
    names |= {"projection": "head"} if c.projection else {}
    trunk = [] if c.backbone is None else _trunk_table(c.backbone, "embedding.backbone.", "patch_embed.backbone.")
    known = {entry.ours: entry for entry in trunk}
    names |= {ours: entry.names[0] for ours, entry in known.items()}

    def special(ours: str, theirs: str) -> KeyEntry | None:
        if ours == "projection.weight":
            return parts.join_projection(ours, theirs)
        if ours == "class_token" and c.class_tokens == 2:
            return KeyEntry(ours, (theirs, "dist_token"), lambda t: t.chunk(2, dim=1), lambda ts: torch.cat(ts, dim=1))
        return parts.split_gate(ours, theirs) if c.gated and c.norm == "rms" else None

    return parts.named_entries("timm's ViT", c, names, special)


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
    """The config of a trunk in timm's names: blocks per stage, width factor, and which of the two units it is built
    from."""
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
    common |= {"num_classes": c.projection} if c.projection else {}
    args: dict[str, Any] = {"img_size": list(c.image), "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads}
    args |= {"qkv_bias": c.qkv_bias, "class_token": c.class_token, "reg_tokens": c.registers}
    hidden = 2 * c.mlp_width if c.gated and c.norm == "layer" else c.mlp_width
    uncovered = bool(c.registers) and not c.register_positions
    args |= {
        "mlp_ratio": (hidden + 0.5) / c.width,  # timm rounds the product down
        "no_embed_class": uncovered or (c.class_token and not c.position_prefix),
        "global_pool": {"mean": "avg", "map": "map"}.get(c.pool, "token"),
        "fc_norm": c.norm_after_pool,
        **({"pool_include_prefix": c.map_prefix} if c.pool == "map" and c.prefix else {}),
        "act_layer": "silu" if c.gated else {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}[c.gelu],
    }
    if c.backbone is not None:
        if c.backbone.blocks not in HYBRID_NAMES:
            listed = f"blocks={c.backbone.blocks}"
            raise ExportRefused(f"timm has no name for a hybrid of field {listed}; write a file instead")
        return HYBRID_NAMES[c.backbone.blocks], {**args, **common}
    patch = c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch)
    name, more = _name_later(c)
    for field in ("reg_tokens", "class_token", "fc_norm") if c.head == "distilled" or c.class_tokens == 2 else ():
        del args[field]
    return name, {**args, **more, "patch_size": patch, **common}


def _name_later(c: ViTConfig) -> tuple[str, dict[str, Any]]:
    """An architecture with the network's layers, since a config.json cannot name classes, and the other arguments that
    later families need."""
    rules: dict[str, bool] = {
        "patch_bias": c.patch_bias == (c.norm_stem == "tokens"),  # timm has one or the other
        "mlp_bias": c.mlp_bias != c.out_bias,
        "map_mlp_width": c.pool == "map" and c.map_mlp_width not in (0, c.mlp_width),
    }
    for field in (field for field, wrong in rules.items() if wrong):
        raise ExportRefused(
            f"timm's ViT cannot be built with field {field}={getattr(c, field)!r}; write a file instead"
        )
    name = "vit_base_patch16_224" if c.norm_eps < 5e-6 or c.norm == "rms" else "vit_base_patch32_clip_224"
    if c.gated:
        name = "vit_giant_patch14_dinov2" if c.norm == "layer" else "aimv2_large_patch14_224"
    name = "deit_tiny_distilled_patch16_224" if c.head == "distilled" or c.class_tokens == 2 else name
    name = "vit_base_patch16_rpn_224" if c.norm_order == "res-post" else name
    norm = {"layer": "layernorm", "rms": "rmsnorm"}[c.norm]
    aim = name.startswith("aimv2")
    given: dict[str, tuple[bool, Any]] = {  # where it is not the architecture's own value
        "init_values": (
            bool(c.layer_scale) or name.startswith(("vit_giant", "vit_base_patch16_rpn")),
            c.layer_scale or None,
        ),
        "pre_norm": ((c.norm_stem == "tokens") != ("_clip_" in name), c.norm_stem == "tokens"),
        "final_norm": (not c.norm_final, False),
        "qk_norm": (c.norm_qk, True),
        "scale_attn_norm": (c.norm_inner_attention, True),
        "scale_mlp_norm": (c.norm_inner_mlp, True),
        "proj_bias": (c.out_bias == aim, c.out_bias),
        "pos_embed": (c.position == "none", "none"),
        "norm_layer": (c.norm == "rms" and not aim, norm),
        "embed_norm_layer": ((c.norm_stem == "patches") != aim, norm if c.norm_stem == "patches" else None),
    }
    return name, {argument: value for argument, (differs, value) in given.items() if differs}


def network_settings(config: ModelConfig) -> dict[str, Any]:
    name, args = architecture(config)
    if isinstance(config, ViTConfig) and config.pool == "token+mean":
        del args["global_pool"]  # timm has none such; without one its own default stands
    return {"architecture": name, "model_args": args}


def build_settings(
    network: dict[str, Any], c: ModelConfig, p: Preprocessing, class_names: tuple[str, ...] | None
) -> dict[str, Any]:
    """The `config.json` of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads."""
    if p.fit == "pad":
        raise ExportRefused("timm pads images on all sides: no place for fit='pad'; write a vitrail file instead")
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
    """Reads preprocessing from a timm folder's config.json; None if it describes something that vitrail does not
    support. ConfigError for absurd values."""
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


def prepare(config: ModelConfig) -> Preprocessing:
    """The usual preprocessing of the family with such layers: CLIP's and AIMv2's mean, SigLIP's, or ImageNet's."""
    if not isinstance(config, ViTConfig):
        return imagenet_crop(config)
    if config.norm_stem != "none":
        return clip_crop(config)
    if config.pool == "map":
        return half_crop(config)
    whole = bool(config.layer_scale)  # DINOv2 and DeiT III crop nothing off
    return imagenet_crop(config, 1.0) if whole else imagenet_crop(config)


FORMATS = (
    Format(
        name=NAME,
        library=NAME,
        order=50,
        recognises=recognises,
        table=build_table,
        infer=infer,
        modern=modernise,
        preprocessing=prepare,
        settings=network_settings,
    ),
)

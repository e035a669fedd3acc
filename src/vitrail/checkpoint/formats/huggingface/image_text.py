"""Image towers of CLIP, MetaCLIP 2, SigLIP, SigLIP 2 and AIMv2 in Hugging Face folders, with or without text towers."""

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.checkpoint.formats.format import clip_crop, half_squash
from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import (
    Family,
    Head,
    Names,
    Place,
    Reshaped,
    add_axes,
    in_blocks,
    read_head,
)
from vitrail.checkpoint.formats.huggingface.names import (
    ATTENTION_DROPOUT,
    CLASSIFIER,
    MLP,
    SHARP,
    SIZES,
    TABLE,
    half_bicubic,
)
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.models.vit_config import ViTConfig

# CLIP, MetaCLIP 2

TOWER_BLOCK: Final[Names] = {
    "norm_attention": "layer_norm1", "attention.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "attention.out": "self_attn.out_proj",
    "norm_mlp": "layer_norm2", "mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2",
}  # fmt: skip
TEXT: Final = (r"^text_model\.", r"^text_projection\.", r"^logit_", r"position_ids$")
TOWER: Final = "vision_model."


def name_clip(c: ViTConfig) -> dict[str, Place]:
    return {
        "class_token": add_axes("embeddings.class_embedding", 2),
        TABLE: add_axes("embeddings.position_embedding.weight", 1),
        "embedding.projection": "embeddings.patch_embedding",
        "norm_stem": "pre_layrnorm",
        **in_blocks("encoder.layers.{}.", TOWER_BLOCK),
        "norm": "post_layernorm",
    }


def clip_heads(name: str) -> dict[str, Head]:
    return {
        "none": Head(f"{name}VisionModel", ("token",)),
        "projected": Head(f"{name}VisionModelWithProjection", ("token",)),
        "linear": Head(f"{name}ForImageClassification", ("mean",)),
    }


def read_clip(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    """A classifier reads the mean of the patches as the last block leaves them."""
    head = read_head(clip_heads(""), get)
    projection = "visual_projection.weight"
    length = get.shapes.get(projection, 2)[0] if projection in get.shapes and not head["classes"] else 0
    return {**head, "norm_final": not head["classes"], "projection": length}


def unpack_clip(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """Without the last norm and the projection where a classifier reads neither."""
    if "classifier.weight" not in tensors:
        return tensors
    return {n: t for n, t in tensors.items() if "post_layernorm." not in n and not n.startswith("visual_projection.")}


def pack_clip(tensors: Tensors, c: ViTConfig) -> Tensors:
    if c.norm_final:
        return tensors
    first = f"{TOWER}pre_layrnorm"
    norm = {"weight": torch.ones_like(tensors[f"{first}.weight"]), "bias": torch.zeros_like(tensors[f"{first}.bias"])}
    return {**tensors, **{f"{TOWER}post_layernorm.{part}": tensor for part, tensor in norm.items()}}


CLIP_KEYS: Final[Keys] = {
    **SIZES, **MLP, **ATTENTION_DROPOUT, "patch": ("patch_size", 32), "gelu": ("hidden_act", "quick_gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
}  # fmt: skip
CLIP: Final = Family(
    model_type="clip_vision_model",
    whole="clip",
    prefix=TOWER,
    layer="encoder.layers.{}.layer_norm1",
    names=name_clip,
    outer={**CLASSIFIER, "projection": "visual_projection"},
    heads=clip_heads("CLIP"),
    keys=CLIP_KEYS,
    constants={"norm_stem": "tokens", "patch_bias": False, **SHARP},
    free=("norm_final", "projection"),
    drop=TEXT,
    read=read_clip,
    write=lambda c: {"projection_dim": c.projection} if c.projection else {},
    check=lambda c: [] if c.norm_final != bool(c.classes) else ["norm_final"],
    unpack=unpack_clip,
    pack=pack_clip,
    pooled=lambda c: True,
    preprocessing=clip_crop,
)

METACLIP_2: Final = replace(
    CLIP, model_type="metaclip_2_vision_model", whole="metaclip_2", heads=clip_heads("MetaClip2"), written=False
)

# SigLIP, SigLIP 2

SIGLIP_POOL: Final[Names] = {
    "map_pool.query": "head.probe", "map_pool.q": "head.attention.q_proj", "map_pool.kv": "head.attention.kv_proj",
    "map_pool.out": "head.attention.out_proj", "map_pool.norm": "head.layernorm", "map_pool.mlp.expand": "head.mlp.fc1",
    "map_pool.mlp.contract": "head.mlp.fc2",
}  # fmt: skip


def name_siglip(c: ViTConfig) -> dict[str, Place]:
    return {
        TABLE: add_axes("embeddings.position_embedding.weight", 1),
        "embedding.projection": "embeddings.patch_embedding",
        **in_blocks("encoder.layers.{}.", TOWER_BLOCK),
        "norm": "post_layernorm",
        **SIGLIP_POOL,
    }


def siglip_heads(name: str) -> dict[str, Head]:
    return {
        "none": Head(f"{name}VisionModel", ("map", "mean")),
        "linear": Head(f"{name}ForImageClassification", ("mean",)),
    }


def read_siglip(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    """A classifier reads the mean of the patches, not what attention pools."""
    pool = "map" if get.has("head.probe") else "mean"
    return {**read_head(siglip_heads(""), get), "pool": pool}


def unpack_siglip(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """Queries apart from keys and values, which torch's attention has in one matrix."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{TOWER}head.") and "classifier.weight" in tensors:
            continue
        stem, found, part = name.rpartition("head.attention.in_proj_")
        if found and tensor.ndim and not tensor.shape[0] % 3:
            third = tensor.shape[0] // 3
            out |= {f"{stem}head.attention.q_proj.{part}": tensor[:third]}
            out |= {f"{stem}head.attention.kv_proj.{part}": tensor[third:]}
        else:
            out[name] = tensor
    return out


def pack_siglip(tensors: Tensors, c: ViTConfig) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if "head.attention.kv_proj." not in name}
    for part in ("weight", "bias") if c.pool == "map" else ():
        stem = f"{TOWER}head.attention."
        joined = [out.pop(f"{stem}q_proj.{part}"), tensors[f"{stem}kv_proj.{part}"]]
        out[f"{stem}in_proj_{part}"] = torch.cat(joined)
    return out


SIGLIP_KEYS: Final[Keys] = {
    **SIZES, **MLP, **ATTENTION_DROPOUT, "gelu": ("hidden_act", "gelu_pytorch_tanh"),
    "norm_eps": ("layer_norm_eps", 1e-6),
}  # fmt: skip
SIGLIP: Final = Family(
    model_type="siglip_vision_model",
    whole="siglip",
    prefix=TOWER,
    layer="encoder.layers.{}.layer_norm1",
    names=name_siglip,
    outer=CLASSIFIER,
    heads=siglip_heads("Siglip"),
    keys=SIGLIP_KEYS,
    constants={"class_token": False, **SHARP},
    drop=TEXT,
    read=read_siglip,
    write=lambda c: {} if c.pool == "map" else {"vision_use_head": False},
    unpack=unpack_siglip,
    pack=pack_siglip,
    pooled=lambda c: c.pool == "map",
    preprocessing=half_bicubic,
)


def name_siglip2(c: ViTConfig) -> dict[str, Place]:
    high, wide = c.patch

    def flatten(kernel: Tensor) -> Tensor:
        return kernel.permute(0, 2, 3, 1).flatten(1)

    def unflatten(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (high, wide, c.channels)).permute(0, 3, 1, 2)

    patches = Reshaped("embeddings.patch_embedding.weight", flatten, unflatten)  # a layer on pixels, channels last
    return {**name_siglip(c), "embedding.projection.weight": patches}


def read_siglip2(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    count, (high, wide) = get.integer("num_patches", 256), found["patch"]
    side = math.isqrt(count)
    if side * side != count:
        raise get.refuse(f"config.json says num_patches={count}, expected the square of a whole number")
    return {**read_siglip(get, found), "image": get.shapes.image or (side * high, side * wide)}


SIGLIP_2: Final = replace(
    SIGLIP,
    model_type="siglip2_vision_model",
    whole="siglip2",
    names=name_siglip2,
    heads=siglip_heads("Siglip2"),
    keys={field: known for field, known in SIGLIP.keys.items() if field != "image"},
    constants={"class_token": False, "position_resample": "bilinear-antialias"},
    free=("image",),
    read=read_siglip2,
    write=lambda c: {**SIGLIP.write(c), "num_patches": c.patches},
    check=lambda c: [] if c.position_resample == "bilinear-antialias" else ["position_resample"],
    preprocessing=half_squash,
)

# AIMv2

AIM_BLOCK: Final[Names] = {
    "norm_attention": "rms_norm1", "attention.qkv": tuple(f"attention.{part}_proj" for part in "qkv"),
    "attention.out": "attention.out_proj", "norm_mlp": "rms_norm2",
    "mlp.expand": ("ffn.gate_proj", "ffn.up_proj"), "mlp.contract": "ffn.down_proj",
}  # fmt: skip
AIM_HEADS: Final = {"none": Head("Aimv2VisionModel", ("map", "mean"))}


def name_aim(c: ViTConfig) -> dict[str, Place]:
    return {
        "embedding.projection": "embeddings.patch_embed",
        "norm_stem": "embeddings.rms_norm",
        TABLE: add_axes("embeddings.position_embedding.weight", 1),
        **in_blocks("encoder.layers.{}.", AIM_BLOCK),
        "norm": "rms_norm",
        "map_pool.query": "head.cls_token",
        "map_pool.kv": ("head.k_proj", "head.v_proj"),
        "map_pool.out": "head.output_proj",
    }


def read_aim(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    get.require("hidden_act", "silu")
    get.require("is_native", False)  # sine positions of its own, which are in no file
    pool = "map" if get.has("head.cls_token") else "mean"
    projection = "visual_projection.weight"
    length = get.shapes.get(projection, 2)[0] if projection in get.shapes else 0
    head = {"head": "none", "classes": 0, "pool": pool, "projection": length}
    return {**head, "out_bias": found["qkv_bias"], "map_style": "aimv2" if pool == "map" else "siglip"}


# Apple's own files, whose model_type is aimv2, too.
AIM_OWN: Final = (
    (r"^preprocessor\.patchifier\.proj\.", "embeddings.patch_embed."),
    (r"^preprocessor\.patchifier\.norm\.", "embeddings.rms_norm."),
    (r"^preprocessor\.pos_embed$", "embeddings.position_embedding.weight"),
    (r"^trunk\.post_trunk_norm\.", "rms_norm."),
    (r"^trunk\.blocks\.", "encoder.layers."),
    (r"\.norm_([12])\.", r".rms_norm\1."),
    (r"\.attn\.proj\.", ".attention.out_proj."),
    (r"\.mlp\.fc1\.", ".ffn.gate_proj."),
    (r"\.mlp\.fc3\.", ".ffn.up_proj."),
    (r"\.mlp\.fc2\.", ".ffn.down_proj."),
)


def unpack_aim(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            out |= {name.replace(".attn.qkv.", f".attention.{part}_proj."): third for part, third in parts}
        elif name == "embeddings.position_embedding.weight" and tensor.ndim == 3:
            out[name] = tensor[0]
        else:
            out[name] = tensor
    return out


AIM_KEYS: Final[Keys] = {
    **SIZES, **ATTENTION_DROPOUT, "width": ("hidden_size", 1024), "depth": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 8), "mlp_width": ("intermediate_size", 2816), "patch": ("patch_size", 14),
    "norm_eps": ("rms_norm_eps", 1e-5), "qkv_bias": ("qkv_bias", False), "mlp_bias": ("mlp_bias", False),
}  # fmt: skip
AIM_CONSTANTS: Final = {
    "class_token": False, "norm": "rms", "norm_stem": "patches", "gated": True, "gelu": "erf",
    "position_resample": "bicubic",
}  # fmt: skip
AIM: Final = Family(
    model_type="aimv2_vision_model",
    whole="aimv2",
    prefixes=(TOWER, "image_encoder."),
    layer="encoder.layers.{}.rms_norm1",
    names=name_aim,
    outer={"projection": "visual_projection"},
    heads=AIM_HEADS,
    keys=AIM_KEYS,
    constants=AIM_CONSTANTS,
    free=("out_bias", "map_style", "gelu"),
    renames=AIM_OWN,
    drop=TEXT,
    read=read_aim,
    write=lambda c: {"hidden_act": "silu", "use_head": c.pool == "map", "is_native": False},
    check=lambda c: [
        *(() if c.out_bias == c.qkv_bias else ("out_bias",)),
        *(() if c.pool != "map" or c.map_style == "aimv2" else ("map_style",)),
    ],
    unpack=unpack_aim,
    pooled=lambda c: c.pool == "map",
    preprocessing=clip_crop,
)
FAMILIES: Final = (CLIP, METACLIP_2, SIGLIP_2, SIGLIP, AIM)

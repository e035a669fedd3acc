"""DINOv2, with and without registers, and DINOv3 in Hugging Face folders."""

import re
from dataclasses import replace
from typing import Any, Final

import torch

from vitrail.checkpoint.formats.format import imagenet_crop
from vitrail.checkpoint.formats.huggingface.config_json import WRITTEN, ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import Family, Head, Names, Place, in_blocks, read_head
from vitrail.checkpoint.formats.huggingface.names import (
    ACTIVATION,
    ATTENTION_DROPOUT,
    CLASSIFIER,
    DROP_PATH,
    DROPOUT,
    FIVE_ATTENTION,
    MASK,
    QKV,
    QKV_BIAS,
    SHARP,
    SIZES,
    imagenet_squash,
    name_vit,
)
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary

DINO_BLOCK: Final[Names] = {
    "norm_attention": "norm1", "attention.qkv": QKV, "attention.out": "attention.output.dense",
    "scale_attention.gamma": "layer_scale1.lambda1", "norm_mlp": "norm2", "scale_mlp.gamma": "layer_scale2.lambda1",
}  # fmt: skip
DINOV2_MLP: Final = (
    {"mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2"},
    {"mlp.expand": "mlp.weights_in", "mlp.contract": "mlp.weights_out"},
)
DINO_POOLS: Final = ("token+mean", "token", "mean")


def dinov2_heads(name: str) -> dict[str, Head]:
    return {
        "none": Head(f"{name}Model", DINO_POOLS),
        "linear": Head(f"{name}ForImageClassification", DINO_POOLS[:1]),
    }


def swiglu_width(width: int, ratio: float) -> int:
    """Two thirds of the MLP that it replaces, as a multiple of eight."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


def find_ratio(c: ViTConfig) -> int | None:
    return next(
        (r for r in range(1, 65) if (swiglu_width(c.width, r) if c.gated else c.width * r) == c.mlp_width), None
    )


def read_dinov2(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    ratio = get.number("mlp_ratio", 4)
    head = read_head(dinov2_heads(""), get)
    _require_scale(get, found)
    return {**head, "mlp_width": swiglu_width(found["width"], ratio) if found["gated"] else int(found["width"] * ratio)}


def _require_scale(get: ConfigReader, found: dict[str, Any]) -> None:
    if not found["layer_scale"] > 0:
        raise get.refuse(f"config.json says layerscale_value={found['layer_scale']!r}, expected a number above 0")


def unpack_dinov2(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """The gate and the value of transformers 5 as the one matrix of 4."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        other = tensors.get(name.replace(".mlp.gate_proj.", ".mlp.up_proj."))
        if ".mlp.gate_proj." in name and other is not None:
            out[name.replace(".mlp.gate_proj.", ".mlp.weights_in.")] = torch.cat([tensor, other])
        elif ".mlp.up_proj." not in name:
            out[name] = tensor
    return out


def add_mask_token(tensors: Tensors, axes: int) -> Tensors:
    """The mask token that transformers' classes have, whether or not anything is masked."""
    name = next(name for name in tensors if name.endswith("embeddings.cls_token"))
    like = tensors[name][0] if axes == 2 else tensors[name]
    return {**tensors, name.replace("cls_token", "mask_token"): torch.zeros_like(like)}


DINOV2_KEYS: Final[Keys] = {
    **SIZES, **ACTIVATION, **DROPOUT, **QKV_BIAS, **DROP_PATH, "norm_eps": ("layer_norm_eps", 1e-6),
    "patch": ("patch_size", 14), "layer_scale": ("layerscale_value", 1.0), "gated": ("use_swiglu_ffn", False),
}  # fmt: skip
DINOV2: Final = Family(
    model_type="dinov2",
    prefix="dinov2.",
    bare=True,
    layer="encoder.layer.{}.norm1",
    names=lambda c: name_vit(c, {**DINO_BLOCK, **DINOV2_MLP[c.gated]}),
    outer=CLASSIFIER,
    heads=dinov2_heads("Dinov2"),
    keys=DINOV2_KEYS,
    constants=SHARP,
    free=("mlp_width", "position_prefix"),
    renames=(
        *((re.escape(five), four) for five, four in FIVE_ATTENTION.items()),
        (r"\.mlp\.down_proj\.", ".mlp.weights_out."),
    ),
    drop=(MASK,),
    read=read_dinov2,
    write=lambda c: {"mlp_ratio": find_ratio(c)},
    check=lambda c: [] if find_ratio(c) and c.layer_scale else ["mlp_width" if c.layer_scale else "layer_scale"],
    unpack=unpack_dinov2,
    pack=lambda tensors, c: add_mask_token(tensors, 2),
    preprocessing=imagenet_crop,
)

_REGISTERS = "dinov2_with_registers"
DINOV2_REGISTERS: Final = replace(
    DINOV2,
    model_type=_REGISTERS,
    prefix=f"{_REGISTERS}.",
    names=lambda c: {**DINOV2.names(c), "registers": "embeddings.register_tokens"},
    heads=dinov2_heads("Dinov2WithRegisters"),
    keys={**DINOV2.keys, "patch": ("patch_size", 16), "registers": ("num_register_tokens", 4)},
    constants={"position_resample": "bicubic"},
    check=lambda c: [*DINOV2.check(c), *(() if c.registers else ("registers",))],
)

DINOV3_MLP: Final = (
    {"mlp.expand": "mlp.up_proj", "mlp.contract": "mlp.down_proj"},
    {"mlp.expand": ("mlp.gate_proj", "mlp.up_proj"), "mlp.contract": "mlp.down_proj"},
)
DINOV3_BLOCK: Final[Names] = {
    **DINO_BLOCK, "attention.out": "attention.o_proj",
    "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
}  # fmt: skip
DINOV3_HEADS: Final = {"none": Head("DINOv3ViTModel", DINO_POOLS)}
VARIED: Final = ("shift", "jitter", "rescale")


def name_dinov3(c: ViTConfig) -> dict[str, Place]:
    return {
        "class_token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        "embedding.projection": "embeddings.patch_embeddings",
        **in_blocks("layer.{}.", {**DINOV3_BLOCK, **DINOV3_MLP[c.gated]}),
        "norm": "norm",
    }


def read_dinov3(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    _require_scale(get, found)
    query, key, value = (get.flag(f"{part}_bias", default=part != "key") for part in ("query", "key", "value"))
    if query != value or key > query:
        raise get.refuse(f"config.json gives biases to queries={query}, keys={key}, values={value}")
    if found["gated"]:
        get.require("hidden_act", "silu", default="gelu")
    usual = {"shift": None, "jitter": None, "rescale": 2.0}
    said = {name: get.values.get(f"pos_embed_{name}", usual[name]) for name in VARIED}
    varied: Any = {name: get.number(f"pos_embed_{name}", 2.0) for name, value in said.items() if value is not None}
    rotary = Rotary(base=get.number("rope_theta", 100.0), coordinates="unit", **varied)
    gelu = "erf" if found["gated"] else get.activation("hidden_act", "gelu")
    return {
        **read_head(DINOV3_HEADS, get),
        "qkv_bias": query,
        "key_bias": key or not query,
        "rotary": rotary,
        "gelu": gelu,
    }


def write_dinov3(c: ViTConfig) -> dict[str, Any]:
    assert c.rotary is not None
    return {
        "query_bias": c.qkv_bias,
        "key_bias": c.qkv_bias and c.key_bias,
        "value_bias": c.qkv_bias,
        "rope_theta": c.rotary.base,
        **{f"pos_embed_{name}": getattr(c.rotary, name) or None for name in VARIED},
        "hidden_act": "silu" if c.gated else WRITTEN[c.gelu],
    }


def check_dinov3(c: ViTConfig) -> list[str]:
    plain = c.rotary and replace(c.rotary, base=100.0, shift=0.0, jitter=0.0, rescale=0.0)
    wrong = [] if plain == Rotary(coordinates="unit") else ["rotary"]
    return wrong if c.layer_scale else [*wrong, "layer_scale"]


def pack_dinov3(tensors: Tensors, c: ViTConfig) -> Tensors:
    out = add_mask_token(tensors, 3)
    if not c.registers:
        out["embeddings.register_tokens"] = out["embeddings.cls_token"][:, :0].clone()
    return out


def drop_empty(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """Registers where there are none are a tensor of no rows."""
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


DINOV3_KEYS: Final[Keys] = {
    **SIZES, **DROP_PATH, **ATTENTION_DROPOUT, "norm_eps": ("layer_norm_eps", 1e-5),
    "width": ("hidden_size", 384), "heads": ("num_attention_heads", 6), "mlp_width": ("intermediate_size", 1536),
    "layer_scale": ("layerscale_value", 1.0), "gated": ("use_gated_mlp", False), "out_bias": ("proj_bias", True),
    "mlp_bias": ("mlp_bias", True), "registers": ("num_register_tokens", 0),
}  # fmt: skip
DINOV3: Final = Family(
    model_type="dinov3_vit",
    layer="layer.{}.norm1",
    names=name_dinov3,
    outer={},
    heads=DINOV3_HEADS,
    keys=DINOV3_KEYS,
    constants={"position": "none"},
    free=("qkv_bias", "key_bias", "rotary", "gelu"),
    renames=((r"^model\.layer\.", "layer."),),
    drop=(MASK, r"rope_embeddings\."),
    read=read_dinov3,
    write=write_dinov3,
    check=check_dinov3,
    unpack=drop_empty,
    pack=pack_dinov3,
    square=False,
    preprocessing=imagenet_squash,
)
FAMILIES: Final = (DINOV2, DINOV2_REGISTERS, DINOV3)

"""EoMT in Hugging Face folders, on DINOv2 and on DINOv3.

A folder says in a tensor, `attn_mask_probs`, how often each query block masks attention; here that is a number of
blocks, for it is annealed from the first block on. The weights of its loss are written and not read. Names are those of
transformers 5, which reads no others.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.dino import (
    DINO_BLOCK,
    DINOV3,
    DINOV3_BLOCK,
    DINOV3_KEYS,
    DINOV3_MLP,
    check_dinov3,
    find_ratio,
    read_dinov3,
    swiglu_width,
    write_dinov3,
)
from vitrail.checkpoint.formats.huggingface.grammar import RESAMPLE, Family, Head, Joined, Place, in_blocks
from vitrail.checkpoint.formats.huggingface.names import (
    ATTENTION_DROPOUT,
    BARE,
    DROP_PATH,
    SIZES,
    TABLE,
    imagenet_squash,
)
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.models.query_configs import EoMTConfig
from vitrail.models.vit_config import ViTConfig

MASKED: Final = "attn_mask_probs"
LOSS: Final = "criterion.empty_weight"
NO_OBJECT: Final = 0.1  # what the loss gives to a query without an object, unless config.json says otherwise


def _eomt(c: ViTConfig) -> EoMTConfig:
    assert isinstance(c, EoMTConfig)
    return c


def name_head(c: EoMTConfig) -> dict[str, Place]:
    def split(queries: Tensor) -> tuple[Tensor, ...]:
        masked, weights = torch.zeros(c.query_blocks), torch.ones(c.classes + 1)
        masked[c.query_blocks - c.masked_blocks :] = 1.0
        weights[-1] = NO_OBJECT
        return queries, masked, weights

    finer = {"expand": "conv1", "smooth": "conv2", "norm": "layernorm2d"}
    return {
        "head.queries": Joined(("query.weight", MASKED, LOSS), split, lambda parts: parts[0]),
        "head.classifier": "class_predictor",
        **{f"head.mask.layers.{i}": f"mask_head.fc{i + 1}" for i in range(3)},
        **{
            f"head.upscale.{i}.{ours}": f"upscale_block.block.{i}.{theirs}"
            for i in range(c.upscale)
            for ours, theirs in finer.items()
        },
    }


def name_eomt(c: ViTConfig) -> dict[str, Place]:
    block = {
        **DINO_BLOCK,
        "attention.out": "attention.out_proj",
        "attention.qkv": DINOV3_BLOCK["attention.qkv"],
        "mlp.expand": ("mlp.gate_proj", "mlp.up_proj") if c.gated else "mlp.fc1",
        "mlp.contract": "mlp.down_proj" if c.gated else "mlp.fc2",
    }
    return {
        "class_token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        TABLE: Joined(("embeddings.position_embeddings.weight",), lambda t: (t[0],), lambda parts: parts[0][None]),
        "embedding.projection": "embeddings.patch_embeddings.projection",
        **in_blocks("layers.{}.", block),
        "norm": "layernorm",
        **name_head(_eomt(c)),
    }


def name_eomt_dinov3(c: ViTConfig) -> dict[str, Place]:
    return {
        "class_token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        "embedding.projection": "embeddings.patch_embeddings",
        **in_blocks("layers.{}.", {**DINOV3_BLOCK, **DINOV3_MLP[c.gated]}),
        "norm": "layernorm",
        **name_head(_eomt(c)),
    }


def read_queries(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    """The head, whose activation transformers takes from the encoder's `hidden_act`: a GELU, in ours."""
    get.require("hidden_act", "gelu", "gelu_python")
    classes = get.shapes.get("class_predictor.weight", 2)[0] - 1
    get.shapes.get(MASKED, 1)
    masked = [bool(share > 0) for share in get.shapes.tensors[MASKED].tolist()]
    count = len(masked) - masked.index(True) if True in masked else 0
    if not found["layer_scale"] > 0:
        raise get.refuse(f"config.json says layerscale_value={found['layer_scale']!r}, expected a number above 0")
    return {"classes": classes, "head": "queries", "pool": BARE[0], "masked_blocks": count}


def read_eomt(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    ratio = get.number("mlp_ratio", 4)
    width = swiglu_width(found["width"], ratio) if found["gated"] else int(found["width"] * ratio)
    return {**read_queries(get, found), "mlp_width": width}


def read_eomt_dinov3(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    rope: Any = get.values.get("rope_parameters")
    theta = {"rope_theta": rope.get("rope_theta", 100.0)} if isinstance(rope, dict) else {}
    inner = ConfigReader(get.shapes, {**get.values, **theta}, get.prefix)
    return {**read_dinov3(inner, found), **read_queries(get, found)}


def write_eomt_dinov3(c: ViTConfig) -> dict[str, Any]:
    values = write_dinov3(c)
    rope = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    return {**values, "rope_parameters": rope}


def check_eomt(c: ViTConfig) -> list[str]:
    return [name for name, fits in (("mlp_width", find_ratio(c)), ("layer_scale", c.layer_scale)) if not fits]


def unpack_eomt(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """Registers where there are none are a tensor of no rows; transformers 4 had gate and value in one matrix; and a
    file may lack what is not learned."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".mlp.weights_in." in name:
            gate, value = tensor.chunk(2)
            out[name.replace("weights_in", "gate_proj")], out[name.replace("weights_in", "up_proj")] = gate, value
        elif tensor.numel():
            out[name.replace(".mlp.weights_out.", ".mlp.down_proj.")] = tensor
    blocks, classes = values.get("num_blocks", 4), out.get("class_predictor.weight")
    if MASKED not in out and isinstance(blocks, int) and 0 < blocks < 2**10:
        out[MASKED] = torch.ones(blocks)  # as transformers has it
    if LOSS not in out and classes is not None:
        out[LOSS] = torch.ones(len(classes))
    return out


def pack_eomt(tensors: Tensors, c: ViTConfig) -> Tensors:
    if c.registers:
        return tensors
    return {**tensors, "embeddings.register_tokens": tensors["embeddings.cls_token"][:, :0].clone()}


QUERY_KEYS: Final[Keys] = {
    "queries": ("num_queries", 200), "query_blocks": ("num_blocks", 4), "upscale": ("num_upscale_blocks", 2),
    "registers": ("num_register_tokens", 4), "norm_eps": ("layer_norm_eps", 1e-6), "image": ("image_size", 640),
    "width": ("hidden_size", 1024), "depth": ("num_hidden_layers", 24), "heads": ("num_attention_heads", 16),
    "dropout": ("hidden_dropout_prob", 0.0),
}  # fmt: skip
EOMT: Final = Family(
    config=EoMTConfig,
    model_type="eomt",
    layer="layers.{}.norm1",
    names=name_eomt,
    outer={},
    heads={"queries": Head("EomtForUniversalSegmentation", BARE)},
    keys={
        **SIZES,
        **ATTENTION_DROPOUT,
        **DROP_PATH,
        **QUERY_KEYS,
        "layer_scale": ("layerscale_value", 1.0),
        "gated": ("use_swiglu_ffn", False),
    },
    constants={"gelu": "erf", "position_prefix": False, RESAMPLE: "bicubic"},
    free=("mlp_width", "masked_blocks"),
    read=read_eomt,
    write=lambda c: {"mlp_ratio": find_ratio(c), "hidden_act": "gelu"},
    check=check_eomt,
    unpack=unpack_eomt,
    pack=pack_eomt,
    preprocessing=imagenet_squash,
)
EOMT_DINOV3: Final = replace(
    EOMT,
    model_type="eomt_dinov3",
    names=name_eomt_dinov3,
    heads={"queries": Head("EomtDinov3ForUniversalSegmentation", BARE)},
    keys={**DINOV3_KEYS, **QUERY_KEYS, "mlp_width": ("intermediate_size", 4096)},
    constants=DINOV3.constants,
    free=(*DINOV3.free, "masked_blocks"),
    drop=DINOV3.drop,
    read=read_eomt_dinov3,
    write=write_eomt_dinov3,
    check=lambda c: [*check_dinov3(c), *(["gated"] if c.gated else []), *(["gelu"] if c.gelu != "erf" else [])],
)
FAMILIES: Final = (EOMT, EOMT_DINOV3)

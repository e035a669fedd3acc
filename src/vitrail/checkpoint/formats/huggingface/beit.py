"""BEiT and data2vec in Hugging Face folders: biases of relative positions, LayerScale, keys without a bias."""

from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import Family, Head, Names, Place, read_head
from vitrail.checkpoint.formats.huggingface.names import (
    ACTIVATION,
    BARE,
    CLASSIFIER,
    DROPOUT,
    FROM_FIVE,
    MASK,
    MLP,
    SHARP,
    SIZES,
    VIT_BLOCK,
    name_vit,
)
from vitrail.models.vit_config import ViTConfig

BEIT_HEADS: Final = {
    "none": Head("BeitModel", BARE), "linear": Head("BeitForImageClassification", ("mean", "token")),
}  # fmt: skip
_BIAS = "relative_position_bias.relative_position_bias_table"
BEIT_BLOCK: Final[Names] = {
    **VIT_BLOCK, "scale_attention.gamma": "lambda_1", "scale_mlp.gamma": "lambda_2",
    "position_bias.table": f"attention.attention.{_BIAS}",
}  # fmt: skip


def name_beit(c: ViTConfig) -> dict[str, Place]:
    norm = "pooler.layernorm" if c.norm_after_pool else "layernorm"
    return {**name_vit(c, BEIT_BLOCK), "position_bias.table": f"encoder.{_BIAS}", "norm": norm}


def read_beit(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    each, shared = (get.flag(f"use_{kind}relative_position_bias", default=False) for kind in ("", "shared_"))
    if each and shared:
        raise get.refuse("config.json has relative position biases both shared and of each layer")
    absolute = get.flag("use_absolute_position_embeddings", default=False)
    after, before = (get.has(f"{norm}.weight") for norm in ("pooler.layernorm", "layernorm"))
    head = read_head(BEIT_HEADS, get)
    token = not get.flag("use_mean_pooling", default=True)
    return {
        **head,
        "pool": "token" if token else "mean",
        "position": "learned" if absolute else "none",
        "position_bias": "table" if each else "shared-table" if shared else "none",
        "norm_after_pool": after and not before,
        "norm_final": after or before,
    }


def write_beit(c: ViTConfig) -> dict[str, Any]:
    return {
        "use_absolute_position_embeddings": c.position == "learned",
        "use_relative_position_bias": c.position_bias == "table",
        "use_shared_relative_position_bias": c.position_bias == "shared-table",
        "use_mean_pooling": c.norm_after_pool or not c.norm_final,
    }


def check_beit(c: ViTConfig) -> list[str]:
    wrong = [] if c.position in ("none", "learned") else ["position"]
    wrong += [] if c.position_bias in ("none", "table", "shared-table") else ["position_bias"]
    if c.classes:  # the mean of the patches has its norm behind, the class token in front
        wrong += [] if c.norm_after_pool == (c.pool == "mean") else ["norm_after_pool"]
        wrong += [] if c.norm_final else ["norm_final"]
    return wrong


BEIT_KEYS: Final[Keys] = {
    **SIZES, **MLP, **ACTIVATION, **DROPOUT, "norm_eps": ("layer_norm_eps", 1e-12),
    "layer_scale": ("layer_scale_init_value", 0.1), "stochastic_depth": ("drop_path_rate", 0.1),
}  # fmt: skip
BEIT: Final = Family(
    model_type="beit",
    prefix="beit.",
    bare=True,
    names=name_beit,
    outer=CLASSIFIER,
    heads=BEIT_HEADS,
    keys=BEIT_KEYS,
    constants={"key_bias": False, **SHARP},
    free=("position", "position_prefix", "position_bias", "norm_after_pool", "norm_final"),
    renames=(
        *FROM_FIVE,
        (r"^shared_position_bias\.", "encoder.relative_position_bias."),
        (r"^(encoder\.layer\.\d+)\.relative_position_bias\.", r"\1.attention.attention.relative_position_bias."),
    ),
    drop=(MASK, r"relative_position_index$", r"^lm_head\."),
    read=read_beit,
    write=write_beit,
    check=check_beit,
    pooled=lambda c: c.norm_after_pool,
)

DATA2VEC: Final = replace(
    BEIT,
    model_type="data2vec-vision",
    prefix="data2vec_vision.",
    written=False,
)
FAMILIES: Final = (BEIT, DATA2VEC)

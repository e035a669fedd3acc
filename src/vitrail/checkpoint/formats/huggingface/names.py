"""Names, keys and habits that several of Hugging Face's families of ViTs share."""

import re
from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.formats.format import half_squash
from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import Names, Place, in_blocks, pad_positions
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig

# The keys that most have, and the names of ViT, which DeiT, MAE, I-JEPA, MSN, BEiT and Pixio share.
SIZES: Final[Keys] = {
    "width": ("hidden_size", 768), "depth": ("num_hidden_layers", 12), "heads": ("num_attention_heads", 12),
    "channels": ("num_channels", 3), "image": ("image_size", 224), "patch": ("patch_size", 16),
}  # fmt: skip
MLP: Final[Keys] = {"mlp_width": ("intermediate_size", 3072)}
ACTIVATION: Final[Keys] = {"gelu": ("hidden_act", "gelu")}
DROPOUT: Final[Keys] = {
    "dropout": ("hidden_dropout_prob", 0.0), "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}  # fmt: skip
QKV_BIAS: Final[Keys] = {"qkv_bias": ("qkv_bias", True)}
DROP_PATH: Final[Keys] = {"stochastic_depth": ("drop_path_rate", 0.0)}
ATTENTION_DROPOUT: Final[Keys] = {"attention_dropout": ("attention_dropout", 0.0)}
VIT_KEYS: Final[Keys] = {**SIZES, **MLP, **ACTIVATION, **DROPOUT, **QKV_BIAS, "norm_eps": ("layer_norm_eps", 1e-12)}

QKV: Final = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
VIT_BLOCK: Final[Names] = {
    "norm_attention": "layernorm_before", "attention.qkv": QKV, "attention.out": "attention.output.dense",
    "norm_mlp": "layernorm_after", "mlp.expand": "intermediate.dense", "mlp.contract": "output.dense",
}  # fmt: skip
CLASSIFIER: Final[Names] = {"head.classifier": "classifier"}
TABLE: Final = "position.tables.0.table"
# Names of transformers 5: those of 4.
_QKV = {f"attention.{name[0]}_proj.": f"attention.attention.{name}." for name in ("query", "key", "value")}
FIVE_ATTENTION: Final = {**_QKV, "attention.o_proj.": "attention.output.dense."}
FIVE: Final = {**FIVE_ATTENTION, "mlp.fc1.": "intermediate.dense.", "mlp.fc2.": "output.dense."}
FROM_FIVE: Final = ((r"^layers\.", "encoder.layer."), *((re.escape(five), four) for five, four in FIVE.items()))
SHARP: Final = {"position_resample": "bicubic-sharp"}
MASK: Final = r"(^|\.)mask_token$"
BARE: Final = ("token", "mean", "token+mean")  # pools of tokens that transformers hands out as they are


def imagenet_squash(config: ModelConfig) -> Preprocessing:
    """Straight to the size with ImageNet's mean and deviation: DINOv3, SAM."""
    return Preprocessing(image=config.image, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def half_bicubic(config: ModelConfig) -> Preprocessing:
    return replace(half_squash(config), interpolation="bicubic")


def name_vit(c: ViTConfig, block: Names = VIT_BLOCK) -> dict[str, Place]:
    table = "embeddings.position_embeddings"
    return {
        "class_token": "embeddings.cls_token",
        TABLE: table if c.position_prefix or not c.class_token else pad_positions(table, c.class_tokens),
        "embedding.projection": "embeddings.patch_embeddings.projection",
        **in_blocks("encoder.layer.{}.", block),
        "norm": "layernorm",
        "head.hidden": "pooler.dense",
    }


def read_ratio(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    """The width of an MLP that config.json states as a multiple of the network's."""
    return {"mlp_width": int(found["width"] * get.number("mlp_ratio", 4))}


def write_ratio(c: ViTConfig) -> dict[str, Any]:
    return {"mlp_ratio": c.mlp_width // c.width}


def check_ratio(c: ViTConfig) -> list[str]:
    return ["mlp_width"] if c.mlp_width % c.width else []

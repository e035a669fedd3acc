"""ViT in Hugging Face folders and its nearest relatives: DeiT, MAE, MSN, I-JEPA, Pixio."""

import re
from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.formats.format import imagenet_crop
from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import Family, Head, Names, read_head
from vitrail.checkpoint.formats.huggingface.names import (
    ACTIVATION,
    BARE,
    CLASSIFIER,
    DROP_PATH,
    DROPOUT,
    FROM_FIVE,
    MASK,
    QKV_BIAS,
    SHARP,
    SIZES,
    VIT_BLOCK,
    VIT_KEYS,
    check_ratio,
    name_vit,
    read_ratio,
    write_ratio,
)
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.models.vit_config import ViTConfig

VIT_HEADS: Final = {
    "none": Head("ViTModel", BARE), "tanh": Head("ViTModel", ("token",)),
    "linear": Head("ViTForImageClassification", ("token",)),
}  # fmt: skip


def read_vit(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    head = read_head(VIT_HEADS, get)
    if not get.has("pooler.dense.weight"):
        return head
    if (act := get.values.get("pooler_act", "tanh")) != "tanh":
        raise get.refuse(f"pooler_act {act!r} is not the paper's tanh")
    return {**head, "head": "tanh"}


VIT: Final = Family(
    model_type="vit",
    prefix="vit.",
    names=name_vit,
    outer=CLASSIFIER,
    heads=VIT_HEADS,
    keys=VIT_KEYS,
    constants=SHARP,
    free=("position_prefix",),
    renames=FROM_FIVE,
    drop=(MASK, r"^decoder\."),
    read=read_vit,
    square=False,
    pooled=lambda c: c.head == "tanh",
)

DEIT_HEADS: Final = {
    "none": Head("DeiTModel", BARE), "tanh": Head("DeiTModel", ("token",)),
    "linear": Head("DeiTForImageClassification", ("token",)),
    "distilled": Head("DeiTForImageClassificationWithTeacher", ("token",)),
}  # fmt: skip


def read_deit(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    head = read_head(DEIT_HEADS, get)
    if "distillation_classifier.weight" in get.shapes:
        return {**head, "head": "distilled"}
    return {**head, "head": "tanh"} if get.has("pooler.dense.weight") else head


def unpack_deit(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """One name for the classifier of the class token, whether or not there is a second."""
    return {name.replace("deit.cls_classifier.", "classifier."): tensor for name, tensor in tensors.items()}


def pack_deit(tensors: Tensors, c: ViTConfig) -> Tensors:
    if c.head != "distilled":
        return tensors
    return {re.sub(r"^classifier\.", "cls_classifier.", name): tensor for name, tensor in tensors.items()}


DEIT: Final = Family(
    model_type="deit",
    prefix="deit.",
    bare=True,
    names=lambda c: {**name_vit(c), "registers": "embeddings.distillation_token"},
    outer={**CLASSIFIER, "head.distilled": "distillation_classifier"},
    heads=DEIT_HEADS,
    keys=VIT_KEYS,
    constants={"registers": 1, "register_positions": True, **SHARP},
    renames=FROM_FIVE,
    drop=(MASK, r"^decoder\."),
    read=read_deit,
    unpack=unpack_deit,
    pack=pack_deit,
    square=False,
    pooled=lambda c: c.head == "tanh",
    preprocessing=imagenet_crop,
)

MAE_HEADS: Final = {"none": Head("ViTMAEModel", ("mean", "token", "token+mean"))}
MAE: Final = replace(
    VIT,
    model_type="vit_mae",
    heads=MAE_HEADS,
    read=lambda get, found: read_head(MAE_HEADS, get),
    written=False,  # its own forward pass leaves out three patches of four; the encoder is a ViT
    preprocessing=imagenet_crop,
)

MSN_HEADS: Final = {"none": Head("ViTMSNModel", BARE), "linear": Head("ViTMSNForImageClassification", ("token",))}
MSN: Final = replace(
    VIT,
    model_type="vit_msn",
    heads=MSN_HEADS,
    keys={**VIT_KEYS, "norm_eps": ("layer_norm_eps", 1e-6)},
    read=lambda get, found: read_head(MSN_HEADS, get),
    written=False,
    preprocessing=imagenet_crop,
)

IJEPA_HEADS: Final = {"none": Head("IJepaModel", ("mean",)), "linear": Head("IJepaForImageClassification", ("mean",))}
IJEPA: Final = replace(
    VIT,
    model_type="ijepa",
    prefix="ijepa.",
    bare=True,
    heads=IJEPA_HEADS,
    constants={"class_token": False, **SHARP},
    drop=(MASK, r"(^|\.)pooler\."),
    read=lambda get, found: read_head(IJEPA_HEADS, get),
    preprocessing=imagenet_crop,
)


PIXIO_BLOCK: Final[Names] = {**VIT_BLOCK, "norm_attention": "norm1", "norm_mlp": "norm2"}
PIXIO_HEADS: Final = {"none": Head("PixioModel", BARE)}


PIXIO_KEYS: Final[Keys] = {
    **SIZES, **ACTIVATION, **DROPOUT, **QKV_BIAS, **DROP_PATH, "norm_eps": ("layer_norm_eps", 1e-6),
    "width": ("hidden_size", 1280), "depth": ("num_hidden_layers", 32), "heads": ("num_attention_heads", 16),
    "image": ("image_size", 256), "class_tokens": ("n_cls_tokens", 8),
}  # fmt: skip
PIXIO: Final = Family(
    model_type="pixio",
    prefixes=("pixio.",),
    layer="encoder.layer.{}.norm1",
    names=lambda c: name_vit(c, PIXIO_BLOCK),
    outer={},
    heads=PIXIO_HEADS,
    keys=PIXIO_KEYS,
    constants=SHARP,
    free=("mlp_width",),
    renames=(*FROM_FIVE, (r"\.layernorm_before\.", ".norm1."), (r"\.layernorm_after\.", ".norm2.")),
    drop=(MASK,),
    read=lambda get, found: {**read_head(PIXIO_HEADS, get), **read_ratio(get, found)},
    write=write_ratio,
    check=lambda c: [*check_ratio(c), *(() if c.class_tokens > 1 else ("class_tokens",))],
    preprocessing=imagenet_crop,
)
FAMILIES: Final = (DEIT, MAE, MSN, IJEPA, PIXIO)

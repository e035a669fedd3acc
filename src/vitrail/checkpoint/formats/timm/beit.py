"""timm's state dicts of beit.py: BEiT and BEiT v2, with relative position bias tables, one per layer or one for all.

The index into a table follows from the grid; if a file stores it, it is dropped.
"""

import math
from typing import Any, Final

import torch

from vitrail.checkpoint.formats.format import Format, Settings, half_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes
from vitrail.checkpoint.formats.timm import parts
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig

NAME: Final = "timm-beit"
TABLE: Final = "blocks.0.attn.relative_position_bias_table"
SHARED: Final = "rel_pos_bias.relative_position_bias_table"
PREFIX: Final = 3  # rows for the class token: from it, to it, and itself
FREE = ("position_bias", "layer_scale", "gated", "norm_inner_mlp", "key_bias")


def recognises(names: set[str], settings: Settings) -> bool:
    return parts.STEM in names and bool(names & {TABLE, SHARED}) and "blocks.0.norm1.weight" in names


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    if TABLE not in tensors and SHARED not in tensors:
        return dict(tensors)
    kept = {name: t for name, t in tensors.items() if not name.endswith("relative_position_index")}
    return parts.store_gates(kept, split=True)


def infer(shapes: TensorShapes) -> ModelConfig:
    fields = parts.infer_layers(shapes)
    if TABLE in shapes and SHARED in shapes:
        raise MismatchedWeights(f"{shapes.path}: has bias tables in its layers and one for all; vitrail has either")
    table = TABLE if TABLE in shapes else SHARED
    rows, heads = shapes.get(table, 2)
    grid = _infer_grid(shapes, rows, fields["patch"])
    image = (grid[0] * fields["patch"][0], grid[1] * fields["patch"][1])
    fields |= {"image": image, "heads": heads, "position": "none", "gelu": "erf", "norm_eps": 1e-6}
    if "pos_embed" in shapes:
        fields |= {"position": "learned"}
    fields |= {"position_bias": "table" if table == TABLE else "shared-table", "position_resample": "bicubic"}
    fields |= {"pool": parts.infer_pool(shapes, fields)}
    return ViTConfig(**fields)


def _infer_grid(shapes: TensorShapes, rows: int, patch: Pair) -> Pair:
    said = shapes.image or parts.read_image(shapes, patch)
    side = math.isqrt(max(rows - PREFIX, 1))
    square = ((side + 1) // 2, (side + 1) // 2)
    for grid in ([(said[0] // patch[0], said[1] // patch[1])] if said else []) + [square]:
        if (2 * grid[0] - 1) * (2 * grid[1] - 1) + PREFIX == rows:
            return grid
    remedy = "pass image=(height, width) of the training images"
    raise MismatchedWeights(f"{shapes.path}: a bias table of {rows} rows is for no square grid; {remedy}")


def build_table(config: ModelConfig) -> list[KeyEntry]:
    c = parts.require_fields("timm's Beit", config, free=FREE)
    rules = {"class_token": c.class_token, "registers": not c.registers, "pool": c.pool in ("mean", "token")}
    rules |= {"position_bias": "table" in c.position_bias, "key_bias": not (c.qkv_bias and c.key_bias)}
    rules |= {"position_prefix": c.position == "none" or c.position_prefix}
    for field in (field for field, held in rules.items() if not held):
        raise ExportRefused(f"timm's Beit has no place for field {field}={getattr(c, field)!r}")
    names = parts.NAMES | parts.GAMMAS | {"norm": "fc_norm" if c.norm_after_pool else "norm"}
    names |= {"position_bias.table": SHARED, "blocks.{}.position_bias.table": TABLE.replace(".0.", ".{}.")}

    def special(ours: str, theirs: str) -> KeyEntry | None:
        if ours.endswith(".attention.qkv.bias"):
            apart = tuple(theirs.replace("qkv.bias", f"{letter}_bias") for letter in "qv")
            return KeyEntry(ours, apart, lambda t: t.chunk(2), torch.cat)
        return parts.split_gate(ours, theirs) if c.gated else None

    return parts.named_entries("timm's Beit", c, names, special)


def claims(config: ModelConfig) -> bool:
    return isinstance(config, ViTConfig) and "table" in config.position_bias


def network_settings(config: ModelConfig) -> dict[str, Any]:
    c = parts.require_fields("timm's Beit", config, free=FREE)
    if c.norm_after_pool != (c.pool == "mean"):
        raise ExportRefused(f"timm's Beit has its norm behind the mean: not field norm_after_pool={c.norm_after_pool}")
    args: dict[str, Any] = {
        "img_size": list(c.image), "patch_size": list(c.patch), "in_chans": c.channels, "num_classes": c.classes,
        "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": (c.mlp_width + 0.5) / c.width,
        "qkv_bias": c.qkv_bias, "swiglu_mlp": c.gated, "scale_mlp": c.norm_inner_mlp,
        "init_values": c.layer_scale or None, "use_abs_pos_emb": c.position == "learned",
        "use_rel_pos_bias": c.position_bias == "table", "use_shared_rel_pos_bias": c.position_bias == "shared-table",
        "global_pool": "avg" if c.pool == "mean" else "token",
    }  # fmt: skip
    return {"architecture": "beit_base_patch16_224", "model_args": args}


FORMATS = (
    Format(
        name=NAME,
        library="timm",
        order=44,
        recognises=recognises,
        table=build_table,
        infer=infer,
        modern=modernise,
        preprocessing=half_crop,
        claims=claims,
        settings=network_settings,
    ),
)

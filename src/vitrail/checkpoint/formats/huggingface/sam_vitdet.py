"""SAM's encoder and ViTDet in Hugging Face folders: maps of patches from end to end, windows, decomposed positions."""

from typing import Any, Final

from vitrail.checkpoint.formats.huggingface.config_json import ConfigReader, Keys
from vitrail.checkpoint.formats.huggingface.grammar import (
    Family,
    Head,
    Names,
    Place,
    Reshaped,
    in_blocks,
    pad_positions,
)
from vitrail.checkpoint.formats.huggingface.names import (
    ACTIVATION,
    ATTENTION_DROPOUT,
    DROP_PATH,
    QKV_BIAS,
    SHARP,
    SIZES,
    TABLE,
    check_ratio,
    imagenet_squash,
    read_ratio,
    write_ratio,
)
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Windows

SAM_BLOCK: Final[Names] = {
    "norm_attention": "layer_norm1", "attention.qkv": "attn.qkv", "attention.out": "attn.proj",
    "position_bias.rows": "attn.rel_pos_h", "position_bias.columns": "attn.rel_pos_w",
    "norm_mlp": "layer_norm2", "mlp.expand": "mlp.lin1", "mlp.contract": "mlp.lin2",
}  # fmt: skip
GRID: Final = {"class_token": False, "norm_final": False}  # a network that is a map of patches from end to end
GRID_FREE: Final = ("mlp_width", "position", "position_bias", "windows")


def name_sam(c: ViTConfig) -> dict[str, Place]:
    return {
        TABLE: Reshaped("pos_embed", lambda t: t.unflatten(1, c.grid), lambda t: t.flatten(1, 2)),
        "embedding.projection": "patch_embed.projection",
        **in_blocks("layers.{}.", SAM_BLOCK),
        "neck.reduce": "neck.conv1",
        "neck.norm_reduce": "neck.layer_norm1",
        "neck.smooth": "neck.conv2",
        "neck.norm_smooth": "neck.layer_norm2",
    }


def _read_grid(*, absolute: bool, relative: bool, windows: Windows | None) -> dict[str, Any]:
    position, bias = "learned" if absolute else "none", "decomposed" if relative else "none"
    head = {"head": "none", "classes": 0, "pool": "mean"}
    return {**head, "position": position, "position_bias": bias, "windows": windows}


def read_sam(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    ratio, stated = get.number("mlp_ratio", 4.0), get.values.get("mlp_dim")
    size, whole = get.integer("window_size", 14, least=0), get.integers("global_attn_indexes", (2, 5, 8, 11))
    return {
        **_read_grid(
            absolute=get.flag("use_abs_pos", default=True),
            relative=get.flag("use_rel_pos", default=True),
            windows=Windows(size=size, whole=whole) if size else None,
        ),
        "mlp_width": int(found["width"] * ratio) if stated is None else get.integer("mlp_dim", 1),
    }


def write_sam(c: ViTConfig) -> dict[str, Any]:
    return {
        "mlp_dim": c.mlp_width,
        "mlp_ratio": c.mlp_width / c.width,
        "use_abs_pos": c.position == "learned",
        "use_rel_pos": c.position_bias == "decomposed",
        "window_size": c.windows.size if c.windows else 0,
        "global_attn_indexes": list(c.windows.whole) if c.windows else list(range(c.depth)),
    }


def check_grid(c: ViTConfig) -> list[str]:
    wrong = [] if c.position in ("none", "learned") else ["position"]
    return wrong if c.position_bias in ("none", "decomposed") else [*wrong, "position_bias"]


SAM_KEYS: Final[Keys] = {
    **SIZES, **ACTIVATION, **ATTENTION_DROPOUT, **QKV_BIAS, "image": ("image_size", 1024),
    "norm_eps": ("layer_norm_eps", 1e-6), "neck": ("output_channels", 256),
}  # fmt: skip
SAM: Final = Family(
    model_type="sam_vision_model",
    whole="sam",
    prefix="vision_encoder.",
    layer="layers.{}.layer_norm1",
    names=name_sam,
    outer={},
    heads={"none": Head("SamVisionModel", ("mean",))},
    keys=SAM_KEYS,
    constants={**GRID, **SHARP},
    free=GRID_FREE,
    drop=(r"^(prompt_encoder|mask_decoder|shared_image_embedding)\.",),
    read=read_sam,
    write=write_sam,
    check=lambda c: [*check_grid(c), *(() if c.neck else ("neck",))],
    preprocessing=imagenet_squash,
)

VITDET_BLOCK: Final[Names] = {
    "norm_attention": "norm1", "attention.qkv": "attention.qkv", "attention.out": "attention.proj",
    "position_bias.rows": "attention.rel_pos_h", "position_bias.columns": "attention.rel_pos_w",
    "norm_mlp": "norm2", "mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2",
}  # fmt: skip


def name_vitdet(c: ViTConfig) -> dict[str, Place]:
    return {
        TABLE: pad_positions("embeddings.position_embeddings", 1),  # the row of a class token that is not there
        "embedding.projection": "embeddings.projection",
        **in_blocks("encoder.layer.{}.", VITDET_BLOCK),
    }


def read_vitdet(get: ConfigReader, found: dict[str, Any]) -> dict[str, Any]:
    if get.integers("residual_block_indices", ()):
        raise get.refuse("config.json has residual_block_indices: convolutions behind blocks are not in the network")
    size, inside = get.integer("window_size", 0, least=0), get.integers("window_block_indices", ())
    whole = tuple(layer for layer in range(found["depth"]) if layer not in inside)
    absolute = get.flag("use_absolute_position_embeddings", default=True)
    first, patch = get.size("pretrain_image_size", 224), found["patch"]
    grid, own = (tuple(n // p for n, p in zip(image, patch, strict=True)) for image in (first, found["image"]))
    return {
        **_read_grid(
            absolute=absolute,
            relative=get.flag("use_relative_position_embeddings", default=False),
            windows=Windows(size=size, whole=whole) if size and inside else None,
        ),
        **read_ratio(get, found),
        "position_grid": grid if absolute and grid != own else None,
    }


def write_vitdet(c: ViTConfig) -> dict[str, Any]:
    return {
        **write_ratio(c),
        "pretrain_image_size": c.patch[0] * (c.position_grid or c.grid)[0],
        "use_absolute_position_embeddings": c.position == "learned",
        "use_relative_position_embeddings": c.position_bias == "decomposed",
        "window_size": c.windows.size if c.windows else 0,
        "window_block_indices": [layer for layer in range(c.depth) if c.window_of(layer)],
    }


VITDET_KEYS: Final[Keys] = {
    **SIZES, **ACTIVATION, **QKV_BIAS, **DROP_PATH, "dropout": ("dropout_prob", 0.0),
    "norm_eps": ("layer_norm_eps", 1e-6),
}  # fmt: skip
VITDET: Final = Family(
    model_type="vitdet",
    prefixes=("vitdet.",),
    layer="encoder.layer.{}.norm1",
    names=name_vitdet,
    outer={},
    heads={"none": Head("VitDetModel", ("mean",))},
    keys=VITDET_KEYS,
    constants={**GRID, **SHARP},
    free=(*GRID_FREE, "position_grid"),
    read=read_vitdet,
    write=write_vitdet,
    check=lambda c: [
        *check_grid(c),
        *check_ratio(c),
        *(["position_grid"] if len({*(c.position_grid or (1,))}) > 1 else []),
    ],
    preprocessing=imagenet_squash,
)
FAMILIES: Final = (SAM, VITDET)

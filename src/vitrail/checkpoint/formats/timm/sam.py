"""timm's state dicts of vision_transformer_sam.py: the image encoders of Segment Anything.

Window layers have bias tables for their window, so the tensors show which layers see the whole image. If grid and
window have the same size, these are taken to be the layers at each quarter of the depth, as in the published networks.
timm's blocks have eps=1e-5.
"""

from typing import Any, Final

from vitrail.checkpoint.formats.format import Format, Settings, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, TensorShapes
from vitrail.checkpoint.formats.timm import parts
from vitrail.core.errors import ExportRefused
from vitrail.core.text import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Windows

NAME: Final = "timm-sam"
ROWS: Final = "blocks.{}.attn.rel_pos_h"
COLUMNS: Final = "blocks.{}.attn.rel_pos_w"
FREE = ("position_bias", "windows", "layer_scale", "norm_stem", "norm_final", "norm_qk", "patch_bias", "neck")
NAMES = parts.NAMES | {
    "blocks.{}.position_bias.rows": ROWS, "blocks.{}.position_bias.columns": COLUMNS, "norm": "neck",
    "neck.reduce": "neck.0", "neck.norm_reduce": "neck.1", "neck.smooth": "neck.2", "neck.norm_smooth": "neck.3",
    "head.classifier": "head.fc",
}  # fmt: skip


def recognises(names: set[str], settings: Settings) -> bool:
    return {parts.STEM, ROWS.format(0), "blocks.0.norm1.weight"} <= names


def infer(shapes: TensorShapes) -> ModelConfig:
    fields = parts.infer_layers(shapes)
    classes = shapes.get("head.fc.weight", 2)[0] if "head.fc.weight" in shapes else 0
    neck = shapes.get("neck.0.weight", 4)[0] if "neck.0.weight" in shapes else 0
    fields |= {"classes": classes, "head": "linear" if classes else "none", "neck": neck}
    fields |= {"norm_final": "neck.weight" in shapes, "pool": "mean", "position_bias": "decomposed"}
    if "heads" not in shapes.facts:
        fields["heads"] = max(1, fields["width"] // shapes.get(ROWS.format(0), 2)[1])
    sides = [_infer_sides(shapes, layer) for layer in range(fields["depth"])]
    grid = max(sides)
    if "pos_embed" in shapes:
        grid = shapes.get("pos_embed", 4)[1:3]
    fields |= {"position": "learned" if "pos_embed" in shapes else "none", "gelu": "erf", "norm_eps": 1e-5}
    fields |= {"image": (grid[0] * fields["patch"][0], grid[1] * fields["patch"][1]), "position_resample": "bicubic"}
    fields |= {"windows": _infer_windows(shapes, sides, (grid[0], grid[1]))}
    return ViTConfig(**fields)


def _infer_sides(shapes: TensorShapes, layer: int) -> Pair:
    """Rows and columns of the grid or window that a layer's bias tables are for."""
    rows, columns = (shapes.get(name.format(layer), 2)[0] for name in (ROWS, COLUMNS))
    return (rows + 1) // 2, (columns + 1) // 2


def _infer_windows(shapes: TensorShapes, sides: list[Pair], grid: Pair) -> Windows | None:
    args, depth = parts.read_args(shapes), len(sides)
    whole: Any = args.get("global_attn_indexes")
    if not isinstance(whole, list):
        whole = [layer for layer, side in enumerate(sides) if side == grid]
        if len(whole) == depth and grid[0] == grid[1]:
            quarter = max(depth // 4, 1)
            whole = list(range(quarter - 1, depth, quarter))
    inside = [side for layer, side in enumerate(sides) if layer not in whole]
    return Windows(size=inside[0][0], whole=tuple(whole)) if inside else None


def build_table(config: ModelConfig) -> list[KeyEntry]:
    c = parts.require_fields("timm's SAM", config, free=FREE)
    rules = {"class_token": not c.class_token, "registers": not c.registers, "pool": c.pool == "mean"}
    rules |= {"position_bias": c.position_bias == "decomposed", "norm_after_pool": not c.norm_after_pool}
    rules |= {"norm_final": c.norm_final != bool(c.neck), "norm_stem": c.norm_stem != "patches"}
    for field in (field for field, held in rules.items() if not held):
        raise ExportRefused(f"timm's SAM has no place for field {field}={getattr(c, field)!r}")

    def special(ours: str, theirs: str) -> KeyEntry | None:
        if ours != "position.tables.0.table":
            return None
        return parts.reshape(ours, theirs, lambda t: t.unflatten(1, c.grid), lambda t: t.flatten(1, 2))

    return parts.named_entries("timm's SAM", c, NAMES, special)


def claims(config: ModelConfig) -> bool:
    return isinstance(config, ViTConfig) and (config.position_bias == "decomposed" or bool(config.neck))


def network_settings(config: ModelConfig) -> dict[str, Any]:
    c = parts.require_fields("timm's SAM", config, free=FREE)
    if c.patch_bias == (c.norm_stem == "tokens"):
        raise ExportRefused(f"timm's SAM cannot be built with field patch_bias={c.patch_bias}; write a file instead")
    args: dict[str, Any] = {
        "img_size": list(c.image), "patch_size": list(c.patch), "in_chans": c.channels, "num_classes": c.classes,
        "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": (c.mlp_width + 0.5) / c.width,
        "qkv_bias": c.qkv_bias, "init_values": c.layer_scale or None,
        "pre_norm": c.norm_stem == "tokens", "use_abs_pos": c.position == "learned", "use_rel_pos": True,
        "window_size": 0 if c.windows is None else c.windows.size,
        "global_attn_indexes": [] if c.windows is None else list(c.windows.whole), "neck_chans": c.neck or None,
    }  # fmt: skip
    args |= {"qk_norm": True} if c.norm_qk else {}
    return {"architecture": "samvit_base_patch16" if c.neck else "samvit_base_patch16_224", "model_args": args}


def prepare(config: ModelConfig) -> Preprocessing:
    return imagenet_crop(config, 1.0)


FORMATS = (
    Format(
        name=NAME,
        library="timm",
        order=42,
        recognises=recognises,
        table=build_table,
        infer=infer,
        preprocessing=prepare,
        claims=claims,
        settings=network_settings,
    ),
)

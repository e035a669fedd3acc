"""Meta's own backbone files: DINOv2, with and without registers, and DINOv3.

Meta's code expects a few tensors that are not weights of the network: the mask token of training, the periods of rotary
angles and a mask over biases. They are dropped on reading and written as constants. Blocks may be numbered in chunks
(`blocks.1.13.norm1`). For images of other sizes DINOv2's code scales positions by (new + 0.1) / old; with registers, it
does not, and antialiases.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from vitrail.checkpoint.formats.format import Format, Settings, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes
from vitrail.checkpoint.formats.timm import parts
from vitrail.core.errors import ExportRefused
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary

LIBRARY: Final = "meta"
MASK: Final = "mask_token"
PERIODS: Final = "rope_embed.periods"
FREE = ("rotary", "layer_scale", "gated", "key_bias", "out_bias", "mlp_bias")
# Parts of training, next to the network: a norm for small crops (7B and satellite L), EUPE's distillation heads.
TRAINING: Final = ("local_cls_norm.", "projectors.")
GATES = {2: {"fc1": "w12", "fc2": "w3"}, 3: {"fc1_g": "w1", "fc1_x": "w2", "fc2": "w3"}}  # timm's names to Meta's


def recognises(names: set[str], settings: Settings, version: int) -> bool:
    if not {"cls_token", MASK, parts.STEM, "blocks.0.norm1.weight"} <= names:
        return False
    rotary = PERIODS in names and "pos_embed" not in names
    return rotary if version == 3 else not rotary and {"pos_embed", "blocks.0.ls1.gamma"} <= names


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Removes chunks and parts of training, and adds the constants if a file with registers lacks them."""
    if not tensors.keys() & {MASK, "register_tokens", "storage_tokens"}:
        return dict(tensors)
    kept = {name: t for name, t in tensors.items() if not name.startswith(TRAINING)}
    out = {re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name): t for name, t in kept.items()}
    if "cls_token" in out and out["cls_token"].ndim == 3:
        out.setdefault(MASK, torch.zeros_like(out["cls_token"][0]))
    if "storage_tokens" in out:
        out.setdefault(PERIODS, torch.zeros(16))
    return out


def infer(shapes: TensorShapes, version: int) -> ModelConfig:
    theirs = {there: here for here, there in GATES[version].items()}
    theirs |= {"register_tokens": "reg_token", "storage_tokens": "reg_token"}
    rename = partial(re.sub, r"(?<=\bmlp\.)w\d+|^\w+_tokens$", lambda found: theirs.get(found[0], found[0]))
    alike = replace(shapes, tensors={rename(name): tensor for name, tensor in shapes.tensors.items()})
    fields = parts.infer_layers(alike)
    fields |= {"gelu": "erf", "key_bias": "blocks.0.attn.qkv.bias_mask" not in shapes}
    if version == 3:
        if "heads" not in shapes.facts:
            fields["heads"] = max(1, fields["width"] // (4 * shapes.get(PERIODS, 1)[0]))
        fields |= {"image": shapes.image or (224, 224), "position": "none", "norm_eps": 1e-5}
        fields |= {"rotary": Rotary(coordinates="unit", rescale=2.0)}
    else:
        image, prefix = parts.infer_grid(alike, shapes.get("pos_embed", 3)[1], fields["patch"], 1)
        resample = "bicubic" if fields["registers"] else "bicubic-offset"
        fields |= {"image": image, "position_prefix": bool(prefix), "position_resample": resample}
    fields |= {"pool": parts.infer_pool(alike, fields, "token+mean")}
    return ViTConfig(**fields)


def build_table(config: ModelConfig, version: int) -> list[KeyEntry]:
    library = f"Meta's DINOv{version}"
    c = parts.require_fields(library, config, free=FREE)
    unit = c.rotary is not None and c.rotary == Rotary(
        base=c.rotary.base, coordinates="unit", shift=c.rotary.shift, jitter=c.rotary.jitter, rescale=c.rotary.rescale
    )
    rules = {"class_token": c.class_token, "pool": c.pool in ("token", "token+mean"), "head": c.head == "none"}
    rules |= {"rotary": unit if version == 3 else c.rotary is None, "layer_scale": c.layer_scale > 0 or version == 3}
    rules |= {"position": c.position == ("none" if version == 3 else "learned")}
    rules |= {"position_prefix": version == 3 or c.position_prefix, "key_bias": version == 3 or c.key_bias}
    for field in (field for field, held in rules.items() if not held):
        raise ExportRefused(f"{library} has no place for field {field}={getattr(c, field)!r}")
    gates = GATES[version] if c.gated else {}
    names = parts.NAMES | {"registers": "register_tokens" if version == 2 else "storage_tokens"}

    def special(ours: str, theirs: str) -> KeyEntry | None:
        if ours == "class_token":
            return KeyEntry(ours, (theirs, MASK), lambda t: (t, t.new_zeros(1, c.width)), lambda ts: ts[0])
        if ours == "norm.weight" and version == 3:
            return KeyEntry(ours, (theirs, PERIODS), lambda t: (t, _periods(c, t)), lambda ts: ts[0])
        if ours.endswith(".attention.qkv.bias") and not c.key_bias:
            return KeyEntry(ours, (theirs, f"{theirs}_mask"), _mask_keys, lambda ts: torch.cat(ts[0].chunk(3)[::2]))
        if c.gated and ".mlp." in ours and version == 3 and (entry := parts.split_gate(ours, theirs)):
            apart = (entry.names[0].replace("fc1_g", "w1"), entry.names[1].replace("fc1_x", "w2"))
            return replace(entry, names=apart)
        for timm, meta in gates.items() if ".mlp." in ours else ():
            if f".{timm}." in theirs:
                return KeyEntry(ours, (theirs.replace(f".{timm}.", f".{meta}."),), lambda t: (t,), lambda ts: ts[0])
        return None

    return parts.named_entries(library, c, names, special)


def _mask_keys(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Biases of queries and values in the layout for all three, and the mask that zeroes those of keys."""
    queries, values = bias.chunk(2)
    none, one = torch.zeros_like(queries), torch.ones_like(queries)
    return torch.cat([queries, none, values]), torch.cat([one, none, one])


def _periods(c: ViTConfig, like: Tensor) -> Tensor:
    """base^(4i/D_h), which its code keeps in half precision."""
    assert c.rotary is not None
    steps = torch.arange(c.head_size // 4, device=like.device, dtype=torch.float32)
    return (c.rotary.base ** (4 * steps / c.head_size)).bfloat16()


def claims(config: ModelConfig, version: int) -> bool:
    return isinstance(config, ViTConfig) and (config.rotary is not None) == (version == 3)


def prepare(config: ModelConfig) -> Preprocessing:
    """ImageNet's mean and deviation; only what exceeds a square is cropped."""
    return imagenet_crop(config, 1.0)


FORMATS = tuple(
    Format(
        name=f"meta-dinov{version}",
        library=LIBRARY,
        order=40,
        recognises=partial(recognises, version=version),
        table=partial(build_table, version=version),
        infer=partial(infer, version=version),
        modern=modernise,
        preprocessing=prepare,
        claims=partial(claims, version=version),
    )
    for version in (2, 3)
)

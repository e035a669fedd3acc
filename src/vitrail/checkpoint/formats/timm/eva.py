"""timm's state dicts of eva.py: EVA, EVA-02, Perception Encoder, DINOv3 and Naver's rotary ViTs.

    family      tensors that tell                                            rotary positions
    dinov3      registers and a class token, no position table               unit coordinates, halves, base 100
    pe          norm_pre with attention pooling, or without a last norm      columns first, counted from 1 (G: from 0)
    mixed       rope.freqs                                                   learned, columns first, base 10
    naver       gamma_1, attn.qkv.bias, a class token, no registers          columns first, base 100
    eva02       gates, or registers alone                                    scaled to a 16x16 grid, base 10000
    eva         q_bias and v_bias                                            none; EVA-02-E has its norms behind

Queries, keys and values are stored in one matrix or in three, gates in one or in two, as in the published file of each
network.
"""

import re
from typing import Any, Final

import torch

from vitrail.checkpoint.formats.format import Format, Settings, clip_crop, half_squash, imagenet_crop
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes
from vitrail.checkpoint.formats.timm import parts
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary

NAME: Final = "timm-eva"
LIBRARY: Final = "timm"
ENORMOUS: Final = (1792, 15360)  # width and MLP of EVA-02-E, the one network here with norms behind
FREE = (
    "register_positions", "rotary", "layer_scale", "gated", "norm_order", "norm_stem", "norm_final", "norm_qk",
    "norm_inner_attention", "norm_inner_mlp", "key_bias", "patch_bias", "map_heads", "map_mlp_width",
    "projection",
)  # fmt: skip
FAMILIES = {
    r"dinov3|lingbot|eupe": "dinov3", r"vit_pe_": "pe", r"_rope_mixed": "mixed", r"_rope_(reg\d_)?gap": "eva02",
    r"_rope_": "naver", r"^eva02_enormous": "enormous", r"^eva02_": "eva02", r"^eva_giant": "eva",
}  # fmt: skip


def recognises(names: set[str], settings: Settings) -> bool:
    """Recognises files by names that only eva.py uses, by tensors that only its networks lack, or by the
    architecture."""
    if parts.STEM not in names or "blocks.0.attn.proj.weight" not in names:
        return False
    stated = str((settings or {}).get("architecture") or "")
    if _name_family(stated):
        return True
    own = {"blocks.0.gamma_1", "blocks.0.attn.q_bias", "blocks.0.attn.k_proj.weight", "rope.freqs"}
    bare = "norm.weight" not in names and "fc_norm.weight" not in names and "norm_pre.weight" in names
    pooled = {"attn_pool.latent", "norm_pre.weight"} <= names
    return bool(own & names) or (not stated and (bare or pooled))


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Removes fixed angles, and stores matrices as in the published network of the kind: see `_splits_heads`,
    `_splits_gates`."""
    if parts.STEM not in tensors:
        return dict(tensors)
    out = {name: t for name, t in tensors.items() if not name.startswith("rope.") or name == "rope.freqs"}
    inner = "blocks.0.mlp.norm.weight" in out
    out = parts.store_gates(out, split=inner or "pos_embed" not in out)
    inner = inner and bool({"blocks.0.attn.q_bias", "blocks.0.attn.q_proj.bias"} & out.keys())
    for name in [name for name in out if name.endswith(".attn.qkv.weight" if inner else ".attn.q_proj.weight")]:
        block = name.removesuffix(".qkv.weight").removesuffix(".q_proj.weight")
        qkv, apart = f"{block}.qkv.weight", [f"{block}.{letter}_proj.weight" for letter in "qkv"]
        if inner and f"{block}.qkv.bias" not in out and out[name].ndim == 2 and not out[name].shape[0] % 3:
            out |= dict(zip(apart, out.pop(name).chunk(3), strict=True))
            out = {_rename_bias(n, block, "{}_bias", "{}_proj.bias"): t for n, t in out.items()}
        elif not inner and f"{block}.k_proj.bias" not in out and _are_alike(out, apart):
            out[qkv] = torch.cat([out.pop(n) for n in apart])
            out = {_rename_bias(n, block, "{}_proj.bias", "{}_bias"): t for n, t in out.items()}
    return out


def _are_alike(tensors: Tensors, names: list[str]) -> bool:
    """Whether all are there, of one shape and type."""
    return all(n in tensors for n in names) and len({(tensors[n].shape, tensors[n].dtype) for n in names}) == 1


def _rename_bias(name: str, block: str, old: str, new: str) -> str:
    names = {f"{block}.{old.format(letter)}": f"{block}.{new.format(letter)}" for letter in "qv"}
    return names.get(name, name)


def _splits_heads(c: ViTConfig) -> bool:
    """Queries, keys and values in matrices of their own: EVA-02 from B on, which has a norm inside its MLP."""
    return c.norm_inner_mlp and c.qkv_bias and not c.key_bias


def _splits_gates(c: ViTConfig) -> bool:
    """Gate and value in layers of their own: EVA-02 from B on, and DINOv3."""
    return c.gated and (c.norm_inner_mlp or c.position == "none")


def infer(shapes: TensorShapes) -> ModelConfig:
    _refuse_sapiens(shapes)
    args, named = parts.read_args(shapes), _name_family(parts.read_architecture(shapes))
    fields = parts.infer_layers(shapes)
    kind = {"dinov3": "dinov3", "mixed": "mixed"}.get(str(args.get("rope_type")))
    family = kind or named or _find_family(shapes)
    lone = fields["registers"] and "pos_embed" not in shapes  # DINOv3 and the SBB recipes: published at 256 px
    fields |= parts.infer_positions(shapes, fields, 256 if lone else 224)
    fields |= _infer_heads(shapes, fields, family, args)
    fields |= {"gelu": "erf", "norm_eps": 1e-5 if (named or family) in ("dinov3", "pe") else 1e-6}
    fields |= {"position_resample": "bicubic"}
    post = args.get("use_post_norm", family == "enormous")
    fields |= {"norm_order": "res-post" if post else "pre"}
    fields |= {"rotary": _infer_rotary(shapes, fields, family, args)}
    fields |= {"pool": parts.infer_pool(shapes, fields, _usual_pool(shapes, family, fields))}
    return ViTConfig(**fields)


def _refuse_sapiens(shapes: TensorShapes) -> None:
    """Sapiens2 has fewer keys than queries in some layers, and scales one branch alone."""
    lone = "blocks.0.gamma_1" in shapes and "blocks.0.gamma_2" not in shapes
    for layer in range(shapes.count("blocks.{}.norm1.weight")):
        queries, keys = (f"blocks.{layer}.attn.{letter}_proj.weight" for letter in "qk")
        few = queries in shapes and keys in shapes and shapes.get(queries, 2)[0] > shapes.get(keys, 2)[0]
        if few or lone:
            raise MismatchedWeights(f"{shapes.path}: these are weights of Sapiens2, which vitrail does not read")


def _name_family(architecture: str) -> str:
    return next((family for form, family in FAMILIES.items() if re.search(form, architecture)), "")


def _usual_pool(shapes: TensorShapes, family: str, fields: dict[str, Any]) -> str:
    """What published networks of the family do with their class token."""
    if family == "dinov3" and not (fields["classes"] and "lingbot" in parts.read_architecture(shapes)):
        return "mean" if fields["classes"] else "token+mean"
    return "mean" if family == "pe" else "token"


def _find_family(shapes: TensorShapes) -> str:
    """The family by its tensors. DeiT III's own files and Naver's networks with a position table look alike."""
    token, registers, table = "cls_token" in shapes, "reg_token" in shapes, "pos_embed" in shapes
    scaled, biased = "blocks.0.gamma_1" in shapes, "blocks.0.attn.qkv.bias" in shapes
    if "rope.freqs" in shapes:
        return "mixed"
    if "norm_pre.weight" in shapes:
        return "pe"
    if not table and registers:
        return "dinov3" if token else "eva02"
    if scaled and biased and token:
        if table and "rotary" not in shapes.facts:
            fault = "its tensors are those of DeiT III and of a rotary ViT (rope_ape) alike"
            remedy = "give the folder with its config.json, or rotary=None or rotary=Rotary(...)"
            raise MismatchedWeights(f"{shapes.path}: {fault}; {remedy}")
        return "naver"
    width, inside = shapes.get("blocks.0.mlp.fc2.weight", 2)
    if (width, inside) == ENORMOUS:
        return "enormous"
    gates = {"blocks.0.mlp.fc1_g.weight", "blocks.0.mlp.norm.weight"}
    packed = "blocks.0.mlp.fc1.weight" in shapes and shapes.get("blocks.0.mlp.fc1.weight", 2)[0] == 2 * inside
    return "eva02" if packed or any(name in shapes for name in gates) else "eva"


def _infer_heads(shapes: TensorShapes, fields: dict[str, Any], family: str, args: dict[str, Any]) -> dict[str, Any]:
    """The heads of the blocks and of the pooling. Learned frequencies show them; DINOv3's heads have 64 dimensions,
    7B's 128."""
    heads, stated = fields["heads"], "heads" in shapes.facts or "num_heads" in args
    if "rope.freqs" in shapes:
        heads = shapes.get("rope.freqs", 4)[2]
    elif family == "dinov3" and not stated and not fields["width"] % 64:
        heads = fields["width"] // (128 if fields["width"] >= 4096 else 64)
    core = family == "pe" and "_spatial_" not in (name := parts.read_architecture(shapes)) and "_lang_" not in name
    pooling = args.get("attn_pool_num_heads", 8 if core else 0)
    pooled = "attn_pool.latent" in shapes and type(pooling) is int and pooling not in (0, heads)
    return {"heads": heads, "map_heads": pooling if pooled else 0}


def _infer_rotary(shapes: TensorShapes, fields: dict[str, Any], family: str, args: dict[str, Any]) -> Rotary | None:
    if not args.get("use_rot_pos_emb", family not in ("eva", "enormous")):
        return None
    image: Pair = fields["image"]
    own = (image[0] // fields["patch"][0], image[1] // fields["patch"][1])
    if named := re.search(r"vit_pe_.*_patch(\d+)_(\d+)$", parts.read_architecture(shapes)):
        own = pair(int(named[2]) // int(named[1]))
    first = 1.0 if fields["class_token"] else 0.0
    usual: dict[str, Any] = {
        "dinov3": {"coordinates": "unit"},
        "pe": {"base": 10000.0, "layout": "pairs", "order": "xy", "offset": first, "reference": own},
        "mixed": {"mixed": True, "base": 10.0, "layout": "pairs", "order": "xy"},
        "naver": {"layout": "pairs", "order": "xy"},
        "eva02": {"base": 10000.0, "layout": "pairs", "reference": (16, 16)},
    }.get(family, {"base": 10000.0, "layout": "pairs"})
    _refuse_mixtures(shapes, family, args)
    names = {"rope_temperature": "base", "rope_grid_offset": "offset"}
    said: dict[str, Any] = {ours: float(args[name]) for name, ours in names.items() if name in args}
    varied = {"rope_shift_coords": "shift", "rope_jitter_coords": "jitter", "rope_rescale_coords": "rescale"}
    said |= {ours: float(args[name] or 0) for name, ours in varied.items() if name in args}
    if family == "dinov3":
        return Rotary(**usual | said)
    if "ref_feat_shape" in args:
        reference: Any = args["ref_feat_shape"]
        said["reference"] = None if reference is None else pair(reference)
    if "rope_grid_indexing" in args:
        said["order"] = "xy" if args["rope_grid_indexing"] == "xy" else "yx"
    return Rotary(**usual | said)


def _refuse_mixtures(shapes: TensorShapes, family: str, args: dict[str, Any]) -> None:
    """Refuses positions of another kind than the architecture's, unless all of their parameters are stated."""
    halves, kind = args.get("rope_rotate_half"), args.get("rope_type")
    usual = {"dinov3": "dinov3", "mixed": "mixed"}.get(_name_family(parts.read_architecture(shapes)) or family, "cat")
    other = kind is not None and kind != usual
    incomplete = other and (halves is None or not {"rope_temperature", "rope_grid_indexing"} <= args.keys())
    if incomplete or (halves is not None and bool(halves) != ((kind or usual) == "dinov3")):
        found = f"rope_type={kind or usual!r} with rope_rotate_half={halves!r} of its model_args"
        raise MismatchedWeights(f"{shapes.path}: {found} are not rotary positions that vitrail supports")


def build_table(config: ModelConfig) -> list[KeyEntry]:
    c = parts.require_fields("timm's Eva", config, free=FREE)
    _refuse_rotary(c)
    if c.registers and c.class_token and c.position_prefix and not c.register_positions and c.position == "learned":
        raise ExportRefused("timm has no place for field position_prefix=True next to registers; use another format")
    names = parts.NAMES | parts.GAMMAS | {"norm": "fc_norm" if c.norm_after_pool else "norm"}
    parts.refuse_second_matrix("timm's Eva", c)
    names |= {"rotary.frequencies": "rope.freqs", **({"projection": "head"} if c.projection else {})}
    split_heads, split_gates = _splits_heads(c), _splits_gates(c)

    def special(ours: str, theirs: str) -> KeyEntry | None:
        if ours == "rotary.frequencies":
            return parts.reshape(ours, theirs, lambda t: t.transpose(0, 1), lambda t: t.transpose(0, 1))
        if ours.endswith(".attention.qkv.weight") and split_heads:
            apart = tuple(theirs.replace("qkv", f"{letter}_proj") for letter in "qkv")
            return KeyEntry(ours, apart, lambda t: t.chunk(3), torch.cat)
        if ours.endswith(".attention.qkv.bias") and not c.key_bias:
            form = "{}_proj.bias" if split_heads else "{}_bias"
            apart = tuple(theirs.replace("qkv.bias", form.format(letter)) for letter in "qv")
            return KeyEntry(ours, apart, lambda t: t.chunk(2), torch.cat)
        if ours == "projection.weight":
            return parts.join_projection(ours, theirs)
        return parts.split_gate(ours, theirs) if split_gates else None

    return parts.named_entries("timm's Eva", c, names, special)


def _refuse_rotary(c: ViTConfig) -> None:
    r = c.rotary
    if r is None:
        return
    unit = Rotary(base=r.base, coordinates="unit", shift=r.shift, jitter=r.jitter, rescale=r.rescale)
    mixed = Rotary(mixed=True, base=r.base, layout="pairs", order=r.order)
    index = Rotary(base=r.base, layout="pairs", order=r.order, offset=r.offset, reference=r.reference)
    if r not in (unit, mixed, index):
        raise ExportRefused(f"timm's Eva has no such rotary positions: field rotary={r}")


def claims(config: ModelConfig) -> bool:
    """Claims the networks that vision_transformer.py cannot hold."""
    if not isinstance(config, ViTConfig) or config.position_bias != "none":
        return False
    pooled = config.pool == "map" and bool(config.norm_stem == "tokens" or config.map_heads)
    return config.rotary is not None or (config.qkv_bias and not config.key_bias) or pooled


def network_settings(config: ModelConfig) -> dict[str, Any]:
    """The nearer of the two epsilons that eva.py's networks have; everything else is an argument."""
    c = parts.require_fields("timm's Eva", config, free=FREE)
    wrong = {"patch_bias": c.patch_bias == (c.norm_stem == "tokens"), "norm_stem": c.norm_stem == "patches"}
    for field in (field for field, fault in wrong.items() if fault):
        raise ExportRefused(f"timm's Eva cannot be built with field {field}={getattr(c, field)!r}")
    both = c.qkv_bias and c.key_bias
    args: dict[str, Any] = {
        "img_size": list(c.image), "patch_size": list(c.patch), "in_chans": c.channels,
        "num_classes": c.projection or c.classes,
        "embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": (c.mlp_width + 0.5) / c.width,
        "qkv_bias": c.qkv_bias, "qkv_fused": not _splits_heads(c), "attn_type": "rope" if both else "eva",
        "swiglu_mlp": c.gated, "swiglu_align_to": int(_splits_gates(c) and not c.norm_inner_mlp),
        "scale_mlp": c.norm_inner_mlp, "scale_attn_inner": c.norm_inner_attention,
        "init_values": c.layer_scale or None, "class_token": c.class_token, "num_reg_tokens": c.registers,
        "no_embed_class": (c.class_token and not c.position_prefix) or bool(c.registers and not c.register_positions),
        "use_abs_pos_emb": c.position == "learned", "use_post_norm": c.norm_order == "res-post",
        "use_pre_transformer_norm": c.norm_stem == "tokens", "use_fc_norm": c.norm_after_pool,
        "use_post_transformer_norm": c.norm_final and not c.norm_after_pool, "dynamic_img_size": False,
    }  # fmt: skip
    args |= {"qk_norm": True} if c.norm_qk else {}  # new in timm 1.0.30
    args |= {} if c.pool == "token+mean" else {"global_pool": {"mean": "avg"}.get(c.pool, c.pool)}
    if c.pool == "map":
        ratio = ((c.map_mlp_width or c.mlp_width) + 0.5) / c.width
        args |= {"attn_pool_num_heads": c.map_heads or c.heads, "attn_pool_mlp_ratio": ratio}
    wide = "vit_small_patch16_dinov3" if c.rotary and c.rotary.coordinates == "unit" else "vit_pe_core_tiny_patch16_384"
    name = "eva_giant_patch14_224" if c.norm_eps < 5e-6 else wide
    return {"architecture": name, "model_args": args | _rotary_args(c.rotary)}


def _rotary_args(r: Rotary | None) -> dict[str, Any]:
    if r is None:
        return {"use_rot_pos_emb": False}
    kind = "mixed" if r.mixed else "dinov3" if r.coordinates == "unit" else "cat"
    return {
        "use_rot_pos_emb": True, "rope_type": kind, "rope_temperature": r.base, "rope_grid_offset": r.offset,
        "rope_grid_indexing": "xy" if r.order == "xy" else "ij", "rope_rotate_half": kind == "dinov3",
        "rope_shift_coords": r.shift or None, "rope_jitter_coords": r.jitter or None,
        "rope_rescale_coords": r.rescale or None, "ref_feat_shape": None if r.reference is None else list(r.reference),
    }  # fmt: skip


def prepare(config: ModelConfig) -> Preprocessing:
    """ImageNet's mean for DINOv3 and Naver, [-1, 1] for PE, CLIP's mean for EVA."""
    if not isinstance(config, ViTConfig) or config.layer_scale:
        return imagenet_crop(config, 1.0)
    return half_squash(config) if config.norm_stem == "tokens" else clip_crop(config)


FORMATS = (
    Format(
        name=NAME,
        library=LIBRARY,
        order=46,
        recognises=recognises,
        table=build_table,
        infer=infer,
        modern=modernise,
        preprocessing=prepare,
        claims=claims,
        settings=network_settings,
    ),
)

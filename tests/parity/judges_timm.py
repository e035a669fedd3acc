"""timm's judges: published architectures made tiny by arguments that fit into a folder's config.json."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tests.parity.judges import Judge, fill, join_readouts, own
from vitrail.core.text import Pair

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}
CLASSES = 7
# timm's positions are resized with bicubic and antialias.
PLAIN: dict[str, Any] = {"gelu": "erf", "norm_eps": 1e-6, "position": "learned", "position_resample": "bicubic"}
NO_CLASS: dict[str, Any] = {"class_token": False}
CLIP: dict[str, Any] = {"norm_stem": "tokens", "patch_bias": False, "norm_eps": 1e-5}
EVA: dict[str, Any] = {"key_bias": False, "pool": "mean", "norm_after_pool": True}
EVA02: dict[str, Any] = {
    "key_bias": False, "gated": True, "mlp_width": 170,
    "rotary": {"mixed": False, "base": 10000.0, "coordinates": "index", "layout": "pairs", "order": "yx",
               "offset": 0.0, "reference": (16, 16)},
}  # fmt: skip
BEIT: dict[str, Any] = {**EVA, "position": "none", "position_bias": "table"}


def perception(offset: float, reference: int) -> dict[str, Any]:
    """The Perception Encoder: columns first, and a grid that counts from `offset`."""
    shared = {"mixed": False, "base": 10000.0, "coordinates": "index", "layout": "pairs", "order": "xy"}
    return {**CLIP, "rotary": {**shared, "offset": offset, "reference": (reference, reference)}}


def naver(*, mixed: bool) -> dict[str, Any]:
    shared = {"coordinates": "index", "layout": "pairs", "order": "xy", "offset": 0.0, "reference": None}
    rotary = {"mixed": mixed, "base": 10.0 if mixed else 100.0, **shared}
    return {"layer_scale": 1e-5, "rotary": rotary}


DINOV3: dict[str, Any] = {
    "position": "none", "registers": 4, "layer_scale": 1e-5, "norm_eps": 1e-5, "pool": "token+mean",
    "rotary": {"mixed": False, "base": 100.0, "coordinates": "unit", "layout": "halves", "order": "yx"},
}  # fmt: skip
SAM: dict[str, Any] = {
    **NO_CLASS, "position_bias": "decomposed", "norm_final": False, "neck": 24, "pool": "mean", "norm_eps": 1e-5,
    "windows": {"size": 3, "whole": (1,)},
}  # fmt: skip


def build(
    name: str,
    architecture: str,
    expected: dict[str, Any],
    *,
    classes: int = CLASSES,
    grows: bool = True,
    size: Pair = (32, 32),
    **args: Any,
) -> Judge:
    """A judge from `create_model`'s own arguments; `grows` where timm has a forward pass for other sizes."""
    import timm

    given: dict[str, Any] = {**SIZES, "img_size": list(size) if size[0] != size[1] else size[0], **args}
    dynamic: dict[str, Any] = {"dynamic_img_size": True} if grows and "samvit" not in architecture else {}
    network = fill(timm.create_model(architecture, pretrained=False, num_classes=classes, **given, **dynamic))
    cfg = {**network.pretrained_cfg, "input_size": (3, *size), "num_classes": classes}
    settings = {"architecture": architecture, "num_classes": classes, "model_args": given, "pretrained_cfg": cfg}
    head = expected.get("head", "linear" if classes else "none")
    mlp_width = int(given["embed_dim"] * given.get("mlp_ratio", 4))
    sizes = {"width": 64, "depth": 3, "heads": 4, "mlp_width": mlp_width, "image": size, "patch": (8, 8)}
    return Judge(
        name=name,
        library="timm",
        network=network,
        blocks=list(network.blocks),
        tensors=own(network.state_dict()),
        settings=json.loads(json.dumps(settings)),
        expected={**sizes, "channels": 3, "classes": classes, **PLAIN, **expected, "head": head},
        call=network.forward_features if hasattr(network, "neck") else network,
        finish=finish_both if expected.get("pool") == "token+mean" else finish,
        native=size,
        other=(48, 32) if grows else None,
        fixed="" if grows else "timm's BEiT has no forward pass for another size",
        resample="" if expected.get("position_resample", "bicubic") == "bicubic" else "bicubic",
    )


def finish(network: Any, last: Tensor, out: Any) -> dict[str, Any]:
    if hasattr(network, "neck"):
        return {"tokens": last, "output": out.mean((2, 3)), "neck": out}
    return {"tokens": network.norm(last), "output": out}


def finish_both(network: Any, last: Tensor, _out: Any) -> dict[str, Any]:
    tokens = network.norm(last)
    return {"tokens": tokens, "output": join_readouts(tokens, network.num_prefix_tokens)}


def row(architecture: str, expected: dict[str, Any], **args: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return architecture, expected, args


ROWS = {
    "augreg": row("vit_base_patch16_224", {"pool": "token", "position_resample": "reference"}),
    "deit distilled": row(
        "deit_small_distilled_patch16_224",
        {"head": "distilled", "registers": 1, "register_positions": True, "pool": "token"},
    ),
    "deit distilled headless": row(
        "deit_small_distilled_patch16_224", {"class_tokens": 2, "pool": "token"}, classes=0
    ),
    "deit3": row("deit3_small_patch16_224", {"layer_scale": 1e-6, "position_prefix": False, "pool": "token"}),
    "mae": row(
        "vit_base_patch16_224",
        {"pool": "mean", "norm_after_pool": True, "position_resample": "reference"},
        global_pool="avg",
    ),
    "ijepa": row("vit_huge_patch14_gap_224", {**NO_CLASS, "pool": "mean", "norm_after_pool": False}, classes=0),
    "dinov2": row("vit_small_patch14_dinov2", {"layer_scale": 1e-5, "pool": "token+mean"}, classes=0),
    "dinov2 reg4": row(
        "vit_small_patch14_reg4_dinov2",
        {"layer_scale": 1e-5, "registers": 4, "position_prefix": False, "pool": "token+mean"},
        classes=0,
    ),
    "dinov2 giant": row(
        "vit_giant_patch14_dinov2",
        {"layer_scale": 1e-5, "gated": True, "mlp_width": 96, "pool": "token+mean"},
        classes=0,
        mlp_ratio=3.0,
    ),
    "siglip": row("vit_base_patch16_siglip_224", {**NO_CLASS, "pool": "map"}, classes=0),
    "siglip gap": row(
        "vit_base_patch16_siglip_gap_224", {**NO_CLASS, "pool": "mean", "norm_after_pool": False}, classes=0
    ),
    "sbb map": row(
        "vit_so150m_patch16_reg4_map_256",
        {**NO_CLASS, "registers": 4, "register_positions": True, "pool": "map", "map_prefix": False},
        mlp_ratio=2.5,
    ),
    "sbb map of all tokens": row(
        "test_vit3",
        {
            **NO_CLASS, "registers": 1, "register_positions": True, "layer_scale": 1e-5, "pool": "map",
            "map_prefix": True,
        },
        mlp_ratio=2,
    ),
    "clip": row("vit_base_patch16_clip_224", {**CLIP, "pool": "token"}),
    "clip quickgelu": row("vit_base_patch16_clip_quickgelu_224", {**CLIP, "gelu": "quick", "pool": "token"}),
    "aimv2": row(
        "aimv2_large_patch14_224",
        {
            **NO_CLASS, "norm": "rms", "norm_stem": "patches", "norm_eps": 1e-5, "gated": True, "qkv_bias": False,
            "out_bias": False, "mlp_bias": False, "patch_bias": True, "pool": "mean", "norm_after_pool": False,
        },
        classes=0,
        mlp_ratio=2.75,
    ),
    "flexivit": row(
        "flexivit_small", {"position_prefix": False, "pool": "token", "position_resample": "bilinear"}
    ),
    "eva02": row(
        "eva02_base_patch14_224", {**EVA02, "norm_inner_mlp": True, "pool": "mean", "norm_after_pool": True}
    ),
    "eva02 small": row("eva02_small_patch14_224", {**EVA02, "pool": "mean", "norm_after_pool": True}),
    "eva02 clip": row(
        "eva02_base_patch16_clip_224",
        {**EVA02, "norm_inner_mlp": True, "norm_inner_attention": True, "pool": "token"},
    ),
    "eva giant": row("eva_giant_patch14_224", EVA, mlp_ratio=3.0),
    "eva02 enormous": row(
        "eva02_enormous_patch14_clip_224", {"key_bias": False, "norm_order": "res-post", "pool": "token"}, mlp_ratio=3.0
    ),
    "pe core": row(
        "vit_pe_core_base_patch16_224",
        {**perception(1.0, 14), "pool": "map", "map_heads": 8, "map_mlp_width": 256},
        mlp_ratio=3.0,
    ),
    "pe core gigantic": row(
        "vit_pe_core_gigantic_patch14_448",
        {**perception(0.0, 32), **NO_CLASS, "pool": "map", "map_heads": 8, "map_mlp_width": 256},
        mlp_ratio=3.0,
    ),
    "pe spatial": row(
        "vit_pe_spatial_base_patch16_512", {**perception(1.0, 32), "norm_final": False, "pool": "mean"}, classes=0
    ),
    "pe lang": row(
        "vit_pe_lang_large_patch14_448",
        {**perception(1.0, 32), "norm_final": False, "layer_scale": 0.1, "pool": "mean"},
        classes=0,
    ),
    "pe lang gigantic": row(
        "vit_pe_lang_gigantic_patch14_448",
        {**perception(0.0, 32), **NO_CLASS, "norm_final": False, "layer_scale": 0.1, "pool": "mean"},
        classes=0,
        mlp_ratio=3.0,
    ),
    "dinov3": row("vit_small_patch16_dinov3", {**DINOV3, "qkv_bias": False}, classes=0),
    "dinov3 qkvb": row("vit_small_patch16_dinov3_qkvb", {**DINOV3, "key_bias": False}, classes=0),
    "dinov3 plus": row(
        "vit_small_plus_patch16_dinov3", {**DINOV3, "qkv_bias": False, "gated": True}, classes=0, mlp_ratio=3.0
    ),
    "rope axial": row("vit_small_patch16_rope_224", {**naver(mixed=False), "position": "none"}),
    "rope mixed": row("vit_small_patch16_rope_mixed_224", {**naver(mixed=True), "position": "none"}),
    "rope axial ape": row("vit_small_patch16_rope_ape_224", {**naver(mixed=False), "position_prefix": False}),
    "rope mixed ape": row("vit_small_patch16_rope_mixed_ape_224", {**naver(mixed=True), "position_prefix": False}),
    "beit": row("beit_base_patch16_224", {**BEIT, "layer_scale": 0.1}, grows=False),
    "beit oblong": row("beit_base_patch16_224", {**BEIT, "layer_scale": 0.1}, grows=False, size=(48, 32)),
    "beit shared": row(
        "beit_base_patch16_224",
        {**BEIT, "position_bias": "shared-table", "layer_scale": 0.1},
        grows=False,
        size=(48, 32),
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=True,
    ),
    "beitv2": row("beitv2_base_patch16_224", {**BEIT, "layer_scale": 1e-5}, grows=False),
    "beitv2 oblong": row("beitv2_base_patch16_224", {**BEIT, "layer_scale": 1e-5}, grows=False, size=(32, 56)),
    "beit3": row(
        "beit3_base_patch16_224",
        {
            "norm_inner_attention": True, "norm_inner_mlp": True, "norm_eps": 1e-5, "pool": "mean",
            "norm_after_pool": True,
        },
    ),
    "samvit": row(
        "samvit_base_patch16", SAM, classes=0, window_size=3, global_attn_indexes=[1], neck_chans=24
    ),
}  # fmt: skip
TIMM: dict[str, Callable[[], Judge]] = {
    f"timm:{name}": partial(build, f"timm:{name}", architecture, expected, **args)
    for name, (architecture, expected, args) in ROWS.items()
}

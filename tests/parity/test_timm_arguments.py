"""No argument of a folder for timm is overlooked: what changes the numbers is read, or the folder is refused.

Each argument of a tiny network is changed by itself, and the folder is written by timm. Where timm builds and runs the
result, vitrail computes the same, or says why not.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.judges import fill
from tests.parity.networks import TOLERANCE
from vitrail.checkpoint.formats.key_table import TensorShapes
from vitrail.checkpoint.formats.registry import recognise
from vitrail.checkpoint.weights import load
from vitrail.core.errors import VitrailError

timm = pytest.importorskip("timm")

SIZES: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7,
}  # fmt: skip
WINDOWS = {"window_size": 3, "global_attn_indexes": [1], "neck_chans": 24, "num_classes": 0}
ARCHITECTURES = (
    "vit_base_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_224", "vit_base_patch16_clip_224", "aimv2_large_patch14_224",
    "deit_small_distilled_patch16_224", "eva02_base_patch14_224", "eva02_small_patch14_224", "eva_giant_patch14_224",
    "eva02_enormous_patch14_clip_224", "vit_pe_core_base_patch16_224", "vit_pe_spatial_base_patch16_512",
    "vit_pe_lang_large_patch14_448", "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3",
    "vit_small_patch16_dinov3_qkvb", "vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_ape_224",
    "vit_small_patch16_rope_ape_224", "beit_base_patch16_224", "beitv2_base_patch16_224", "beit3_base_patch16_224",
    "samvit_base_patch16", "flexivit_small", "vit_medium_patch16_rope_reg1_gap_256",
)  # fmt: skip
FLAG = (True, False)
VALUES: dict[str, tuple[Any, ...]] = {
    "global_pool": ("", "avg", "avgmax", "max", "token", "map", "prr"), "num_classes": (0, 5), "in_chans": (1,),
    "num_heads": (2,), "mlp_ratio": (2, 3.3), "init_values": (None, 0.3), "class_token": FLAG, "fc_norm": FLAG,
    "pos_embed": ("learn", "none"), "no_embed_class": FLAG, "reg_tokens": (0, 2), "num_reg_tokens": (0, 2),
    "qkv_bias": FLAG, "qkv_fused": FLAG, "qk_norm": FLAG, "scale_attn_norm": FLAG, "scale_mlp_norm": FLAG,
    "proj_bias": FLAG, "pre_norm": FLAG, "final_norm": FLAG, "pool_include_prefix": FLAG,
    "norm_layer": ("layernorm", "rmsnorm", "simplenorm"), "embed_norm_layer": ("layernorm", "rmsnorm"),
    "act_layer": ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu"), "attn_layer": ("diff",),
    "dynamic_img_size": FLAG, "swiglu_mlp": FLAG, "swiglu_align_to": (0, 8), "scale_mlp": FLAG,
    "scale_attn_inner": FLAG, "attn_type": ("eva", "rope"), "use_abs_pos_emb": FLAG, "use_rot_pos_emb": FLAG,
    "rope_type": ("cat", "dinov3", "mixed", "base", "mrope"), "rope_grid_offset": (0.5,), "use_fc_norm": FLAG,
    "rope_grid_indexing": ("ij", "xy"), "rope_temperature": (50.0,), "rope_rotate_half": FLAG,
    "rope_rescale_coords": (3.0,), "ref_feat_shape": (None, [5, 5], [3, 7]), "use_post_norm": FLAG,
    "use_pre_transformer_norm": FLAG, "use_post_transformer_norm": FLAG, "attn_pool_num_heads": (4,),
    "attn_pool_mlp_ratio": (2.0,), "num_kv_heads": (2,), "attn_only_layer_scale": FLAG, "use_rel_pos_bias": FLAG,
    "use_shared_rel_pos_bias": FLAG, "use_abs_pos": FLAG, "use_rel_pos": FLAG, "use_rope": FLAG,
    "window_size": (0, 2), "neck_chans": (None, 8),
}  # fmt: skip


@torch.no_grad()
def differs(architecture: str, args: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with our reading of a folder; nothing where the numbers are the same or it is refused, and None
    where timm itself cannot build or run the network."""
    try:
        theirs = fill(timm.create_model(architecture, pretrained=False, **args))
        images = torch.randn(2, args.get("in_chans", 3), 32, 32, generator=torch.Generator().manual_seed(0))
        tokens, output = theirs.forward_features(images), theirs(images)
        timm.models.save_for_hf(theirs, folder, model_args=args, safe_serialization=True)
    except Exception:  # whatever timm raises for arguments that do not go together
        return None
    try:
        ours = load(folder)
    except VitrailError:
        return ""
    found, answer = ours.forward_features(images), ours(images)
    if tokens.ndim == 4:  # SAM's map
        found, answer, output = ours.patch_map(images), found, found
    if answer.shape != output.shape and not args["num_classes"]:
        answer = output  # timm has no readout here, or that of the class token alone where ours adds the mean
    if (found.shape, answer.shape) != (tokens.shape, output.shape):
        return f"{tuple(found.shape)} and {tuple(answer.shape)}, not {tuple(tokens.shape)} and {tuple(output.shape)}"
    pairs = ((found, tokens), (answer, output))
    far = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return "" if far < TOLERANCE else f"{far:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_changed_argument_is_read_or_refused(architecture: str, tmp_path: Path) -> None:
    own = {**SIZES, **(WINDOWS if architecture.startswith("samvit") else {})}
    assert differs(architecture, own, tmp_path / "own") == ""
    changes = [(name, value) for name, values in VALUES.items() for value in values]
    found = {
        f"{name}={value!r}": differs(architecture, {**own, name: value}, tmp_path / str(at))
        for at, (name, value) in enumerate(changes)
    }
    assert sum(fault is not None for fault in found.values()) > 5
    assert not {change: fault for change, fault in found.items() if fault}


JUNK: tuple[Any, ...] = (
    "abc",
    [],
    [None],
    [[1]],
    [1, 2, 3],
    {},
    {"a": 1},
    -1,
    0,
    float("inf"),
    float("nan"),
    2**70,
    True,
)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["vit_base_patch16_224", "eva02_base_patch14_224", "samvit_base_patch16"])
def test_an_argument_of_any_type_is_read_or_refused(architecture: str) -> None:
    """Without a traceback, whatever a config.json says."""
    own = {**SIZES, **(WINDOWS if architecture.startswith("samvit") else {})}
    with torch.device("meta"):
        network = timm.create_model(architecture, pretrained=False, **own)
    path = Path(architecture)
    for name in (*VALUES, "img_size", "patch_size", "embed_dim", "depth", "global_attn_indexes"):
        for value in JUNK:
            settings = {"architecture": architecture, "model_args": {**own, name: value}, name: value}
            with suppress(VitrailError):
                form, tensors = recognise(path, network.state_dict(), settings)
                form.infer(TensorShapes(path=path, tensors=tensors, settings=settings, facts={}))

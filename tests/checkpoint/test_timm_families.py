"""timm's and Meta's files of later families, where judges do not look: what a bare file says, how one network is stored
in two ways, what is refused, and what Meta's own code expects in a file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.tiny import awake
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.convert import export
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.key_table import Tensors, export_tensors
from vitrail.checkpoint.formats.registry import FORMATS, find_format
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary, Windows

SMALL = ViTConfig(
    width=64, depth=2, mlp_width=96, heads=1, image=(32, 32), patch=(8, 8), classes=0, head="none", gelu="erf"
)
DINOV2 = replace(SMALL, layer_scale=1e-5, pool="token+mean", position_resample="bicubic-offset")
DINOV3 = replace(
    SMALL,
    image=(224, 224),
    layer_scale=1e-5,
    pool="token+mean",
    position="none",
    registers=4,
    norm_eps=1e-5,
    key_bias=False,
    rotary=Rotary(coordinates="unit", rescale=2.0),
)
EVA02 = replace(
    SMALL,
    key_bias=False,
    gated=True,
    pool="mean",
    norm_after_pool=True,
    position_resample="bicubic",
    rotary=Rotary(base=10000.0, layout="pairs", reference=(16, 16)),
)


def bundle(config: ViTConfig) -> Bundle:
    torch.manual_seed(0)
    return to_bundle(awake(config, torch.float32))


def tensors_in(form: str, config: ViTConfig) -> Tensors:
    return export_tensors(FORMATS[form].table(config), bundle(config).tensors)


def read(tensors: Tensors, folder: Path, **facts: Any) -> Any:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "bare.safetensors")
    return read_bundle(folder / "bare.safetensors", **facts)


def assert_read(tensors: Tensors, config: ViTConfig, folder: Path, **facts: Any) -> None:
    """A bare file gives the config and the numbers that it was made of."""
    found, made = read(tensors, folder, **facts), bundle(config)
    assert found.config == config
    assert all(torch.equal(tensor, made.tensors[name]) for name, tensor in found.tensors.items())


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("timm", replace(DINOV2, position_resample="bicubic")),
        ("timm", replace(SMALL, layer_scale=1e-5, position_prefix=False, position_resample="bicubic")),
        ("timm-eva", EVA02),
        ("timm-eva", replace(EVA02, norm_inner_mlp=True, norm_inner_attention=True)),
        ("timm-eva", replace(EVA02, gated=False, rotary=None)),
        ("meta-dinov2", DINOV2),
        ("meta-dinov2", replace(DINOV2, registers=4, gated=True, position_resample="bicubic")),
        ("meta-dinov3", DINOV3),
        ("meta-dinov3", replace(DINOV3, gated=True, qkv_bias=False, key_bias=True)),
    ],
    ids=str,
)
def test_a_bare_file_says_what_its_family_is(form: str, config: ViTConfig, tmp_path: Path) -> None:
    assert_read(tensors_in(form, config), config, tmp_path)


def test_gates_and_heads_may_be_stored_in_one_matrix_or_apart(tmp_path: Path) -> None:
    """EVA-02 S has one matrix for gate and value and one for queries, keys and values; B has several."""
    apart: Tensors = {}
    for name, tensor in tensors_in("timm-eva", EVA02).items():
        if ".mlp.fc1." in name:
            gate, value = tensor.chunk(2)
            apart |= {name.replace("fc1", "fc1_g"): gate, name.replace("fc1", "fc1_x"): value}
        elif ".attn.qkv.weight" in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            apart |= {name.replace("qkv", f"{letter}_proj"): part for letter, part in parts}
        else:
            apart[name.replace("q_bias", "q_proj.bias").replace("v_bias", "v_proj.bias")] = tensor
    assert_read(apart, EVA02, tmp_path)
    larger = replace(EVA02, norm_inner_mlp=True)
    written = tensors_in("timm-eva", larger)
    block = "blocks.{}.attn."
    for layer in range(2):
        at = block.format(layer)
        written[f"{at}qkv.weight"] = torch.cat([written.pop(f"{at}{letter}_proj.weight") for letter in "qkv"])
        written |= {f"{at}{letter}_bias": written.pop(f"{at}{letter}_proj.bias") for letter in "qv"}
    assert_read(written, larger, tmp_path)


def test_what_tensors_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    """DeiT III in its own names and a rotary ViT with positions have the same tensors."""
    rotary = Rotary(layout="pairs", order="xy")
    config = replace(SMALL, layer_scale=1e-5, position_prefix=False, position_resample="bicubic", rotary=rotary)
    tensors = tensors_in("timm-eva", config)
    with pytest.raises(MismatchedWeights, match=r"DeiT III.*rotary="):
        read(tensors, tmp_path)
    assert read(tensors, tmp_path, rotary=rotary).config.rotary == rotary
    assert read(tensors, tmp_path, rotary=None).config.rotary is None


def test_fewer_keys_than_queries_are_refused(tmp_path: Path) -> None:
    tensors = tensors_in("timm-eva", replace(EVA02, norm_inner_mlp=True))
    for layer in range(2):
        for letter in "kv":
            name = f"blocks.{layer}.attn.{letter}_proj.weight"
            tensors[name] = tensors[name][:32]
    with pytest.raises(MismatchedWeights, match="Sapiens2"):
        read(tensors, tmp_path)


def test_files_of_dino_without_a_head_give_token_and_mean(tmp_path: Path) -> None:
    config = replace(DINOV2, pool="token", position_resample="bicubic")
    tensors = tensors_in("timm", config)
    assert read(tensors, tmp_path).config.pool == "token+mean"
    assert read(tensors, tmp_path, pool="token").config == config
    labelled = replace(config, classes=3, head="linear")
    assert read(tensors_in("timm", labelled), tmp_path).config.pool == "token"


def test_metas_constants(tmp_path: Path) -> None:
    """What Meta's code expects next to the network's own tensors; how an unused value is does not matter."""
    written = tensors_in("meta-dinov3", DINOV3)
    assert written["mask_token"].shape == (1, 64)
    assert written["rope_embed.periods"].tolist()[:2] == pytest.approx([1.0, 100 ** (1 / 16)], rel=1e-2)
    queries, keys, values = written["blocks.0.attn.qkv.bias"].chunk(3)
    assert queries.all()
    assert values.all()
    assert not keys.any()
    assert written["blocks.0.attn.qkv.bias_mask"].sum() == 2 * 64
    keys.fill_(0.7)  # under the mask
    written["mask_token"].fill_(3)
    written["local_cls_norm.weight"] = torch.ones(64)
    assert_read(written, DINOV3, tmp_path)


def test_blocks_in_chunks(tmp_path: Path) -> None:
    chunked = {name.replace("blocks.", "blocks.0.", 1): t for name, t in tensors_in("meta-dinov2", DINOV2).items()}
    assert_read(chunked, DINOV2, tmp_path)


@pytest.mark.parametrize(
    ("to", "changes", "field"),
    [
        ("timm", {"pool": "map", "map_style": "aimv2"}, "map_style"),
        ("timm", {"head_width": 32}, "head_width"),
        ("timm", {"rotary": Rotary(coordinates="unit", layout="pairs")}, "rotary"),
        ("timm", {"rotary": Rotary(), "norm": "rms"}, "norm"),
        ("timm", {"registers": 2}, "position_prefix"),
        ("timm", {"class_tokens": 3}, "class_tokens"),
        ("timm", {"class_tokens": 2, "pool": "mean"}, "class_tokens"),
        ("timm", {"position_bias": "table", "position": "sincos2d"}, "position"),
        ("timm", {"position_bias": "table"}, "key_bias"),
        ("timm", {"class_token": False, "pool": "mean", "windows": Windows(size=2)}, "windows"),
        ("meta", {"pool": "mean", "layer_scale": 1e-5}, "pool"),
        ("meta", {"rotary": Rotary(base=10.0), "position": "none"}, "rotary"),
        ("meta", {"position_prefix": False, "layer_scale": 1e-5}, "position_prefix"),
    ],
)
def test_a_refusal_names_the_field(to: str, changes: dict[str, Any], field: str) -> None:
    config = replace(SMALL, **changes)
    with pytest.raises(ExportRefused, match=rf"field {field}="):
        find_format(to, config).table(config)


@pytest.mark.parametrize("config", [DINOV2, EVA02, replace(SMALL, norm_eps=1e-5)], ids=["dinov2", "eva02", "eps"])
def test_a_network_goes_to_timm_and_comes_back(config: ViTConfig, tmp_path: Path) -> None:
    """Also what a bare file cannot hold: it stands in the sidecar."""
    done = export(bundle(config), tmp_path / "out.pth", "timm")
    assert read_bundle(done.target).config == config
    assert done.parity.identical == done.parity.tensors


STRANGERS = {
    "swin": "layers.0.blocks.0.attn.relative_position_bias_table", "CaiT": "blocks_token_only.0.norm1.weight",
    "XCiT": "cls_attn_blocks.0.norm1.weight", "LeViT": "stem.conv1.linear.weight", "SAM 2": "pos_embed_window",
    "CLIP or PE": "visual.transformer.resblocks.0.ln_1.weight",
    "MetaFormer": "stages.0.blocks.0.token_mixer.proj.weight",
    "gated attention": "blocks.0.attn.gate.weight", "TNT": "pixel_embed.proj.weight",
}  # fmt: skip


@pytest.mark.parametrize("family", STRANGERS)
def test_one_tensor_gives_a_stranger_away(family: str, tmp_path: Path) -> None:
    """Even where all others are a ViT's."""
    tensors = tensors_in("timm", replace(SMALL, layer_scale=1e-5)) | {STRANGERS[family]: torch.ones(1)}
    with pytest.raises(MismatchedWeights, match=f"(?i){family}"):
        read(tensors, tmp_path)

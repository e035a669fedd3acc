"""Meta's own files of DINOv2 and DINOv3: tensors by the names of its repositories, values of transformers' judges."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.judges import Judge
from tests.parity.judges_huggingface import DINOV2, DINOV3, build, end_with_both
from tests.parity.networks import Tensors

# Meta's files do not say the number of heads; each has 64 dimensions.
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
EXPECTED: dict[str, Any] = {"width": 128, "heads": 2, "layer_scale": 1e-5}
ROTARY: dict[str, Any] = {name: DINOV3["rotary"][name] for name in ("mixed", "base", "coordinates", "layout", "order")}
NAMES = {
    "patch_embeddings.projection": "patch_embed.proj", "patch_embeddings.": "patch_embed.proj.", "embeddings.": "",
    "position_embeddings": "pos_embed", "encoder.layer.": "blocks.", "model.layer.": "blocks.",
    "layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma", "attention.o_proj": "attn.proj",
    "attention.output.dense": "attn.proj",
    "layernorm.": "norm.",
}  # fmt: skip


def rename(tensors: Tensors, chunked: bool = False) -> Tensors:
    """transformers' names and its three projections to those of Meta's blocks."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, metas in NAMES.items():
            name = name.replace(theirs, metas)
        if "attention." not in name:
            out[name] = tensor
    for layer in range(3):
        at = f"blocks.{layer}."
        get = partial(_projections, {n.split(".layer.")[-1]: t for n, t in tensors.items()}, layer)
        out[f"{at}attn.qkv.weight"] = torch.cat(get("weight"))
        if biases := get("bias"):
            out[f"{at}attn.qkv.bias"] = torch.cat(biases)
    if chunked:  # two blocks, then one; the second number goes on counting
        return {name.replace("blocks.", f"blocks.{int(name[7] == '2')}.") if "blocks" in name else name: tensor
                for name, tensor in out.items()}  # fmt: skip
    return out


def _projections(tensors: Tensors, layer: int, kind: str) -> list[Tensor]:
    """Queries', keys' and values' part. Meta has a bias of the keys that its mask turns into nothing."""
    parts = {"q": "query", "k": "key", "v": "value"}  # by the present and the older names
    found = [
        tensors.get(f"{layer}.attention.{part}_proj.{kind}", tensors.get(f"{layer}.attention.attention.{name}.{kind}"))
        for part, name in parts.items()
    ]
    if found[0] is None:
        return []
    return [torch.full_like(found[0], 0.7) if part is None else part for part in found]


def offset_positions(embeddings: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    """DINOv2's hub code: the scale is that of a grid larger by a tenth of a patch."""
    table = embeddings.position_embeddings
    side = round((table.shape[1] - 1) ** 0.5)
    if tokens.shape[1] == table.shape[1] and height == width:
        return table
    grid = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    scale = tuple((size // 8 + 0.1) / side for size in (height, width))
    return torch.cat([table[:, :1], F.interpolate(grid, scale_factor=scale, mode="bicubic").flatten(2).mT], 1)


def build_dinov2(name: str, *, registers: int = 0, gated: bool = False, chunked: bool = False) -> Judge:
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    fields = {**DINOV2, **EXPECTED, "mlp_width": 344 if gated else 512, "gated": gated, "registers": registers}
    fields["position_resample"] = "bicubic" if registers else "bicubic-offset"
    theirs = build(
        name, f"{kind}Model", f"{kind}Config", {**SIZES, "use_swiglu_ffn": gated}, fields, layers="encoder.layer",
        finish=end_with_both("layernorm"), dropped=("mask_token",),
    )  # fmt: skip
    if not registers:
        part: Any = theirs.network.get_submodule("embeddings")
        part.interpolate_pos_encoding = MethodType(offset_positions, part)
    tensors = rename(theirs.tensors, chunked)
    if gated:
        tensors = pack_gates(tensors)
    older = rename(theirs.tensors) if chunked else None
    return replace(theirs, library="meta", tensors=tensors, older=older, settings=None)


def pack_gates(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".gate_proj." in name:
            both = [tensor, tensors[name.replace(".gate_proj.", ".up_proj.")]]
            out[name.replace(".gate_proj.", ".w12.")] = torch.cat(both)
        elif ".up_proj." not in name:
            out[name.replace(".down_proj.", ".w3.")] = tensor
    return out


def build_dinov3(name: str, *, gated: bool = False, biased: bool = True) -> Judge:
    settings = {**SIZES, "intermediate_size": 96, "num_register_tokens": 4, "use_gated_mlp": gated}
    settings |= {"query_bias": biased, "value_bias": biased, "hidden_act": "silu" if gated else "gelu"}
    fields = {**DINOV3, **EXPECTED, "rotary": ROTARY, "gated": gated, "qkv_bias": biased, "key_bias": not biased}
    theirs = build(
        name, "DINOv3ViTModel", "DINOv3ViTConfig", settings, fields, layers="model.layer",
        finish=end_with_both("norm"),
        dropped=("mask_token", "rope_embed.periods", "local_cls_norm."),
    )  # fmt: skip
    tensors = rename(theirs.tensors)
    layers = {".gate_proj.": ".w1.", ".up_proj.": ".w2.", ".down_proj.": ".w3."}
    layers = layers if gated else {".up_proj.": ".fc1.", ".down_proj.": ".fc2."}
    for old, new in {**layers, "register_tokens": "storage_tokens"}.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tensors["mask_token"] = tensors["mask_token"][0]
    tensors["rope_embed.periods"] = (100 ** (torch.arange(16) / 16)).bfloat16().float()
    for layer in range(3 * biased):
        tensors[f"blocks.{layer}.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(128)
    if gated:
        tensors |= {f"local_cls_norm.{name}": tensors[f"norm.{name}"] + 1 for name in ("weight", "bias")}
    parts = {f"blocks.{layer}.attn.qkv.bias": without_keys for layer in range(3 * biased)}
    files: dict[str, Any] = {"tensors": tensors, "parts": parts, "settings": None, "older": None}
    return replace(theirs, library="meta", facts={"image": (32, 32)}, **files)


def without_keys(bias: Tensor) -> Tensor:
    return bias.unflatten(0, (3, -1))[[0, 2]]


META: dict[str, Callable[[], Judge]] = {
    name: partial(make, name, **args)
    for name, make, args in (
        ("meta:dinov2", build_dinov2, {}),
        ("meta:dinov2 chunked", build_dinov2, {"chunked": True}),
        ("meta:dinov2 registers", build_dinov2, {"registers": 4}),
        ("meta:dinov2 giant", build_dinov2, {"registers": 4, "gated": True}),
        ("meta:dinov3", build_dinov3, {}),
        ("meta:dinov3 7b", build_dinov3, {"gated": True, "biased": False}),
    )
}

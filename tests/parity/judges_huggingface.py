"""transformers' judges, with the tensor names of its version 5 and those of version 4, which most files have."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.judges import Finish, Judge, fill, join_readouts, own
from tests.parity.networks import Tensors

CLASSES = 7
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 96}
SHARP: dict[str, Any] = {"position": "learned", "position_resample": "bicubic-sharp", "gelu": "erf"}
BEIT: dict[str, Any] = {
    "gelu": "erf", "norm_eps": 1e-12, "position": "none", "key_bias": False, "layer_scale": 0.1,
}  # fmt: skip
BEIT_MEAN: dict[str, Any] = {**BEIT, "pool": "mean", "norm_after_pool": True}
DINOV2: dict[str, Any] = {**SHARP, "norm_eps": 1e-6, "layer_scale": 1.0, "mlp_width": 256, "pool": "token+mean"}
DINOV3: dict[str, Any] = {
    "gelu": "erf", "norm_eps": 1e-5, "position": "none", "registers": 4, "layer_scale": 1.0, "key_bias": False,
    "pool": "token+mean",
    "rotary": {"mixed": False, "base": 100.0, "coordinates": "unit", "layout": "halves", "order": "yx",
               "shift": 0.0, "jitter": 0.0, "rescale": 2.0},
}  # fmt: skip
CLIP: dict[str, Any] = {
    **SHARP, "gelu": "quick", "norm_eps": 1e-5, "norm_stem": "tokens", "patch_bias": False, "pool": "token",
}  # fmt: skip
SIGLIP: dict[str, Any] = {**SHARP, "gelu": "tanh", "norm_eps": 1e-6, "class_token": False, "pool": "map"}
AIMV2: dict[str, Any] = {
    "position": "learned", "class_token": False, "norm": "rms", "norm_stem": "patches", "norm_eps": 1e-5, "gated": True,
    "qkv_bias": False, "out_bias": False, "mlp_bias": False, "patch_bias": True,
}  # fmt: skip
WINDOWED: dict[str, Any] = {
    "gelu": "erf", "norm_eps": 1e-6, "position": "learned", "class_token": False, "position_bias": "decomposed",
    "windows": {"size": 3, "whole": (1,)}, "norm_final": False, "pool": "mean",
}  # fmt: skip


def build(
    name: str,
    kind: str,
    config: str,
    settings: dict[str, Any],
    expected: dict[str, Any],
    *,
    finish: Finish,
    layers: str,
    inner: str = "",
    grow: dict[str, Any] | None = None,
    call: Callable[[nn.Module, Tensor], Any] | None = None,
    fixed: str = "",
    older: Callable[[nn.Module, Tensors], Tensors] | None = None,
    dropped: tuple[str, ...] = (),
    parts: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Judge:
    """A judge from a class and its config; `grow` are the arguments with which it takes another size."""
    import transformers

    network = fill(getattr(transformers, kind)(getattr(transformers, config)(**settings)))
    network.config.architectures = [kind]
    network.config.dtype = "float32"
    tensors = own(network.state_dict())
    before = own((older or names_of_four)(network, tensors))
    sizes = {"width": 64, "depth": 3, "heads": 4, "mlp_width": 96, "image": (32, 32), "patch": (8, 8), "channels": 3}
    head = {"classes": 0, "head": "none"} if "ForImage" not in kind else {"classes": CLASSES, "head": "linear"}
    body = network.get_submodule(inner)
    return Judge(
        name=name,
        library="huggingface",
        network=network,
        blocks=list(network.get_submodule(layers)),
        tensors=tensors,
        settings=json.loads(network.config.to_json_string()),
        expected={**sizes, **head, **expected},
        call=(lambda images: call(body, images)) if call else (lambda images: network(images, **(grow or {}))),
        finish=finish,
        native=(32, 32),
        other=None if fixed else (48, 32),
        fixed=fixed,
        older=before if before.keys() != tensors.keys() else None,
        dropped=dropped,
        parts=parts or {},
    )


def names_of_four(network: nn.Module, tensors: Tensors) -> Tensors:
    """The names under which transformers itself would save them: those of its version 4."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(network, dict(tensors))  # pyright: ignore[reportArgumentType]
    return {
        name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers."): t for name, t in reverted.items()
    }


def in_front(prefix: str) -> Callable[[nn.Module, Tensors], Tensors]:
    return lambda _network, tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def end_with(norm: str, answer: str = "") -> Finish:
    """The module that is the final norm, and which answer of the network is pooled or classified."""

    def finish(network: nn.Module, last: Tensor, out: Any) -> dict[str, Any]:
        tokens = network.get_submodule(norm)(last) if norm else last
        return {"tokens": tokens, "output": getattr(out, answer) if answer else None}

    return finish


def end_with_mean(norm: str) -> Finish:
    def finish(network: nn.Module, last: Tensor, _out: Any) -> dict[str, Any]:
        tokens = network.get_submodule(norm)(last) if norm else last
        return {"tokens": tokens, "output": tokens.mean(1)}

    return finish


def end_with_both(norm: str) -> Finish:
    def finish(network: Any, last: Tensor, _out: Any) -> dict[str, Any]:
        tokens = network.get_submodule(norm)(last)
        return {
            "tokens": tokens,
            "output": join_readouts(tokens, 1 + getattr(network.config, "num_register_tokens", 0)),
        }

    return finish


def end_with_neck(_network: nn.Module, last: Tensor, out: Any) -> dict[str, Any]:
    return {"tokens": last, "output": out.last_hidden_state.mean((2, 3)), "neck": out.last_hidden_state}


def keep_order(mae: nn.Module, images: Tensor) -> Any:
    """The encoder of a masked autoencoder that masks nothing."""
    count = images.shape[-2] * images.shape[-1] // 64
    noise = torch.arange(count, dtype=torch.float32).expand(len(images), -1)
    return mae(images, noise=noise, interpolate_pos_encoding=True)


def see(encoder: nn.Module, images: Tensor) -> Any:
    return encoder(images)


def see_only(pair: Any, images: Tensor) -> Any:
    """The half of an image-text pair that sees."""
    return pair.get_image_features(images, interpolate_pos_encoding=True)


def in_patches(naflex: nn.Module, images: Tensor) -> Any:
    """SigLIP 2's own input: patches as rows of pixels, channels last, and the grid they come from."""
    rows, columns = images.shape[-2] // 8, images.shape[-1] // 8
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(1, 2).flatten(2)
    mask = torch.ones(patches.shape[:2], dtype=torch.long)
    shapes = torch.tensor([[rows, columns]]).expand(len(images), -1)
    return naflex(patches, pixel_attention_mask=mask, spatial_shapes=shapes)


def without_first_row(table: Tensor) -> Tensor:
    """ViTDet's position table has a row for a class token that the network has not."""
    return table[:, 1:]


def row(kind: str, config: str, settings: dict[str, Any], expected: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"kind": kind, "config": config, "settings": settings, "expected": expected, **rest}


GROW: dict[str, Any] = {"interpolate_pos_encoding": True}
LABELS = {"num_labels": CLASSES}
BEIT_BIAS = {**WIDE, "use_relative_position_bias": True}
BEIT_SHARED = {**WIDE, "use_shared_relative_position_bias": True}
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
    "max_position_embeddings": 8, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
WINDOWS = {**SIZES, "window_size": 3}
ROWS = {
    "vit": row(
        "ViTForImageClassification", "ViTConfig", {**WIDE, **LABELS},
        {**SHARP, "norm_eps": 1e-12, "pool": "token"},
        layers="vit.layers", finish=end_with("vit.layernorm", "logits"), grow=GROW,
    ),
    "deit": row(
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", {**WIDE, **LABELS},
        {**SHARP, "norm_eps": 1e-12, "head": "distilled", "registers": 1, "register_positions": True, "pool": "token"},
        layers="deit.layers", finish=end_with("deit.layernorm", "logits"), grow=GROW,
    ),
    "mae": row(
        "ViTMAEForPreTraining", "ViTMAEConfig",
        {**WIDE, "mask_ratio": 0.0, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
         "decoder_num_attention_heads": 4, "decoder_intermediate_size": 48},
        {**SHARP, "norm_eps": 1e-12},
        layers="vit.layers", inner="vit", finish=end_with("vit.layernorm"), call=keep_order, dropped=("decoder.",),
    ),
    "ijepa": row(
        "IJepaModel", "IJepaConfig", WIDE, {**SHARP, "norm_eps": 1e-12, "class_token": False, "pool": "mean"},
        layers="layers", finish=end_with_mean("layernorm"), grow=GROW, dropped=("pooler.",),
    ),
    "beit": row(
        "BeitForImageClassification", "BeitConfig", {**BEIT_BIAS, **LABELS}, {**BEIT_MEAN, "position_bias": "table"},
        layers="beit.layers", finish=end_with("", "logits"),
    ),
    "beit shared": row(
        "BeitForImageClassification", "BeitConfig", {**BEIT_SHARED, **LABELS, "layer_scale_init_value": 1e-5},
        {**BEIT_MEAN, "position_bias": "shared-table", "layer_scale": 1e-5},
        layers="beit.layers", finish=end_with("", "logits"),
    ),
    "beit model": row(
        "BeitModel", "BeitConfig", {**BEIT_BIAS, "use_mean_pooling": False, "use_mask_token": True},
        {**BEIT, "pool": "token", "position_bias": "table"},
        layers="layers", finish=end_with("layernorm", "pooler_output"), dropped=("embeddings.mask_token",),
    ),
    "data2vec": row(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", {**BEIT_BIAS, **LABELS},
        {**BEIT_MEAN, "position_bias": "table"},
        layers="data2vec_vision.encoder.layer", finish=end_with("", "logits"), grow=GROW,
    ),
    "dinov2": row(
        "Dinov2Model", "Dinov2Config", SIZES, DINOV2, layers="encoder.layer",
        finish=end_with_both("layernorm"), dropped=("embeddings.mask_token",),
    ),
    "dinov2 classifier": row(
        "Dinov2ForImageClassification", "Dinov2Config", {**SIZES, **LABELS}, DINOV2,
        layers="dinov2.encoder.layer", finish=end_with("dinov2.layernorm", "logits"),
        dropped=("dinov2.embeddings.mask_token",),
    ),
    "dinov2 swiglu": row(
        "Dinov2Model", "Dinov2Config", {**SIZES, "use_swiglu_ffn": True}, {**DINOV2, "gated": True, "mlp_width": 176},
        layers="encoder.layer", finish=end_with_both("layernorm"), dropped=("embeddings.mask_token",),
    ),
    "dinov2 registers": row(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", SIZES,
        {**DINOV2, "registers": 4, "position_resample": "bicubic"},
        layers="encoder.layer", finish=end_with_both("layernorm"), dropped=("embeddings.mask_token",),
    ),
    "dinov2 registers classifier": row(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", {**SIZES, **LABELS},
        {**DINOV2, "registers": 4, "position_resample": "bicubic"},
        layers="dinov2_with_registers.encoder.layer", finish=end_with("dinov2_with_registers.layernorm", "logits"),
        dropped=("dinov2_with_registers.embeddings.mask_token",),
    ),
    "dinov3": row(
        "DINOv3ViTModel", "DINOv3ViTConfig", {**WIDE, "num_register_tokens": 4}, DINOV3, layers="model.layer",
        finish=end_with_both("norm"), dropped=("embeddings.mask_token",),
    ),
    "dinov3 gated": row(
        "DINOv3ViTModel", "DINOv3ViTConfig",
        {**WIDE, "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"},
        {**{name: value for name, value in DINOV3.items() if name != "gelu"}, "gated": True},
        layers="model.layer", finish=end_with_both("norm"), dropped=("embeddings.mask_token",),
    ),
    "clip": row(
        "CLIPVisionModel", "CLIPVisionConfig", WIDE, CLIP, layers="encoder.layers",
        finish=end_with("post_layernorm", "pooler_output"), grow=GROW, older=in_front("vision_model."),
    ),
    "clip projection": row(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", {**WIDE, "projection_dim": 24}, {**CLIP, "projection": 24},
        layers="vision_model.encoder.layers", finish=end_with("vision_model.post_layernorm", "image_embeds"), grow=GROW,
    ),
    "clip gelu": row(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", {**WIDE, "projection_dim": 24, "hidden_act": "gelu"},
        {**CLIP, "projection": 24, "gelu": "erf"},
        layers="vision_model.encoder.layers", finish=end_with("vision_model.post_layernorm", "image_embeds"), grow=GROW,
    ),
    "metaclip2": row(
        "MetaClip2VisionModel", "MetaClip2VisionConfig", WIDE, CLIP, layers="encoder.layers",
        finish=end_with("post_layernorm", "pooler_output"), grow=GROW, older=in_front("vision_model."),
    ),
    "clip whole": row(
        "CLIPModel", "CLIPConfig", {"vision_config": WIDE, "text_config": TEXT, "projection_dim": 24},
        {**CLIP, "projection": 24}, layers="vision_model.encoder.layers", call=see_only,
        finish=end_with("vision_model.post_layernorm", "pooler_output"),
        dropped=("text_model.", "text_projection.", "logit_scale"),
    ),
    "siglip": row(
        "SiglipVisionModel", "SiglipVisionConfig", WIDE, SIGLIP, layers="encoder.layers",
        finish=end_with("post_layernorm", "pooler_output"), grow=GROW, older=in_front("vision_model."),
    ),
    "siglip whole": row(
        "SiglipModel", "SiglipConfig", {"vision_config": WIDE, "text_config": TEXT}, SIGLIP,
        layers="vision_model.encoder.layers", call=see_only,
        finish=end_with("vision_model.post_layernorm", "pooler_output"),
        dropped=("text_model.", "logit_scale", "logit_bias"),
    ),
    "siglip2 naflex": row(
        "Siglip2VisionModel", "Siglip2VisionConfig",
        {**{name: value for name, value in WIDE.items() if name != "image_size"}, "num_patches": 16},
        {**SIGLIP, "position_resample": "bilinear-antialias"},
        layers="encoder.layers", finish=end_with("post_layernorm", "pooler_output"), call=in_patches,
        older=in_front("vision_model."),
    ),
    "aimv2": row(
        "Aimv2VisionModel", "Aimv2VisionConfig", {**WIDE, "use_head": False}, {**AIMV2, "pool": "mean"},
        layers="encoder.layers", finish=end_with_mean("rms_norm"),
        fixed="transformers' AIMv2 takes positions by number, of a square grid",
    ),
    "aimv2 head": row(
        "Aimv2VisionModel", "Aimv2VisionConfig", {**WIDE, "use_head": True},
        {**AIMV2, "pool": "map", "map_style": "aimv2"},
        layers="encoder.layers", finish=end_with("rms_norm", "pooler_output"),
        fixed="transformers' AIMv2 takes positions by number, of a square grid",
    ),
    "pixio": row(
        "PixioModel", "PixioConfig", SIZES,
        {**SHARP, "norm_eps": 1e-6, "mlp_width": 256, "class_tokens": 8, "pool": "token"},
        layers="layers", finish=end_with("layernorm", "pooler_output"),
    ),
    "sam": row(
        "SamVisionModel", "SamVisionConfig", {**WINDOWS, "mlp_dim": 96, "global_attn_indexes": [1],
                                              "output_channels": 24},
        {**WINDOWED, "neck": 24}, layers="vision_encoder.layers", finish=end_with_neck,
        fixed="transformers' SAM takes squares of one size",
    ),
    "sam whole": row(
        "SamModel", "SamConfig",
        {"vision_config": {**WINDOWS, "mlp_dim": 96, "global_attn_indexes": [1], "output_channels": 24},
         "prompt_encoder_config": {"hidden_size": 24, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
         "mask_decoder_config": {"hidden_size": 24, "mlp_dim": 32, "num_attention_heads": 2,
                                 "iou_head_hidden_dim": 16}},
        {**WINDOWED, "neck": 24}, layers="vision_encoder.layers", inner="vision_encoder", call=see,
        finish=end_with_neck, fixed="transformers' SAM takes squares of one size",
        dropped=("prompt_encoder.", "mask_decoder.", "shared_image_embedding."),
    ),
    "vitdet": row(
        "VitDetBackbone", "VitDetConfig", {**WINDOWS, "pretrain_image_size": 32, "window_block_indices": [0, 2],
                                           "use_relative_position_embeddings": True},
        {**WINDOWED, "mlp_width": 256, "position_resample": "bicubic-sharp"},
        layers="encoder.layer", finish=end_with_mean(""), parts={"embeddings.position_embeddings": without_first_row},
    ),
}  # fmt: skip
HUGGINGFACE: dict[str, Callable[[], Judge]] = {
    f"huggingface:{name}": partial(build, f"huggingface:{name}", **args) for name, args in ROWS.items()
}

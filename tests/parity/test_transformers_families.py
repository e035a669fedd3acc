"""Folders of Hugging Face's families that judges do not have: other heads, older files, and how images are prepared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lanes import rest_slow
from tests.parity.judges import fill, judge, names
from tests.parity.networks import TOLERANCE, Tensors, assert_same, pictures
from vitrail.checkpoint.convert import convert, export
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import load, to_bundle
from vitrail.core.errors import ExportRefused, MismatchedWeights, WeightsError
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.build import build
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 96}
TEXT = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
TOWERS = {"vision_config": WIDE, "text_config": TEXT, "num_labels": 5}
BEIT = {**WIDE, "use_shared_relative_position_bias": True, "use_mask_token": True}
GATED = {**WIDE, "use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 2, "pos_embed_rescale": None}
DETECTION = {**WIDE, "use_relative_position_embeddings": True, "window_size": 3, "window_block_indices": [0]}
NETWORKS: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**WIDE, "num_labels": 5}, "logits"),
    "deit pooler": ("DeiTModel", "DeiTConfig", WIDE, "pooler_output"),
    "msn": ("ViTMSNForImageClassification", "ViTMSNConfig", {**WIDE, "num_labels": 5}, "logits"),
    "ijepa": ("IJepaForImageClassification", "IJepaConfig", {**WIDE, "num_labels": 5}, "logits"),
    "beit positions": ("BeitModel", "BeitConfig", {**BEIT, "use_absolute_position_embeddings": True}, "pooler_output"),
    "clip": ("CLIPForImageClassification", "CLIPConfig", TOWERS, "logits"),
    "siglip": ("SiglipForImageClassification", "SiglipConfig", TOWERS, "logits"),
    "dinov3 plain": ("DINOv3ViTModel", "DINOv3ViTConfig", {**WIDE, "key_bias": True}, ""),
    "dinov3 gated": ("DINOv3ViTModel", "DINOv3ViTConfig", {**GATED, "query_bias": False, "value_bias": False}, ""),
    "vitdet": ("VitDetModel", "VitDetConfig", {**DETECTION, "pretrain_image_size": 64}, "map"),
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity_warning()


def made(kind: str, config: str, settings: Mapping[str, Any]) -> Any:
    return fill(getattr(transformers, kind)(getattr(transformers, config)(**settings)))


def answer(network: Any, images: Tensor, what: str, registers: int = 0) -> Tensor:
    with torch.no_grad():
        out = network(images)
    if what == "map":
        return out.last_hidden_state.mean((2, 3))
    if what:
        return getattr(out, what)
    z = out.last_hidden_state
    return torch.cat([z[:, 0], z[:, 1 + registers :].mean(1)], dim=1)


def taken(folder: Path) -> Any:
    """Our folder in transformers' hands, which must find each tensor and no other."""
    kind = json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0]
    network, info = getattr(transformers, kind).from_pretrained(str(folder), output_loading_info=True)
    missing = {name for name in info["missing_keys"] if not name.startswith("pooler.")}  # which ours has not
    assert not missing
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return network.eval()


@pytest.mark.parametrize("name", rest_slow(NETWORKS, "clip", "vitdet"))
def test_networks_with_other_heads(name: str, tmp_path: Path) -> None:
    kind, config, settings, what = NETWORKS[name]
    network = made(kind, config, settings)
    network.save_pretrained(tmp_path / "in")
    model: Any = load(tmp_path / "in")
    images = pictures((32, 32))
    wanted = answer(network, images, what, model.config.registers)
    with torch.no_grad():
        assert (model(images) - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    done = convert(tmp_path / "in", tmp_path / "out")
    assert (done.parity.identical, done.lost_fields) == (done.parity.tensors, [])
    assert done.parity.worst < TOLERANCE
    assert read_bundle(done.target).config == model.config
    again = answer(taken(done.target), images, what, model.config.registers)
    assert (again - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name.startswith("huggingface:")])
def test_transformers_finds_each_tensor_of_an_export(name: str, tmp_path: Path) -> None:
    theirs = judge(name)
    (tmp_path / "in").mkdir()
    save_file(theirs.tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(theirs.settings), "utf-8")
    taken(convert(tmp_path / "in", tmp_path / "out").target)


def test_pretrained_beit_is_read_without_its_tokens_of_images(tmp_path: Path) -> None:
    network = made("BeitForMaskedImageModeling", "BeitConfig", {**BEIT, "vocab_size": 11})
    network.save_pretrained(tmp_path / "in")
    model: Any = load(tmp_path / "in")
    images, config = pictures((32, 32)), model.config
    assert (config.position_bias, config.pool, config.norm_after_pool) == ("shared-table", "mean", False)
    with torch.no_grad():
        wanted = network.layernorm(network.beit(images).last_hidden_state)[:, 1:].mean(1)
        assert (model(images) - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def apple_names(tensors: Tensors) -> Tensors:
    """AIMv2 as Apple's own files name it."""
    parts = {"rms_norm1": "norm_1", "rms_norm2": "norm_2", "attention.out_proj": "attn.proj"}
    parts |= {"ffn.gate_proj": "mlp.fc1", "ffn.up_proj": "mlp.fc3", "ffn.down_proj": "mlp.fc2"}
    parts |= {"encoder.layers.": "trunk.blocks.", "embeddings.patch_embed.": "preprocessor.patchifier.proj."}
    parts |= {"embeddings.rms_norm.": "preprocessor.patchifier.norm."}
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".attention.q_proj." in name:
            three = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            out[name.replace("encoder.layers.", "trunk.blocks.").replace("attention.q_proj", "attn.qkv")] = torch.cat(
                three
            )
        elif name == "embeddings.position_embedding.weight":
            out["preprocessor.pos_embed"] = tensor[None].clone()
        elif name.startswith("rms_norm."):
            out[f"trunk.post_trunk_norm.{name.removeprefix('rms_norm.')}"] = tensor
        elif ".k_proj." not in name and ".v_proj." not in name:
            for ours, theirs in parts.items():
                name = name.replace(ours, theirs)
            out[name] = tensor
    return out


def test_aimv2_by_the_names_of_its_authors(tmp_path: Path) -> None:
    network = made("Aimv2VisionModel", "Aimv2VisionConfig", {**WIDE, "use_head": False})
    network.save_pretrained(tmp_path / "in")
    wanted = read_bundle(tmp_path / "in")
    weights, settings = tmp_path / "in" / "model.safetensors", tmp_path / "in" / "config.json"
    save_file(apple_names(load_file(weights)), weights)
    settings.write_text(json.dumps({**json.loads(settings.read_text("utf-8")), "model_type": "aimv2"}), "utf-8")
    found = read_bundle(tmp_path / "in")
    assert found.config == wanted.config
    assert_same(found.tensors, wanted.tensors)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("dinov3 gated", {"hidden_act": "gelu"}, "config.json says hidden_act='gelu'"),
        ("dinov3 gated", {"value_bias": True}, "gives biases to queries=False, keys=False, values=True"),
        ("dinov3 gated", {"layerscale_value": 0.0}, "layerscale_value=0.0"),
        ("beit positions", {"use_relative_position_bias": True}, "both shared and of each layer"),
        ("vitdet", {"residual_block_indices": [1]}, "residual_block_indices"),
        ("vitdet", {"window_block_indices": 3}, "expected a list of whole numbers"),
        ("deit", {"qkv_bias": 1}, "expected true or false"),
        ("deit", {"num_hidden_layers": 5}, "num_hidden_layers=5, the tensors make 2"),
        ("deit", {"model_type": "yolos"}, "model_type 'yolos'"),
    ],
    ids=str,
)
def test_settings_that_no_network_has(name: str, change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    kind, config, settings, _ = NETWORKS[name]
    made(kind, config, settings).save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), "utf-8")
    with pytest.raises(MismatchedWeights, match=complaint):
        load(tmp_path / "in")


PLAIN: dict[str, Any] = {"width": 64, "depth": 1, "mlp_width": 256, "heads": 4, "image": (32, 32), "patch": (8, 8)}
HEADLESS: dict[str, Any] = {**PLAIN, "classes": 0, "head": "none"}
UNIT = Rotary(coordinates="unit")
DINOV3: dict[str, Any] = {**HEADLESS, "position": "none", "layer_scale": 1e-5, "rotary": UNIT}
CLIP: dict[str, Any] = {**PLAIN, "classes": 5, "norm_stem": "tokens", "patch_bias": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**DINOV3, "classes": 5, "head": "linear"}, "field head='linear' under model_type dinov3_vit"),
    ({**DINOV3, "rotary": Rotary(coordinates="unit", layout="pairs")}, "field rotary="),
    ({**HEADLESS, "layer_scale": 1e-5, "mlp_width": 100}, "field mlp_width=100 under model_type dinov2"),
    ({**HEADLESS, "layer_scale": 1e-5, "norm_qk": True}, "field norm_qk=True under model_type dinov2"),
    (CLIP, "field pool='token' under model_type clip_vision_model"),
    ({**HEADLESS, "class_token": False, "pool": "map", "map_heads": 2}, "field map_heads=2"),
]


@pytest.mark.parametrize(("fields", "complaint"), REFUSED, ids=[complaint for _, complaint in REFUSED])
def test_an_export_names_the_field_that_no_folder_holds(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=complaint):
        export(to_bundle(build(ViTConfig(**fields))), tmp_path / "out", "hf")
    assert not list(tmp_path.iterdir())


def test_weights_in_several_files(tmp_path: Path) -> None:
    network = made("Dinov2Model", "Dinov2Config", SIZES)
    network.save_pretrained(tmp_path / "one")
    network.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    whole, pieces = read_bundle(tmp_path / "one"), read_bundle(tmp_path / "many")
    assert pieces.config == whole.config
    assert_same(pieces.tensors, whole.tensors)
    next((tmp_path / "many").glob("*.safetensors")).unlink()
    with pytest.raises(WeightsError):
        read_bundle(tmp_path / "many")


@pytest.mark.parametrize("listed", [{}, {"a": "../model.safetensors"}, {"a": 3}, []], ids=str)
def test_an_index_that_leads_elsewhere(listed: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}), "utf-8")
    with pytest.raises(MismatchedWeights, match=r"lists no \.safetensors files of this folder"):
        read_bundle(tmp_path)


def test_pixels_beyond_the_last_patch_are_cut_off(tmp_path: Path) -> None:
    """SigLIP's so400m at patch 14 is published for 384 pixels, of which it sees 378."""
    network = made("SiglipVisionModel", "SiglipVisionConfig", {**WIDE, "image_size": 36})
    network.save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 36, "width": 36}).save_pretrained(tmp_path)
    model, images = load(tmp_path), pictures((36, 36))
    assert model.config.image == model.card.preprocessing.image == (32, 32)
    wanted = answer(network, images, "pooler_output")
    with torch.no_grad():
        assert (model(images[:, :, :32, :32]) - wanted).abs().max() < TOLERANCE * wanted.abs().max()


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CROP: dict[str, Any] = {"image": (224, 224), "interpolation": "bicubic"}
PROCESSORS: dict[str, tuple[dict[str, Any] | None, Preprocessing | None]] = {
    "CLIPImageProcessor": (None, Preprocessing(**CROP, resize=224, mean=CLIP_MEAN, std=CLIP_STD)),
    "SiglipImageProcessor": (None, Preprocessing(**CROP, mean=HALF, std=HALF)),
    "BitImageProcessor": (
        {"size": {"shortest_edge": 256}, "image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)},
        Preprocessing(**CROP, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "DINOv3ViTImageProcessor": (
        None,
        Preprocessing(image=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "BeitImageProcessor": (None, Preprocessing(**CROP, mean=HALF, std=HALF)),
    "DeiTImageProcessor": (None, None),  # squashes, and then crops
    "SamImageProcessor": (None, None),  # pads
    "Siglip2ImageProcessor": (None, None),  # keeps the aspect of each image
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_image_processors_are_understood(kind: str, tmp_path: Path) -> None:
    """One that does what ours cannot gives way to the family's habit."""
    settings, wanted = PROCESSORS[kind]
    made("CLIPVisionModel", "CLIPVisionConfig", WIDE).save_pretrained(tmp_path)
    getattr(transformers, kind)(**(settings or {})).save_pretrained(tmp_path)
    habit = Preprocessing(image=(32, 32), resize=32, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD)
    assert read_bundle(tmp_path).card.preprocessing == (wanted or habit)


@pytest.mark.parametrize("nested", [False, True])
def test_older_and_newer_files_of_clips_processor(nested: bool, tmp_path: Path) -> None:
    """The size as one number, that of the shorter side; and a file that prepares text, too."""
    made("CLIPVisionModel", "CLIPVisionConfig", WIDE).save_pretrained(tmp_path)
    said: dict[str, Any] = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 40, "crop_size": 32}
    said |= {"do_center_crop": True, "resample": 3, "image_mean": list(HALF), "image_std": list(HALF)}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": said} if nested else said), "utf-8")
    wanted = Preprocessing(image=(32, 32), resize=40, interpolation="bicubic", mean=HALF, std=HALF)
    assert read_bundle(tmp_path).card.preprocessing == wanted

"""EoMT against transformers, which has the authors' network on DINOv2 and on DINOv3: every prediction, with a random
value in every parameter, read from a folder and written back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lanes import rest_slow
from tests.parity.judges import fill
from tests.parity.networks import assert_same, pictures
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.huggingface.folder import build_preprocessor
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import MismatchedWeights
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.eomt import EoMT
from vitrail.models.query_configs import EoMTConfig
from vitrail.models.query_output import QueryOutput

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "num_queries": 6, "num_labels": 5, "num_upscale_blocks": 1,
}  # fmt: skip
V2, V3 = ("Eomt", {**SIZES, "mlp_ratio": 2}), ("EomtDinov3", {**SIZES, "intermediate_size": 48})
# The class and its arguments, in which query blocks attention is masked, and how many images.
CASES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], list[float], int]] = {
    "plain": (V2, {"num_register_tokens": 0}, [0], 1),
    "registers, masked": (V2, {"num_register_tokens": 4}, [1, 1], 3),
    "gated, half masked": (V2, {"use_swiglu_ffn": True}, [0, 0, 1, 1], 3),
    "finer, annealed": (V2, {"num_upscale_blocks": 2}, [0, 0, 0], 1),
    "dinov3, masked": (V3, {"num_register_tokens": 4}, [1, 1, 1, 1], 3),
    "dinov3, annealed": (V3, {"num_register_tokens": 0, "num_upscale_blocks": 0}, [0, 0, 0], 1),
    "dinov3, last masked": (V3, {"pos_embed_rescale": None}, [0, 1], 3),
    "dinov3, key bias": (V3, {"key_bias": True, "proj_bias": True}, [1], 1),
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity_warning()


def judge(name: str) -> tuple[Any, list[float], int]:
    (kind, settings), more, masked, batch = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**settings, **more}, num_blocks=len(masked))
    network = fill(getattr(transformers, f"{kind}ForUniversalSegmentation")(config))
    network.attn_mask_probs.copy_(torch.tensor(masked, dtype=torch.float32))
    network.criterion.empty_weight.fill_(1.0)
    network.criterion.empty_weight[-1] = 0.1
    return network.eval(), masked, batch


def save_folder(network: Any, folder: Path) -> Path:
    network.config.architectures = [type(network).__name__]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(network.config.to_json_string(), encoding="utf-8")
    save_file({n: t.contiguous() for n, t in network.state_dict().items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def predictions(network: Any, images: Tensor) -> list[QueryOutput]:
    """All that the network predicts on its way, in order."""
    found: list[QueryOutput] = []
    predict = network.predict

    def note(tokens: Tensor) -> tuple[Tensor, Tensor]:
        masks, classes = predict(tokens)
        found.append(QueryOutput(classes, masks))
        return masks, classes

    network.predict = note
    network(images)
    network.predict = predict
    return found


def assert_close(ours: QueryOutput, theirs: QueryOutput) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        error = (one - other).abs().max() / other.abs().max()
        assert error <= 1e-5, f"{error:.1e}"


@pytest.mark.parametrize("name", rest_slow(CASES, 1, 2, 4, 5))
@torch.no_grad()
def test_every_prediction(name: str, tmp_path: Path) -> None:
    network, masked, batch = judge(name)
    bundle = read_bundle(save_folder(network, tmp_path / "theirs"))
    config, ours = bundle.config, build_network(bundle)
    assert isinstance(config, EoMTConfig)
    assert isinstance(ours, EoMT)
    assert config.query_blocks == len(masked)
    assert config.masked_blocks == sum(masked)
    assert bundle.card.task == "panoptic"
    images = pictures(config.image).repeat(2, 1, 1, 1)[:batch] * torch.linspace(0.5, 1.5, batch)[:, None, None, None]
    theirs = predictions(network, images)
    assert len(theirs) == 1 + config.masked_blocks
    assert_close(ours(images), theirs[-1])
    switched = torch.tensor(masked, dtype=torch.bool)[None, :, None].expand(batch, -1, config.queries)
    layers = ours.forward_layers(images, switched)
    assert len(layers) == 1 + config.query_blocks
    for one, other in zip(layers[-len(theirs) :], theirs, strict=True):
        assert_close(one, other)
    if any(masked):  # or the masks would not be tested
        assert (ours.forward_layers(images)[-1].masks - theirs[-1].masks).abs().max() > 1e-3


@pytest.mark.parametrize(
    "name", rest_slow(["registers, masked", "dinov3, last masked", "gated, half masked", "dinov3, annealed"], 0, 1)
)
def test_a_folder_is_written_back_as_it_was(name: str, tmp_path: Path) -> None:
    network, masked, _ = judge(name)
    network.config.id2label = dict(enumerate(("sky", "road", "car", "dog", "cat")))
    theirs = save_folder(network, tmp_path / "theirs")
    report = convert(theirs, tmp_path / "back", to="huggingface")
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not {"labels", "task"} & {*report.lost_fields}
    assert report.parity.reference is not None
    assert report.parity.worst <= 1e-5
    bundle = read_bundle(tmp_path / "back")
    assert bundle.card.labels == ("sky", "road", "car", "dog", "cat")
    assert bundle.config == read_bundle(theirs).config
    kind = json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["architectures"][0]
    again, info = getattr(transformers, kind).from_pretrained(str(tmp_path / "back"), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.attn_mask_probs.tolist() == masked


def test_what_our_network_has_not_is_refused(tmp_path: Path) -> None:
    for name, said in (("gated, half masked", {"hidden_act": "silu"}), ("plain", {"layerscale_value": 0.0})):
        network, _, _ = judge(name)
        folder = save_folder(network, tmp_path / name)
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({**settings, **said}), encoding="utf-8")
        with pytest.raises(MismatchedWeights):
            read_bundle(folder)


def test_names_of_older_files(tmp_path: Path) -> None:
    """transformers 4 has gate and value in one matrix; and no file has to hold what is not learned."""
    network, _, _ = judge("gated, half masked")
    folder = save_folder(network, tmp_path / "gated")
    wanted, tensors = read_bundle(folder), load_file(folder / "model.safetensors")
    older = {name: t for name, t in tensors.items() if not name.startswith(("attn_", "criterion."))}
    for name in [name for name in older if ".gate_proj." in name]:
        value = older.pop(name.replace("gate_proj", "up_proj"))
        older[name.replace("gate_proj", "weights_in")] = torch.cat([older.pop(name), value])
    older = {name.replace("down_proj", "weights_out"): t for name, t in older.items()}
    save_file(older, folder / "model.safetensors")
    found = read_bundle(folder)
    assert found.config == replace(wanted.config, masked_blocks=4)
    assert_same(found.tensors, wanted.tensors)


@pytest.mark.parametrize("size", [(48, 30), (30, 48), (40, 40)])
def test_whole_images_with_borders_are_prepared_alike(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    ours = Preprocessing(image=(32, 32), fit="pad")
    said = build_preprocessor(ours, {"model_type": "eomt"})
    theirs = getattr(transformers, said.pop("image_processor_type"))(**said)
    found = theirs(image, return_tensors="pt")["pixel_values"][0]
    assert found.shape == (3, 32, 32)
    assert (found - ours(image)).abs().max() < 2.5 / 127.5  # levels: it resizes tensors, where we resize images

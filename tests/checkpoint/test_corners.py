"""Small mistakes at the edges of reading and writing that once went wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.convert import convert, export
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import ConfigError, MismatchedWeights, UnknownName
from vitrail.models.build import build
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

VIT = ViTConfig(width=64, depth=1, mlp_width=32, heads=1, image=(8, 8), patch=(4, 4), classes=3)
BIT = ResNetConfig(blocks=(1, 1), classes=3)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_mistyped_keyword_is_the_callers_mistake_not_the_files(tmp_path: Path) -> None:
    vitrail.save(build(VIT), tmp_path / "m.safetensors")
    with pytest.raises(UnknownName, match="dropout"):
        vitrail.load(tmp_path / "m.safetensors", droput=0.1)


def test_a_new_head_has_no_old_labels(tmp_path: Path) -> None:
    vitrail.save(build(VIT), tmp_path / "m.safetensors", labels=["a", "b", "c"])
    model = vitrail.load(tmp_path / "m.safetensors")
    assert isinstance(model.card, Card)
    assert model.card.labels == ("a", "b", "c")
    model.reset_classifier(3)
    assert to_bundle(model).card.labels is None
    assert to_bundle(model).card.preprocessing == model.card.preprocessing


def test_a_bare_bit_folder_of_transformers(tmp_path: Path) -> None:
    export(to_bundle(build(BIT)), tmp_path / "bit", "hf")
    file = tmp_path / "bit" / "model.safetensors"
    bare = {name.removeprefix("bit."): t for name, t in load_file(file).items() if name.startswith("bit.")}
    save_file(bare, file)
    file.with_name(file.name + ".vitrail.json").unlink()
    assert read_bundle(tmp_path / "bit").config.classes == 0


def test_big_vision_with_a_class_row_is_read_as_its_code_reads_it(tmp_path: Path) -> None:
    export(to_bundle(build(VIT)), tmp_path / "m.npz", "npz-linen")
    arrays = dict(np.load(tmp_path / "m.npz"))
    arrays["pos_embedding"] = arrays.pop("Transformer/posembed_input/pos_embedding")
    np.savez(tmp_path / "odd.npz", **arrays)
    config = vitrail.load(tmp_path / "odd.npz").config
    assert isinstance(config, ViTConfig)
    assert config.position_prefix


@pytest.mark.parametrize("to", ["hf", "timm"])
def test_a_folder_may_have_a_dot_in_its_name(to: str, tmp_path: Path) -> None:
    done = export(to_bundle(build(VIT)), tmp_path / "vit-1.0", to)
    assert done.target.is_dir()
    assert read_bundle(done.target).config == VIT
    with pytest.raises(ConfigError, match=r"\.0"):
        convert(done.target, tmp_path / "vit-2.0")


def test_an_activation_that_is_no_gelu_is_refused(tmp_path: Path) -> None:
    export(to_bundle(build(replace(VIT, gelu="erf"))), tmp_path / "timm", "timm")
    edit(tmp_path / "timm" / "config.json", model_args={"act_layer": "silu"})
    with pytest.raises(MismatchedWeights, match="silu"):
        read_bundle(tmp_path / "timm")
    export(to_bundle(build(replace(VIT, head="tanh", classes=0))), tmp_path / "hf", "hf")
    edit(tmp_path / "hf" / "config.json", pooler_act="relu")
    with pytest.raises(MismatchedWeights, match="pooler_act"):
        read_bundle(tmp_path / "hf")
    export(to_bundle(build(BIT)), tmp_path / "bit", "hf")
    edit(tmp_path / "bit" / "config.json", embedding_dynamic_padding=True)
    (tmp_path / "bit" / "model.safetensors.vitrail.json").unlink(missing_ok=True)
    with pytest.raises(MismatchedWeights, match="padding"):
        read_bundle(tmp_path / "bit")


def test_provenance_says_the_last_import(tmp_path: Path) -> None:
    export(to_bundle(build(VIT)), tmp_path / "a.npz", "npz")
    convert(tmp_path / "a.npz", tmp_path / "b.safetensors", "timm")
    assert read_bundle(tmp_path / "b.safetensors").card.provenance["file"] == "b.safetensors"


@pytest.mark.parametrize(
    "changes", [{"heads": 1.5}, {"classes": True}, {"norm_eps": float("inf")}, {"dropout": "0.1"}, {"class_token": 1}]
)
def test_fields_are_held_to_their_types(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(VIT, **changes)


def test_a_constant_kernel_has_finite_gradients() -> None:
    from vitrail.models.layers import StandardisedConv

    conv = StandardisedConv(replace(BIT, standardisation="std+eps", standardisation_eps=1e-5), 1, 2, 1)
    conv(torch.ones(1, 1, 2, 2)).sum().backward()
    assert conv.weight.grad is not None
    assert torch.isfinite(conv.weight.grad).all()

"""Weights of a ViT in a network with queries, and those of a network with queries in another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import VARIANTS, VIT, awake
from vitrail.checkpoint.bundle import PANOPTIC, Bundle, Card
from vitrail.checkpoint.convert import export
from vitrail.checkpoint.weights import build_network, graft_encoder, load, replace_head_and_resize, save, to_bundle
from vitrail.core.errors import ConfigError, ExportRefused
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import build, tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryConfig, query_config
from vitrail.models.vit_config import ViTConfig

KINDS: list[Any] = ["eomt", "pmt"]
SEEDED = ["learned, stem", "clip", "siglip", "sam", "beit, shared table", "deit, distilled", "tanh", "patches"]


def bundle_of(config: ModelConfig, **card: Any) -> Bundle:
    torch.manual_seed(0)
    model = awake(config, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=config.image), **card)
    return to_bundle(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEEDED)
def test_a_vit_gets_queries(name: str, kind: Any) -> None:
    vit = bundle_of(VARIANTS[name])
    made = replace_head_and_resize(vit, 3, kind=kind)
    config = made.config
    assert isinstance(config, QueryConfig)
    assert config.family == kind
    assert config == query_config(vit.config, kind, 3)
    assert {n: tuple(t.shape) for n, t in made.tensors.items()} == tensor_shapes(config)
    kept = [n for n in made.tensors if not n.startswith("head.") and n in vit.tensors]
    assert len(kept) > 20
    assert all(made.tensors[n] is vit.tensors[n] for n in kept)
    dropped = ("head.", "map_pool.", "projection.", "neck.")
    assert all(n.startswith(dropped) for n in vit.tensors.keys() - made.tensors.keys())
    assert {n.split(".")[0] for n in made.tensors.keys() - vit.tensors.keys()} <= {"head", "norm"}
    again = replace_head_and_resize(vit, 3, kind=kind)
    assert all(torch.equal(again.tensors[n], tensor) for n, tensor in made.tensors.items())
    assert made.card.task == PANOPTIC
    assert made.card.labels is None
    out = build_network(made)(torch.randn(1, 3, *config.image))
    assert out.classes.shape == (1, 100, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_there_and_back(kind: Any, tmp_path: Path) -> None:
    config = query_config(VIT, kind, 2, queries=5, query_blocks=2, masked_blocks=1)
    model, path = awake(config, torch.float32), tmp_path / "queries.safetensors"
    model.card = Card(preprocessing=Preprocessing(image=config.image), labels=("sky", "sea"), task="instances")
    save(model, path)
    again = load(path)
    assert again.config == config
    assert not again.training
    assert (again.card.labels, again.card.task) == (("sky", "sea"), "instances")
    x = torch.randn(2, 3, *config.image)
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(again(x), model(x), strict=True))
    larger = load(path, image_size=(8, 12))
    assert larger.config.grid == (4, 4)
    assert larger(torch.randn(1, 3, 8, 12)).masks.shape == (1, 5, 8, 8)
    finer = load(path, patch=(1, 3))
    assert finer.config == replace(config, patch=(1, 3))
    assert finer(x).masks.shape == (2, 5, 12, 8)
    grey = load(path, channels=1)
    assert grey(torch.randn(1, 1, *config.image)).masks.shape == (1, 5, 6, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_new_classes_are_all_that_is_new(kind: Any) -> None:
    config = query_config(VIT, kind, 2, queries=5)
    old = bundle_of(config, labels=("sky", "sea"), task="instances")
    made = replace_head_and_resize(old, 7)
    assert made.config == replace(config, classes=7)
    assert {n for n, t in made.tensors.items() if t is not old.tensors[n]} == {
        "head.classifier.weight",
        "head.classifier.bias",
    }
    assert made.tensors["head.classifier.weight"].shape == (8, 16)
    assert not made.tensors["head.classifier.weight"].any()
    assert (made.card.labels, made.card.task) == (None, "instances")


def test_one_kind_becomes_another() -> None:
    old = bundle_of(query_config(VIT, "eomt", 2, queries=5), task="panoptic")
    other = replace_head_and_resize(old, 3, kind="pmt")
    assert other.config == query_config(VIT, "pmt", 3)
    assert other.tensors["head.queries"].shape == (100, 16)
    for kind in ("linear", "patches"):
        plain = replace_head_and_resize(old, 3, kind=kind)
        assert type(plain.config) is ViTConfig
        assert plain.config == replace(VIT, classes=3, head=kind)
        assert plain.card.task == "classification"
        assert plain.tensors.keys() == tensor_shapes(VIT).keys()
        assert all(t is old.tensors[n] for n, t in plain.tensors.items() if not n.startswith("head."))


def test_more_queries_than_before() -> None:
    """What training asks for: the encoder and masks of a file, with queries of a fresh network."""
    old = bundle_of(query_config(VIT, "eomt", 2, queries=5))
    config = query_config(old.config, "eomt", 3, queries=9)
    fresh = build(config).state_dict()
    made = graft_encoder(old, config, fresh)
    assert torch.equal(made.tensors["head.queries"], fresh["head.queries"])
    assert made.tensors["head.mask.layers.0.weight"] is old.tensors["head.mask.layers.0.weight"]
    assert {n: tuple(t.shape) for n, t in made.tensors.items()} == tensor_shapes(config)
    half = replace(old, tensors={n: t.bfloat16() for n, t in old.tensors.items()})
    assert {t.dtype for t in graft_encoder(half, config, fresh).tensors.values()} == {torch.bfloat16}
    with pytest.raises(ConfigError):
        graft_encoder(old, replace(config, image=(12, 12)), build(replace(config, image=(12, 12))).state_dict())


def test_loading_asks_for_queries_by_name(tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    save(awake(VIT, torch.float32), path)
    model = load(path, classes=3, head="eomt")
    assert model.training
    assert model.config == query_config(VIT, "eomt", 3)
    assert load(path, classes=3, head="pmt", image_size=(8, 12)).config.grid == (4, 4)


def test_formats_without_queries_refuse_them(tmp_path: Path) -> None:
    square = replace(VIT, gelu="erf", image=(8, 8), patch=(2, 2))
    for kind in KINDS:
        old = bundle_of(query_config(square, kind, 2, queries=5))
        for target, to in (("a.npz", None), ("b.safetensors", "timm"), ("c.pth", "torchvision"), ("d", "huggingface")):
            with pytest.raises(ExportRefused):
                export(old, tmp_path / target, to)
        with pytest.raises(ConfigError):
            replace_head_and_resize(old, 0)
    assert not list(tmp_path.iterdir())

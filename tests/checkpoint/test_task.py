"""Networks with a head on every patch, and the task that a card names: saved, loaded, resized, with a new head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import VARIANTS, VIT, awake
from vitrail.checkpoint.bundle import Card, describe, get_card, parse_description, sidecar_path
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.hub_repository import from_pretrained, model_card, save_pretrained
from vitrail.checkpoint.weights import load, replace_head_and_resize, save, to_bundle
from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig

PATCHES = replace(VIT, head="patches")
NAMES = ("sky", "sea", "sand", "ship", "sun")
SEGMENTATION = Card(preprocessing=Preprocessing(image=(6, 12)), labels=NAMES, task="segmentation")


def network(config: ModelConfig = PATCHES, card: Card = SEGMENTATION) -> Any:
    torch.manual_seed(0)
    model = awake(config, torch.float32)
    model.card = replace(card, preprocessing=Preprocessing(image=config.image), labels=card.labels)
    return model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "seg.safetensors"
    save(network(), path)
    return path


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.has_patch_head])
@torch.no_grad()
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    model = network(VARIANTS[name])
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    x = torch.randn(2, 3, *model.config.image)
    assert torch.equal(again(x), model(x))
    assert again.config == model.config
    assert get_card(again) == get_card(model)


@torch.no_grad()
def test_another_size_keeps_head_and_task(file: Path) -> None:
    model, x = load(file, image_size=(12, 15)), torch.randn(1, 3, 12, 15)
    assert model(x).shape == (1, 5, 12, 15)
    assert (get_card(model).labels, get_card(model).task) == (NAMES, "segmentation")
    torch.testing.assert_close(model(x), load(file)(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [VIT, replace(VIT, head="tanh"), replace(VIT, head="none", classes=0)], ids=str)
@pytest.mark.parametrize("way", [load, from_pretrained])
@torch.no_grad()
def test_a_classifier_becomes_a_network_for_pixels(start: ModelConfig, way: Any, tmp_path: Path) -> None:
    save(network(start, Card(preprocessing=Preprocessing(image=(6, 12)))), tmp_path / "m.safetensors")
    kept = load(tmp_path / "m.safetensors")
    model = way(tmp_path / "m.safetensors", classes=3, image_size=(8, 12), head="patches")
    assert model.training
    x = torch.randn(2, 3, 8, 12)
    assert torch.equal(model(x), torch.zeros(2, 3, 8, 12))
    heads = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith("head.")}
    assert heads == {"head.classifier.weight": (3, 16), "head.classifier.bias": (3,)}
    torch.testing.assert_close(model.eval().patch_map(x), kept.patch_map(x), atol=1e-5, rtol=1e-5)


def test_a_new_head_is_of_the_kind_that_there_was(file: Path) -> None:
    pixels, image, none = load(file, classes=3), load(file, classes=3, head="linear"), load(file, classes=0)
    assert [model.config.classes for model in (pixels, image, none)] == [3, 3, 0]
    assert [model.config.has_patch_head for model in (pixels, image, none)] == [True, False, False]
    assert [get_card(model).task for model in (pixels, image, none)] == ["segmentation", *["classification"] * 2]
    assert [get_card(model).labels for model in (pixels, image, none)] == [None] * 3
    model = load(file)
    model.reset_classifier(4)
    assert get_card(model).task == "segmentation"
    model.reset_classifier(4, "token")
    assert get_card(model).task == "classification"


def test_the_kind_says_which_head(file: Path) -> None:
    bundle = read_bundle(file)
    for kind, changes in (("linear", bundle.config.linear_head(7)), ("patches", bundle.config.patch_head(7))):
        made = replace_head_and_resize(bundle, 7, (8, 12), kind=kind)
        assert made.config == replace(PATCHES, image=(8, 12), **changes)
        assert made.tensors["head.classifier.weight"].shape == (7, 16)


def test_networks_without_patches_have_no_such_head(tmp_path: Path) -> None:
    save(network(VARIANTS["bit"], Card(preprocessing=Preprocessing(image=(20, 28)))), tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match="patch tokens"):
        load(tmp_path / "m.safetensors", classes=3, head="patches")


# The task of a card.


def test_a_task_is_written_where_it_is_another() -> None:
    plain = replace(SEGMENTATION, task="classification")
    assert "task" not in describe(PATCHES, plain)
    assert describe(PATCHES, SEGMENTATION) == {**describe(PATCHES, plain), "task": "segmentation"}
    for card in (plain, SEGMENTATION, replace(SEGMENTATION, task="a task of tomorrow")):
        assert parse_description(describe(PATCHES, card)) == (PATCHES, card)
    for wrong in (None, 3, ""):
        with pytest.raises(ConfigError, match="task"):
            parse_description({**describe(PATCHES, plain), "task": wrong})


def test_labels_are_as_many_as_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 labels for 5 classes"):
        save(network(), tmp_path / "m.safetensors", labels=NAMES[:4])


def test_conversion_keeps_the_task(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "half.safetensors", dtype=torch.float16)
    assert read_bundle(tmp_path / "half.safetensors").card.task == "segmentation"
    save(network(VIT, replace(SEGMENTATION, task="depth")), file)
    done = convert(file, tmp_path / "theirs.pth", to="timm")
    assert "task" in done.lost_fields
    assert sidecar_path(done.target).is_file()
    assert read_bundle(done.target).card.task == "depth"


def test_a_hub_files_it_under_its_task(file: Path, tmp_path: Path) -> None:
    assert "pipeline_tag: image-segmentation" in model_card(read_bundle(file))
    folder = save_pretrained(load(file), tmp_path / "out")
    assert to_bundle(from_pretrained(folder)).card.task == "segmentation"

"""What people have in their fingers from timm does the same here: forward_features, forward_head, reset_classifier."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vitrail
from tests.lanes import rest_slow
from tests.parity.networks import TOLERANCE, pictures
from tests.parity.test_timm import bit, made, written
from vitrail.core.errors import ConfigError, UnknownName

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64}),
    "avg": ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64, "global_pool": "avg"}),
    "hybrid": ("vit_base_r50_s16_224", {"depth": 1, "img_size": 64, "embed_dim": 192, "num_heads": 3}),
}


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.fixture(params=["vit", "avg", "bit", pytest.param("hybrid", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """timm's network and ours with the same weights."""
    if request.param == "bit":
        theirs = bit((1, 1), 1)
        return theirs, vitrail.load(written(theirs, tmp_path / "w.safetensors"), image=(64, 64))
    name, arguments = NETWORKS[request.param]
    theirs = made(name, **arguments)
    return theirs, vitrail.load(written(theirs, tmp_path / "w.safetensors"))


@torch.no_grad()
def test_features_and_heads_are_equal(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    images = pictures((64, 64))
    features, others = ours.forward_features(images), theirs.forward_features(images)
    assert features.shape == others.shape
    assert_close(features, others)
    assert_close(ours.forward_head(features), theirs.forward_head(others))
    assert_close(ours.forward_head(features, pre_logits=True), theirs.forward_head(others, pre_logits=True))
    assert_close(ours(images), theirs(images))


def test_sizes_have_the_same_names(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    assert (ours.num_features, ours.num_classes) == (theirs.num_features, theirs.num_classes)
    last = ours.get_classifier()
    assert isinstance(last, nn.Linear)
    assert last.weight.shape == theirs.get_classifier().weight.flatten(1).shape  # BiT's is a 1x1 convolution there


@torch.no_grad()
@pytest.mark.parametrize("classes", [3, 0])
def test_a_new_head_has_the_same_shape_and_reads_the_same(both: tuple[Any, Any], classes: int) -> None:
    theirs, ours = both
    images = pictures((64, 64))
    theirs.reset_classifier(classes)
    ours.reset_classifier(num_classes=classes)
    assert ours.num_classes == classes == ours.config.classes
    assert ours(images).shape == theirs(images).shape
    assert_close(
        ours.forward_head(ours.forward_features(images), pre_logits=True),
        theirs.forward_head(theirs.forward_features(images), pre_logits=True),
    )
    if classes:
        assert not ours(images).any()  # ours starts at zero (3.2)
        ours.get_classifier().weight.copy_(theirs.get_classifier().weight.flatten(1))
        ours.get_classifier().bias.copy_(theirs.get_classifier().bias)
    else:
        assert isinstance(ours.get_classifier(), nn.Identity)
    assert_close(ours(images), theirs(images))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "pool"), rest_slow([("vit", "avg"), ("avg", "token"), ("vit", "token"), ("avg", "avg")], 0, 1)
)
def test_a_new_head_may_read_something_else(tmp_path: Path, name: str, pool: str) -> None:
    kind, arguments = NETWORKS[name]
    theirs = made(kind, **arguments)
    ours = vitrail.load(written(theirs, tmp_path / "w.safetensors"))
    images = pictures((64, 64))
    theirs.reset_classifier(0, pool)
    ours.reset_classifier(0, pool)
    assert_close(ours(images), theirs(images))
    vitrail.save(ours, tmp_path / "new.safetensors")
    assert_close(vitrail.load(tmp_path / "new.safetensors")(images), theirs(images))


def test_a_new_head_drops_the_names_and_is_saved(both: tuple[Any, Any], tmp_path: Path) -> None:
    _, ours = both
    vitrail.save(ours, tmp_path / "named.safetensors", labels=[f"c{at}" for at in range(11)])
    ours = vitrail.load(tmp_path / "named.safetensors")
    assert ours.card.labels is not None
    ours.reset_classifier(4)
    assert ours.card.labels is None
    vitrail.save(ours, tmp_path / "new.safetensors")
    assert vitrail.load(tmp_path / "new.safetensors").config.classes == 4
    vitrail.save(ours, tmp_path / "new.safetensors", labels=list("abcd"))
    assert vitrail.predictor(tmp_path / "new.safetensors", device="cpu").labels == tuple("abcd")


def test_a_pool_that_is_not_known_is_refused(both: tuple[Any, Any]) -> None:
    _, ours = both
    with pytest.raises((ConfigError, UnknownName), match="global_pool"):
        ours.reset_classifier(3, "map")
    assert ours.config.classes == 11  # nothing was changed


def test_timm_is_what_it_was() -> None:
    """The signature that is followed here."""
    import inspect

    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    assert list(inspect.signature(model.reset_classifier).parameters) == ["num_classes", "global_pool"]
    assert list(inspect.signature(model.forward_head).parameters) == ["x", "pre_logits"]

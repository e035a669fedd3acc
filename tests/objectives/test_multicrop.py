"""Views of several sizes, and a network that sees sizes it was not made for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, HYBRID
from tests.objectives.taught import MODEL, network
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Augmentation, cifar, inception
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.data.transforms.policy import Distort, RandAugment
from vitrail.models.build import build
from vitrail.models.positions.embeddings import resize_positions
from vitrail.models.vit import ViT
from vitrail.objectives.dino import DINO
from vitrail.objectives.multicrop import PositionsAt, check_resizable, represent_at, split_views

SMALL = (4, 6)
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "learned2d": {"position": "learned2d"},
    "learned2d-sum": {"position": "learned2d-sum"},
    "sincos2d": {"position": "sincos2d"},
    "none": {"position": "none"},
    "registers": {"registers": 2, "position_prefix": False},
    "mean": {"pool": "mean", "class_token": False},
    "mean, norm last": {"pool": "mean", "norm_after_pool": True, "registers": 1},
    **{name: {**changes, "head": "none", "classes": 0} for name, changes in FAMILIES.items()},
}
FEW = [kind for kind in KINDS if kind not in FAMILIES] + ["dinov2, registers", "dinov3", "siglip", "vitdet"]


@pytest.mark.parametrize("kind", rest_slow(KINDS, *FEW))
@pytest.mark.parametrize("training", [True, False])
def test_a_small_picture_is_seen_as_by_a_network_resized_for_it(kind: str, training: bool) -> None:
    model = network(**KINDS[kind]).double().train(training)
    config = replace(model.config, image=SMALL)
    other = build(config).double().train(training)
    assert isinstance(other, ViT)
    other.load_state_dict(resize_positions(model.state_dict(), model.config, config))
    images = torch.randn(3, 3, *SMALL, dtype=torch.float64)
    at = PositionsAt(model.config, SMALL)
    found = represent_at(model, images, at)
    assert torch.allclose(found, other.represent(images), rtol=0, atol=1e-6 if kind == "sincos2d" else 1e-12)


@pytest.mark.parametrize("kind", rest_slow(KINDS, *FEW))
def test_at_its_own_size_it_is_the_network_to_the_bit(kind: str) -> None:
    model = network(**KINDS[kind])
    images = torch.randn(3, 3, *MODEL.image)
    assert torch.equal(represent_at(model, images, PositionsAt(model.config, SMALL)), model.represent(images))


def test_positions_learn_from_small_views_too() -> None:
    model = network()
    represent_at(model, torch.randn(3, 3, *SMALL), PositionsAt(model.config, SMALL)).square().sum().backward()
    gradient = model.position.tables[0].table.grad
    assert gradient is not None
    assert gradient[0, 0].abs().sum() > 0  # the class token's own row
    corners = gradient[0, 1:].view(*MODEL.grid, -1)[:: MODEL.grid[0] - 1, :: MODEL.grid[1] - 1]
    assert (corners.abs().sum(-1) > 0).all()  # corner to corner: all four have a part


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (replace(MODEL, position="relative"), "relative"),
        (replace(MODEL, placement="every"), "every"),
        (replace(MODEL, placement="shared"), "shared"),
        (replace(MODEL, attention="axial", class_token=False, pool="mean"), "axial"),
        (replace(HYBRID, head="none", classes=0), "hybrid"),
    ],
)
def test_what_is_tied_to_its_grid_is_refused(model: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_resizable(model, "dino")
    with pytest.raises(ConfigError, match="local_views=0"):
        DINO().check_model(model)
    assert DINO(local_views=0).check_model(model) == model


def test_two_views_are_distorted_unevenly_and_never_blurred_where_that_is_off() -> None:
    first, second = split_views(Augmentation(crop=InceptionCrop(size=(8, 8)), policy=Distort()))
    assert (first.policy, second.policy) == (Distort(blur=1.0), Distort(blur=0.1, solarise=0.2))
    sharp = split_views(Augmentation(crop=InceptionCrop(size=(8, 8)), policy=Distort(blur=0.0)))
    assert [view.policy for view in sharp] == [Distort(blur=0.0), Distort(blur=0.0, solarise=0.2)]
    for other in (cifar(8, padding=1), replace(inception(8), policy=RandAugment())):
        assert split_views(other) == (other, other)


def test_dinos_views_are_the_published_ones() -> None:
    crop = InceptionCrop(size=(224, 224), interpolation="bicubic")
    given = Augmentation(crop=crop, policy=Distort())
    first, second, *local = DINO(local_size=96).views(given, (16, 16))
    assert first == Augmentation(crop=replace(crop, area=(0.4, 1.0)), policy=Distort(blur=1.0))
    assert second == replace(first, policy=Distort(blur=0.1, solarise=0.2))
    small = InceptionCrop(size=(96, 96), area=(0.05, 0.4), interpolation="bicubic")
    assert local == [Augmentation(crop=small, policy=Distort(blur=0.5))] * 8


def test_small_views_are_half_the_image_in_whole_patches() -> None:
    config = DINO()
    assert config.local((224, 224), (16, 16)) == (112, 112)
    assert config.local((32, 32), (4, 4)) == (16, 16)
    assert config.local((28, 28), (4, 4)) == (12, 12)
    assert config.local((8, 12), (8, 4)) == (8, 4)
    assert DINO(local_size=20).local((32, 32), (4, 4)) == (20, 20)
    with pytest.raises(ConfigError, match="local_size=5"):
        DINO(local_size=5).check_model(MODEL)

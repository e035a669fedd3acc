"""Names: the paper's notation, slugs, patterns, and what replacing a field drags along."""

import re
from dataclasses import replace

import pytest

from vitrail.core.errors import ConfigError, ImageSizeError, UnknownName
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import SLUGS, ZOO, adapt_config, list_models, model_config, resolve_name, slug


def test_zoo_has_the_papers_networks() -> None:
    """Table 1, Table 6 and Figures 4 and 13."""
    papers = [
        *("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14", "ViT-b/32"),
        *("R50+ViT-B/16", "R50+ViT-B/32", "R50+ViT-L/16", "R50+ViT-L/32"),
        *("BiT-R50x1", "BiT-R50x2", "BiT-R101x1", "BiT-R152x1", "BiT-R152x2", "BiT-R152x4", "BiT-R200x3"),
        *("Axial-ViT-B/16", "Axial-ViT-B/32", "AxialResNet50"),
    ]
    assert set(papers) <= set(ZOO)


def test_slugs_are_unique_and_plain() -> None:
    assert len(SLUGS) == len(ZOO)
    assert set(SLUGS.values()) == set(ZOO)
    for name, network in SLUGS.items():
        assert re.fullmatch(r"[a-z0-9_.]+", name)
        assert slug(network) == name


@pytest.mark.parametrize("name", ZOO)
def test_every_network_answers_to_both_names_in_any_case(name: str) -> None:
    assert resolve_name(name) == name
    for spelling in (slug(name), slug(name).upper(), slug(name).replace("_", "-")):
        assert resolve_name(spelling) == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("vit_b_16", "ViT-B/16"),
        ("VIT-B/16", "ViT-B/16"),
        ("vit-b-16", "ViT-B/16"),
        ("r50_vit_b_16", "R50+ViT-B/16"),
        ("r50+vit-l/32", "R50+ViT-L/32"),
        ("bit_r152x4", "BiT-R152x4"),
        ("axialresnet50", "AxialResNet50"),
        ("vit_ti_16", "ViT-Ti/16"),
        ("mini-r11+vit-nano/4", "mini-R11+ViT-Nano/4"),
    ],
)
def test_notation_and_slug(given: str, meant: str) -> None:
    assert resolve_name(given) == meant


def test_case_tells_two_pairs_apart_only_in_the_papers_own_spelling() -> None:
    assert model_config("ViT-b/32") != model_config("ViT-B/32")
    assert resolve_name("ViT-b/32") == resolve_name("vit_slim_b_32") == "ViT-b/32"
    assert resolve_name("vit_b_32") == resolve_name("vit-b/32") == "ViT-B/32"
    assert model_config("ViT-g/14") != model_config("ViT-G/14")
    assert resolve_name("ViT-G/14") == resolve_name("vit_gigantic_14") == "ViT-G/14"
    assert resolve_name("vit_g_14") == resolve_name("vit-g/14") == "ViT-g/14"


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("ViT-B/15", "ViT-B/16"),
        ("vit_b16", "vit_b_16"),
        ("R50+ViT-B/8", "R50+ViT-B/16"),
        ("BiT-R152x3", "BiT-R152x4"),
        ("resnet50", "AxialResNet50"),
    ],
)
def test_unknown_model_names_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as caught:
        model_config(given)
    assert f"unknown model {given!r}; did you mean " in str(caught.value)
    assert nearest in str(caught.value)
    assert "`vitrail models` lists all" in str(caught.value)


def test_a_name_like_nothing_gets_a_list() -> None:
    with pytest.raises(UnknownName, match=r"known: ViT-Ti/8, .*, \.\.\. `vitrail models` lists all"):
        resolve_name("?????????????")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("vit-*/32", ["ViT-Ti/32", "ViT-S/32", "ViT-B/32", "ViT-L/32", "ViT-H/32", "ViT-g/32", "ViT-G/32", "ViT-b/32"]),
        ("ViT-B/16", ["ViT-B/16", "Axial-ViT-B/16", "R50+ViT-B/16"]),
        ("r50_*", ["R50+ViT-B/16", "R50+ViT-B/32", "R50+ViT-L/16", "R50+ViT-L/32"]),
        ("AXIAL", ["Axial-ViT-B/16", "Axial-ViT-B/32", "AxialResNet50"]),
        ("vit_gigantic_1?", ["ViT-G/14", "ViT-G/16"]),
        ("gigantic_1?", []),
        ("bit-r[12]*x[34]", ["BiT-R152x4", "BiT-R200x3"]),
        ("zebra", []),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert list_models(pattern) == names


def test_all_models_in_the_zoos_order() -> None:
    assert list_models() == list(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_classes_and_image_size_fit_every_family(name: str) -> None:
    config = model_config(name, classes=10, image_size=(448, 672))
    assert (config.classes, config.image) == (10, (448, 672))
    if isinstance(config, ViTConfig) and config.backbone is not None:
        assert (config.backbone.image, config.backbone.classes) == ((448, 672), 0)
    assert model_config(name, image_size=448).image == (448, 448)
    assert ZOO[name].classes == 1000


def test_head_and_classes_move_together() -> None:
    bare = model_config("ViT-B/16", classes=0)
    assert isinstance(bare, ViTConfig)
    assert (bare.head, bare.classes) == ("none", 0)
    also = model_config("ViT-B/16", head="none")
    assert also == bare
    again = adapt_config(bare, classes=7)
    assert isinstance(again, ViTConfig)
    assert (again.head, again.classes) == ("linear", 7)
    tanh = model_config("ViT-B/16", head="tanh", classes=0)
    assert isinstance(tanh, ViTConfig)
    assert (tanh.head, tanh.classes) == ("tanh", 0)
    kept = adapt_config(model_config("ViT-B/16", head="tanh"), classes=7)
    assert isinstance(kept, ViTConfig)
    assert kept.head == "tanh"
    resnet = model_config("BiT-R50x1", classes=0)
    assert isinstance(resnet, ResNetConfig)
    assert resnet.classes == 0


def test_backbone_follows_image_and_channels() -> None:
    config = model_config("R50+ViT-B/16", image_size=384, channels=1)
    assert isinstance(config, ViTConfig)
    assert config.backbone is not None
    assert (config.backbone.image, config.backbone.channels) == ((384, 384), 1)
    assert config.grid == (24, 24)


def test_token_pooling_brings_its_token() -> None:
    bare = model_config("ViT-B/16", pool="mean", class_token=False)
    again = adapt_config(bare, pool="token")
    assert isinstance(again, ViTConfig)
    assert again.class_token


def test_any_field_can_be_replaced() -> None:
    config = model_config("ViT-Ti/16", dropout=0.1, gelu="erf", patch=8, image=(64, 32))
    assert isinstance(config, ViTConfig)
    assert (config.dropout, config.gelu, config.patch, config.image) == (0.1, "erf", (8, 8), (64, 32))
    assert config == replace(ZOO["ViT-Ti/16"], dropout=0.1, gelu="erf", patch=(8, 8), image=(64, 32))


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown config field 'dropot'; did you mean dropout"):
        model_config("ViT-B/16", dropot=0.1)
    with pytest.raises(UnknownName, match="unknown config field 'patch'"):
        model_config("BiT-R50x1", patch=8)


def test_size_is_given_once() -> None:
    with pytest.raises(ConfigError, match="image_size or image, not both"):
        model_config("ViT-B/16", image_size=224, image=224)


def test_size_that_leaves_pixels_over() -> None:
    with pytest.raises(ImageSizeError, match="image 230x230 leaves 6 pixels over at patch 16x16; use 224 or 240"):
        model_config("ViT-B/16", image_size=230)


@pytest.mark.parametrize("size", [(224, 224, 3), (224,)])
def test_size_of_one_or_three_numbers_is_a_config_error(size: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="height, width"):
        model_config("ViT-B/16", image_size=size)  # type: ignore[arg-type]


def test_asking_changes_nothing() -> None:
    before = dict(ZOO)
    model_config("R50+ViT-B/16", classes=3, image_size=64, channels=1)
    assert before == ZOO

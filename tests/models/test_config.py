"""Configs: every rule is refused by name, and data goes there and back."""

import dataclasses
import json
import math
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin

import pytest

from tests.models.tiny import BACKBONE, HYBRID, RESNET, VARIANTS, VIT
from vitrail.core.errors import ConfigError, ImageSizeError, UnknownName
from vitrail.models.family import ModelConfig, from_dict, to_dict
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO

AXIAL = replace(VIT, attention="axial", class_token=False, pool="mean")

# A sound config, what is changed in it, and what the message must name.
RULES: list[tuple[ModelConfig, dict[str, Any], str]] = [
    *((VIT, {name: 0}, f"{name}=0 must be above 0") for name in ("width", "depth", "mlp_width", "heads", "channels")),
    (VIT, {"depth": -3}, "depth=-3 must be above 0"),
    (VIT, {"norm_eps": 0.0}, "norm_eps=0.0 must be above 0"),
    (VIT, {"norm_eps": math.nan}, "norm_eps=nan must be a finite number"),
    (VIT, {"heads": 3}, "heads=3 does not divide width=16"),
    (VIT, {"image": (0, 12)}, r"image=\(0, 12\) must be \(height, width\)"),
    (VIT, {"image": (6,)}, r"image=\(6,\) must be \(height, width\)"),
    (VIT, {"patch": (2, 3, 1)}, r"patch=\(2, 3, 1\) must be \(height, width\)"),
    *((VIT, {name: 1.0}, rf"{name}=1.0 must lie in \[0, 1\)") for name in ("dropout", "attention_dropout")),
    (VIT, {"stochastic_depth": -0.1}, r"stochastic_depth=-0.1 must lie in \[0, 1\)"),
    (VIT, {"dropout": math.nan}, "dropout=nan"),
    (VIT, {"registers": -1}, "registers=-1"),
    (VIT, {"class_token": False}, "pool='token' reads the class token"),
    (VIT, {"norm_after_pool": True}, "norm_after_pool=True goes with pool='mean'"),
    (VIT, {"head": "none"}, "head='none' has no room for classes=5"),
    (VIT, {"classes": 0}, "head='linear' does not take classes=0"),
    (VIT, {"classes": -1}, "head='linear' does not take classes=-1"),
    (VIT, {"head": "tanh", "classes": -1}, "head='tanh' does not take classes=-1"),
    (VIT, {"attention": "axial"}, "attention='axial'.*class_token=False"),
    (AXIAL, {"registers": 1}, "attention='axial'.*registers=0"),
    (AXIAL, {"position": "relative"}, "position='relative'"),
    (VIT, {"position": "none", "placement": "every"}, "position='none' has nothing to place at 'every'"),
    (VIT, {"position": "none", "placement": "shared"}, "position='none' has nothing to place at 'shared'"),
    (VIT, {"position": "learned2d", "width": 15, "heads": 3}, "position='learned2d'.*width=15 is odd"),
    (VIT, {"position": "sincos2d", "width": 14}, "position='sincos2d'.*divisible by 4, not 14"),
    (HYBRID, {"image": (40, 28)}, "image=40x28 but the backbone was made for 20x28"),
    (HYBRID, {"channels": 1}, "channels=1 but the backbone takes 3"),
    (HYBRID, {"backbone": replace(BACKBONE, classes=5)}, "backbone.*without a head"),
    (HYBRID, {"backbone": replace(RESNET, classes=0)}, "backbone is a post-activation ResNet"),
    (RESNET, {"blocks": ()}, "blocks="),
    (RESNET, {"blocks": (1, 0)}, r"blocks=\(1, 0\)"),
    (RESNET, {"classes": -1}, "classes=-1"),
    (RESNET, {"image": (20, 0)}, "image="),
    (RESNET, {"groups": 3}, "groups=3 does not divide 8 channels"),
    (RESNET, {"groups": 16}, "groups=16 does not divide 8 channels"),
    (RESNET, {"mixing": "axial", "axial_heads": 3}, "axial_heads=3"),
    (RESNET, {"unit": "postactivation"}, "pool_padding='zero'"),
    *(
        (RESNET, {name: 0}, f"{name}=0 must be above 0")
        for name in ("channels", "groups", "norm_eps", "standardisation_eps", "factor", "axial_heads")
    ),
    (RESNET, {"factor": 0.001}, "factor=0.001"),  # rounds to no channels at all
    (RESNET, {"factor": math.inf}, "factor=inf"),
]


@pytest.mark.parametrize(("config", "changes", "message"), RULES, ids=[str(rule[1]) for rule in RULES])
def test_every_rule_names_its_field(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (VIT, {"image": (7, 12)}, "image 7x12 leaves 1 pixel over at patch 2x3; use 6 or 8"),
        (VIT, {"image": (6, 14)}, "image 6x14 leaves 2 pixels over at patch 2x3; use 12 or 15"),
        (VIT, {"patch": (16, 3)}, "image 6x12 leaves 6 pixels over at patch 16x3; use 16"),
        (HYBRID, {"patch": (2, 1)}, "feature map 3x4 leaves 1 pixel over at patch 2x1; use 2 or 4"),
    ],
)
def test_image_size_errors_name_sizes_and_remedy(config: ViTConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageSizeError) as caught:
        replace(config, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
def test_every_choice_is_checked_and_the_nearest_named(config: ModelConfig) -> None:
    kinds = {field.name: (field.type, *get_args(field.type)) for field in fields(config)}
    choices = {
        name: next((get_args(kind) for kind in own if get_origin(kind) is Literal), ()) for name, own in kinds.items()
    }
    assert sum(map(bool, choices.values())) >= 6
    for name, known in ((name, own[0]) for name, own in choices.items() if own):
        with pytest.raises(UnknownName) as caught:
            replace(config, **{name: f"{known}x"})
        assert f"unknown {name} '{known}x'" in str(caught.value)
        assert known in str(caught.value).split("did you mean")[1]


@pytest.mark.parametrize("config", [VIT, HYBRID, RESNET], ids=["vit", "hybrid", "resnet"])
def test_configs_are_frozen_and_take_no_other_fields(config: ModelConfig) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.classes = 7  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        config.colour = "red"  # type: ignore[attr-defined]
    assert hash(config) == hash(replace(config))


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        ViTConfig(16, 2, 24, 2)  # type: ignore[misc]


@pytest.mark.parametrize("config", [*ZOO.values(), *VARIANTS.values()], ids=[*ZOO, *VARIANTS])
def test_there_and_back_through_json(config: ModelConfig) -> None:
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert type(again) is type(config)
    assert hash(again) == hash(config)


def test_data_is_plain() -> None:
    data = to_dict(HYBRID)
    assert data["family"] == "vit"
    assert data["backbone"]["blocks"] == (1, 2)
    assert to_dict(RESNET)["family"] == "resnet"
    assert set(data) == {"family", *(field.name for field in fields(ViTConfig))} - set(ViTConfig.parts)
    assert set(to_dict(replace(VIT, gated=True))) - set(data) == {"gated"}


def test_whole_numbers_become_floats_where_a_float_is_meant() -> None:
    config = from_dict({**to_dict(RESNET), "factor": 1, "groups": 32})
    assert isinstance(config, ResNetConfig)
    assert type(config.factor) is float


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (VIT, {"family": "vti"}, "unknown model family 'vti'; did you mean vit"),
        (VIT, {"family": None}, "unknown model family"),
        (VIT, {"family": ["vit"]}, "unknown model family"),
        (VIT, {"widht": 3}, "unknown config field 'widht'; did you mean width"),
        (RESNET, {"patch": [1, 1]}, "unknown config field 'patch'"),
        (VIT, {"width": "16"}, "width='16' must be of type int"),
        (VIT, {"width": 16.0}, "width=16.0 must be of type int"),
        (VIT, {"width": True}, "width=True must be of type int"),
        (VIT, {"qkv_bias": 1}, "qkv_bias=1 must be of type bool"),
        (VIT, {"dropout": "0"}, "dropout='0' must be a finite number"),
        (VIT, {"dropout": False}, "dropout=False must be a finite number"),
        (VIT, {"pool": 3}, "unknown pool '3'"),
        (VIT, {"pool": None}, "unknown pool"),
        (VIT, {"image": "ab"}, "image='ab' must be a list of whole numbers"),
        (VIT, {"image": [6.0, 12.0]}, r"image=\[6.0, 12.0\] must be a list of whole numbers"),
        (VIT, {"image": [6, 12, 3]}, r"image=\(6, 12, 3\)"),
        (VIT, {"image": []}, r"image=\(\)"),
        (RESNET, {"blocks": 3}, "blocks=3 must be a list of whole numbers"),
        (RESNET, {"blocks": [True]}, "blocks="),
        (RESNET, {"blocks": []}, "blocks="),
        (HYBRID, {"backbone": {"bloks": [1]}}, "unknown config field 'bloks'; did you mean blocks"),
        (HYBRID, {"backbone": {}}, "incomplete model config.*blocks"),
        (HYBRID, {"backbone": 5}, "backbone=5"),
        (HYBRID, {"backbone": [1, 2]}, "backbone="),
        (HYBRID, {"backbone": to_dict(replace(HYBRID, backbone=None))}, "backbone|unknown config field 'width'"),
        (RESNET, {"factor": 10**400}, "factor"),
        (RESNET, {"factor": 1e308}, "factor=1e"),
        (VIT, {"norm_eps": 10**400}, "norm_eps"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_foreign_data_is_refused_by_name(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict({**to_dict(config), **changes})


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"incomplete model config.*width.*heads"):
        from_dict({"family": "vit", "depth": 2, "mlp_width": 3})


# What a config derives.


def test_grid_tokens_and_prefix() -> None:
    config = replace(VIT, registers=3)
    assert (config.grid, config.patches, config.prefix, config.tokens) == ((3, 4), 12, 4, 16)
    bare = replace(config, class_token=False, pool="mean")
    assert (bare.prefix, bare.tokens) == (3, 15)
    assert (HYBRID.grid, HYBRID.tokens) == ((3, 4), 13)  # half of 20x28 three times, rounded up


@pytest.mark.parametrize(
    ("image", "root", "grid"),
    [((20, 28), "7x7", (3, 4)), ((33, 17), "7x7", (5, 3)), ((9, 7), "3x3", (5, 4)), ((1, 1), "7x7", (1, 1))],
)
def test_feature_map_is_rounded_up_at_every_stride(image: tuple[int, int], root: str, grid: tuple[int, int]) -> None:
    assert replace(RESNET, image=image, root=root).grid == grid

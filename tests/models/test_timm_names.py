"""timm's names and keywords stand for the networks that they stand for in timm."""

import pytest

import vitrail
from vitrail.core.errors import ConfigError
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import HINTS, find_timm_name, model_config


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_names_of_timm_have_as_many_parameters_there(every: bool) -> None:
    import timm
    import torch

    found = {}
    for name in timm.list_models(["vit_*", "deit_*", "resnetv2_*"]):
        ours = find_timm_name(name)
        if ours is not None:
            found[name] = ours
    some = {"vit_tiny_patch16_224", "vit_base_patch16_384", "deit_small_patch16_224", "vit_base_r50_s16_224"}
    assert some <= set(found)
    for name, ours in found.items() if every else [(name, found[name]) for name in sorted(some)]:
        with torch.device("meta"):
            theirs = timm.create_model(name, num_classes=1000)
        config: ModelConfig = model_config(ours.name, image_size=ours.image)
        assert config.parameters == sum(parameter.numel() for parameter in theirs.parameters()), name


def test_keywords_of_timm_are_fields_of_ours() -> None:
    model = vitrail.create_model(
        "vit_tiny_patch16_384", num_classes=7, in_chans=1, drop_path_rate=0.2, drop_rate=0.1, img_size=64
    )
    config = model.config
    assert (config.image, config.classes, config.channels) == ((64, 64), 7, 1)
    assert (config.stochastic_depth, config.dropout) == (0.2, 0.1)
    assert vitrail.create_model("vit_tiny_patch16_384").config.image == (384, 384)


@pytest.mark.parametrize("keywords", [{"num_classes": 3, "classes": 3}, *({name: 1} for name in HINTS)], ids=str)
def test_what_cannot_be_meant_is_answered(keywords: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        vitrail.create_model("vit_tiny_patch16_224", **keywords)


def test_pretrained_asks_which_weights() -> None:
    with pytest.raises(ConfigError, match="augreg_in21k"):
        vitrail.create_model("vit_base_patch16_224", pretrained=True)
    assert find_timm_name("vit_base_patch16_384.augreg_in21k_ft_in1k") == (
        "ViT-B/16",
        384,
        "augreg_in21k_ft_in1k_384",
    )

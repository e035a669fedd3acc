"""timm's names and keywords stand for the networks that they stand for in timm."""

import pytest

import vitrail
from vitrail.core.errors import ConfigError
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import HINTS, find_timm_name, model_config


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_names_of_timm_have_as_many_parameters_there(every: bool) -> None:
    import timm
    import torch

    found = {}
    later = {name for family in WEIGHT_FAMILIES.values() for name in family.networks}  # tests of their own
    for name in timm.list_models(["vit_*", "deit_*", "resnetv2_*"]):
        ours = find_timm_name(name)
        if ours is not None and ours.name not in later:
            found[name] = ours
    some = {"vit_tiny_patch16_224", "vit_base_patch16_384", "deit_small_patch16_224", "vit_base_r50_s16_224"}
    assert some <= set(found)
    for name, ours in found.items() if every else [(name, found[name]) for name in sorted(some)]:
        with torch.device("meta"):
            theirs = timm.create_model(name, num_classes=1000)
        config: ModelConfig = model_config(ours.name, image_size=ours.image)
        assert config.parameters == sum(parameter.numel() for parameter in theirs.parameters()), name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("vit_base_patch14_reg4_dinov2.lvd142m", ("DINOv2-reg-B/14", 518, "lvd142m")),
        ("timm/vit_base_patch14_dinov2.lvd142m", ("DINOv2-B/14", 518, "lvd142m")),
        ("vit_large_patch14_clip_336.openai", ("CLIP-L/14", 336, "openai_336")),
        ("vit_base_patch16_clip_quickgelu_224.openai", ("CLIP-B/16", 224, "openai")),
        ("vit_so400m_patch14_siglip_378.v2_webli", ("SigLIP2-So400m/14", 378, "webli_378")),
        ("vit_huge_plus_patch16_dinov3", ("DINOv3-H+/16", 256, "")),
        ("vit_huge_patch14_gap_224.in22k_ijepa", ("I-JEPA-H/14", 224, "in22k")),
        ("eva02_large_patch14_448.nonsense", ("EVA-02-L/14", 448, "nonsense")),
        ("vit_base_patch16_siglip_gap_224", None),
    ],
)
def test_names_of_weight_families(theirs: str, ours: tuple[str, int, str] | None) -> None:
    assert find_timm_name(theirs) == ours


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

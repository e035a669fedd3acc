"""The table of public weights against timm's own, and its answers to wrong names."""

from dataclasses import replace
from typing import Any

import pytest

from vitrail.checkpoint.known_weights import PUBLIC, find_public_weights, list_tags
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.zoo import resolve_name, slug

# timm's default where the authors of CLIP say MIT; and Apple's pages name another licence than timm's copies.
OTHER_LICENCES = {("apache-2.0", "mit"), ("apple-ascl", "apple-amlr")}


@pytest.fixture(scope="module")
def timm_cfgs() -> dict[str, Any]:
    """timm's configurations by 'architecture.tag'."""
    pytest.importorskip("timm")
    from timm.models import beit, deit, eva, resnetv2, vision_transformer, vision_transformer_hybrid
    from timm.models import vision_transformer_sam as sam

    cfgs: dict[str, Any] = {}
    for module in (vision_transformer, vision_transformer_hybrid, resnetv2, deit, eva, beit, sam):
        for arch, default in module.default_cfgs.items():
            cfgs.update({f"{arch}.{tag}": cfg for tag, cfg in default.cfgs.items()})
    return cfgs


@pytest.mark.parametrize("family", WEIGHT_FAMILIES)
def test_every_entry_says_what_timm_says(family: str, timm_cfgs: dict[str, Any]) -> None:
    for entry in (entry for entry in PUBLIC if entry.family == family):
        cfg = timm_cfgs[entry.timm]
        if cfg.hf_hub_id:
            assert entry.repo == f"timm/{entry.timm}", entry
        assert cfg.input_size == (3, entry.image, entry.image), entry
        assert cfg.num_classes == (entry.classes or getattr(entry.config, "projection", 0)), entry
        assert (cfg.mean, cfg.std) == (entry.mean, entry.std), entry
        assert cfg.interpolation == entry.interpolation, entry
        assert (cfg.crop_mode, cfg.crop_pct) == ("center", entry.crop) or (cfg.crop_mode, entry.crop) == (
            "squash",
            None,
        )
        assert cfg.license == entry.licence or (cfg.license, entry.licence) in OTHER_LICENCES, entry
        assert ("nc" in entry.licence or entry.licence == "apple-amlr") == (entry.access == "non-commercial"), entry
        assert bool(entry.terms) == (entry.access != "open"), entry


# SigLIP's So400m/14 at 384 is the one at 378: its patches leave the last pixels out. MobileCLIP is not in the table.
LEFT_OUT = {"vit_so400m_patch14_siglip_384.webli", "vit_large_patch14_clip_224.apple_mclip2_dfndr2b"}
# Meta's efficient encoders have DINOv3's form and licences of their own.
OTHERS = ("eupe_lvd1689m",)


def test_no_tag_of_a_listed_network_is_left_out(timm_cfgs: dict[str, Any]) -> None:
    listed = {entry.timm for entry in PUBLIC}
    archs = {name.split(".")[0] for name in listed}
    theirs = {name for name, cfg in timm_cfgs.items() if cfg.hf_hub_id == "timm/" and name.split(".")[0] in archs}
    assert {name for name in theirs if not name.endswith(OTHERS)} - LEFT_OUT <= listed
    assert listed <= set(timm_cfgs)


def test_every_model_is_in_the_zoo() -> None:
    for entry in PUBLIC:
        assert resolve_name(entry.model) == entry.network
        assert slug(entry.network) == entry.model


def test_names_are_unique() -> None:
    assert len({(entry.model, entry.tag) for entry in PUBLIC}) == len(PUBLIC)
    assert len({entry.repo for entry in PUBLIC}) == len(PUBLIC)


def test_google_alone_trained_with_the_tanh_gelu() -> None:
    tanh = {entry.family for entry in PUBLIC if entry.numerics.get("gelu") == "tanh"}
    assert tanh == {"ViT", "SigLIP", "SigLIP 2"}
    assert find_public_weights("vit_b_16", "augreg2_in21k_ft_in1k").numerics == {"gelu": "erf"}


def test_find_tells_sizes_apart() -> None:
    small = find_public_weights("vit_b_16", "augreg_in21k_ft_in1k")
    large = find_public_weights("vit_b_16", "augreg_in21k_ft_in1k_384")
    assert (small.image, small.repo) == (224, "timm/vit_base_patch16_224.augreg_in21k_ft_in1k")
    assert (large.image, large.repo) == (384, "timm/vit_base_patch16_384.augreg_in21k_ft_in1k")


def test_tags_are_those_of_the_model() -> None:
    assert list_tags("vit_h_14") == ("orig_in21k", "mae")
    assert list_tags("bit_r50x2") == ()


def test_unknown_tag_names_the_nearest_of_that_model() -> None:
    with pytest.raises(UnknownName, match=r"unknown weights of vit_l_32 'orig_in21k_ft_in1k'.*orig_in21k_ft_in1k_384"):
        find_public_weights("vit_l_32", "orig_in21k_ft_in1k")


def test_model_without_weights_says_so() -> None:
    with pytest.raises(UnknownName, match=r"no public weights of 'bit_r50x2'.*bit_r50x1"):
        find_public_weights("bit_r50x2", "goog_in21k")


@pytest.mark.parametrize(
    "repo", ["timm", "timm/..", "../timm", "timm/a/b", "/timm/a", "timm/a\n", "timm/.a", "timm\\a"]
)
def test_repository_cannot_climb_out_of_the_cache(repo: str) -> None:
    with pytest.raises(ConfigError, match="repo="):
        replace(PUBLIC[0], repo=repo)


@pytest.mark.parametrize("file", ["", "..", "../model", "a/b", "/model", "C:\\model", ".hidden", "model\0"])
def test_file_cannot_climb_out_of_its_folder(file: str) -> None:
    with pytest.raises(ConfigError, match="file="):
        replace(PUBLIC[0], file=file)


def test_pinned_checksum_must_be_one() -> None:
    with pytest.raises(ConfigError, match="sha256="):
        replace(PUBLIC[0], sha256="abc")

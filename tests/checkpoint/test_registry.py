"""The table of public weights against timm's own, and its answers to wrong names."""

from dataclasses import replace
from typing import Any

import pytest

from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights, find_public_weights, list_tags
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.models.zoo import resolve_name, slug

FAMILIES = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@pytest.fixture(scope="module")
def timm_cfgs() -> dict[str, Any]:
    """timm's configurations by 'architecture.tag', those with a repository on the hub."""
    pytest.importorskip("timm")
    from timm.models import deit, resnetv2, vision_transformer, vision_transformer_hybrid

    cfgs: dict[str, Any] = {}
    for module in (vision_transformer, vision_transformer_hybrid, resnetv2, deit):
        for arch, default in module.default_cfgs.items():
            cfgs.update({f"{arch}.{tag}": cfg for tag, cfg in default.cfgs.items() if cfg.hf_hub_id == "timm/"})
    return cfgs


@pytest.mark.parametrize("entry", PUBLIC, ids=lambda entry: entry.repo)
def test_every_entry_says_what_timm_says(entry: PublicWeights, timm_cfgs: dict[str, Any]) -> None:
    owner, name = entry.repo.split("/")
    assert owner == "timm"
    cfg = timm_cfgs[name]
    assert cfg.input_size == (3, entry.image, entry.image)
    assert cfg.num_classes == entry.classes
    assert (cfg.mean, cfg.std) == FAMILIES[entry.normalisation]
    assert cfg.interpolation == entry.interpolation
    assert cfg.crop_pct == entry.crop
    assert cfg.crop_mode == "center"
    assert cfg.license == entry.licence


def test_no_tag_of_a_listed_network_is_left_out(timm_cfgs: dict[str, Any]) -> None:
    listed = {entry.repo.removeprefix("timm/") for entry in PUBLIC}
    archs = {name.split(".")[0] for name in listed}
    assert {name for name in timm_cfgs if name.split(".")[0] in archs} == listed


def test_every_model_is_in_the_zoo() -> None:
    for entry in PUBLIC:
        assert slug(resolve_name(entry.model)) == entry.model


def test_names_are_unique() -> None:
    assert len({(entry.model, entry.tag) for entry in PUBLIC}) == len(PUBLIC)
    assert len({entry.repo for entry in PUBLIC}) == len(PUBLIC)


def test_meta_alone_takes_imagenet_statistics() -> None:
    assert all((entry.origin == "meta") == (entry.normalisation == "imagenet") for entry in PUBLIC)


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

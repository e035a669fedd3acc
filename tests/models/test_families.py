"""The table of weight families: its networks and published counts, names and aliases, and what is said of them.

Names and shapes of the published files are in tests/checkpoint/test_published_files.py.
"""

import re
from collections.abc import Iterator

import pytest
import torch

from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights
from vitrail.core.errors import UnknownName
from vitrail.models.build import tensor_shapes
from vitrail.models.families import WEIGHT_FAMILIES, WeightFamily, parse_families
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary
from vitrail.models.zoo import ALIASES, SLUGS, ZOO, model_config, network_name, resolve_name, slug

NAMED = [
    *("DeiT-distilled-B/16", "DeiT-III-B/16", "I-JEPA-H/14", "BEiT-B/16", "BEiT-v2-B/16", "DINOv2-B/14"),
    *("DINOv2-reg-B/14", "DINOv3-S/16", "DINOv3-S+/16", "DINOv3-B/16", "DINOv3-L/16", "DINOv3-H+/16", "DINOv3-7B/16"),
    *("CLIP-B/16", "SigLIP-So400m/14", "SigLIP2-B/16", "EVA-02-L/14", "PE-Core-B/16", "PE-Spatial-B/16"),
    *("PE-Lang-L/14", "AIMv2-L/14", "SAM-B/16", "ViTDet-B/16"),
]  # fmt: skip


def of_family(family: str) -> Iterator[PublicWeights]:
    return (entry for entry in PUBLIC if entry.family == family)


def count_parameters(config: ModelConfig) -> int:
    """By a network on the meta device."""
    return sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())


def test_every_family_of_the_issue_has_a_network() -> None:
    assert set(NAMED) <= set(ZOO)
    assert [resolve_name(name) for name in ("DeiT-B/16", "mae-l/16", "dino_s_8")] == ["ViT-B/16", "ViT-L/16", "ViT-S/8"]
    assert not set(ALIASES) & set(SLUGS)


@pytest.mark.parametrize("family", WEIGHT_FAMILIES)
def test_published_counts(family: str) -> None:
    for entry in of_family(family):
        assert entry.config.parameters == entry.parameters, entry.name
        assert (entry.config.image, entry.config.classes) == ((entry.image, entry.image), entry.classes), entry.name


def every_network() -> Iterator[object]:
    """The first network of each family, which is its smallest, and in the slow lane the others."""
    for family in WEIGHT_FAMILIES.values():
        for index, name in enumerate(family.networks):
            yield pytest.param(name, marks=pytest.mark.slow) if index else name


@pytest.mark.parametrize("name", list(every_network()))
def test_a_network_is_what_its_config_says(name: str) -> None:
    assert count_parameters(ZOO[name]) == ZOO[name].parameters


@pytest.mark.parametrize("family", WEIGHT_FAMILIES.values(), ids=lambda family: family.name)
def test_what_is_said_of_a_family(family: WeightFamily) -> None:
    assert 0 < len(family.about) <= 100
    assert 2019 <= family.year <= 2026
    assert re.fullmatch(r"\d{4}\.\d{5}", family.arxiv)
    assert "et al.)" in family.paper
    for entry in family.weights:
        assert entry["licence"]
        # Weights for another size than the network's own carry it in their tag.
        other = entry["image"] != ZOO[entry["network"]].image[0]
        assert not other or entry["tag"].endswith(f"_{entry['image']}") or family.name == "BiT"


def test_names_tell_structures_apart() -> None:
    twins = {"BEiT-v2": "BEiT", "SigLIP2": "SigLIP"}  # trained otherwise, built alike
    for family in WEIGHT_FAMILIES.values():
        for name, network in family.networks.items():
            size = name.rpartition("-")[2]
            known = {f"{other}-{size}" for other in (name.rpartition("-")[0], *twins.values())}
            assert network_name(network.config) == name or network_name(network.config) in known, name
    assert network_name(model_config("DINOv2-reg-B/14", classes=3)) == "DINOv2-reg-B/14"
    assert network_name(model_config("DINOv2-B/14", image_size=224, pool="mean")) == "DINOv2-B/14"
    assert network_name(model_config("ViT-B/16", class_token=False, pool="mean")) == "ViT-B/16"


def test_a_sign_is_not_lost_in_a_slug() -> None:
    assert slug("DINOv3-S+/16") == "dinov3_s_plus_16"
    assert resolve_name("dinov3-s+/16") == "DINOv3-S+/16"
    assert resolve_name("CLIP-G/14") == resolve_name("clip_gigantic_14") == "CLIP-G/14"
    assert resolve_name("clip_g_14") == "CLIP-g/14"
    assert resolve_name("r50+vit-b/16") == "R50+ViT-B/16"


FAMILY = """
[normalisation]
half = { mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }
[terms]
secret = "ask first"
[family.New]
about = "a test"
paper = "Nobody et al."
year = 2026
licence = "secret"
access = "gated"
[family.New.config]
registers = 2
rotary = { base = 50.0, reference = [4, 4] }
[family.New.networks]
"New-S/8" = { width = 64, depth = 2, mlp_width = 128, heads = 4, patch = 8, image = 64 }
[[family.New.release]]
about = "nothing"
normalisation = "half"
config = { gelu = "erf" }
[family.New.release.weights]
"New-S/8:first_96" = { timm = "new_small_patch8.first", image = 96, classes = 3, crop = "squash", parameters = 1 }
"""


def test_a_family_is_a_few_lines_of_text() -> None:
    family = parse_families(FAMILY)["New"]
    config = family.networks["New-S/8"].config
    assert (config.registers, config.patch, config.image) == (2, (8, 8), (64, 64))
    assert config.rotary == Rotary(base=50.0, reference=(4, 4))
    row = family.weights[0]
    assert (row["network"], row["tag"], row["repo"]) == ("New-S/8", "first_96", "timm/new_small_patch8.first")
    assert (row["image"], row["classes"], row["access"], row["terms"]) == (96, 3, "gated", "ask first")
    assert (row["mean"], row["numerics"]["gelu"], row["numerics"]["registers"]) == ([0.5] * 3, "erf", 2)
    with pytest.raises(UnknownName, match="unknown config field 'regsters'; did you mean registers"):
        parse_families(FAMILY.replace("registers", "regsters"))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["B", "L", "H"])
def test_vitdet_has_the_parameters_of_transformers(size: str) -> None:
    """Its files keep a row of the position table for a class token that is not there."""
    transformers = pytest.importorskip("transformers")
    ours = model_config(f"ViTDet-{size}/16", classes=0)
    assert isinstance(ours, ViTConfig)
    assert ours.windows is not None
    windowed = [layer for layer in range(ours.depth) if layer not in ours.windows.whole]
    config = transformers.VitDetConfig(
        hidden_size=ours.width, num_hidden_layers=ours.depth, num_attention_heads=ours.heads, image_size=1024,
        window_size=14, window_block_indices=windowed, use_relative_position_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = transformers.VitDetModel(config)
    assert ours.parameters + ours.width == sum(parameter.numel() for parameter in theirs.parameters())

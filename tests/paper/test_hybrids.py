"""Hybrids of 3.1 and the BiT ResNets they are compared with."""

import pytest

from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, model_config

# Parameters with 1000 classes at 224, GMAC at 224 and 384.
HYBRIDS = {
    "R50+ViT-B/32": (110_945_832, 8.46, 24.94),
    "R50+ViT-B/16": (98_659_112, 21.54, 67.16),
    "R50+ViT-L/32": (328_994_856, 19.41, 57.14),
    "R50+ViT-L/16": (316_483_624, 65.54, 202.78),
}
# Blocks, width factor, parameters with 1000 and with 21843 classes, GMAC at 224 and 384.
BIT = {
    "BiT-R50x1": ((3, 4, 6, 3), 1, 25_549_352, 68_256_659, 4.09, 12.01),
    "BiT-R50x2": ((3, 4, 6, 3), 2, 97_988_712, 183_382_483, 16.11, 47.35),
    "BiT-R101x1": ((3, 4, 23, 3), 1, 44_541_480, 87_248_787, 7.80, 22.92),
    "BiT-R152x1": ((3, 8, 36, 3), 1, 60_185_128, 102_892_435, 11.51, 33.83),
    "BiT-R152x2": ((3, 8, 36, 3), 2, 236_335_208, 321_728_979, 45.81, 134.63),
    "BiT-R152x4": ((3, 8, 36, 3), 4, 936_533_224, 1_107_299_923, 182.77, 537.12),
    "BiT-R200x3": ((3, 24, 36, 3), 3, 568_633_000, 696_713_235, 134.34, 394.80),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_parameters(name: str) -> None:
    assert model_config(name, classes=1000).parameters == HYBRIDS[name][0]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(("column", "size"), [(1, 224), (2, 384)])
def test_hybrid_gmac(name: str, column: int, size: int) -> None:
    assert abs(model_config(name, image_size=size).macs / 1e9 - HYBRIDS[name][column]) < 0.01


@pytest.mark.parametrize(
    ("stride", "blocks", "channels", "tokens"),
    [(32, (3, 4, 6, 3), 2048, {224: 49, 384: 144}), (16, (3, 4, 9), 1024, {224: 196, 384: 576})],
    ids=["option i: stage 4", "option ii: stage 4 moved into stage 3"],
)
@pytest.mark.parametrize("shape", ["B", "L"])
def test_the_two_options(
    shape: str, stride: int, blocks: tuple[int, ...], channels: int, tokens: dict[int, int]
) -> None:
    for size, count in tokens.items():
        config = model_config(f"R50+ViT-{shape}/{stride}", image_size=size)
        assert isinstance(config, ViTConfig)
        assert config.backbone is not None
        assert config.backbone.blocks == blocks
        assert sum(blocks) == 16
        assert config.backbone.features == channels
        assert config.backbone.grid == (size // stride, size // stride)
        assert config.patch == (1, 1)
        assert config.patches == count
        assert config.tokens == count + 1
        plain = ZOO[f"ViT-{shape}/16"]
        assert isinstance(plain, ViTConfig)
        assert (config.width, config.depth, config.heads) == (plain.width, plain.depth, plain.heads)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_numerics_are_not_those_of_bit(name: str) -> None:
    config = ZOO[name]
    assert isinstance(config, ViTConfig)
    inner = config.backbone
    assert inner is not None
    assert (inner.unit, inner.groups, inner.norm_eps) == ("postactivation", 32, 1e-6)
    assert (inner.standardisation, inner.standardisation_eps) == ("std+eps", 1e-5)
    assert (inner.padding, inner.pool_padding) == ("same", "infinity")


@pytest.mark.parametrize("name", BIT)
def test_bit_shape_and_numerics(name: str) -> None:
    config = ZOO[name]
    assert isinstance(config, ResNetConfig)
    blocks, factor = BIT[name][:2]
    assert (config.blocks, config.factor) == (blocks, factor)
    assert config.root_width == 64 * factor
    assert [config.bottleneck(stage) for stage in range(4)] == [64 * factor, 128 * factor, 256 * factor, 512 * factor]
    assert config.features == 2048 * factor
    assert (config.unit, config.groups, config.norm_eps) == ("preactivation", 32, 1e-5)
    assert (config.standardisation, config.standardisation_eps) == ("sqrt(var+eps)", 1e-10)
    assert (config.padding, config.pool_padding) == ("symmetric", "zero")


@pytest.mark.parametrize("name", BIT)
@pytest.mark.parametrize(("column", "classes"), [(2, 1000), (3, 21843)])
def test_bit_parameters(name: str, column: int, classes: int) -> None:
    assert model_config(name, classes=classes).parameters == BIT[name][column]


@pytest.mark.parametrize("name", BIT)
@pytest.mark.parametrize(("column", "size"), [(4, 224), (5, 384)])
def test_bit_gmac(name: str, column: int, size: int) -> None:
    assert abs(model_config(name, image_size=size).macs / 1e9 - BIT[name][column]) < 0.01


@pytest.mark.parametrize("name", ["BiT-R50x1", "R50+ViT-B/32"])
def test_stages_have_strides_1_2_2_2(name: str) -> None:
    ends = {step.name.split(",")[0]: step.shape for step in ZOO[name].walk() if step.name.startswith("stage ")}
    assert ends == {
        "stage 1": (56, 56, 256),
        "stage 2": (28, 28, 512),
        "stage 3": (14, 14, 1024),
        "stage 4": (7, 7, 2048),
    }


def test_axial_vit_has_twice_the_sub_blocks_on_a_kept_grid() -> None:
    """D.6: row attention and MLP, then column attention and MLP; tokens stay 2-D."""
    plain, axial = ZOO["ViT-B/16"], ZOO["Axial-ViT-B/16"]
    assert isinstance(plain, ViTConfig)
    assert isinstance(axial, ViTConfig)
    assert (axial.tokens, axial.class_token, axial.pool) == (196, False, "mean")
    one = sum(step.params for step in plain.walk() if step.name.startswith("block 1:"))
    assert sum(step.params for step in axial.walk() if step.name.startswith("block 1:")) == 2 * one
    assert sum(step.macs for step in axial.walk() if step.name == "block 1: row attention") == 2 * 196 * 14 * 768


def test_axial_resnet_replaces_every_3x3_convolution() -> None:
    """D.6: AxialResNet50 is R50 but for the middle of each bottleneck."""
    plain, axial = ZOO["BiT-R50x1"], ZOO["AxialResNet50"]
    assert isinstance(plain, ResNetConfig)
    assert isinstance(axial, ResNetConfig)
    assert (axial.blocks, axial.factor, axial.unit) == (plain.blocks, plain.factor, plain.unit)
    gained = 0
    for stage, count in enumerate(axial.blocks):
        inner, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            length = 2 * side if stage and not block else side  # the stride comes behind the attention
            gained += 2 * (4 * inner**2 + (2 * length - 1) * inner // 8) - 9 * inner**2
    assert axial.parameters - plain.parameters == gained

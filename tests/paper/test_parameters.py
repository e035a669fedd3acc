"""Section 3.1 and Table 1: shapes and parameter counts of the Vision Transformers."""

import pytest

from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, model_config

# Without a head, with 1000 classes, with 21843, and with 21843 behind the hidden tanh layer of pre-training.
COUNTS_AT_224 = {
    "ViT-B/16": (85_798_656, 86_567_656, 102_595_923, 103_186_515),
    "ViT-B/32": (87_455_232, 88_224_232, 104_252_499, 104_843_091),
    "ViT-L/16": (303_301_632, 304_326_632, 325_690_707, 326_740_307),
    "ViT-L/32": (305_510_400, 306_535_400, 327_899_475, 328_949_075),
    "ViT-H/14": (630_764_800, 632_045_800, 658_745_683, 660_385_363),
}
HEADS = {
    "no head": {"classes": 0},
    "1000": {"classes": 1000},
    "21843": {"classes": 21843},
    "tanh and 21843": {"classes": 21843, "head": "tanh"},
}
# At 384 px patch 14 leaves six pixels over; the reference drops them, which is the network at 378.
COUNTS_AT_OTHER_SIZES = [
    ("ViT-B/16", 384, 86_859_496),
    ("ViT-B/32", 384, 88_297_192),
    ("ViT-L/16", 384, 304_715_752),
    ("ViT-L/32", 384, 306_632_680),
    ("ViT-H/14", 378, 632_651_240),
    ("ViT-B/16", 512, 87_203_560),
    ("ViT-L/16", 512, 305_174_504),
    ("ViT-H/14", 518, 633_470_440),
]


@pytest.mark.parametrize("column", range(len(HEADS)), ids=list(HEADS))
@pytest.mark.parametrize("name", COUNTS_AT_224)
def test_parameters_at_224(name: str, column: int) -> None:
    config = model_config(name, **list(HEADS.values())[column])
    assert config.image == (224, 224)
    assert config.parameters == COUNTS_AT_224[name][column]


@pytest.mark.parametrize(("name", "size", "count"), COUNTS_AT_OTHER_SIZES)
def test_parameters_at_other_sizes(name: str, size: int, count: int) -> None:
    assert model_config(name, image_size=size).parameters == count


@pytest.mark.parametrize(
    ("shape", "layers", "width", "mlp", "heads", "per_head"),
    [("B", 12, 768, 3072, 12, 64), ("L", 24, 1024, 4096, 16, 64), ("H", 32, 1280, 5120, 16, 80)],
)
def test_table_1(shape: str, layers: int, width: int, mlp: int, heads: int, per_head: int) -> None:
    for patch in (8, 14, 16, 32):
        config = ZOO[f"ViT-{shape}/{patch}"]
        assert isinstance(config, ViTConfig)
        assert (config.depth, config.width, config.mlp_width, config.heads) == (layers, width, mlp, heads)
        assert config.width // config.heads == per_head
        assert config.patch == (patch, patch)


@pytest.mark.parametrize(
    ("name", "classes", "millions"), [("ViT-B/16", 0, 86), ("ViT-L/32", 1000, 307), ("ViT-H/14", 1000, 632)]
)
def test_table_1_rounds_a_different_network_in_each_row(name: str, classes: int, millions: int) -> None:
    assert round(model_config(name, classes=classes).parameters / 1e6) == millions


def test_slim_base_of_figure_4_halves_every_hidden_dimension() -> None:
    base, slim = ZOO["ViT-B/32"], ZOO["ViT-b/32"]
    assert isinstance(base, ViTConfig)
    assert isinstance(slim, ViTConfig)
    assert (slim.width, slim.mlp_width, slim.depth, slim.patch) == (384, 1536, 12, (32, 32))
    assert base.width == 2 * slim.width
    assert base.mlp_width == 2 * slim.mlp_width
    assert base.depth == slim.depth
    assert slim.width // slim.heads == base.width // base.heads == 64


@pytest.mark.parametrize(
    ("name", "count"), [("ViT-B/16", 7_087_872), ("ViT-L/16", 12_596_224), ("ViT-H/14", 19_677_440)]
)
def test_one_block(name: str, count: int) -> None:
    """4D² + 2DM + 9D + M."""
    config = ZOO[name]
    assert isinstance(config, ViTConfig)
    d, m = config.width, config.mlp_width
    assert 4 * d * d + 2 * d * m + 9 * d + m == count
    for layer in range(1, config.depth + 1):
        assert sum(step.params for step in config.walk() if step.name.startswith(f"block {layer}:")) == count


@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("ViT-")])
@pytest.mark.parametrize(("head", "classes"), [("linear", 10), ("tanh", 10), ("none", 0)])
def test_whole_formula(name: str, head: str, classes: int) -> None:
    """Embedding 3P²D + D, class token D, positions (N+1)D, L blocks, last norm 2D, pre-logits D² + D, head DK + K."""
    c = model_config(name, head=head, classes=classes)
    assert isinstance(c, ViTConfig)
    p, d, m, n = c.patch[0], c.width, c.mlp_width, (c.image[0] // c.patch[0]) ** 2
    outside = 3 * p * p * d + d + d + (n + 1) * d + 2 * d
    blocks = c.depth * (4 * d * d + 2 * d * m + 9 * d + m)
    top = (d * d + d if head == "tanh" else 0) + (d * classes + classes)
    assert c.parameters == outside + blocks + top

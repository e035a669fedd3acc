"""D.4: what each kind of position is, where it enters, and who has none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import slow
from tests.models.tiny import POSITIONS, VIT, awake, images
from vitrail.models.attention import Places
from vitrail.models.build import build, build_from
from vitrail.models.positions.embeddings import PositionEmbeddings
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig

ADDITIVE = [changes for changes in POSITIONS if changes["position"] not in ("none", "relative")]
TOKENS: list[dict[str, Any]] = [
    {},
    {"registers": 2},
    {"position_prefix": False},
    {"registers": 2, "position_prefix": False},
    {"class_token": False, "pool": "mean"},
    {"class_token": False, "pool": "mean", "registers": 2},
]


def vit(**changes: Any) -> ViT:
    model = awake(replace(VIT, **changes))
    assert isinstance(model, ViT)
    return model


def added(position: PositionEmbeddings, config: ViTConfig, layer: int) -> Tensor:
    """What positions add at a layer: [T, D]."""
    zero = torch.zeros(1, config.tokens, config.width, dtype=torch.float64)
    return position(zero, layer)[0].detach()


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("kind", ADDITIVE, ids=lambda changes: ", ".join(changes.values()))
def test_additive_table_against_a_slow_one(kind: dict[str, Any], tokens: dict[str, Any]) -> None:
    model = vit(**kind, **tokens, depth=3)
    weights = slow.arrays(model.state_dict())
    for layer in range(3):
        expected = slow.table(weights, model.config, layer)
        got = added(model.position, model.config, layer).numpy()
        np.testing.assert_allclose(got, 0 if expected is None else expected, atol=1e-6 if "sin" in str(kind) else 0)


@pytest.mark.parametrize("kind", ["learned", "learned2d", "learned2d-sum", "sincos2d"])
def test_placements(kind: str) -> None:
    """stem adds once, shared adds the same table before each layer, every has a table for each."""
    stem, shared, every = (vit(position=kind, placement=p, depth=3) for p in ("stem", "shared", "every"))
    assert [len(model.position.tables) for model in (stem, shared, every)] == [1, 1, 3]
    tables = [added(stem.position, stem.config, layer) for layer in range(3)]
    assert tables[0].abs().max() > 0
    assert tables[1].abs().max() == tables[2].abs().max() == 0
    first, *rest = (added(shared.position, shared.config, layer) for layer in range(3))
    assert all(torch.equal(first, other) for other in rest)
    first, *rest = (added(every.position, every.config, layer) for layer in range(3))
    assert all(torch.equal(first, other) == (kind == "sincos2d") for other in rest)


def test_default_placement_is_the_papers() -> None:
    assert replace(VIT, position="learned").entry == "stem"
    assert replace(VIT, position="relative").entry == "every"
    assert len(build(replace(VIT, position="relative")).position.tables) == VIT.depth


def test_shared_positions_reach_the_layers_input() -> None:
    """The residual stream carries them: with silent layers, z_L is the tokens and L times the table."""
    model = vit(placement="shared", depth=3)
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attention.out, block.mlp.contract):
                layer.weight.zero_()
                layer.bias.zero_()
    x = images(VIT)
    expected = model.tokens(x) + 3 * model.position.tables[0]()
    torch.testing.assert_close(model.encode(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("placement", "layers"), [("stem", [True, False]), ("every", [True, True]), ("shared", [True, True])]
)
def test_relative_offsets_go_to_the_attention_only(placement: str, layers: list[bool]) -> None:
    model = vit(position="relative", placement=placement)
    offsets = [model.position.offsets(layer) for layer in range(2)]
    assert [each is not None for each in offsets] == layers
    for each in offsets:
        assert each is None or each.shape == (2 * 13 - 1, 8)
    assert (offsets[0] is offsets[1]) == (placement == "shared")
    z = torch.randn(1, 13, 16, dtype=torch.float64)
    assert model.position(z, 0) is z


def test_additive_kinds_give_the_attention_nothing() -> None:
    assert vit(position="learned").position.offsets(0) is None
    assert vit(position="none").position.offsets(0) is None


def permuted(x: Tensor, order: Tensor, config: ViTConfig) -> Tensor:
    """The image with its patches in another order."""
    rows, columns = config.grid
    ph, pw = config.patch
    patches = x.unflatten(2, (rows, ph)).unflatten(4, (columns, pw)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    grid = patches[:, order].unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return grid.flatten(4, 5).flatten(2, 3)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_without_positions_the_network_is_blind_to_order(pool: str) -> None:
    """A bag of patches: the answer stays, and the tokens move with their patches."""
    model = vit(position="none", pool=pool, registers=1)
    x, order = images(VIT), torch.randperm(12)
    shuffled = permuted(x, order, VIT)
    assert not torch.equal(shuffled, x)
    torch.testing.assert_close(model(shuffled), model(x), atol=1e-11, rtol=0)
    torch.testing.assert_close(model.encode(shuffled)[:, 2:], model.encode(x)[:, 2:][:, order], atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", ["learned", "learned2d", "learned2d-sum", "sincos2d", "relative"])
def test_with_positions_the_network_sees_order(kind: str) -> None:
    model = vit(position=kind)
    x = images(VIT)
    assert (model(permuted(x, torch.randperm(12), VIT)) - model(x)).abs().max() > 1e-3


def test_relative_positions_see_differences_only() -> None:
    """The raster index moved on by one changes nothing: the logits of (i+1, j+1) are those of (i, j)."""
    model = vit(position="relative", class_token=False, pool="mean", depth=1)
    z = torch.randn(1, 12, 16, dtype=torch.float64)
    moved = z.roll(1, dims=1)
    attention = model.blocks[0].attention
    with torch.no_grad():
        places = Places(model.config.grid, model.position.offsets(0))
        logits, shifted = (attention.weights(each, places).log() for each in (z, moved))
    # The token that left one end and entered the other changes every row's sum; differences between keys do not.
    inner = logits[..., :11, :11]
    inner_shifted = shifted[..., 1:, 1:]
    torch.testing.assert_close(inner - inner[..., :1], inner_shifted - inner_shifted[..., :1], atol=1e-12, rtol=0)


def test_relative_table_is_indexed_by_query_minus_key() -> None:
    """Only the offset i - j = 1 is large and positive for positive queries: each token attends to the one before it."""
    model = vit(position="relative", class_token=False, pool="mean", depth=1, heads=1)
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.qkv.weight.zero_()
        attention.qkv.bias.fill_(1)
        table = model.position.tables[0].table
        table.zero_()
        table[12 - 1 + 1] = 100
        places = Places(model.config.grid, model.position.offsets(0))
        weights = attention.weights(torch.randn(1, 12, 16, dtype=torch.float64), places)[0, 0]
    assert weights[1:].argmax(dim=1).tolist() == list(range(11))


def test_registers_and_unplaced_class_token_have_no_position() -> None:
    for kind in ADDITIVE:
        model = vit(**kind, registers=2)
        row = added(model.position, model.config, 0)
        assert row[1:3].abs().max() == 0
        assert (row[0].abs().max() > 0) == (kind["position"] != "sincos2d")
        assert row[3:].abs().max() > 0
        model = vit(**kind, registers=2, position_prefix=False)
        assert added(model.position, model.config, 0)[:3].abs().max() == 0


def sine_table(config: ViTConfig) -> Tensor:
    model = build(replace(config, position="sincos2d"))
    assert isinstance(model, ViT)
    return model.position.tables[0]()[0, config.prefix :].double()


def test_sine_positions_are_fixed_and_in_no_weight_file() -> None:
    first, again = sine_table(VIT), sine_table(VIT)
    assert torch.equal(first, again)
    model = build(replace(VIT, position="sincos2d"))
    assert not [name for name in model.state_dict() if "position" in name]
    assert not list(model.position.parameters())


def test_sine_positions_depend_on_differences_only() -> None:
    """Each has the same length, and two of them the same product wherever their difference is the same."""
    config = replace(VIT, image=(10, 18), width=32)
    grid = sine_table(config).unflatten(0, (5, 6))
    torch.testing.assert_close((grid**2).sum(dim=-1), torch.full((5, 6), 16.0, dtype=torch.float64))
    for dr, dc in [(0, 1), (2, 0), (1, 3)]:
        product = (grid[: 5 - dr, : 6 - dc] * grid[dr:, dc:]).sum(dim=-1)
        torch.testing.assert_close(product, product[:1, :1].expand_as(product), atol=1e-5, rtol=0)
        assert product[0, 0] < 15.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sine_positions_follow_the_weights_they_are_built_around(dtype: torch.dtype) -> None:
    """A network put together from given tensors makes its own table, of their type."""
    config = replace(VIT, position="sincos2d")
    model = awake(config, dtype)
    again = build_from(config, model.state_dict()).eval()
    x = images(config, dtype=dtype)
    assert again(x).dtype == dtype
    torch.testing.assert_close(again(x), model(x), atol=1e-6, rtol=0)


def test_sine_positions_lie_where_the_weights_lie() -> None:
    """The device without storage stands for any other device."""
    config = replace(VIT, position="sincos2d")
    tensors = {name: tensor.to("meta") for name, tensor in build(config).state_dict().items()}
    model = build_from(config, tensors)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}

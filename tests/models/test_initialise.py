"""How fresh networks start (paper B.1, reference code): the distribution of every kind of tensor."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import HYBRID, RESNET, SOME, VARIANTS, VIT
from vitrail.models.blocks import Block
from vitrail.models.build import build
from vitrail.models.layers import lecun_normal_
from vitrail.models.resnet import PostActivationUnit, ResNet
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig

# Base's width in one layer: large enough for sharp statistics, and the numbers are the published ones.
WIDE = ViTConfig(width=768, depth=1, mlp_width=3072, heads=12, image=(64, 64), classes=10, head="tanh", registers=4)


@pytest.fixture(scope="module")
def wide() -> ViT:
    torch.manual_seed(1)
    model = build(WIDE)
    assert isinstance(model, ViT)
    return model


@pytest.fixture(scope="module")
def block(wide: ViT) -> Block:
    block = wide.blocks[0]
    assert isinstance(block, Block)
    return block


def is_uniform(weight: Tensor, bound: float) -> None:
    assert weight.abs().max().item() <= bound
    assert weight.abs().max().item() > 0.999 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=0.01 * bound)


def is_lecun(weight: Tensor, fan_in: int) -> None:
    """Variance 1/fan_in behind the cut at two standard deviations of the normal that was cut."""
    std = 1 / math.sqrt(fan_in)
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=0.03 * std)
    assert 0.9 * 2 * std / 0.8796 < weight.abs().max().item() <= 2 * std / 0.8796


def test_attention_is_xavier_for_each_square_part(block: Block) -> None:
    """√(6/2D) = 0.0625 at D = 768, where one fill of the stacked matrix would give √(6/4D)."""
    parts = (*block.attention.qkv.weight.detach().chunk(3), block.attention.out.weight.detach())
    for part in parts:
        assert part.shape == (768, 768)
        is_uniform(part, 0.0625)
    assert not torch.equal(parts[0], parts[1])


def test_attention_biases_are_zero(block: Block) -> None:
    assert block.attention.qkv.bias.abs().max() == 0
    assert block.attention.out.bias.abs().max() == 0


def test_mlp_is_xavier_with_tiny_biases(block: Block) -> None:
    for layer in (block.mlp.expand, block.mlp.contract):
        is_uniform(layer.weight.detach(), math.sqrt(6 / (768 + 3072)))
        assert layer.bias.std().item() == pytest.approx(1e-6, rel=0.1)


def test_patch_projection_is_lecun_normal(wide: ViT) -> None:
    projection = wide.embedding.projection
    assert isinstance(projection, nn.Conv2d)
    is_lecun(projection.weight.detach(), 3 * 16 * 16)
    assert projection.bias is not None
    assert projection.bias.abs().max() == 0


def test_tokens_and_positions(wide: ViT) -> None:
    assert wide.class_token is not None
    assert wide.registers is not None
    assert wide.class_token.abs().max() == 0
    assert wide.position.tables[0].table.std().item() == pytest.approx(0.02, rel=0.05)
    assert wide.registers.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("kind", ["learned", "learned2d", "learned2d-sum", "relative"])
def test_every_learned_position_has_deviation_002(kind: str) -> None:
    model = build(replace(WIDE, position=kind, heads=1, placement="every"))
    for name, parameter in model.named_parameters():
        if name.startswith("position."):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15)


def test_head_is_zero_and_pre_logits_lecun(wide: ViT) -> None:
    assert wide.head.classifier is not None
    assert wide.head.hidden is not None
    assert wide.head.classifier.weight.abs().max() == 0
    assert wide.head.classifier.bias.abs().max() == 0
    is_lecun(wide.head.hidden.weight.detach(), 768)
    assert wide.head.hidden.bias.abs().max() == 0


@pytest.mark.parametrize("name", SOME)
def test_norms_are_the_identity_but_for_the_hybrids_third(name: str) -> None:
    model = build(VARIANTS[name])
    third = {id(unit.norm3) for unit in model.modules() if isinstance(unit, PostActivationUnit)}
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm)]
    assert norms
    for norm in norms:
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.0 if id(norm) in third else 1.0))
        assert isinstance(norm, nn.RMSNorm) or norm.bias.abs().max() == 0


@pytest.mark.parametrize("name", SOME)
def test_a_fresh_network_is_finite_and_its_head_says_nothing(name: str) -> None:
    """torch.empty somewhere without an initialiser would leave whatever was in memory."""
    config = VARIANTS[name]
    real = torch.empty

    def poisoned(*args: int, **rest: object) -> Tensor:
        return real(*args, **rest).fill_(math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        model = build(config).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.isfinite().all()
    with torch.no_grad():
        out = model(torch.randn(2, config.channels, *config.image))
    if config.classes:
        assert torch.equal(out, torch.zeros(2, config.classes, *(config.image if config.has_patch_head else ())))
    else:
        assert out.abs().max() > 0


def test_convolutions_are_lecun_normal() -> None:
    model = build(replace(RESNET, factor=0.5, blocks=(1, 1)))
    assert isinstance(model, ResNet)
    unit = model.trunk.stages[1][0]
    is_lecun(unit.conv2.weight.detach(), 9 * 64)
    is_lecun(unit.project.weight.detach(), 128)


def test_axial_mixing_is_xavier_with_small_offsets() -> None:
    model = build(replace(RESNET, factor=1, groups=32, blocks=(1,), mixing="axial", image=(128, 128), axial_heads=1))
    assert isinstance(model, ResNet)
    mixing = model.trunk.stages[0][0].conv2
    for part in mixing.row.qkv.weight.detach().chunk(3):
        assert 0.99 * math.sqrt(6 / 128) < part.abs().max().item() <= math.sqrt(6 / 128)
    for offsets in (mixing.row_offsets, mixing.column_offsets):
        assert offsets.std().item() == pytest.approx(0.02, rel=0.05)


def test_lecun_counts_every_input_of_one_output() -> None:
    is_lecun(lecun_normal_(torch.empty(64, 7, 5, 3)), 7 * 5 * 3)


@pytest.mark.parametrize("config", [VIT, HYBRID, RESNET], ids=["vit", "hybrid", "resnet"])
def test_same_seed_same_network(config: ViTConfig) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build(config).state_dict()

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_seed_draws_the_same_numbers_in_the_same_order() -> None:
    """The draws of a block, one after the other: another order is another network for the same seed."""
    block = Block(VIT, 0)
    torch.manual_seed(3)
    block.mlp.initialise()
    torch.manual_seed(3)
    for layer in (block.mlp.expand, block.mlp.contract):
        assert torch.equal(layer.weight, nn.init.xavier_uniform_(torch.empty_like(layer.weight)))
        assert torch.equal(layer.bias, nn.init.normal_(torch.empty_like(layer.bias), std=1e-6))

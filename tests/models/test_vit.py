"""Section 3.1: the module against its equations, and what goes in and out of it."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import slow
from tests.models.tiny import HYBRID, VARIANTS, VIT, awake, images
from vitrail.core.errors import ImageSizeError
from vitrail.models.attention import Places
from vitrail.models.blocks import AxialBlock, Block
from vitrail.models.build import build, build_from
from vitrail.models.layers import MLP
from vitrail.models.patch_embedding import PatchEmbedding
from vitrail.models.positions.embeddings import resize_positions
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import adapt_config

VITS = {name: c for name, c in VARIANTS.items() if isinstance(c, ViTConfig) and c.backbone is None}


def vit(config: ViTConfig) -> ViT:
    model = awake(config)
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize("name", VITS)
def test_equals_equations_1_to_4(name: str) -> None:
    """Every kind of network, step by step in numpy: positions of each kind and place, registers, pools, heads."""
    config = VITS[name]
    model, x = vit(config), images(config)
    weights = slow.arrays(model.state_dict())
    near = 2e-6 if config.position == "sincos2d" or config.rotary is not None else 1e-11  # what is held in float32
    with torch.no_grad():
        tokens, out = model.encode(x), model(x)
    for b in range(2):
        z, y = slow.vit(x[b].numpy(), weights, config)
        np.testing.assert_allclose(tokens[b].numpy(), z, atol=near)
        np.testing.assert_allclose(out[b].numpy(), y, atol=near)


def test_hybrid_is_the_same_encoder_on_the_backbones_feature_map() -> None:
    """Each position of the map is a 1x1 patch."""
    model, x = vit(HYBRID), images(HYBRID)
    assert HYBRID.backbone is not None
    features = model.embedding.backbone(x)
    rows, columns = HYBRID.backbone.grid
    assert features.shape == (2, HYBRID.backbone.features, rows, columns)
    plain = replace(HYBRID, backbone=None, image=(rows, columns), channels=HYBRID.backbone.features)
    twin = vit(plain)
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("embedding.backbone.")})
    torch.testing.assert_close(model(x), twin(features), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("channels", "patch", "image"), [(3, (2, 3), (6, 12)), (1, (4, 2), (8, 4)), (5, (1, 1), (2, 3))]
)
def test_patch_embedding_is_one_matrix_on_flattened_patches(
    channels: int, patch: tuple[int, int], image: tuple[int, int]
) -> None:
    module = PatchEmbedding(channels, 7, patch).double()
    x = torch.randn(2, channels, *image, dtype=torch.float64)
    config = replace(VIT, width=7, heads=1, channels=channels, patch=patch, image=image)
    weights = slow.arrays({f"embedding.{name}": tensor for name, tensor in module.state_dict().items()})
    got = module(x).detach().numpy()
    for b in range(2):
        np.testing.assert_allclose(got[b], slow.embed(x[b].numpy(), weights, config), atol=1e-13)


def test_class_token_stands_before_registers_before_patches() -> None:
    model = vit(replace(VIT, registers=2))
    x = images(VIT)
    tokens = model.tokens(x)
    assert tokens.shape == (2, 1 + 2 + 12, 16)
    assert model.class_token is not None
    assert model.registers is not None
    assert torch.equal(tokens[1, 0], model.class_token[0, 0])
    assert torch.equal(tokens[1, 1:3], model.registers[0])
    assert torch.equal(tokens[:, 3:], model.embedding(x))


def test_network_is_pre_norm() -> None:
    """With both branches silent a layer passes its input on untouched, norms and all."""
    model = vit(VIT)
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attention.out, block.mlp.contract):
                layer.weight.zero_()
                layer.bias.zero_()
    x = images(VIT)
    assert torch.equal(model.encode(x), model.position(model.tokens(x), 0))


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_form_is_the_configs(form: str) -> None:
    x = torch.tensor([[2.7]], dtype=torch.float64)
    mlp = MLP(replace(VIT, gelu=form))
    assert mlp.gelu(x).item() == pytest.approx(slow.gelu(x.numpy(), form).item(), abs=1e-12)
    gap = slow.gelu(x.numpy(), "erf") - slow.gelu(x.numpy(), "tanh")
    assert abs(gap.item()) == pytest.approx(4.73e-4, abs=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 1e-12, 0.5])
def test_norm_eps_is_the_configs_everywhere(eps: float) -> None:
    config = replace(VIT, norm_eps=eps)
    model = vit(config)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * config.depth + 1
    assert {norm.eps for norm in norms} == {eps}


# Errors.


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 3, 7, 12), "(2, 3, 7, 12)"),
        ((2, 3, 6, 16), "(2, 3, 6, 16)"),
        ((2, 1, 6, 12), "(2, 1, 6, 12)"),
        ((3, 6, 12), "(3, 6, 12)"),
        ((2, 3, 0, 12), "(2, 3, 0, 12)"),
    ],
)
def test_images_of_another_size_are_refused_by_size(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ImageSizeError) as caught:
        vit(VIT)(torch.zeros(shape, dtype=torch.float64))
    assert said in str(caught.value)
    assert "[B, 3, 6, 12]" in str(caught.value)
    assert "multiples of 2x3" in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"attention": "axial", "class_token": False, "pool": "mean"}, {"position": "relative"}]
)
def test_what_is_tied_to_its_size_takes_no_other(changes: dict[str, Any]) -> None:
    with pytest.raises(ImageSizeError, match=r"\[B, 3, 6, 12\]"):
        vit(replace(VIT, **changes))(torch.zeros(2, 3, 12, 6, dtype=torch.float64))


SIZED = {
    "learned": VIT,
    "mean, registers, no prefix": replace(VIT, pool="mean", registers=2, position_prefix=False),
    "2-D": replace(VIT, position="learned2d"),
    "2-D sum in every layer": replace(VIT, position="learned2d-sum", placement="every"),
    "sines": replace(VIT, position="sincos2d"),
    "none": replace(VIT, position="none"),
    "hybrid": adapt_config(HYBRID, image_size=(32, 32)),
}


@pytest.mark.parametrize("name", SIZED)
def test_images_of_another_size_are_read_as_by_a_network_resized_for_them(name: str) -> None:
    config = SIZED[name]
    model = vit(config)
    size = (config.image[0] + 2 * config.patch_pixels[0], config.image[1] - config.patch_pixels[1])
    other = adapt_config(config, image_size=size)
    resized = build_from(other, resize_positions(dict(model.state_dict()), config, other))
    x = torch.randn(2, config.channels, *size, dtype=torch.float64)
    torch.testing.assert_close(model(x), resized(x), rtol=1e-6, atol=1e-6)
    assert model.patch_map(x).shape == (2, config.width, *other.grid)
    model(x).sum().backward()


def test_hybrid_refuses_other_images_too() -> None:
    with pytest.raises(ImageSizeError, match=r"\[B, 3, 20, 28\]"):
        vit(HYBRID)(torch.zeros(1, 3, 24, 28, dtype=torch.float64))


# Dropout and stochastic depth.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"placement": "every"},
        {"placement": "shared", "position": "learned2d"},
        {"attention": "axial", "class_token": False, "pool": "mean"},
        {"head": "tanh"},
    ],
    ids=str,
)
def test_dropout_stands_in_four_places(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the positions, the attention's output, the GELU and the second MLP layer; never on q, k, v or the head.

    Dropout is replaced by a factor of 0.7, which the slow network applies in exactly these places.
    """
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: 0.7 * x if self.p == 0.25 else x)
    config = replace(VIT, dropout=0.25, **changes)
    model, x = vit(config).train(), images(config)
    with torch.no_grad():
        out = model(x)
    weights = slow.arrays(model.state_dict())
    for b in range(2):
        _, y = slow.vit(x[b].numpy(), weights, config, drop=lambda a: 0.7 * a)
        np.testing.assert_allclose(out[b].numpy(), y, atol=1e-11)


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "stochastic_depth"])
def test_noise_is_in_training_only(field: str) -> None:
    config = replace(VIT, **{field: 0.5})
    model, x = vit(config), images(config, batch=8)
    quiet = vit(VIT)
    quiet.load_state_dict(model.state_dict())
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), quiet(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_stochastic_depth_grows_linearly_from_zero() -> None:
    model = build(replace(VIT, depth=5, stochastic_depth=0.4))
    assert [block.skip.p for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert build(replace(VIT, depth=1, stochastic_depth=0.4)).blocks[0].skip.p == 0
    axial = replace(VITS["axial"], depth=3, stochastic_depth=0.4)
    assert [(b.row.skip.p, b.column.skip.p) for b in build(axial).blocks] == [(0, 0), (0.2, 0.2), (0.4, 0.4)]


def branches(block: Block, z: Tensor, keep: float) -> list[Tensor]:
    """The four outcomes of a layer whose two branches are each kept, and scaled up, or left out."""
    scale = 1 / keep
    outcomes: list[Tensor] = []
    for attention, mlp in itertools.product((0.0, scale), repeat=2):
        middle = z + attention * block.attention(block.norm_attention(z))
        outcomes.append(middle + mlp * block.mlp(block.norm_mlp(middle)))
    return outcomes


def test_stochastic_depth_drops_each_branch_for_a_whole_image() -> None:
    block = vit(replace(VIT, stochastic_depth=0.5)).blocks[1].train()
    assert isinstance(block, Block)
    z = torch.randn(64, 13, 16, dtype=torch.float64)
    with torch.no_grad():
        out, outcomes = block(z, Places(VIT.grid)), branches(block, z, keep=0.5)
    fits = torch.stack([(out - outcome).abs().amax(dim=(1, 2)) < 1e-12 for outcome in outcomes])
    assert (fits.sum(dim=0) == 1).all()
    assert (fits.sum(dim=1) >= 6).all()  # of 64 images, 16 are expected in each


def test_stochastic_depth_drops_axial_branches_for_a_whole_image() -> None:
    """The rows of a grid are sequences of their own in axial attention; the draw is still one for an image."""
    config = replace(VITS["axial"], stochastic_depth=0.5)
    block = vit(config).blocks[1].train()
    assert isinstance(block, AxialBlock)
    rows, columns = config.grid
    one_row = torch.randn(16, 1, columns, 16, dtype=torch.float64)
    z = one_row.expand(16, rows, columns, 16).flatten(1, 2)  # all rows of an image are alike
    with torch.no_grad():
        out = block(z, Places(config.grid)).unflatten(1, config.grid)
    torch.testing.assert_close(out, out[:, :1].expand_as(out), atol=1e-12, rtol=0)


def test_axial_block_connects_a_row_and_then_its_columns() -> None:
    """One block already connects every pair of tokens; with its column half silent, only those of one row (D.6)."""
    config = VITS["axial"]
    block = vit(config).blocks[0]
    assert isinstance(block, AxialBlock)
    z = torch.randn(1, 12, 16, dtype=torch.float64)
    other = z.clone()
    other[0, 0] = torch.randn(16, dtype=torch.float64)

    def moved() -> Tensor:
        with torch.no_grad():
            before, after = block(z, Places(config.grid)), block(other, Places(config.grid))
            return (before != after).any(dim=2)[0].unflatten(0, config.grid)

    assert moved().all()
    with torch.no_grad():
        for layer in (block.column.attention.out, block.column.mlp.contract):
            layer.weight.zero_()
    assert moved()[0].all()
    assert not moved()[1:].any()

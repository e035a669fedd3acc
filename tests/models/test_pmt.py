"""Queries in blocks of their own, on several layers of an encoder that may be frozen."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.lanes import rest_slow
from tests.models.test_eomt import VITS, assert_same, pictures
from tests.models.test_walk import traced_macs
from tests.models.tiny import FEW, VIT, awake
from vitrail.core.errors import ConfigError
from vitrail.models.build import build, tensor_shapes
from vitrail.models.family import from_dict, to_dict
from vitrail.models.pmt import PMT
from vitrail.models.query_configs import PMTConfig, query_config
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary
from vitrail.models.zoo import model_config, network_name
from vitrail.optim.config import Optim
from vitrail.optim.groups import freeze, group_parameters

SOME = rest_slow(VITS, *(name for name in FEW if name in VITS))


def pmt(config: ViTConfig = VIT, **changes: Any) -> PMT:
    model = awake(query_config(config, "pmt", 5, **{"queries": 7, "query_blocks": 2, "upscale": 1, **changes}))
    assert isinstance(model, PMT)
    return model


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_around_any_vit(name: str) -> None:
    model = pmt(VITS[name])
    rows, columns = model.config.grid
    x = pictures(model)
    out, layers = model(x), model.forward_layers(x)
    assert out.classes.shape == (2, 7, 6)
    assert out.masks.shape == (2, 7, 2 * rows, 2 * columns)
    assert len(layers) == 3
    assert_same(layers[-1], out)
    none = torch.zeros(2, 2, 7, dtype=torch.bool)
    assert_same(model.forward_layers(x, none)[-1], out)
    model.set_masked_blocks(2)
    assert_same(model(x), model.forward_layers(x, ~none)[-1])
    one = model.config.encoder
    encoder = awake(one)
    encoder.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("head.")})
    torch.testing.assert_close(model.features(x), encoder(x), atol=0, rtol=0)
    step = one.open_sizes.step
    if step is not None and one.backbone is None:
        assert model(pictures(model, 1, (1, 2))).masks.shape == (1, 7, 2 * (rows + 1), 2 * (columns + 2))


@pytest.mark.parametrize("name", rest_slow(VITS))
def test_cost_in_closed_form(name: str) -> None:
    config = query_config(VITS[name], "pmt", 5, queries=7, query_blocks=1, upscale=2)
    for c in (config, replace(config, masked_blocks=1)):
        assert c.parameters == sum(math.prod(shape) for shape in tensor_shapes(c).values())
        assert c.macs == traced_macs(c)
    kept = [config.activation_bytes(4, recompute=again) for again in (False, True)]
    assert kept[1] < kept[0]


@torch.no_grad()
def test_levels_written_out() -> None:
    """Each level behind the encoder's norm, its own norm and MLP; the sum; queries; blocks; a norm of the head's."""
    model = pmt(replace(VITS["dinov3"], depth=5), levels=3)
    assert model.config.tapped == (0, 2, 4)
    x = pictures(model)
    _, found = model.forward_intermediates(x, [0, 2, 4])
    total = torch.zeros(())
    for z, lateral in zip(found.tokens, cast(Any, model.head.laterals), strict=True):
        y = lateral.norm(z)
        total = total + y + lateral.contract(torch.nn.functional.gelu(lateral.expand(y)))
    z = torch.cat([model.head.queries.expand(2, -1, -1), total], dim=1)
    grid, rotation = model.config.grid, model.head.rotary(model.config.grid, z)
    for block in range(2):
        z = model.run_block(block, z, grid, rotation, None)
    assert_same(model.head(model.head.norm(z), grid), model(x))


def gradients(model: PMT, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    masked = torch.rand(2, 2, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    outputs = model.forward_layers(x, masked)
    sum((out.classes.square().mean() + out.masks.square().mean() for out in outputs), torch.zeros(())).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["learned, stem", "sam", "rotary, mixed", "axial"])
def test_frozen_or_not(name: str) -> None:
    """A frozen encoder keeps nothing for the backward pass, and the head learns what it would learn anyway."""
    model = pmt(VITS[name]).train()
    x = pictures(model)
    assert not model.is_encoder_frozen
    whole = gradients(model, x)
    assert whole.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.any() for gradient in whole.values())
    freeze(model, Optim(freeze="all"))
    assert model.is_encoder_frozen
    assert all(not level.requires_grad for level in model.run_encoder(x))
    alone = gradients(model, x)
    assert alone.keys() == {name for name in whole if name.startswith("head.")}
    for name, gradient in alone.items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-12, rtol=0)
    model.set_grad_checkpointing()
    for name, gradient in gradients(model, x).items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-12, rtol=0)
    assert {group.rate for group in group_parameters(model, Optim(layer_decay=0.5))} == {1.0}


@torch.no_grad()
def test_an_image_does_not_depend_on_the_others() -> None:
    model = pmt().train()
    x = pictures(model, 3)
    for one, other in zip(model(x), model(x[1:2]), strict=True):
        torch.testing.assert_close(one[1:2], other, atol=1e-12, rtol=0)
    assert not dict(model.named_buffers())


def test_rules_and_words() -> None:
    c = query_config(model_config("DINOv3-B/16"), "pmt", 133)
    assert isinstance(c, PMTConfig)
    assert (c.query_blocks, c.levels, c.tapped, c.upscale) == (6, 4, (2, 5, 8, 11), 2)
    assert c.head_blocks.rotary == c.rotary
    assert (c.head_blocks.depth, c.head_blocks.layer_scale) == (6, 0.0)
    plain = query_config(model_config("ViT-B/16"), "pmt", 5).head_blocks
    assert plain is not None
    assert plain.rotary == Rotary(coordinates="unit")
    assert from_dict(to_dict(c)) == c
    assert network_name(c) == "PMT of DINOv3-B/16"
    assert c.encoder == query_config(c, "eomt", 133).encoder
    for changes in ({"levels": 0}, {"levels": 13}, {"query_blocks": 0}, {"queries": 0}, {"classes": 0}):
        with pytest.raises(ConfigError):
            replace(c, **changes)
    with pytest.raises(ConfigError):
        query_config(replace(VIT, width=12, heads=2), "pmt", 5)
    assert build(query_config(VIT, "pmt", 5, queries=3)).config.encoder == replace(VIT, classes=0, head="none")

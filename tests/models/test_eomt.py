"""Queries in the last blocks of any ViT: what they see, what they cost, and that the encoder stays what it was."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.lanes import rest_slow
from tests.models.test_walk import traced_macs
from tests.models.tiny import FEW, RESNET, VARIANTS, VIT, awake
from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.models.attention import Places, attend_masked, attention_weights, count_windows, split_windows
from vitrail.models.blocks import Block, WindowBlock
from vitrail.models.build import build, tensor_shapes
from vitrail.models.eomt import EoMT
from vitrail.models.family import from_dict, to_dict
from vitrail.models.query_configs import EoMTConfig, QueryConfig, query_config
from vitrail.models.query_network import find_hidden
from vitrail.models.query_output import QueryOutput, map_output
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import adapt_config, model_config, network_name
from vitrail.optim.config import Optim
from vitrail.optim.groups import freeze, group_parameters

VITS = {name: config for name, config in VARIANTS.items() if isinstance(config, ViTConfig)}
OPEN = {
    name: config
    for name, config in VITS.items()
    if config.attention == "full" and config.position != "relative" and config.entry == "stem"
}
CLOSED = sorted(VITS.keys() - OPEN.keys())
SOME = rest_slow(OPEN, *(name for name in FEW if name in OPEN))
SMALL: dict[str, Any] = {"queries": 7, "query_blocks": 2, "upscale": 1}


def eomt(config: ViTConfig = VIT, **changes: Any) -> EoMT:
    model = awake(query_config(config, "eomt", 5, **{**SMALL, **changes}))
    assert isinstance(model, EoMT)
    return model


def pictures(model: ViT, count: int = 2, more: tuple[int, int] = (0, 0)) -> Tensor:
    (height, width), (rows, columns), generator = model.config.image, model.config.patch_pixels, torch.Generator()
    size = height + more[0] * rows, width + more[1] * columns
    return torch.randn(count, model.config.channels, *size, generator=generator.manual_seed(0), dtype=torch.float64)


def assert_same(one: QueryOutput, other: QueryOutput, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one.classes, other.classes, atol=tolerance, rtol=0)
    torch.testing.assert_close(one.masks, other.masks, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_around_any_vit(name: str) -> None:
    model = eomt(OPEN[name])
    c = model.config
    rows, columns = c.grid
    for x in (pictures(model), pictures(model, 1, (1, 2))):
        grid = (rows, columns) if x.shape[0] == 2 else (rows + 1, columns + 2)
        if x.shape[0] == 1 and c.backbone is not None:
            continue  # its maps have sizes of their own
        out, layers = model(x), model.forward_layers(x)
        assert out.classes.shape == (len(x), 7, 6)
        assert out.masks.shape == (len(x), 7, 2 * grid[0], 2 * grid[1])
        assert len(layers) == 3
        assert_same(layers[-1], out)
        assert (layers[0].masks - layers[1].masks).abs().max() > 1e-6
        none = torch.zeros(len(x), 2, 7, dtype=torch.bool)
        assert_same(model.forward_layers(x, none)[-1], out)
        all_masked = model.forward_layers(x, ~none)
        assert_same(all_masked[0], layers[0])
        model.set_masked_blocks(2)
        assert_same(model(x), all_masked[-1])
        model.set_masked_blocks(0)


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_the_encoder_stays_what_it_was(name: str) -> None:
    model = eomt(OPEN[name])
    encoder = awake(model.config.encoder)
    encoder.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("head.")})
    x = pictures(model)
    torch.testing.assert_close(model.features(x), encoder(x), atol=0, rtol=0)
    torch.testing.assert_close(model.patch_map(x), encoder.patch_map(x), atol=0, rtol=0)
    tokens = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), model.features(x), atol=1e-12, rtol=0)
    _, found = model.forward_intermediates(x, [-1], attention=True)
    assert found.attention[0].shape == (2, 2, model.config.tokens, model.config.tokens)
    with pytest.raises(ConfigError):
        model.forward_head(tokens)


@pytest.mark.parametrize("name", rest_slow(OPEN))
def test_cost_in_closed_form(name: str) -> None:
    config = query_config(OPEN[name], "eomt", 5, queries=7, query_blocks=1, upscale=2)
    for c in (config, replace(config, masked_blocks=1)):
        assert c.parameters == sum(math.prod(shape) for shape in tensor_shapes(c).values())
        assert c.macs == traced_macs(c)
    kept = [config.activation_bytes(4, recompute=again) for again in (False, True)]
    assert config.encoder.activation_bytes(4, recompute=False) < kept[0]
    assert kept[1] < kept[0]


@pytest.mark.gpu
def test_masks_of_many_keys_compile() -> None:
    """1,225 keys: those of 200 queries and 1,025 tokens of an image of 512 px, with gradients and in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v = (draw(4, 3, 1225, 64).requires_grad_() for _ in range(3))
    logits = draw(4, 200, 1024)  # the mask is computed in the graph

    def attend(logits: Tensor) -> Tensor:
        return attend_masked(q, k, v, None, logits < 0, 0.0)

    wanted = attend(logits)
    found = torch.compile(attend, fullgraph=True)(logits)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)
    (slope,) = torch.autograd.grad(found.float().square().sum(), q)
    assert slope.isfinite().all()


@torch.no_grad()
def test_a_query_sees_its_own_mask_alone() -> None:
    """Attention written out, and a patch that is hidden from a query does not move it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 11, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    hidden = torch.rand(2, 4, 6, generator=generator) > 0.4
    bias = torch.randn(3, 11, 11, generator=generator, dtype=torch.float64)
    whole = torch.zeros(2, 1, 11, 11, dtype=torch.float64)
    whole[:, 0, :4, 5:] = hidden.double() * -1e9
    for added in (None, bias):
        wanted = attention_weights(q, k, whole if added is None else whole + added) @ v
        found = attend_masked(q, k, v, added, hidden, 0.0)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    model = eomt(query_blocks=1)
    x = pictures(model, 1)
    z, rotation = model.prepare(x, model.config.grid)
    nothing = torch.zeros(1, 7, model.config.patches, dtype=torch.bool)
    nothing[0, 3, 2] = True
    moved = z.clone()
    moved[:, 7 + model.config.prefix + 2] += torch.arange(16.0)
    before, after = (model.run_block(0, one, model.config.grid, rotation, nothing) for one in (z, moved))
    change = (before - after).abs().amax(dim=-1)[0]
    assert change[3] == 0
    assert (change[[0, 1, 2, 4, 5, 6]] > 1e-9).all()


def test_masks_are_resized_to_the_grid() -> None:
    masks = torch.tensor([[[[3.0, -1.0, -2.0, -2.0], [-1.0, -0.5, -2.0, 9.0]]]])
    assert find_hidden(masks, (1, 2)).tolist() == [[[False, False]]]
    assert find_hidden(-masks, (1, 2)).tolist() == [[[True, True]]]
    assert find_hidden(masks, (2, 4)).flatten().tolist() == [False, True, True, True, True, True, True, False]


@torch.no_grad()
def test_masked_attention_is_that_of_each_block_and_query() -> None:
    model = eomt()
    x = pictures(model)
    off = torch.zeros(2, 2, 7, dtype=torch.bool)
    first, second = off.clone(), off.clone()
    first[1, 0, 2], second[1, 1, 2] = True, True
    plain, one, two = (model.forward_layers(x, masked) for masked in (None, first, second))
    for found in (one, two):
        assert_same(map_first(found[-1]), map_first(plain[-1]))
    assert (one[1].classes - plain[1].classes).abs()[1, 2].max() > 1e-9
    assert_same(two[1], plain[1])
    assert (two[2].classes - plain[2].classes).abs()[1, 2].max() > 1e-9


def map_first(output: QueryOutput) -> QueryOutput:
    """Of the first image alone."""
    return cast(QueryOutput, map_output(output, lambda tensor: tensor[:1]))


@torch.no_grad()
def test_queries_visit_every_window() -> None:
    """Windows written out: patches see their own and the queries, queries take the mean of what they find."""
    config = replace(VITS["sam"], image=(6, 9), neck=0)
    model = awake(config)
    block = cast(WindowBlock, model.blocks[0])
    assert isinstance(block, WindowBlock)
    grid, z = config.grid, torch.randn(2, 3 + config.patches, 16, dtype=torch.float64)
    hidden = torch.rand(2, 3, config.patches) > 0.5
    for seen in (None, hidden):
        found = block.attend(z, Places(grid, ahead=3, hidden=seen), None, None)
        count = math.prod(count_windows(grid, 2))
        windows = split_windows(z[:, 3:], grid, 2).unflatten(0, (2, count))
        there = None if seen is None else split_windows(seen.transpose(1, 2), grid, 2).unflatten(0, (2, count))
        parts = []
        for one in range(count):
            own = None if there is None else there[:, one].transpose(1, 2)
            inside = torch.cat([z[:, :3], windows[:, one]], dim=1)
            places = Places((2, 2), ahead=3, hidden=own)
            parts.append(block.attention(inside, places, None, None, block.position_bias))
        torch.testing.assert_close(found[:, :3], torch.stack(parts)[:, :, :3].mean(dim=0), atol=1e-12, rtol=0)
        torch.testing.assert_close(found[:, 3], parts[0][:, 3], atol=1e-12, rtol=0)
    one = Block.attend(block, z[:, :7], Places((2, 2), ahead=3), None, None)
    whole = block.attend(z[:, :7], Places((2, 2), ahead=3), None, None)
    torch.testing.assert_close(one, whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["registers", "beit", "sam", "rotary, mixed", "dinov3"])
@torch.no_grad()
def test_queries_stand_nowhere(name: str) -> None:
    """Queries that trade places trade answers, and nothing else changes."""
    model = eomt(VITS[name])
    x, order = pictures(model), torch.tensor([3, 0, 6, 1, 2, 5, 4])
    before = model(x)
    model.head.queries.copy_(model.head.queries[order])
    after = model(x)
    torch.testing.assert_close(after.classes, before.classes[:, order], atol=1e-10, rtol=0)
    torch.testing.assert_close(after.masks, before.masks[:, order], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["learned, stem", "sam", "rotary, mixed", "eva02"])
@pytest.mark.parametrize("again", [False, True])
def test_every_parameter_learns(name: str, again: bool) -> None:
    model = eomt(OPEN[name]).train()
    model.set_grad_checkpointing(again)
    model.class_token_only = True
    masked = torch.rand(2, 2, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    outputs = model.forward_layers(pictures(model), masked)
    sum((out.classes.square().mean() + out.masks.square().mean() for out in outputs), torch.zeros(())).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_layers_weigh_and_freeze_as_in_any_network() -> None:
    model = eomt()
    names = {
        name: group
        for group in group_parameters(model, Optim(weight_decay=0.1, layer_decay=0.5))
        for name in group.params
    }
    assert names["head.queries"].weight_decay == 0
    assert names["head.queries"].rate == names["head.upscale.0.expand.weight"].rate == names["norm.weight"].rate == 1
    assert names["head.mask.layers.1.weight"].weight_decay == names["head.upscale.0.expand.weight"].weight_decay == 0.1
    assert names["head.upscale.0.norm.weight"].weight_decay == names["head.classifier.bias"].weight_decay == 0
    assert names["blocks.1.mlp.expand.weight"].rate == 0.5
    assert names["embedding.projection.weight"].rate == 0.125
    assert "head.queries" in model.no_weight_decay()
    freeze(model, Optim(freeze="all"))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("head.")
    }


@torch.no_grad()
def test_a_new_layer_of_classes() -> None:
    model = eomt()
    x = pictures(model)
    masks = model(x).masks
    model.reset_classifier(3)
    out = model(x)
    assert out.classes.shape == (2, 7, 4)
    assert not out.classes.any()
    assert torch.equal(out.masks, masks)
    assert model.num_classes == 3
    assert model.get_classifier() is model.head.classifier
    with pytest.raises(ConfigError):
        model.reset_classifier(3, "avg")
    with pytest.raises(ConfigError):
        model.reset_classifier(0)


@torch.no_grad()
def test_initial_values() -> None:
    torch.manual_seed(0)
    model = cast(EoMT, build(query_config(model_config("ViT-Ti/16"), "eomt", 20)))
    assert abs(float(model.head.queries.std()) - 1) < 0.02
    mlp: Any = model.head.mask.layers
    assert abs(float(mlp[0].weight.std()) * math.sqrt(3 * 192) - 1) < 0.02
    assert model.head.classifier.weight.shape == (21, 192)
    masks = model(torch.randn(1, 3, 32, 32)).masks
    assert 0.1 < float(masks.std()) < 10


@pytest.mark.parametrize("name", CLOSED)
def test_who_cannot_have_queries(name: str) -> None:
    with pytest.raises(ConfigError, match="pmt"):
        query_config(VITS[name], "eomt", 5, query_blocks=1)


def test_rules_of_the_config() -> None:
    c = query_config(VIT, "eomt", 5, queries=7)
    assert (c.query_blocks, c.upscale, c.masked_blocks, c.head) == (2, 1, 0, "queries")
    assert query_config(model_config("ViT-S/16"), "eomt", 133).upscale == 2
    assert query_config(model_config("DINOv2-S/14"), "eomt", 133).upscale == 1
    bad: list[dict[str, Any]] = [
        {"queries": 0}, {"query_blocks": 0}, {"query_blocks": 3}, {"upscale": -1}, {"masked_blocks": 3}, {"classes": 0},
        {"head": "linear"}, {"pool": "map"}, {"projection": 4}, {"norm_final": False}, {"masked_blocks": -1},
        {"queries": 1.0}, {"upscale": 9},
    ]  # fmt: skip
    for changes in bad:
        with pytest.raises(ConfigError):
            replace(c, **changes)
    for config, kind in ((RESNET, "eomt"), (VIT, "maskformer")):
        with pytest.raises(ConfigError):
            query_config(config, cast(Any, kind), 5)
    with pytest.raises(ConfigError):
        replace(VIT, head="queries")
    with pytest.raises(ConfigError):
        c.linear_head(5)
    with pytest.raises(ImageSizeError):
        adapt_config(c, image_size=7)


def test_the_config_in_words_and_files() -> None:
    c = query_config(model_config("DINOv3-S/16"), "eomt", 133, queries=200)
    assert from_dict(to_dict(c)) == c
    assert isinstance(from_dict(to_dict(c)), EoMTConfig)
    assert network_name(c) == "EoMT of DINOv3-S/16"
    assert network_name(replace(c, classes=3, image=(640, 480))) == network_name(c)
    assert c.encoder == replace(model_config("DINOv3-S/16"), classes=0, head="none")
    assert c.has_queries
    assert not c.encoder.has_queries
    assert c.encoder.encoder is None
    assert dict(c.card_rows)["masks"] == "64x64"
    assert c.shape != c.encoder.shape
    assert query_config(c, "eomt", 20) == replace(c, classes=20)
    assert query_config(query_config(c, "pmt", 20), "eomt", 133, queries=200) == c
    assert adapt_config(c, classes=4).classes == 4
    assert adapt_config(c, image_size=(256, 128)).grid == (16, 8)
    assert isinstance(c, QueryConfig)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eomt", "pmt"])
def test_as_one_graph(kind: Any) -> None:
    model: Any = awake(query_config(VIT, kind, 5, queries=7, query_blocks=2, masked_blocks=1))
    x, masked = pictures(model), torch.rand(2, 2, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    with torch.no_grad():
        graph: Any = torch.compile(model, backend="eager", fullgraph=True)
        assert_same(graph(x), model(x))
    layers: Any = torch.compile(model.train().forward_layers, backend="eager", fullgraph=True)
    for one, other in zip(layers(x, masked), model.forward_layers(x, masked), strict=True):
        assert_same(one, other)


@torch.no_grad()
def test_in_half_precision() -> None:
    model = eomt(masked_blocks=1).float()
    x = pictures(model).float()
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert (out.classes.float() - wanted.classes).abs().max() < 0.1 * wanted.classes.abs().max()
    low = model.bfloat16().forward_layers(x)  # called past the hooks that cast a network's images
    assert {part.dtype for one in low for part in one} == {torch.bfloat16}

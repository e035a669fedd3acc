"""Parts of later families: what each promises by itself. That a whole network of them equals its equations is tested in
test_vit.py, against loops in numpy."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import FAMILIES, NO_CLASS_TOKEN, VARIANTS, VIT, awake, images
from vitrail.core.errors import ConfigError
from vitrail.models.attention import Attention, Places, expand_window_weights, rotate, split_windows
from vitrail.models.backbone import Taps
from vitrail.models.build import build
from vitrail.models.layers import AttentionPool, LayerScale
from vitrail.models.positions.bias import BiasTable
from vitrail.models.positions.rotary import RotaryPositions
from vitrail.models.resampling.interpolation import resize_grid
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.vit_parts import Rotary, Windows

ROTARY = {
    "index": Rotary(),
    "offset": Rotary(offset=1.0, layout="pairs", order="xy"),
    "reference": Rotary(reference=(16, 16), layout="pairs"),
    "unit": Rotary(coordinates="unit"),
    "mixed": Rotary(mixed=True, base=10.0),
}


def vit(**changes: Any) -> ViT:
    model = awake(replace(VIT, **changes))
    assert isinstance(model, ViT)
    return model


def angles(rotary: Rotary, grid: tuple[int, int] = (3, 4), **changes: Any) -> Tensor:
    """Cosines and sines of all tokens: [2, T, D_h], of mixed ones [depth, 2, heads, T, D_h]."""
    torch.manual_seed(0)
    module = RotaryPositions(replace(VIT, rotary=rotary, **changes), rotary)
    with torch.no_grad():
        module.initialise()
        return module.eval()(grid, torch.empty(0))


# Rotary positions


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_logits_depend_on_the_difference_of_places_alone(kind: str) -> None:
    """The same query and key everywhere: the product of two places is that of two others as far apart."""
    rotation = angles(ROTARY[kind], (5, 6), class_token=False, pool="mean")
    rotation = rotation[0, :, 1] if ROTARY[kind].mixed else rotation  # one layer, one head
    pairs = ROTARY[kind].layout == "pairs"
    q, k = (rotate(torch.randn(8).expand(30, 8), rotation, pairs=pairs) for _ in range(2))
    logits = (q @ k.T).view(5, 6, 5, 6)
    torch.testing.assert_close(logits[1:, 2:, 1:, 2:], logits[:-1, :-2, :-1, :-2], atol=1e-5, rtol=0)
    assert logits[0, 0].std() > 0.05


@pytest.mark.parametrize("kind", ROTARY)
def test_turning_keeps_lengths_and_leaves_the_first_tokens_alone(kind: str) -> None:
    rotation = angles(ROTARY[kind], registers=2)
    one = rotation[0] if ROTARY[kind].mixed else rotation
    cosine, sine = one[..., :3, :]
    assert torch.equal(cosine, torch.ones_like(cosine))
    assert not sine.any()
    assert one[1, ..., 3:, :].any()
    z = torch.randn(2, 15, 8)
    torch.testing.assert_close(rotate(z, one, pairs=ROTARY[kind].layout == "pairs").norm(dim=-1), z.norm(dim=-1))


def test_unit_coordinates_are_places_on_the_image_whatever_its_size() -> None:
    """The centre of a patch is the centre of the middle one of the nine that a finer grid has there."""
    coarse, fine = (angles(ROTARY["unit"], grid, **NO_CLASS_TOKEN) for grid in ((2, 3), (6, 9)))
    middle = fine.unflatten(1, (6, 9))[:, 1::3, 1::3].flatten(1, 2)
    torch.testing.assert_close(coarse, middle, atol=1e-5, rtol=0)


def test_a_reference_grid_stretches_indices_to_it() -> None:
    plain, twice = Rotary(), Rotary(reference=(6, 8))
    steps = torch.arange(4) * 2
    assert torch.equal(
        angles(twice, (3, 4), **NO_CLASS_TOKEN)[:, :4], angles(plain, (1, 8), **NO_CLASS_TOKEN)[:, steps]
    )


def test_coordinates_vary_in_training_alone_and_by_the_seed() -> None:
    config = replace(VARIANTS["dinov3"], rotary=Rotary(coordinates="unit", shift=0.2, jitter=1.5, rescale=2.0))
    model, x = awake(config), images(config)
    plain = model(x)
    assert torch.equal(model(x), plain)
    outputs: list[Tensor] = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outputs.append(model.train()(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], plain)
    assert torch.equal(model.eval()(x), plain)


@pytest.mark.parametrize(("field", "value", "least", "most"), [("shift", 0.2, -0.2, 0.2), ("rescale", 2.0, 0.5, 2.0)])
def test_how_far_coordinates_vary(field: str, value: float, least: float, most: float) -> None:
    rotary = Rotary(coordinates="unit", **{field: value})
    module = RotaryPositions(replace(VIT, rotary=rotary), rotary)
    where = torch.device("cpu")
    plain = module.eval().coordinates((2, 4), where)
    moved = torch.stack([module.train().coordinates((2, 4), where) for _ in range(200)])
    change = moved - plain if field == "shift" else moved / plain
    assert least <= change.min() < least + 0.1 * (most - least)
    assert most - 0.1 * (most - least) < change.max() <= most
    torch.testing.assert_close(change, change[:, :1].expand_as(change))  # the same for all patches
    together = torch.allclose(change[..., 0], change[..., 1])
    assert together == (field == "rescale")


@pytest.mark.parametrize("name", ["dinov3", "rotary, mixed", "eva02"])
@torch.no_grad()
def test_dropped_tokens_are_as_if_nobody_looked_at_them(name: str) -> None:
    model, x = vit(**FAMILIES[name]), images(VIT)
    keep = torch.tensor([[7, 0, 2, 11], [1, 3, 4, 10]])
    prefix = model.config.prefix
    found = model.forward_blocks(model.embed(x, keep=keep), keep=keep)
    for picture in range(2):
        seen = torch.cat([torch.arange(prefix), prefix + keep[picture]])
        mask = torch.full((model.config.tokens,), -math.inf, dtype=x.dtype)
        mask[seen] = 0.0
        z = model.embed(x[picture : picture + 1])
        assert model.rotary is not None
        rotation = model.rotary(model.config.grid, z)
        for layer, block in enumerate(model.blocks):
            own = rotation[layer] if rotation.ndim > 3 else rotation
            z = block(z, Places(model.config.grid, rotation=own, bias=mask.expand(2, len(mask), -1)))
        torch.testing.assert_close(found[picture], z[0, seen], atol=1e-9, rtol=0)


# Biases, norms, scales


def test_keys_without_a_bias_of_their_own() -> None:
    module = Attention(16, 2, key_bias=False)
    module.initialise()
    assert module.qkv.bias.shape == (32,)
    nn.init.normal_(module.qkv.bias)
    q, k, v = module.qkv(torch.zeros(1, 16)).chunk(3, dim=-1)
    assert torch.equal(torch.cat([q, v], dim=-1)[0], module.qkv.bias)
    assert not k.any()
    few = module.project(torch.zeros(1, 5, 16), queries=2)
    whole = module.project(torch.zeros(1, 5, 16))
    torch.testing.assert_close(few[0], whole[0][:, :, :2])
    torch.testing.assert_close(few[1:], whole[1:])


def test_a_fresh_layer_scale_leaves_all_but_nothing_of_the_layers() -> None:
    model = build(replace(VIT, layer_scale=1e-6)).double()
    scales = [part.gamma for part in model.modules() if isinstance(part, LayerScale)]
    assert len(scales) == 4
    torch.testing.assert_close(torch.stack(scales), torch.full((4, 16), 1e-6, dtype=torch.float64))
    x = images(VIT)
    torch.testing.assert_close(model.encode(x), model.embed(x), atol=1e-4, rtol=0)


def test_layer_scale_multiplies_each_channel_of_a_branch() -> None:
    """A scale is the same as rows of the branch's last matrix times it."""
    scaled, plain = vit(layer_scale=0.5), vit()
    tensors = dict(scaled.state_dict())
    for block in ("blocks.0", "blocks.1"):
        for gamma, last in (("scale_attention", "attention.out"), ("scale_mlp", "mlp.contract")):
            factor = tensors.pop(f"{block}.{gamma}.gamma")
            tensors[f"{block}.{last}.weight"] = factor[:, None] * tensors[f"{block}.{last}.weight"]
            tensors[f"{block}.{last}.bias"] = factor * tensors[f"{block}.{last}.bias"]
    plain.load_state_dict(tensors)
    x = images(VIT)
    torch.testing.assert_close(scaled(x), plain(x), atol=1e-12, rtol=0)


def test_bias_tables_know_offsets_alone() -> None:
    table = BiasTable(replace(VIT, position_bias="table"))
    table.initialise()
    bias = table(torch.empty(0), (3, 4))[:, 1:, 1:].unflatten(2, (3, 4)).unflatten(1, (3, 4))
    assert torch.equal(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1])
    assert bias.unique().numel() == 2 * 5 * 7


def test_a_bias_table_of_another_grid_is_resampled() -> None:
    model = vit(position_bias="table")
    other = replace(model.config, image=(10, 18))
    x = torch.randn(2, 3, 10, 18, dtype=torch.float64)
    twin = build(other).double().eval()
    twin.load_state_dict(ViT.resize_tensors(dict(model.state_dict()), model.config, other))
    torch.testing.assert_close(model(x), twin(x), atol=1e-9, rtol=0)


@torch.no_grad()
def test_a_position_grid_of_its_own_is_resampled_in_every_pass() -> None:
    model, plain = vit(position_grid=(2, 3), position_resample="bicubic"), vit()
    tensors = dict(model.state_dict())
    name = "position.tables.0.table"
    first, grid = tensors[name][0].split([1, 6])
    tensors[name] = torch.cat([first, resize_grid(grid.unflatten(0, (2, 3)), (3, 4), "bicubic").flatten(0, 1)])[None]
    plain.load_state_dict(tensors)
    x = images(VIT)
    torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)


# Windows


@pytest.mark.parametrize("bias", ["none", "decomposed"])
def test_a_window_as_large_as_the_grid_is_full_attention(bias: str) -> None:
    square = {**NO_CLASS_TOKEN, "image": (8, 12), "position_bias": bias}  # 4x4 patches
    windows, whole = vit(**square, windows=Windows(size=4)), vit(**square)
    whole.load_state_dict(windows.state_dict())
    x = images(windows.config)
    torch.testing.assert_close(windows(x), whole(x), atol=1e-12, rtol=0)


def test_windows_do_not_see_each_other() -> None:
    model = vit(**NO_CLASS_TOKEN, windows=Windows(size=2))
    x = images(VIT).requires_grad_()
    model.encode(x)[0, 0].sum().backward()  # the first patch, in the first window of 2x2
    assert x.grad is not None
    seen = x.grad[0].abs().sum(0).unflatten(1, (4, 3)).unflatten(0, (3, 2)).sum((1, 3)) > 0
    assert seen.tolist() == [[True, True, False, False], [True, True, False, False], [False] * 4]


@torch.no_grad()
def test_weights_of_windows_over_all_tokens() -> None:
    """As in a network whose tokens may see all, but give nothing to those of other windows."""
    model = vit(**NO_CLASS_TOKEN, windows=Windows(size=2), image=(8, 12))
    taps = Taps(attention=True)
    x = images(model.config)
    model.encode(x, taps=taps)
    place = torch.arange(16)
    window = place // 4 // 2 * 2 + place % 4 // 2
    for tap in taps.layers:
        weights = tap.attention
        assert weights.shape == (2, 2, 16, 16)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert not weights[:, :, window[:, None] != window[None]].any()
        torch.testing.assert_close(tap.mean_attention, weights.mean(1))
        assert tap.inside is not None
        v = tap.inside.v  # [B·windows, k, 4, D_h]
        mixed = (weights @ torch.stack([_place_values(v, image, head, (4, 4)) for image, head in _each(2, 2)]).view(
            2, 2, 16, -1
        ))  # fmt: skip
        inside = tap.inside.weights @ v
        wanted = torch.stack([_place_values(inside, image, head, (4, 4)) for image, head in _each(2, 2)])
        torch.testing.assert_close(mixed, wanted.view_as(mixed))


def _each(images: int, heads: int) -> list[tuple[int, int]]:
    return [(image, head) for image in range(images) for head in range(heads)]


def _place_values(values: Tensor, image: int, head: int, grid: tuple[int, int]) -> Tensor:
    """Values of windows [B·4, k, 4, X] in raster order of a 4x4 grid: [16, X]."""
    out = values.new_zeros(*grid, values.shape[-1])
    for window in range(4):
        for at in range(4):
            row, column = window // 2 * 2 + at // 2, window % 2 * 2 + at % 2
            out[row, column] = values[image * 4 + window, head, at]
    return out.flatten(0, 1)


def test_what_padding_gets_is_left_out() -> None:
    grid, size = (3, 4), 2
    z = torch.randn(1, 12, 5)
    windows = split_windows(z, grid, size)
    assert windows.shape == (4, 4, 5)
    assert not windows[2:, 2:].any()  # the row below the grid
    weights = torch.full((4, 2, 4, 4), 0.25)
    whole = expand_window_weights(weights, grid, size)
    assert torch.equal(whole.sum(-1)[0, 0].view(3, 4), torch.tensor([[1.0] * 4, [1.0] * 4, [0.5] * 4]))


# Pooling and heads


def test_attention_pooling_of_patches_alone_does_not_see_the_prefix() -> None:
    config = vit_config(VARIANTS["sbb"])
    pool = AttentionPool(config).requires_grad_(False)
    for parameter in pool.parameters():
        nn.init.normal_(parameter, std=0.3)
    z = torch.randn(2, config.tokens, config.width)
    other = z.clone()
    other[:, : config.prefix] += 1
    shares = pool.weights(z)
    assert torch.equal(pool(z), pool(other))
    assert not shares[..., : config.prefix].any()
    torch.testing.assert_close(shares.sum(-1), torch.ones(shares.shape[:-1]))


@pytest.mark.parametrize("heads", [0, 4])
def test_attention_pooling_is_torchs_attention(heads: int) -> None:
    config = replace(VARIANTS["siglip"], map_heads=heads)
    assert isinstance(config, ViTConfig)
    pool = AttentionPool(config).double()
    for part in pool.modules():
        if callable(own := getattr(part, "initialise", None)):
            own()
    for parameter in pool.parameters():
        nn.init.normal_(parameter, std=0.3)
    torchs = nn.MultiheadAttention(16, heads or 2, batch_first=True, dtype=torch.float64)
    assert pool.q is not None
    torchs.load_state_dict(
        {
            "in_proj_weight": torch.cat([pool.q.weight, pool.kv.weight]),
            "in_proj_bias": torch.cat([pool.q.bias, pool.kv.bias]),
            "out_proj.weight": pool.out.weight,
            "out_proj.bias": pool.out.bias,
        }
    )
    z = torch.randn(3, 12, 16, dtype=torch.float64)
    y, weights = torchs(pool.query.expand(3, -1, -1), z, z, average_attn_weights=False)
    assert pool.norm is not None
    assert pool.mlp is not None
    torch.testing.assert_close(pool(z), y[:, 0] + pool.mlp(pool.norm(y[:, 0])))
    torch.testing.assert_close(pool.weights(z), weights[:, :, 0])


def test_token_and_mean_stand_side_by_side() -> None:
    model = vit(pool="token+mean", registers=2)
    x = images(VIT)
    tokens = model.forward_features(x)
    assert model.num_features == 32
    assert model.embed_dim == 16
    torch.testing.assert_close(model.features(x), torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1))


def test_a_distilled_head_averages_what_two_tokens_say() -> None:
    model = vit(**FAMILIES["deit, distilled"])
    x = images(VIT)
    tokens = model.forward_features(x)
    logits = [tokens[:, at] @ layer.weight.T + layer.bias for at, layer in enumerate(model.head.children())]
    torch.testing.assert_close(model(x), (logits[0] + logits[1]) / 2, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.features(x), tokens[:, :2].mean(1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_linear_head_reads_what_its_config_says(name: str) -> None:
    """A projection is part of the old head; the pooling stays."""
    config = VARIANTS[name]
    model, x = awake(config), images(config)
    body = model.forward_features(x)
    model.reset_classifier(7, "mean" if config.has_patch_head else None)
    assert torch.equal(model.forward_features(x), body)
    assert model(x).shape == (2, 7)
    assert model.get_classifier().in_features == model.num_features == model.features(x).shape[1]
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in build(model.config).state_dict().items()
    }


# Training


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputed_blocks_give_the_same_gradients(name: str) -> None:
    config = VARIANTS[name]
    model, x = awake(config).train(), images(config)
    found: list[list[Tensor]] = []
    for again in (False, True):
        model.set_grad_checkpointing(again)
        loss = model(x).square().sum()
        found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)


KEPT = ("dinov2, registers", "dinov2, gated", "dinov3", "clip", "eva02", "eva02, post-norm", "two class tokens")


@pytest.mark.parametrize("name", KEPT)
def test_memory_is_what_the_backward_pass_reads(name: str) -> None:
    config = replace(VIT, width=32, mlp_width=128, heads=4, depth=3, image=(32, 48), patch=(8, 8), **FAMILIES[name])
    model, kept = build(config).train(), dict[int, int]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images(config, batch=8, dtype=torch.float32))
    assert output.isfinite().all()
    assert sum(kept.values()) / 8 == pytest.approx(config.activation_bytes(4, recompute=False), rel=0.12)


def test_stochastic_depth_drops_whole_branches_of_later_parts() -> None:
    config = replace(VARIANTS["eva02"], stochastic_depth=0.9, layer_scale=0.5)
    assert isinstance(config, ViTConfig)
    model = vit(**{name: getattr(config, name) for name in (*config.parts, "stochastic_depth", "pool")}).train()
    x = images(VIT, batch=64)
    z, before = model.encode(x), model.embed(x)
    first = model.forward_blocks(before, last=1)
    kept = (z - first).flatten(1).abs().amax(1) > 0
    assert 0 < int(kept.sum()) < 32


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(name: str) -> None:
    """Under autocast, with a gradient, and in weights of bfloat16."""
    config = VARIANTS[name]
    model, x = awake(config, torch.float32), images(config, dtype=torch.float32)
    exact = model(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
        low = model(x).detach()
    assert all(parameter.grad is not None for parameter in model.parameters())
    half = model.to(torch.bfloat16)(x.bfloat16()).detach()
    assert half.dtype == torch.bfloat16
    for found in (low, half):
        assert (found - exact).abs().max() < 0.1 * exact.abs().max()


def test_what_goes_with_what() -> None:
    for changes in (
        {"rotary": Rotary(), "head_width": 6},
        {"windows": Windows(size=2)},
        {"windows": Windows(size=2, whole=(2,)), **NO_CLASS_TOKEN},
        {"position_bias": "decomposed"},
        {"position_bias": "table", "registers": 1},
        {"head": "distilled"},
        {"pool": "token+mean", "class_token": False},
        {"pool": "map", "map_heads": 3},
        {"register_positions": True, "registers": 1, "position": "none"},
        {"neck": 4},
        {"head": "patches", "pool": "map"},
        {"head": "patches", "projection": 8},
        {"rotary": Rotary(), "position": "relative"},
    ):
        with pytest.raises(ConfigError):
            replace(VIT, **changes)
    for changes in ({"base": 1.0}, {"rescale": 2.0}, {"coordinates": "unit", "offset": 1.0}, {"reference": (0, 2)}):
        with pytest.raises(ConfigError):
            Rotary(**changes)

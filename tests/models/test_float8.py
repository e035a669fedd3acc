"""Products that read eight bits: with types of all digits they are the plain layers, and with their own they are near
them. Kernels are checked where there is a GPU, and through Triton's interpreter where there is not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.test_every_variant import gradients
from tests.models.test_fused import BACKENDS, GPU, run_interpreted
from tests.models.tiny import VIT, awake, images
from tests.train.tiny import MODEL, tiny_run
from vitrail.core.errors import ConfigError
from vitrail.distributed.parallel import parallelise
from vitrail.distributed.process_group import World
from vitrail.models import attention, blocks
from vitrail.models.build import Model, build_on_meta
from vitrail.models.kernels import float8_layers
from vitrail.models.kernels import float8_ops as eight
from vitrail.models.kernels import fused_ops as fused
from vitrail.models.vit_config import Rotary
from vitrail.train.data import open_splits
from vitrail.train.resolve import resolve

CONFIG = replace(VIT, width=32, mlp_width=64, heads=2, gelu="erf")
CHANGES = pytest.mark.parametrize(
    "changes",
    [{}, {"gelu": "tanh"}, {"gated": True, "norm_inner_attention": True, "out_bias": False}, {"rotary": Rotary()}],
    ids=str,
)
EXACT = torch.float64
HALF_STEP = {eight.ACTIVATIONS: 1 / 16, eight.GRADIENTS: 1 / 8}  # largest relative error of rounding


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wherever they could stand, also on a CPU, where the operators are written out."""
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    monkeypatch.setattr(attention, "can_fuse_attention", lambda _z, _layer, _heads: torch.is_grad_enabled())


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    """As if eight bits had all digits."""
    del always
    for name in ("ACTIVATIONS", "GRADIENTS"):
        monkeypatch.setattr(eight, name, EXACT)


@BACKENDS
@CHANGES
@pytest.mark.usefixtures("exact")
def test_without_rounding_it_is_the_plain_network(changes: dict[str, object], backend: str | None) -> None:
    model, x = awake(replace(CONFIG, **changes)).train(), images(CONFIG)
    wanted = gradients(model, model, x)
    model.float8 = True
    torch.compiler.reset()
    found = gradients(model, model if backend is None else torch.compile(model, fullgraph=True, backend=backend), x)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-10, rtol=1e-10)


@CHANGES
@pytest.mark.usefixtures("exact")
@torch.no_grad()
def test_without_rounding_inference_is_the_plain_one(changes: dict[str, object]) -> None:
    model, x = awake(replace(CONFIG, **changes, layer_scale=0.3)).eval(), images(CONFIG)
    wanted = model.forward_features(x)
    model.float8 = True
    torch.testing.assert_close(model.forward_features(x), wanted, atol=1e-12, rtol=1e-12)


@CHANGES
@pytest.mark.usefixtures("always")
def test_rounded_gradients_point_where_the_exact_ones_do(changes: dict[str, object]) -> None:
    model, x = awake(replace(CONFIG, **changes)).train(), images(CONFIG, batch=8)
    out, grads = gradients(model, model, x)
    model.float8 = True
    again, found = gradients(model, model, x)
    assert 1e-6 < (again - out).norm() / out.norm() < 0.1
    wanted, mine = (torch.cat([part.flatten() for part in some.values()]) for some in (grads, found))
    assert F.cosine_similarity(wanted, mine, dim=0) > 0.98
    assert 0.95 < mine.norm() / wanted.norm() < 1.05


@pytest.mark.usefixtures("always")
def test_products_read_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of the last layer, where the class token alone is computed."""
    seen, whole = list[tuple[torch.dtype, torch.dtype]](), eight.multiply

    def multiply(a: Tensor, b: Tensor, *more: Any, fast: bool) -> Tensor:
        seen.append((a.dtype, b.dtype))
        return whole(a, b, *more, fast=fast)

    monkeypatch.setattr(eight, "multiply", multiply)
    model = awake(CONFIG).train()
    model.class_token_only, model.float8 = True, True
    model(images(CONFIG)).sum().backward()
    layers = 4 * (CONFIG.depth - 1)
    forward, backward = (eight.ACTIVATIONS, eight.ACTIVATIONS), (eight.GRADIENTS, eight.ACTIVATIONS)
    assert seen == [forward] * layers + [backward] * 2 * layers


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"gated": True, "registers": 2}, ""),
        ({"width": 24, "heads": 3}, "24 and 72 are no multiples of 16"),
        ({"dropout": 0.1}, "drops at random"),
        ({"stochastic_depth": 0.1}, "drops at random"),
        ({"layer_scale": 0.1}, "LayerScale"),
        ({"norm": "rms"}, "norms"),
        ({"norm_order": "res-post"}, "plain"),
        ({"placement": "every"}, "positions"),
        ({"attention": "axial", "class_token": False, "pool": "mean"}, "plain"),
    ],
)
def test_networks_that_cannot_read_eight_bits_say_why(changes: dict[str, Any], text: str) -> None:
    found = build_on_meta(replace(CONFIG, **changes)).float8_obstacle()
    assert text in found
    assert bool(text) == bool(found)


def test_what_can_read_eight_bits_takes_a_stream(always: None) -> None:
    """The obstacles named are those that keep a layer from it."""
    del always
    for changes in ({}, {"gated": True, "registers": 2}, {"norm_qk": True}, {"rotary": Rotary()}):
        model = awake(replace(CONFIG, **changes)).train()
        assert not model.float8_obstacle()
        assert all(block.can_fuse(model.embed(images(CONFIG))) for block in model.blocks)


def test_precision_fp8_is_bfloat16_and_eight_bits() -> None:
    objective = nn.Module()
    objective.network = awake(CONFIG, torch.float32)
    world = World(device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="recompute"):
        parallelise(objective, world=world, precision="fp8", recompute=True)
    whole = parallelise(objective, world=world, precision="fp8")
    assert objective.network.float8
    seen = whole.evaluate_with(lambda network, _x: next(network.parameters()).dtype, images(CONFIG))
    assert seen == torch.bfloat16


def test_a_device_that_cannot_is_refused() -> None:
    assert "GPU" in float8_layers.float8_obstacle(torch.device("cpu"))
    run = tiny_run(model=replace(MODEL, dropout=0.0, stochastic_depth=0.0), precision="fp8")
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolve(run, open_splits(run.data), World(device=torch.device("cpu")))


def test_weights_are_rounded_by_their_largest() -> None:
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    for part in (weight, weight.bfloat16(), weight * 1e20, weight * 1e-20):
        rounded, scale = float8_layers.round_weight(part)
        assert rounded.float().abs().max() == eight.LARGEST
        error = (rounded.float() * scale - part).abs() / part.float().abs().clamp_min(part.float().abs().max() / 2**14)
        assert error.max() < HALF_STEP[eight.ACTIVATIONS] + 1e-3
    rounded, scale = float8_layers.round_weight(torch.zeros(16, 16))
    assert not (rounded.float() * scale).any()


def check_rounding(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]) -> None:
    """Scales, casts, and the eight bits that other kernels write: those of what they write in full."""
    from vitrail.models.kernels import attention_kernels, float8_kernels, gelu_kernels, norm_kernels

    draw = torch.Generator().manual_seed(5)
    for rows, columns in shapes:
        x, g, k = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(3))
        sizes = (eight.SAMPLED_ROWS, eight.SAMPLED_COLUMNS)
        for part in (x, x[:, columns // 2 :]):
            found = float8_kernels.sample_scale(part, 28.0, *sizes)
            torch.testing.assert_close(found.cpu(), eight.sample_scale(part.cpu().float(), 28.0), atol=0, rtol=1e-5)
        weight, shift = g[0] + 2, k[0]
        scale = float8_kernels.norm_scale(weight, shift, eight.LARGEST)
        torch.testing.assert_close(
            scale.cpu(), eight.norm_scale(weight.cpu().float(), shift.cpu().float(), eight.LARGEST), atol=0, rtol=1e-5
        )
        for kind in HALF_STEP:
            check_same(x, float8_kernels.round_scaled(x, scale, kind), scale)
        for added in (None, g[-1]):
            total, normed, _ = norm_kernels.add_norm(x, g, added, weight, shift, 1e-5)
            again, low, _ = norm_kernels.add_norm_float8(x, g, added, weight, shift, 1e-5, scale)
            check_near(again, total)
            check_same(normed, low, scale)
        padded = eight.pad_rows(x)
        each, of_x = fused.rows_per_program(rows, columns), float8_kernels.sample_scale(x, 28.0, *sizes)
        for tanh in (False, True):
            check_same(gelu_kernels.gelu(x, tanh), gelu_kernels.gelu_float8(x, tanh, of_x), of_x)
            low, turned = gelu_kernels.gelu_turned_float8(x, tanh, of_x, padded)
            check_turned(gelu_kernels.gelu_float8(x, tanh, of_x), low, turned)
            grad, sums = gelu_kernels.gelu_backward(g, x, tanh, each)
            same, low, turned = gelu_kernels.gelu_backward_float8(g, x, tanh, eight.rows_per_sum(x), of_x, padded)
            check_near(same.sum(0), sums.sum(0))
            check_same(grad, low, of_x)
            check_turned(low, low, turned)
        check_turned(float8_kernels.round_scaled(g, of_x, eight.GRADIENTS),
                     *float8_kernels.round_turned(g, of_x, eight.GRADIENTS, padded))  # fmt: skip
        sums, low = attention_kernels.concat_qkv_grad_float8(x, g, k, each, of_x)
        joined, same = attention_kernels.concat_qkv_grad(x, g, k, each)
        check_near(sums, same)
        check_same(joined, low, of_x)
        for part in (low, low[:1], low[: max(rows - 3, 1), : columns // 16 * 16].contiguous()):
            wanted = eight.turn(part.cpu()).view(torch.uint8)
            assert torch.equal(float8_kernels.turn(part, wanted.shape[1]).view(torch.uint8).cpu(), wanted)


def check_turned(wanted: Tensor, low: Tensor, turned: Tensor) -> None:
    """Both are the wanted bytes: as they are, and transposed and padded with zeros."""
    assert torch.equal(low.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(turned.cpu().view(torch.uint8), eight.turn(low.cpu()).view(torch.uint8))


def check_near(found: Tensor, wanted: Tensor) -> None:
    """Equal, but for how a compiler joins products and sums: in the last digit, and where large numbers cancel."""
    digit, size = torch.finfo(wanted.dtype).eps, float(wanted.double().abs().nan_to_num(0).max())
    atol = size * max(digit / 16, 1e-5)
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=2 * digit, equal_nan=True)


def check_same(full: Tensor, low: Tensor, scale: Tensor) -> None:
    """Eight bits are those of the tensor in full, but for its own rounding and for what is too small for them. Triton's
    interpreter rounds some values wrongly: those that carry into the next power of two, and subnormal ones."""
    kind, exact = low.dtype, full.double()
    back, least = low.double() * scale[0].double(), torch.finfo(kind).tiny * scale[0].double()
    room = exact.abs().clamp_min(least) * (HALF_STEP[kind] + 2 * torch.finfo(full.dtype).eps) + least / 1e6
    right = ((back - exact).abs() <= room) | full.isnan()
    assert right.all() or (not full.is_cuda and right.double().mean() > 0.9)


def check_extremes(device: str) -> None:
    """What is beyond the range is its end, NaN stays NaN, and scales are made of finite numbers."""
    from vitrail.models.kernels import float8_kernels

    x = torch.ones(40, 16, device=device)
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30])
    scale = float8_kernels.sample_scale(x[1:], 28.0, eight.SAMPLED_ROWS, eight.SAMPLED_COLUMNS)
    assert scale.tolist() == pytest.approx([1 / 28, 28])
    for kind in HALF_STEP:
        low = float8_kernels.round_scaled(x, scale, kind).float()
        end = torch.finfo(kind).max
        assert low[0, [0, 1, 3]].tolist() == [end, -end, end]
        assert low[0, 2].isnan() or device == "cpu"  # the interpreter makes a number of it
        assert (low[1:] == 28).all()
    x[0, 3] = 3.0
    found = float8_kernels.sample_scale(x, 28.0, eight.SAMPLED_ROWS, eight.SAMPLED_COLUMNS)
    assert found.tolist() == pytest.approx([3 / 28, 28 / 3])
    zero = float8_kernels.sample_scale(x * 0, 28.0, eight.SAMPLED_ROWS, eight.SAMPLED_COLUMNS)
    assert zero.isfinite().all()


def check_attention(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]) -> None:
    from vitrail.models.kernels import attention_kernels

    draw = torch.Generator().manual_seed(3)
    for tokens, heads, head in shapes:
        qkv = 2 * torch.randn(3, tokens, 3 * heads * head, generator=draw).to(device, dtype)
        g = torch.randn(3, tokens, heads * head, generator=draw).to(device, dtype)
        scale = torch.tensor([0.25, 4.0], device=device)
        out, logs = attention_kernels.attention(qkv, heads)
        again, same, low = attention_kernels.attention_float8(qkv, heads, scale)
        check_near(again, out)
        check_near(same, logs)
        check_same(out, low, scale)
        grads, sums = attention_kernels.attention_backward(qkv, out, g, logs, heads)
        same, low = attention_kernels.attention_backward_float8(qkv, out, g, logs, heads, scale)
        check_near(same, sums)
        check_same(grads, low, scale)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the switch when it is imported."""
    run_interpreted(
        "from tests.models.test_float8 import *; check_rounding('cpu', torch.float32, [(5, 16), (260, 48)]); "
        "check_extremes('cpu'); check_attention('cpu', torch.float32, [(1, 2, 64), (65, 2, 16)])"
    )


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    check_rounding("cuda", dtype, [(5, 16), (257, 272), (1000, 768), (33000, 48)])
    check_extremes("cuda")
    if dtype == torch.bfloat16:
        check_attention("cuda", dtype, [(1, 2, 64), (65, 3, 32), (197, 12, 64), (256, 2, 64)])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", ["few", "many"])
def test_training_with_eight_bits_on_a_gpu(tokens: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as near to float64's as when everything is written out, also where attention is torch's own: errors
    of rounding differ by up to a quarter from one draw of this network to another."""
    torch.manual_seed(0)
    side = 4 if tokens == "few" else 17
    config = replace(CONFIG, width=64, mlp_width=256, image=(side * CONFIG.patch[0], side * CONFIG.patch[1]))
    exact, model = awake(config).train(), awake(config, torch.bfloat16).train().cuda()
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    x, along = images(config, batch=32).bfloat16(), torch.randn(32, config.classes)

    def step(network: Model, run: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        network.zero_grad()
        (run(pixels).double().cpu() * along).sum().backward()
        return torch.cat([p.grad.double().cpu().flatten() for p in network.parameters() if p.grad is not None])

    wanted = step(exact, exact, x.double())
    exact.float8 = model.float8 = True
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    found = step(model, run, x.cuda())
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    monkeypatch.setattr(attention, "can_fuse_attention", lambda *_: tokens == "few")
    written_out = step(exact, exact, x.double())
    assert not torch.equal(found, wanted)
    assert (found - wanted).norm() < 1.5 * (written_out - wanted).norm()

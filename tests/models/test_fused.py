"""The layers with one-pass backward passes are the plain layers; the kernels are checked where there is a GPU, and
through Triton's interpreter where there is not."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.models.test_every_variant import gradients
from tests.models.tiny import VIT, awake, images
from vitrail.distributed.parallel import parallelise
from vitrail.distributed.process_group import World
from vitrail.models import attention, blocks, layers, query_head, streams
from vitrail.models.build import Model, build_on_meta
from vitrail.models.kernels import fused_ops as fused
from vitrail.models.vit_config import Rotary

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
# torch.compile makes an object of what it traces, and torch warns of that.
INSTANCE = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BACKENDS = pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[INSTANCE, pytest.mark.slow])])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layers wherever they could stand, also on a CPU, where their operators are written out."""
    choose(monkeypatch, True)


def choose(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    for module in (attention, layers):
        monkeypatch.setattr(module, "can_fuse_linear", lambda _z, _layer: fused)
    monkeypatch.setattr(attention, "can_fuse_attention", lambda _z, _layer, _heads: fused)


def plain_and_fused(
    model: Model, x: Tensor, monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    found = [gradients(model, model, x)]
    choose(monkeypatch, True)
    torch.compiler.reset()
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    return [*found, gradients(model, run, x)]


@BACKENDS
@pytest.mark.parametrize(("gelu", "position"), [("tanh", "relative"), ("erf", "relative"), ("erf", "learned")])
def test_whole_network_is_the_same(
    monkeypatch: pytest.MonkeyPatch, gelu: str, position: str, backend: str | None
) -> None:
    config = replace(VIT, gelu=gelu, position=position)
    (out, grads), (again, again_grads) = plain_and_fused(awake(config).train(), images(config), monkeypatch, backend)
    torch.testing.assert_close(again, out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(again_grads, grads, atol=1e-10, rtol=1e-10)


@BACKENDS
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_scale": 0.3}, {"norm_inner_attention": True, "out_bias": False}, {"rotary": Rotary()}],
    ids=str,
)
@torch.no_grad()
def test_inference_adds_to_one_stream(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], backend: str | None
) -> None:
    config = replace(VIT, **changes)
    model, x, seen = awake(config).eval(), images(config), list[int]()
    z = model.embed(x)
    wanted, before = model.forward_blocks(z), z.clone()
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    whole = fused.add_product
    monkeypatch.setattr(streams, "add_product", lambda *args: (seen.append(1), whole(*args))[1])
    torch.compiler.reset()
    found = (
        model.forward_blocks(z)
        if backend is None
        else torch.compile(model.forward_blocks, fullgraph=True, backend=backend)(z)
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    assert torch.equal(z, before)
    assert len(seen) == 2 * VIT.depth or backend


@BACKENDS
@pytest.mark.parametrize(
    "changes", [{}, {"norm_inner_attention": True, "out_bias": False}, {"rotary": Rotary(), "mlp_bias": False}], ids=str
)
def test_training_sums_and_normalises_at_once(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], backend: str | None
) -> None:
    config = replace(VIT, **changes)
    model, x, seen = awake(config).train(), images(config), list[int]()
    wanted = gradients(model, model, x)
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    whole = streams.fused_add_norm
    monkeypatch.setattr(streams, "fused_add_norm", lambda *args: (seen.append(1), whole(*args))[1])
    torch.compiler.reset()
    found = gradients(model, model if backend is None else torch.compile(model, fullgraph=True, backend=backend), x)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-10, rtol=1e-10)
    assert len(seen) == 2 * VIT.depth - 1 or backend


@torch.no_grad()
def test_layers_that_take_no_stream_are_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    monkeypatch.setattr(streams, "add_product", lambda *_: pytest.fail("a stream"))
    for changes in ({"norm_order": "res-post"}, {"placement": "every"}, {"attention": "axial", "class_token": False}):
        config = replace(VIT, pool="mean", **changes)
        awake(config).eval()(images(config))
    monkeypatch.setattr(streams, "fused_add_norm", lambda *_: pytest.fail("a stream"))
    with torch.enable_grad():
        for changes in ({"dropout": 0.1}, {"stochastic_depth": 0.1}, {"layer_scale": 0.1}):
            awake(replace(VIT, **changes)).train()(images(VIT))
        recomputed, again = awake(VIT).train(), awake(VIT).train()
        recomputed.set_grad_checkpointing()
        objective = nn.Module()
        objective.network = again
        parallelise(objective, world=World(device=torch.device("cpu")), recompute=True)
        for model in (recomputed, again):
            model(images(VIT))
    awake(VIT).train()(images(VIT))
    awake(VIT).eval().run_layers(images(VIT), None, norm=True, prefix=False, attention=False, qkv=False)


@torch.no_grad()
def test_a_stream_ends_where_the_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few tokens are asked for of a layer that is not among them."""
    model, x = awake(replace(VIT, depth=3)).eval(), images(VIT)
    z = model.embed(x)
    wanted = model.forward_blocks(z, last=1, queries=1)
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    torch.testing.assert_close(model.forward_blocks(z, last=1, queries=1), wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("part", ["", ".norm_mlp", ".attention", ".mlp.contract"])
def test_a_hook_is_called_with_tensors(monkeypatch: pytest.MonkeyPatch, part: str, training: bool) -> None:
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    model, seen = awake(VIT).train(training), list[object]()
    model.get_submodule("blocks.0" + part).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.set_grad_enabled(training):
        model(images(VIT))
    assert [type(output) for output in seen] == [Tensor]


@torch.no_grad()
def test_other_modules_may_stand_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "can_fuse_stream", lambda *_: True)
    model, x = awake(VIT).eval(), images(VIT)
    before = model(x)
    model.blocks[0].mlp = nn.Identity()  # pyright: ignore[reportArgumentType] - a person may
    assert (model(x) - before).abs().max() > 1e-6


@torch.no_grad()
def test_a_map_twice_as_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = query_head.Upscale(6).double(), torch.randn(2, 6, 3, 4, dtype=torch.float64)
    wanted = module(x)
    monkeypatch.setattr(query_head, "can_fuse_gelu", lambda _pre: True)
    torch.testing.assert_close(module(x), wanted, atol=1e-12, rtol=1e-12)


@BACKENDS
def test_frozen_parts_stay_without_gradients(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    model = awake(VIT).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1" in name and not name.endswith("expand.weight"))
    (_, grads), (_, again) = plain_and_fused(model, images(VIT), monkeypatch, backend)
    assert set(again) == set(grads)
    assert "blocks.1.mlp.expand.bias" in again
    torch.testing.assert_close(again, grads, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("always")
def test_fused_layers_are_there_to_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    names = ("fused_gelu_linear", "fused_qkv", "fused_attention")
    for module, name in zip((layers, attention, attention), names, strict=True):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, whole=whole: (seen.append(name), whole(*args))[1])
    awake(VIT).train()(images(VIT))
    assert [seen.count(name) for name in names] == [VIT.depth, 0, VIT.depth]
    seen.clear()
    relative = replace(VIT, position="relative")
    awake(relative).train()(images(relative))
    assert [seen.count(name) for name in names] == [VIT.depth, VIT.depth, 0]


class Elsewhere:
    """A tensor as if it lay on a GPU: what is asked of it is where it lies, of what type and of what shape it is."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype, tokens: int = 197) -> None:
        self.dtype, self.shape = dtype, (2, tokens, 32)


def test_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TRITON", True)
    half, layer = Elsewhere(torch.bfloat16), nn.Linear(32, 96).bfloat16()
    suits: object = fused.can_fuse_linear
    assert callable(suits)
    assert suits(half, layer)
    assert not suits(Elsewhere(torch.float32), layer)
    assert not suits(half, nn.Linear(32, 96))
    assert not suits(half, nn.Linear(32, 96, bias=False).bfloat16())
    assert not suits(half, nn.Linear(32, 90).bfloat16())
    assert not suits(half, nn.Linear(32, 96).bfloat16().eval())
    assert not suits(torch.ones(2, 32, dtype=torch.bfloat16), layer)
    with torch.no_grad():
        assert not suits(half, layer)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: True)
    assert not suits(half, layer)
    monkeypatch.undo()
    monkeypatch.setattr(fused, "TRITON", False)
    assert not suits(half, layer)


def test_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TRITON", True)
    monkeypatch.setattr(fused, "query_shared_memory", lambda _device: 227 * 1024)
    half, layer = Elsewhere(torch.bfloat16), nn.Linear(32, 96).bfloat16()
    attends: object = fused.can_fuse_attention
    assert callable(attends)
    assert attends(half, layer, 2)
    assert attends(Elsewhere(torch.bfloat16, tokens=256), layer, 2)
    assert not attends(Elsewhere(torch.bfloat16, tokens=257), layer, 2)
    assert not attends(half, layer, 4)  # heads of width 8
    assert not attends(half, nn.Linear(160, 480).bfloat16(), 2)
    assert not attends(Elsewhere(torch.float32), layer, 2)
    monkeypatch.setattr(fused, "query_shared_memory", lambda _device: 99 * 1024)
    assert not attends(half, layer, 2)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ["GELU", "attention", "residual sums with norms"]),
        ({"rotary": Rotary()}, ["GELU", "residual sums with norms"]),
        ({"gated": True}, ["attention", "residual sums with norms"]),
        ({"dropout": 0.1, "placement": "every"}, ["GELU", "attention"]),
        ({"image": (66, 66)}, ["GELU", "residual sums with norms"]),
        ({"attention": "axial", "class_token": False, "pool": "mean"}, []),
    ],
    ids=str,
)
def test_kernels_are_listed(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], wanted: list[str]) -> None:
    monkeypatch.setattr(fused, "TRITON", True)
    monkeypatch.setattr(fused, "query_shared_memory", lambda _device: 227 * 1024)
    config = replace(VIT, width=32, mlp_width=64, heads=2, **changes)
    model = build_on_meta(config).bfloat16().train()
    assert model.list_kernels(torch.device("cuda", 0)) == wanted
    assert model.list_kernels(torch.device("cpu")) == []
    monkeypatch.setattr(fused, "TRITON", False)
    assert model.list_kernels(torch.device("cuda", 0)) == []


def test_attention_is_differentiated_as_it_should_be() -> None:
    layer, draw = nn.Linear(8, 24).double(), torch.Generator().manual_seed(0)
    z = torch.randn(2, 5, 8, dtype=torch.float64, generator=draw, requires_grad=True)
    with torch.no_grad():
        layer.weight.normal_(generator=draw)
    assert torch.autograd.gradcheck(lambda z: fused.fused_attention(z, layer.weight, layer.bias, 2), (z,))


def test_a_stream_suits_also_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tensor that says it lies on a GPU; GELU by itself is for inference."""
    monkeypatch.setattr(fused, "TRITON", True)
    layer, norm, found = nn.Linear(32, 32).bfloat16(), nn.LayerNorm(32).bfloat16(), list[str]()

    def choice(z: Tensor) -> Tensor:
        z = z.sin() if fused.can_fuse_stream(z, layer, norm) else z.cos()
        return z.exp() if fused.can_fuse_gelu(z) else z.cos()

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        found.append(graph.code)
        return graph.forward

    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        torch.compiler.reset()
        with FakeTensorMode(), mode():
            z = torch.empty(2, 5, 32, device="cuda", dtype=torch.bfloat16)
            torch.compile(choice, backend=keep, fullgraph=True)(z)
    assert [("sin()" in graph, "exp()" in graph) for graph in found] == [(True, True), (True, True), (True, False)]


def test_suits_also_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tensor that says it lies on a GPU."""
    monkeypatch.setattr(fused, "TRITON", True)
    monkeypatch.setattr(fused, "query_shared_memory", lambda _device: 227 * 1024)
    layer, graphs = nn.Linear(32, 96).bfloat16(), list[str]()

    def choice(z: Tensor) -> Tensor:
        z = z.sin() if fused.can_fuse_linear(z, layer) else z.cos()
        return z.exp() if fused.can_fuse_attention(z, layer, 2) else z.cos()

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    with FakeTensorMode():
        z = torch.empty(2, 5, 32, device="cuda", dtype=torch.bfloat16)
        torch.compile(choice, backend=keep, fullgraph=True)(z)
    (graph,) = graphs
    assert "sin()" in graph
    assert "exp()" in graph


def check_kernels(device: str, dtype: torch.dtype, tolerance: float, shapes: Sequence[tuple[int, int]]) -> None:
    """Against float64, at sizes that fill no tile, and with values far out on both sides."""
    from vitrail.models.kernels import attention_kernels, gelu_kernels

    draw = torch.Generator().manual_seed(3)
    for rows, columns in shapes:
        x, g, k = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(3))
        x = x * 4
        for tanh in (False, True):
            ref = x.double().requires_grad_()
            value = F.gelu(ref, approximate="tanh" if tanh else "none")
            value.backward(g.double())
            grad, sums = gelu_kernels.gelu_backward(g, x, tanh, fused.rows_per_program(*x.shape))
            assert ref.grad is not None
            for mine, theirs in ((gelu_kernels.gelu(x, tanh), value), (grad, ref.grad)):
                torch.testing.assert_close(mine.double(), theirs.detach(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(sums.sum(0).double(), ref.grad.sum(0), atol=5e-3, rtol=1e-3)
        check_shifted_norm(x, k, 4 * tolerance)
        check_add_norm(x, g, k, 4 * tolerance)
        spread = gelu_kernels.gelu_spread(x[:4].view(2, 1, 2, -1))
        wanted = fused.gelu_spread(x[:4].double().view(2, 1, 2, -1).cpu())
        torch.testing.assert_close(spread.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
        joined, sums = attention_kernels.concat_qkv_grad(x, g, k, fused.rows_per_program(x.shape[0], 3 * x.shape[1]))
        assert torch.equal(joined, torch.cat([x, g, k], dim=1))
        torch.testing.assert_close(sums.sum(0), joined.float().sum(0), atol=1e-3, rtol=1e-5)


def check_shifted_norm(z: Tensor, other: Tensor, tolerance: float) -> None:
    from vitrail.models.kernels import norm_kernels

    weight, bias, exact = other[0] + 2, other[1], z.double()
    for shift in (None, other[2].float()):
        found = norm_kernels.shifted_norm(z, shift, weight, bias, 1e-5)
        shifted = exact if shift is None else exact + shift.double()
        wanted = F.layer_norm(shifted, z.shape[-1:], weight.double(), bias.double(), 1e-5)
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def check_add_norm(z: Tensor, branch: Tensor, other: Tensor, tolerance: float) -> None:
    """Forward and backward. Sums over many rows are compared by their norm."""
    from vitrail.models.kernels import norm_kernels

    weight, shift, bias = other[0] + 2, other[1], other[2]
    for added in (None, bias):
        total, normed, stats = norm_kernels.add_norm(z, branch, added, weight, shift, 1e-5)
        exact = z.double() + branch.double() + (0 if added is None else added.double())
        torch.testing.assert_close(total, exact.to(z.dtype), atol=tolerance, rtol=tolerance)
        given = [part.double().requires_grad_() for part in (total, weight, shift)]
        wanted = F.layer_norm(given[0], z.shape[-1:], given[1], given[2], 1e-5)
        torch.testing.assert_close(normed.double(), wanted.detach(), atol=tolerance, rtol=tolerance)
    of_total, of_normed = other, branch
    wanted.backward(of_normed.double())
    of_x, of_weight, of_shift = (part.grad for part in given)
    assert of_x is not None
    grad, sums = norm_kernels.add_norm_backward(of_total, of_normed, total, stats, weight, fused.norm_rows(total))
    of_x = of_x + of_total.double()
    torch.testing.assert_close(grad.double(), of_x, atol=4 * tolerance, rtol=4 * tolerance)
    for mine, exact in zip(sums.sum(0).double(), (of_weight, of_shift, of_x.sum(0)), strict=True):
        assert exact is not None
        assert (mine - exact).norm() < 1e-3 * exact.norm() + 1e-4


def check_attention(device: str, dtype: torch.dtype, tolerance: float, shapes: Sequence[tuple[int, int, int]]) -> None:
    """As near to float64 as torch's own attention, with few and many tokens, and logits far from 0."""
    from vitrail.models.kernels import attention_kernels

    draw = torch.Generator().manual_seed(3)
    for tokens, heads, head in shapes:
        qkv = 2 * torch.randn(3, tokens, 3 * heads * head, generator=draw)
        qkv[0, 0] *= 8
        qkv, g = qkv.to(device, dtype), torch.randn(3, tokens, heads * head, generator=draw).to(device, dtype)
        ref = qkv.double().requires_grad_()
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in ref.chunk(3, -1))
        wanted = (attention.attention_weights(q, k) @ v).transpose(1, 2).flatten(2)
        wanted.backward(g.double())
        wanted = wanted.detach()
        assert ref.grad is not None
        out, logs = attention_kernels.attention(qkv, heads)
        grads, sums = attention_kernels.attention_backward(qkv, out, g, logs, heads)
        plain = plain_attention(qkv, g, heads)
        for mine, its, exact in zip((out, grads, sums), plain, (wanted, ref.grad, ref.grad.sum(1)), strict=True):
            error = (mine.double() - exact).norm() / exact.norm()
            assert error < tolerance + 1.2 * (its.double() - exact).norm() / exact.norm(), (tokens, heads, head)


def plain_attention(qkv: Tensor, g: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own in the same type: output, gradient, and the sums of the gradient."""
    x = qkv.detach().requires_grad_()
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    out.backward(g)
    assert x.grad is not None
    return out.detach(), x.grad, x.grad.float().sum(1)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-3), (torch.float16, 2e-4)])
def test_attention_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_attention(
        "cuda",
        dtype,
        tolerance,
        [(1, 2, 64), (50, 3, 16), (65, 3, 32), (112, 2, 64), (197, 12, 64), (200, 2, 64), (256, 2, 64)],
    )


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_kernels_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_kernels("cuda", dtype, tolerance, [(5, 16), (300, 48), (257, 272), (1000, 768), (33000, 48)])


def run_interpreted(script: str) -> None:
    """In a process of its own: Triton reads the switch when it is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(
        "from tests.models.test_fused import *; check_kernels('cpu', torch.float32, 3e-5, [(5, 16), (260, 48)]); "
        "check_attention('cpu', torch.float32, 3e-5, "
        "[(1, 2, 64), (65, 2, 16), (100, 1, 32), (197, 1, 64), (256, 1, 16)])"
    )


@pytest.mark.gpu
@GPU
def test_training_in_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are as near to float64's as those of the plain layers."""
    config = replace(VIT, width=64, mlp_width=128, heads=4, gelu="erf")
    exact = awake(config).train().cuda()
    model = awake(config, torch.bfloat16).train().cuda()
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())  # the same numbers, rounded
    x = images(config, batch=64, dtype=torch.bfloat16).cuda()

    def step(network: nn.Module, pixels: Tensor) -> Tensor:
        network.zero_grad()
        network(pixels).double().square().sum().backward()
        return torch.cat([p.grad.double().flatten() for p in network.parameters() if p.grad is not None])

    wanted, quick = step(exact, x.double()), step(model, x)
    choose(monkeypatch, False)
    plain = step(model, x)
    assert not torch.equal(plain, quick)
    assert (quick - wanted).norm() < 1.2 * (plain - wanted).norm()


@pytest.mark.slow
def test_importing_it_does_not_import_the_compiler() -> None:
    """torch._dynamo takes more than a second, in every command that loads a network."""
    code = "import sys, vitrail.models.kernels.fused_ops, vitrail.models.vit; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
@GPU
@torch.no_grad()
def test_inference_in_half_precision_on_a_gpu() -> None:
    """Compiled or not, features are as near to float64's as those of the plain layers."""
    config = replace(VIT, width=96, mlp_width=192, heads=4, gelu="erf", layer_scale=0.3)
    exact, model = awake(config).eval().cuda(), awake(config, torch.bfloat16).eval().cuda()
    exact.load_state_dict(model.state_dict())
    x = images(config).cuda()
    wanted = exact.forward_features(x)
    with torch.enable_grad():  # gradients are not for the kernels
        error = (model.forward_features(x.bfloat16()).double() - wanted).norm()
    torch.compiler.reset()
    for run in (model.forward_features, torch.compile(model.forward_features, fullgraph=True)):
        assert (run(x.bfloat16()).double() - wanted).norm() < 1.1 * error

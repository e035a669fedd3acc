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
from vitrail.models import attention, fused, vit
from vitrail.models.build import Model

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
# torch.compile makes an object of what it traces, and torch warns of that.
INSTANCE = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BACKENDS = pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=INSTANCE)])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layers wherever they could stand, also on a CPU, where their operators are written out."""
    for module in (attention, vit):
        monkeypatch.setattr(module, "suits", lambda _z, _layer: True)


def plain_and_fused(
    model: Model, x: Tensor, monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    found = [gradients(model, model, x)]
    for module in (attention, vit):
        monkeypatch.setattr(module, "suits", lambda _z, _layer: True)
    torch.compiler.reset()
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    return [*found, gradients(model, run, x)]


@BACKENDS
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_whole_network_is_the_same(monkeypatch: pytest.MonkeyPatch, gelu: str, backend: str | None) -> None:
    config = replace(VIT, gelu=gelu, position="relative")
    (out, grads), (again, again_grads) = plain_and_fused(awake(config).train(), images(config), monkeypatch, backend)
    torch.testing.assert_close(again, out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(again_grads, grads, atol=1e-10, rtol=1e-10)


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
    for module, name in ((vit, "gelu_linear"), (attention, "split_linear")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, whole=whole: (seen.append(name), whole(*args))[1])
    awake(VIT)(images(VIT))
    assert seen.count("gelu_linear") == VIT.depth
    assert seen.count("split_linear") == VIT.depth


class Elsewhere:
    """A tensor as if it lay on a GPU: `suits` asks only where it is and of what type."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TRITON", True)
    half, layer = Elsewhere(torch.bfloat16), nn.Linear(32, 96).bfloat16()
    suits: object = fused.suits
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


def test_suits_also_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tensor that says it lies on a GPU."""
    monkeypatch.setattr(fused, "TRITON", True)
    layer, graphs = nn.Linear(32, 96).bfloat16(), list[str]()

    def choice(z: Tensor) -> Tensor:
        return z.sin() if fused.suits(z, layer) else z.cos()

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    with FakeTensorMode():
        z = torch.empty(2, 32, device="cuda", dtype=torch.bfloat16)
        torch.compile(choice, backend=keep, fullgraph=True)(z)
    (graph,) = graphs
    assert "sin()" in graph


def check_kernels(device: str, dtype: torch.dtype, tolerance: float, shapes: Sequence[tuple[int, int]]) -> None:
    """Against float64, at sizes that fill no tile, and with values far out on both sides."""
    from vitrail.models import kernels

    draw = torch.Generator().manual_seed(3)
    for rows, columns in shapes:
        x, g, k = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(3))
        x = x * 4
        for tanh in (False, True):
            ref = x.double().requires_grad_()
            value = F.gelu(ref, approximate="tanh" if tanh else "none")
            value.backward(g.double())
            grad, sums = kernels.gelu_backward(g, x, tanh)
            assert ref.grad is not None
            for mine, theirs in ((kernels.gelu(x, tanh), value), (grad, ref.grad)):
                torch.testing.assert_close(mine.double(), theirs.detach(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(sums.sum(0).double(), ref.grad.sum(0), atol=5e-3, rtol=1e-3)
        joined, sums = kernels.join(x, g, k)
        assert torch.equal(joined, torch.cat([x, g, k], dim=1))
        torch.testing.assert_close(sums.sum(0), joined.float().sum(0), atol=1e-3, rtol=1e-5)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_kernels_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_kernels("cuda", dtype, tolerance, [(5, 16), (300, 48), (257, 272), (1000, 768)])


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the switch when it is imported."""
    script = "from tests.models.test_fused import *; check_kernels('cpu', torch.float32, 3e-5, [(5, 16), (260, 48)])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
    for module in (attention, vit):
        monkeypatch.setattr(module, "suits", lambda _z, _layer: False)
    plain = step(model, x)
    assert not torch.equal(plain, quick)
    assert (quick - wanted).norm() < 1.2 * (plain - wanted).norm()

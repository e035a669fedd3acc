"""One pass on a CPU for a layer and GELU: the numbers of two, and the two wherever more than numbers is asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.tiny import VIT, awake, images
from vitrail.models.kernels import cpu_ops
from vitrail.models.layers import MLP

ONEDNN = pytest.mark.skipif(not cpu_ops.ONEDNN, reason="oneDNN's pointwise functions are used on x86 alone")


def make_mlp(gelu: Any = "erf", bias: bool = True) -> MLP:
    torch.manual_seed(0)
    mlp = MLP(replace(VIT, gelu=gelu, mlp_bias=bias))
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp.eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A mark for every pass that is one instead of two."""
    made, whole = list[int](), cpu_ops.gelu_linear
    monkeypatch.setattr(cpu_ops, "gelu_linear", lambda *args: (made.append(1), whole(*args))[1])
    return made


@ONEDNN
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 197)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_the_numbers_are_those_of_two_steps(gelu: str, bias: bool, shape: tuple[int, int], calls: list[int]) -> None:
    mlp, z = make_mlp(gelu, bias), 3 * torch.randn(*shape, VIT.width)
    z[0, 0, 0] = 0
    bias_too = None if mlp.expand.bias is None else mlp.expand.bias.double()
    pre = F.linear(z.double(), mlp.expand.weight.double(), bias_too)
    exact = F.gelu(pre, approximate="tanh" if gelu == "tanh" else "none").detach()
    with torch.no_grad():
        found = mlp.activate(z)
        strided = mlp.activate(z.transpose(0, 1)).transpose(0, 1)
    assert len(calls) == 2
    for one in (found, strided):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))


@ONEDNN
def test_a_network_gives_the_same(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = awake(VIT, torch.float32).eval(), images(VIT, dtype=torch.float32)
    with torch.inference_mode():
        found = network(x)
        assert len(calls) == VIT.depth
        monkeypatch.setattr(cpu_ops, "ONEDNN", False)
        torch.testing.assert_close(found, network(x), rtol=1e-5, atol=1e-6)
    assert len(calls) == VIT.depth


CHANGES: dict[str, Callable[[MLP], object]] = {
    "strided bias": lambda mlp: set_bias(mlp, torch.randn(mlp.expand.out_features, 2)[:, 0]),
    "expanded bias": lambda mlp: set_bias(mlp, torch.randn(1).expand(mlp.expand.out_features)),
    "another activation": lambda mlp: setattr(mlp, "gelu", nn.ReLU()),
    "another forward": lambda mlp: setattr(mlp.expand, "forward", lambda z: F.linear(z, mlp.expand.weight) - 1),
    "another weight": lambda mlp: setattr(mlp.expand, "weight", nn.Parameter(mlp.expand.weight.detach().to_sparse())),
}


def set_bias(mlp: MLP, bias: Tensor) -> None:
    mlp.expand.bias = nn.Parameter(bias)


@pytest.mark.parametrize("change", CHANGES)
def test_modified_layers_run_as_they_are(change: str, calls: list[int]) -> None:
    mlp, z = make_mlp(), torch.randn(2, 5, VIT.width)
    CHANGES[change](mlp)
    with torch.no_grad():
        torch.testing.assert_close(mlp.activate(z), mlp.gelu(mlp.expand(z)))
    assert not calls


def test_the_form_of_gelu_is_that_of_its_layer() -> None:
    mlp, z = make_mlp("erf"), torch.randn(2, 5, VIT.width)
    mlp.gelu.approximate = "tanh"
    with torch.no_grad():
        torch.testing.assert_close(mlp.activate(z), F.gelu(mlp.expand(z), approximate="tanh"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_derivatives(calls: list[int]) -> None:
    mlp, z = make_mlp(), torch.randn(2, 5, VIT.width)
    _, wanted = torch.func.jvp(mlp.activate, (z,), (torch.ones_like(z),))
    with torch.no_grad():
        _, found = torch.func.jvp(mlp.activate, (z,), (torch.ones_like(z),))
    torch.testing.assert_close(found, wanted.detach())
    assert not calls


def test_global_hooks_run(calls: list[int]) -> None:
    mlp, seen = make_mlp(), list[type[nn.Module]]()
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))), torch.no_grad():
        mlp.activate(torch.randn(2, 5, VIT.width))
    assert seen == [nn.Linear, nn.GELU]
    assert not calls


def test_a_wrong_width_is_torchs_error() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
        make_mlp().activate(torch.randn(2, VIT.width + 1))


@pytest.mark.parametrize("why", ["gradients", "half", "hook", "hook behind", "quick", "gated", "autocast"])
def test_two_steps_where_more_is_asked_for(why: str, calls: list[int]) -> None:
    kind: dict[str, Any] = {"quick": {"gelu": "quick"}, "gated": {"gated": True}}.get(why, {})
    mlp, seen = MLP(replace(VIT, **kind)).eval(), list[Tensor]()
    z = torch.randn(2, 5, VIT.width)
    if why == "half":
        mlp, z = mlp.bfloat16(), z.bfloat16()
    if "hook" in why:
        (mlp.gelu if why == "hook behind" else mlp.expand).register_forward_hook(lambda _, args, out: seen.append(out))
    low = torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast")
    with torch.set_grad_enabled(why == "gradients"), low:
        mlp(z)
    assert not calls
    assert len(seen) == ("hook" in why)

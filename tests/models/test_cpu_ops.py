"""One pass on a CPU for a layer and GELU: the numbers of two, and the two wherever more than numbers is asked for."""

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

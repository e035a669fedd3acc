"""Every network of the zoo, shrunk but of its own kind, and every option: one training step, compiled, exported."""

from dataclasses import replace
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, LATER, OTHERS, POSITIONS, RESNETS, VARIANTS, VIT, awake, images, small, tiny
from vitrail.models.build import Model, build
from vitrail.models.family import ModelConfig
from vitrail.models.vit_parts import Rotary
from vitrail.models.zoo import ZOO


def distinct(configs: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
    """One name for each different config."""
    seen: dict[ModelConfig, str] = {}
    for name, config in configs.items():
        seen.setdefault(config, name)
    return {name: config for config, name in seen.items()}


SMALL = distinct({f"small {name}": small(config) for name, config in ZOO.items() if name not in LATER})
TINY = distinct({f"tiny {name}": tiny(config) for name, config in ZOO.items() if name not in LATER})
TINY_LATER = distinct({f"tiny {name}": tiny(config) for name, config in ZOO.items() if name in LATER})

# Structures whose graphs differ from all others'; the rest are theirs with other numbers, and run in the slow lane.
QUICK_KINDS = ("tiny ViT-Ti/8", "tiny Axial-ViT-B/16", "tiny R50+ViT-B/16", "tiny BiT-R50x1")
QUICK: dict[str, ModelConfig] = {
    **{name: config for name, config in TINY.items() if name in QUICK_KINDS},
    "relative": VARIANTS["relative, every"],
    "2d positions in every layer, registers, mean, norm last": replace(
        VIT, position="learned2d", placement="every", registers=2, pool="mean", norm_after_pool=True
    ),
    "shared sine-cosine, tanh head": replace(VIT, position="sincos2d", placement="shared", head="tanh"),
}
ALL = distinct(QUICK | TINY | VARIANTS | SMALL | TINY_LATER)
LANES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]


def test_shrunk_networks_stand_for_all() -> None:
    """Nothing of the zoo or of the options is left out, and shrinking keeps what makes a kind."""
    everything = set(ALL.values())
    assert len(set(ZOO) - LATER) == 56
    for name, config in ZOO.items():
        assert name in LATER or small(config) in everything
        assert tiny(config) in everything
        for shrunk in (small(config), tiny(config)):
            assert type(shrunk) is type(config)
            kept = ("attention", "position", "placement", "pool", "head", "class_token", "unit", "root", "padding")
            kept += ("mixing", "standardisation", "pool_padding", "norm_eps", "gelu", "position_bias", "gated")
            for field in kept:
                assert getattr(shrunk, field, None) == getattr(config, field, None)
            assert (getattr(shrunk, "backbone", None) is None) == (getattr(config, "backbone", None) is None)
    assert len(VARIANTS) == len(POSITIONS) + len(OTHERS) + len(FAMILIES) + len(RESNETS)
    assert len(TINY) == 7
    assert set(QUICK_KINDS) <= set(TINY)


def loss_of(output: Tensor) -> Tensor:
    """Weighs every output differently, so that no gradient cancels."""
    weight = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).view_as(output[0])
    return (output * weight).sum() + output.square().sum()


def gradients(model: Model, run: object, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    assert callable(run)
    model.zero_grad(set_to_none=True)
    output = run(x)
    loss_of(output).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), found


@pytest.mark.parametrize("name", rest_slow(ALL, *QUICK))
def test_one_step_reaches_every_parameter(name: str) -> None:
    """Gradients are finite, arrive everywhere, and a small step along them saves as much as they promise."""
    config = ALL[name]
    model, x = awake(config).train(), images(config)
    output, grads = gradients(model, model, x)
    assert output.isfinite().all()
    for key, parameter in model.named_parameters():
        assert key in grads, f"{key} has no gradient"
        assert grads[key].isfinite().all(), f"{key} has a gradient that is not finite"
        assert grads[key].abs().max() > 0, f"no gradient reaches {key}"
        assert grads[key].shape == parameter.shape
    before = loss_of(output).item()
    steepness = sum(float(grad.square().sum()) for grad in grads.values())
    rate = 1e-7 * max(abs(before), 1) / steepness
    torch.optim.SGD(model.parameters(), lr=rate).step()
    with torch.no_grad():
        after = loss_of(model(x)).item()
    assert before - after == pytest.approx(rate * steepness, rel=0.02)


@pytest.mark.parametrize("name", TINY)
def test_a_fresh_network_wakes_up(name: str) -> None:
    """The zero head moves first, then what it reads; a hybrid's zero scales take one step more."""
    config = TINY[name]
    model, x = build(config).double(), images(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, grads = gradients(model, model, x)
    moved = {key for key, grad in grads.items() if grad.abs().max() > 0}
    assert moved
    assert all(key.startswith("head.") for key in moved)
    for _ in range(2):
        optimizer.step()
        _, grads = gradients(model, model, x)
    assert all(grad.abs().max() > 0 for grad in grads.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_compiled_whole_equals_eager(name: str) -> None:
    config = ALL[name]
    model, x = awake(config).train(), images(config)
    output, grads = gradients(model, model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    again, again_grads = gradients(model, compiled, x)
    torch.testing.assert_close(again, output, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(again_grads, grads, atol=1e-10, rtol=1e-10)


NOISE = {"dropout": 0.1, "attention_dropout": 0.2, "stochastic_depth": 0.5}
VARIED = Rotary(coordinates="unit", shift=0.2, jitter=1.5, rescale=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [NOISE, {"position": "none", "rotary": VARIED}], ids=["dropout", "coordinates"])
def test_compiled_with_noise_draws_what_eager_draws(noise: dict[str, Any]) -> None:
    model = awake(replace(VIT, **noise)).train()
    x = images(VIT, batch=4)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outputs: list[Tensor] = []
    for run in (model, compiled, compiled):
        if len(outputs) < 2:
            torch.manual_seed(5)
        outputs.append(run(x).detach())
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-10, rtol=0)
    assert not torch.equal(outputs[2], outputs[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(LANES, "tiny ViT-Ti/8"))
def test_exported_equals_eager_at_any_batch(name: str) -> None:
    config = ALL[name]
    model = awake(config)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images(config),), dynamic_shapes=({0: batch},))
    exported = program.module()
    for count in (1, 2, 5):
        x = images(config, batch=count)
        with torch.no_grad():
            torch.testing.assert_close(exported(x), model(x), atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(
    which("cc") is None and which("gcc") is None and which("clang") is None, reason="no C compiler here"
)
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own parts
def test_inductor_equals_eager() -> None:
    config = TINY["tiny ViT-Ti/8"]
    model, x = awake(config, torch.float32).train(), images(config, dtype=torch.float32)
    output, grads = gradients(model, model, x)
    torch.compiler.reset()
    again, again_grads = gradients(model, torch.compile(model, fullgraph=True, backend="inductor"), x)
    torch.testing.assert_close(again, output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again_grads, grads, atol=1e-3, rtol=1e-3)

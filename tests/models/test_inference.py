"""Precision where nothing is trained: what "auto" is on a device, what weights become, and what is refused."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from vitrail.core.errors import ConfigError, UnknownName
from vitrail.core.precision import Precision
from vitrail.models import inference
from vitrail.models.build import build
from vitrail.models.inference import choose_precision, set_precision
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import model_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VIT: Any = model_config("ViT-Nano/4", depth=2, classes=3)


def test_auto_goes_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("auto", CPU) == "float32"
    for capability, wanted in (((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choose_precision("auto", CUDA) == wanted
    for name in get_args(Precision):
        assert choose_precision(name, CPU) == name
    with pytest.raises(UnknownName):
        choose_precision("half", CPU)  # type: ignore[arg-type]


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that multiplies eight bits."""
    monkeypatch.setattr(inference, "float8_obstacle", lambda device: "")


@pytest.mark.parametrize(
    ("precision", "kind"), [("float32", torch.float32), ("autocast", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_weights_are_converted_and_back(precision: Precision, kind: torch.dtype) -> None:
    network = build(VIT).eval()
    set_precision(network, precision, CPU)
    assert {parameter.dtype for parameter in network.parameters()} == {kind}
    assert not network.float8
    set_precision(network, "float32", CPU)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


@pytest.mark.usefixtures("eight_bits")
def test_fp8_is_bfloat16_with_products_of_eight_bits() -> None:
    network = build(VIT).eval()
    set_precision(network, "fp8", CPU)
    assert network.float8
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    set_precision(network, "bfloat16", CPU)
    assert not network.float8


def test_fp8_is_refused_where_the_device_or_the_network_cannot(request: pytest.FixtureRequest) -> None:
    network = build(VIT).eval()
    with pytest.raises(ConfigError):
        set_precision(network, "fp8", CPU)
    assert not network.float8
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    request.getfixturevalue("eight_bits")
    resnet = ResNetConfig(blocks=(1,), factor=0.5, image=(32, 32), classes=3)
    for config in (resnet, replace(VIT, norm="rms"), replace(VIT, pool="mean", class_token=False, attention="axial")):
        with pytest.raises(ConfigError):
            set_precision(build(config).eval(), "fp8", CPU)


@pytest.mark.usefixtures("eight_bits")
def test_what_only_training_does_is_no_obstacle_in_inference() -> None:
    network = build(replace(VIT, layer_scale=0.1, dropout=0.1, stochastic_depth=0.1))
    with pytest.raises(ConfigError):
        set_precision(network.train(), "fp8", CPU)
    set_precision(network.eval(), "fp8", CPU)
    assert network.float8

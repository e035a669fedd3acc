"""Averages against a loop and against torch's, and weights that come back from an evaluation as they were."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.optim.slow import gradients, params
from vitrail.core.errors import ConfigError
from vitrail.optim.optimiser import Average

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(factor: float, device: str = "cpu") -> tuple[dict[str, nn.Parameter], Average]:
    parameters = {f"p{at}": parameter for at, parameter in enumerate(params(device=device))}
    return parameters, Average(parameters, factor)


def move(parameters: dict[str, nn.Parameter], step: int) -> None:
    with torch.no_grad():
        for parameter, change in zip(parameters.values(), gradients(step, parameters["p0"].device.type), strict=True):
            parameter.add_(change, alpha=0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 0.9999])
def test_a_loop_over_numbers(factor, device):
    parameters, average = made(factor, device)
    wanted = {name: p.detach().double().flatten().tolist() for name, p in parameters.items()}
    for step in range(10):
        move(parameters, step)
        average.update()
        for name, numbers in wanted.items():
            now = parameters[name].detach().double().flatten().tolist()
            wanted[name] = [factor * e + (1 - factor) * w for e, w in zip(numbers, now, strict=True)]
    for name, numbers in wanted.items():
        assert average.state()[f"average/{name}"].flatten().tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_torchs_averaged_model():
    network = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    average = Average(dict(network.named_parameters()), 0.99)
    theirs = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    theirs.update_parameters(network)  # the first of theirs copies: the start, as ours
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw))
        average.update()
        theirs.update_parameters(network)
    for name, parameter in theirs.module.named_parameters():
        assert torch.equal(average.state()[f"average/{name}"], parameter)


def test_it_starts_at_the_weights_and_follows_where_they_stand_still():
    parameters, average = made(0.5)
    assert all(torch.equal(average.state()[f"average/{name}"], p) for name, p in parameters.items())
    average.update()
    assert all(torch.equal(average.state()[f"average/{name}"], p) for name, p in parameters.items())
    start = parameters["p0"].detach().clone()
    move(parameters, 1)
    average.update()
    average.update()  # as after a masked step
    torch.testing.assert_close(average.state()["average/p0"], 0.25 * start + 0.75 * parameters["p0"].detach())


@pytest.mark.parametrize("device", DEVICES)
def test_swap_in(device):
    parameters, average = made(0.9, device)
    move(parameters, 1)
    average.update()
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    averages = {name: tensor.clone() for name, tensor in average.state().items()}
    places = {name: p.data_ptr() for name, p in parameters.items()}
    with average.swap_in():
        assert all(torch.equal(p, averages[f"average/{name}"]) for name, p in parameters.items())
        assert all(torch.equal(tensor, averages[name]) for name, tensor in average.state().items())
        assert {name: p.data_ptr() for name, p in parameters.items()} == places
    assert all(torch.equal(p, weights[name]) for name, p in parameters.items())
    with pytest.raises(KeyboardInterrupt), average.swap_in():
        raise KeyboardInterrupt
    assert all(torch.equal(p, weights[name]) for name, p in parameters.items())
    assert all(torch.equal(tensor, averages[name]) for name, tensor in average.state().items())


def test_a_factor_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"average=1\.0"):
        made(1.0)

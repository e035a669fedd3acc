"""Multiply-accumulates on padding, in closed form and counted by convolutions of ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vitrail.evaluation.speed import count_paper_macs
from vitrail.models.build import build
from vitrail.models.family import ModelConfig
from vitrail.models.layers import StandardisedConv, pad_same
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import model_config


def on_padding(config: ModelConfig) -> int:
    """What every convolution of a built network multiplies of its padding, from its true inputs."""
    found: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        assert isinstance(module, StandardisedConv)
        side, stride = module.kernel_size[0], module.stride[0]
        ones = torch.ones(1, 1, *inputs[0].shape[2:], dtype=torch.float64)
        ones = pad_same(ones, side, stride) if module.same else ones
        pad = 0 if module.same else module.padding
        taken = F.conv2d(ones, torch.ones(1, 1, side, side, dtype=torch.float64), stride=stride, padding=pad)
        wasted = taken.numel() * side * side - int(taken.sum())
        found.append(wasted * module.in_channels * module.out_channels)

    network = build(config).eval()
    for module in network.modules():
        if isinstance(module, StandardisedConv):
            module.register_forward_pre_hook(count)
    with torch.no_grad():
        network(torch.zeros(1, 3, *config.image))
    return sum(found)


@pytest.mark.parametrize("image", [(64, 64), (60, 45)])
@pytest.mark.parametrize(
    "name",
    [
        "mini-R20+ViT-Micro/4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("BiT-mini-R26", "BiT-R50x1", "R50+ViT-B/16")),
    ],
)
def test_padding_is_counted_as_the_network_pads(name: str, image: tuple[int, int]) -> None:
    config = model_config(name, image_size=image)
    if name in ("BiT-R50x1", "R50+ViT-B/16"):  # the same rules in less time
        thin = {"factor": 0.5, "blocks": (1, 2, 1), "groups": 8}
        inner = config if isinstance(config, ResNetConfig) else config.backbone
        assert inner is not None
        inner = replace(inner, **thin)
        config = inner if isinstance(config, ResNetConfig) else replace(config, backbone=inner, depth=1)
    with torch.random.fork_rng(devices=[]):
        assert config.padding_macs == on_padding(config) > 0
    assert count_paper_macs(config) == config.macs - config.padding_macs


def test_attention_has_no_padding() -> None:
    assert model_config("ViT-B/16").padding_macs == 0
    assert 0 < model_config("AxialResNet50").padding_macs < model_config("BiT-R50x1").padding_macs  # its root's alone

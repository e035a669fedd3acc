"""What decays, at which rate, and what is frozen, for every kind of network."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.tiny import HYBRID, LATER, RESNET, RESNETS, VARIANTS, VIT, small
from vitrail.core.errors import ConfigError
from vitrail.models.build import build
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import ZOO
from vitrail.optim.config import Optim
from vitrail.optim.groups import freeze, group_parameters

KINDS = {**{f"small {name}": small(config) for name, config in ZOO.items() if name not in LATER}, **VARIANTS}
DISTINCT = {config: name for name, config in reversed(KINDS.items())}


def decayed(module: nn.Module) -> set[str]:
    made = group_parameters(module, Optim(weight_decay=0.1))
    assert {group.weight_decay for group in made} <= {0.0, 0.1}
    return {name for group in made if group.weight_decay for name in group.params}


def rates(module: nn.Module, decay: float) -> dict[str, float]:
    made = group_parameters(module, Optim(layer_decay=decay, weight_decay=0.1))
    return {name: group.rate for group in made for name in group.params}


def trainable(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


class Around(nn.Module):
    """An objective's shape: a network, a decoder and a token next to it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.decoder = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.mask_token = nn.Parameter(torch.zeros(4))


class Own(nn.Module):
    """Somebody's network with blocks, and nothing of ours."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.table = nn.Embedding(3, 4)
        self.blocks = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("config", DISTINCT, ids=DISTINCT.values())
def test_kernels_decay_and_nothing_else(config):
    network = build(config)
    names = {name for name, _ in network.named_parameters()}
    assert decayed(network) == {name for name in names if name.endswith(".weight") and "norm" not in name}
    assert {name for group in group_parameters(network, Optim(weight_decay=0.1)) for name in group.params} == names


def test_by_name():
    network = build(replace(VIT, registers=2, position="relative", head="tanh", depth=1))
    assert decayed(network) == {
        "embedding.projection.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp.expand.weight",
        "blocks.0.mlp.contract.weight",
        "head.hidden.weight",
        "head.classifier.weight",
    }
    axial = build(RESNETS["axial resnet"])
    assert not any("offsets" in name for name in decayed(axial))
    assert "trunk.stages.0.0.conv2.row.qkv.weight" in decayed(axial)


@pytest.mark.parametrize("config", DISTINCT, ids=DISTINCT.values())
def test_rates_fall_towards_the_picture(config):
    network = build(config)
    depth = len(config.blocks) if isinstance(config, ResNetConfig) else config.depth
    for name, rate in rates(network, 0.75).items():
        path = name.split(".")
        if path[0] in ("norm", "neck", "map_pool", "projection", "head"):
            layer = depth + 1
        elif path[0] == "blocks":
            layer = int(path[1]) + 1
        elif path[:2] == ["trunk", "stages"]:
            layer = int(path[2]) + 1
        else:
            layer = 0
        assert rate == pytest.approx(0.75 ** (depth + 1 - layer)), name


def test_a_hybrids_backbone_is_layer_0_and_without_layer_decay_two_groups_do():
    network = build(HYBRID)
    assert rates(network, 0.5)["embedding.backbone.stages.1.0.conv1.weight"] == 0.5 ** (HYBRID.depth + 1)
    assert [group.rate for group in group_parameters(network, Optim(weight_decay=0.1))] == [1.0, 1.0]
    assert [group.weight_decay for group in group_parameters(network, Optim())] == [0.0]


def test_what_an_objective_adds_comes_last():
    objective = Around(build(VIT))
    found = rates(objective, 0.5)
    assert found["decoder.weight"] == found["norm.weight"] == found["mask_token"] == found["network.norm.bias"] == 1.0
    assert found["network.blocks.1.mlp.expand.bias"] == 0.5
    assert found["network.class_token"] == 0.5**3
    assert decayed(objective) == {"decoder.weight", *(f"network.{name}" for name in decayed(objective.network))}
    for group in group_parameters(objective, Optim()):
        for name, parameter in group.params.items():
            assert objective.get_parameter(name) is parameter


def test_any_module_with_blocks():
    network = Own()
    assert decayed(network) == {"head.weight", *(f"blocks.{i}.weight" for i in range(3))}
    found = rates(network, 0.5)
    assert found["position"] == found["table.weight"] == 0.5**4
    assert [found[f"blocks.{i}.bias"] for i in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert found["norm.bias"] == found["head.bias"] == 1.0


@pytest.mark.parametrize(
    ("what", "prefixes"),
    [
        ("", ["embedding", "class_token", "position", "blocks.0", "blocks.1", "norm", "head"]),
        ("embedding", ["blocks.0", "blocks.1", "norm", "head"]),
        ("blocks:0", ["blocks.0", "blocks.1", "norm", "head"]),
        ("blocks:1", ["blocks.1", "norm", "head"]),
        ("blocks:2", ["norm", "head"]),
        ("all", ["head"]),
    ],
)
def test_freezing(what, prefixes):
    network = build(VIT)
    freeze(network, Optim(freeze=what))
    wanted = {name for name, _ in network.named_parameters() if name.startswith(tuple(prefixes))}
    assert trainable(network) == wanted
    assert {name for group in group_parameters(network, Optim()) for name in group.params} == wanted
    objective = Around(build(VIT))
    freeze(objective, Optim(freeze=what))
    around = {"decoder.weight", "decoder.bias", "norm.weight", "norm.bias", "mask_token"}
    assert trainable(objective) == {f"network.{name}" for name in wanted} | around


def test_freezing_a_resnet():
    network = build(RESNET)
    freeze(network, Optim(freeze="blocks:1"))
    assert {name.split(".")[0] for name in trainable(network)} == {"trunk", "norm", "head"}
    assert {name.split(".")[2] for name in trainable(network) if name.startswith("trunk")} == {"1"}


@pytest.mark.parametrize("what", ["blocks", "blocks:", "blocks:3", "blocks:-1", "block:1", "head", "All", "embedding "])
def test_what_cannot_be_frozen_is_refused_with_what_can(what):
    network = build(VIT)
    with pytest.raises(ConfigError, match=r"optim\.freeze=.*'embedding', 'blocks:N' with N from 0 to 2, or 'all'"):
        freeze(network, Optim(freeze=what))
    assert trainable(network) == {name for name, _ in network.named_parameters()}


def test_a_run_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze(build(replace(VIT, head="none", classes=0)), Optim(freeze="all"))


@pytest.mark.parametrize("around", [False, True])
def test_the_encoder_has_groups_of_its_own_where_it_has_a_rate(around):
    network = build(VIT)
    module = Around(network) if around else network
    encoder = {f"{'network.' * around}{name}" for name, _ in network.named_parameters() if not name.startswith("head")}
    groups = group_parameters(module, Optim(layer_decay=0.5, weight_decay=0.1), has_encoder_rate=True)
    assert {name for group in groups if group.is_encoder for name in group.params} == encoder
    assert {name for group in groups for name in group.params} == trainable(module)
    found = {name: (group.weight_decay, group.rate) for group in groups for name in group.params}
    usual = group_parameters(module, Optim(layer_decay=0.5, weight_decay=0.1))
    assert found == {name: (group.weight_decay, group.rate) for group in usual for name in group.params}
    assert not any(group.is_encoder for group in usual)

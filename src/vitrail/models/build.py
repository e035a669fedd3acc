"""Builds networks from configs: the one place that knows which module a config describes."""

from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from vitrail.models.backbone import Backbone
from vitrail.models.eomt import EoMT
from vitrail.models.family import ModelConfig, register_config
from vitrail.models.layers import initialise
from vitrail.models.pmt import PMT
from vitrail.models.positions.embeddings import SineTable
from vitrail.models.resnet import ResNet
from vitrail.models.vit import ViT

Model: TypeAlias = Backbone
NETWORKS: dict[type[ModelConfig], type[Backbone]] = {}
N = TypeVar("N", bound=type[Backbone])


def register_family(network: N) -> N:
    """Makes a family known: its config by name, to files and to --set, and the network that it describes."""
    NETWORKS[register_config(network.config_class)] = network
    return network


register_family(ViT)
register_family(ResNet)
register_family(EoMT)
register_family(PMT)


def network_class(config: ModelConfig) -> type[Backbone]:
    """The module that a config describes."""
    return NETWORKS[type(config)]


def build(config: ModelConfig) -> Model:
    """A fresh network, initialised as in the reference from torch's current seed."""
    model = network_class(config).from_config(config)
    initialise(model)
    return model


def build_on_meta(config: ModelConfig) -> Model:
    """The network without storage: names, shapes and rules only."""
    with torch.device("meta"):
        return network_class(config).from_config(config)


def build_from(config: ModelConfig, tensors: dict[str, Tensor]) -> Model:
    """The network around given tensors: nothing is drawn, copied or held twice. Names and shapes must fit."""
    model = build_on_meta(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    for module in model.modules():
        if isinstance(module, SineTable):
            like = next(iter(tensors.values()))
            module.table = module.compute_table().to(like.device, like.dtype)  # in no weight file
    return model


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that the network holds, without holding any."""
    return {name: tuple(tensor.shape) for name, tensor in build_on_meta(config).state_dict().items()}

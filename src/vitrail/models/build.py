"""From a config to a network: the one place that knows which module a config asks for."""

from typing import TypeAlias

import torch
from torch import Tensor

from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.models.initialise import initialise
from vitrail.models.position import SineTable

Model: TypeAlias = Backbone


def build(config: ModelConfig) -> Model:
    """A fresh network, initialised as in the reference from torch's current seed."""
    model = config.build()
    initialise(model)
    return model


def bare(config: ModelConfig) -> Model:
    """The network without storage: names, shapes and rules, and nothing else."""
    with torch.device("meta"):
        return config.build()


def build_from(config: ModelConfig, tensors: dict[str, Tensor]) -> Model:
    """The network around given tensors: nothing is drawn, copied or held twice. Names and shapes must fit."""
    model = bare(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    for module in model.modules():
        if isinstance(module, SineTable):
            module.materialise(next(iter(tensors.values())))
    return model


def skeleton(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that the network holds, without holding any."""
    return {name: tuple(tensor.shape) for name, tensor in bare(config).state_dict().items()}

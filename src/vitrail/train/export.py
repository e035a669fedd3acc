"""Weight files of a run: whatever is sharded or averaged, one file that describes itself."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.source import read_bundle
from vitrail.checkpoint.weights import write_bundle
from vitrail.distributed.pieces import local, put, whole
from vitrail.distributed.world import World
from vitrail.models.resnet import ResNet
from vitrail.models.vit import ViT
from vitrail.train.build import Parts


def write_weights(path: Path, network: nn.Module, world: World, provenance: dict[str, Any]) -> None:
    """All processes take part in gathering; the first one writes."""
    assert isinstance(network, ViT | ResNet)
    card = network.card
    assert isinstance(card, Card)
    tensors = {name: whole(tensor.detach(), world) for name, tensor in network.state_dict(keep_vars=True).items()}
    if world.rank == 0:
        told = {**card.provenance, **provenance}
        bundle = Bundle(
            config=network.config,
            tensors=tensors,
            card=Card(preprocessing=card.preprocessing, labels=card.labels, provenance=told),
        )
        write_bundle(bundle, path)


def provenance_of(network: nn.Module) -> dict[str, Any]:
    """What the weights that a run started from said of themselves."""
    card = network.card
    assert isinstance(card, Card)
    return card.provenance


def take_provenance(network: nn.Module, provenance: dict[str, Any]) -> None:
    """Of a run that goes on, whose first weights may be gone."""
    card = network.card
    assert isinstance(card, Card)
    setattr(network, "card", replace(card, provenance=provenance))  # noqa: B010 (torch types attributes as tensors)


@contextlib.contextmanager
def best_in_place(path: Path, parts: Parts) -> Generator[None]:
    """The network with the weights of a file while the context lasts."""
    tensors = read_bundle(path).tensors
    live = parts.objective.learnt.state_dict(keep_vars=True)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        with torch.no_grad():
            for name, tensor in live.items():
                part, shape, start = local(tensor.detach())
                put(tensor.detach(), tensors[name][start : start + part.shape[0]] if shape else tensors[name])
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.detach().copy_(before[name])

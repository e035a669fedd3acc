"""Weight files of a run: whatever is sharded or averaged, one file that describes itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.weights import write_bundle
from vitrail.distributed.pieces import whole
from vitrail.distributed.world import World
from vitrail.models.resnet import ResNet
from vitrail.models.vit import ViT


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
            card=replace(card, provenance=told),
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

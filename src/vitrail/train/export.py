"""Weight files of a run: whatever is sharded or averaged, one file that describes itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.checkpoint.bundle import Bundle, card_of
from vitrail.checkpoint.weights import write_bundle
from vitrail.distributed.pieces import whole
from vitrail.distributed.world import World
from vitrail.models.backbone import Backbone


def write_weights(path: Path, network: Backbone, world: World, provenance: dict[str, Any]) -> None:
    """All processes take part in gathering; the first one writes."""
    card = card_of(network)
    tensors = {name: whole(tensor.detach(), world) for name, tensor in network.state_dict(keep_vars=True).items()}
    if world.rank == 0:
        told = {**card.provenance, **provenance}
        bundle = Bundle(
            config=network.config,
            tensors=tensors,
            card=replace(card, provenance=told),
        )
        write_bundle(bundle, path)


def provenance_of(network: Backbone) -> dict[str, Any]:
    """What the weights that a run started from said of themselves."""
    return card_of(network).provenance


def take_provenance(network: Backbone, provenance: dict[str, Any]) -> None:
    """Of a run that goes on, whose first weights may be gone."""
    network.card = replace(card_of(network), provenance=provenance)

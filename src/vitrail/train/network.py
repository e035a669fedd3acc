"""The network that a run starts from: fresh, or somebody's weights with a new head and resized positions (3.2)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.find import find_weights
from vitrail.checkpoint.weights import head_changes, network, operate
from vitrail.data.draws import keyed, number
from vitrail.distributed.materialise import draw
from vitrail.models.build import Model, bare, build, network_class
from vitrail.models.family import ModelConfig
from vitrail.models.initialise import initialise
from vitrail.models.zoo import adapted
from vitrail.train.config import ResolvedRun

REGULARISERS = ("dropout", "attention_dropout", "stochastic_depth")


def wanted_otherwise(config: ModelConfig, run: ResolvedRun) -> dict[str, Any]:
    """The regularisers that a run wants otherwise than the weights' own config."""
    return {
        name: getattr(run.model, name) for name in REGULARISERS if hasattr(config, name) and hasattr(run.model, name)
    }


def starting_network(
    run: ResolvedRun, labels: tuple[str, ...], facts: Mapping[str, Any], *, fresh: bool = False
) -> Model:
    """In training mode, on the CPU; without labels it has no head. With `fresh` the weights are not looked at: a
    checkpoint will bring others. The card will tell the `facts`, too."""
    provenance: dict[str, Any] = {}
    if run.weights and not fresh:
        bundle = find_weights(run.weights)
        other = wanted_otherwise(bundle.config, run)
        moved = bundle.config.image != run.model.image
        head = head_changes(bundle.config, len(labels), "patches" if run.model.has_patch_head else "linear")
        bundle = operate(with_config(bundle, other), image_size=run.model.image, head=head)
        if moved and run.positions == "drawn":
            bundle = positions_drawn(bundle, run.seed)
        model = network(bundle)
        provenance = {"from": {"weights": run.weights, **bundle.card.provenance}}
    else:
        model = fresh_network(run.model, run.seed)
        run.objective.prepare_head(model)
    return described(model, run, labels, provenance, facts)


def described(
    model: Model, run: ResolvedRun, labels: tuple[str, ...], provenance: dict[str, Any], facts: Mapping[str, Any]
) -> Model:
    """With the card that its weights will carry, and in training mode."""
    model.card = Card(preprocessing=run.preprocessing, labels=labels or None, provenance=provenance, **facts)
    return model.train()


def bare_network(run: ResolvedRun, labels: tuple[str, ...], facts: Mapping[str, Any]) -> Model:
    """Without storage: where a network is sharded no process need ever hold it whole."""
    provenance = {"from": {"weights": run.weights}} if run.weights else {}
    return described(bare(run.model), run, labels, provenance, facts)


def drawn(module: nn.Module, run: ResolvedRun) -> None:
    """Gives a sharded network without values those that `starting_network` would have drawn."""
    network: Any = module.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(run.seed))
        draw(network, initialise)
    run.objective.prepare_head(network)


def tables_only(module: nn.Module) -> None:
    """Fixed tables make themselves; all else a checkpoint brings."""
    for part in module.modules():
        if getattr(part, "fixed", False) and callable(fill := getattr(part, "initialise", None)):
            fill()


def with_config(bundle: Bundle, changes: dict[str, Any]) -> Bundle:
    return replace(bundle, config=adapted(bundle.config, **changes))


def positions_drawn(bundle: Bundle, seed: int) -> Bundle:
    """With the grid's positions as a network of this size would start with; a class token keeps its own."""
    drawn = fresh_network(bundle.config, seed).state_dict()
    return replace(bundle, tensors=network_class(bundle.config).redraw_positions(bundle.tensors, drawn, bundle.config))


def fresh_network(config: ModelConfig, seed: int) -> Model:
    """Initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(seed))
        return build(config)


def start_seed(seed: int) -> int:
    return int(keyed(number("initialise"), seed)[0] >> 1)

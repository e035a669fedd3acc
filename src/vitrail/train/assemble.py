"""Puts a run's parts together: network, objective, optimiser, average, data.

The network that a run starts from: fresh, or somebody's weights with a new head and resized positions (3.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.checkpoint.weights import build_network, head_changes, replace_head_and_resize
from vitrail.core.errors import ConfigError
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.meta_init import draw_parameters
from vitrail.distributed.parallel import Parallel, parallelise
from vitrail.distributed.process_group import World
from vitrail.models.build import Model, build, build_on_meta, network_class
from vitrail.models.family import ModelConfig
from vitrail.models.layers import initialise
from vitrail.models.zoo import adapt_config
from vitrail.objectives.objective import Objective
from vitrail.objectives.registry import build_objective
from vitrail.optim.averaging import Average
from vitrail.optim.groups import freeze, group_parameters
from vitrail.optim.optimiser import Optimiser
from vitrail.tasks.registry import targets_of, task_of
from vitrail.train.closed_form_baseline import put_head
from vitrail.train.config import RECORDED, ResolvedRun
from vitrail.train.data import DataSplits, TrainBatches
from vitrail.train.metrics import RunCost, peak_flops
from vitrail.train.resume import collect_state, restore_state
from vitrail.train.step import TrainingStep

REGULARISERS = ("dropout", "attention_dropout", "stochastic_depth")


def wanted_otherwise(config: ModelConfig, run: ResolvedRun) -> dict[str, Any]:
    """The regularisers that a run wants otherwise than the weights' own config."""
    return {
        name: getattr(run.model, name) for name in REGULARISERS if hasattr(config, name) and hasattr(run.model, name)
    }


def build_starting_network(
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
        bundle = replace_head_and_resize(with_config(bundle, other), image_size=run.model.image, head=head)
        if moved and run.positions == "drawn":
            bundle = redraw_positions(bundle, run.seed)
        model = build_network(bundle)
        provenance = {"from": {"weights": run.weights, **bundle.card.provenance}}
    else:
        model = build_fresh_network(run.model, run.seed)
        run.objective.prepare_head(model)
    return attach_card(model, run, labels, provenance, facts)


def attach_card(
    model: Model, run: ResolvedRun, labels: tuple[str, ...], provenance: dict[str, Any], facts: Mapping[str, Any]
) -> Model:
    """With the card that its weights will carry, and in training mode."""
    model.card = Card(preprocessing=run.preprocessing, labels=labels or None, provenance=provenance, **facts)
    return model.train()


def build_bare_network(run: ResolvedRun, labels: tuple[str, ...], facts: Mapping[str, Any]) -> Model:
    """Without storage: where a network is sharded no process need ever hold it whole."""
    provenance = {"from": {"weights": run.weights}} if run.weights else {}
    return attach_card(build_on_meta(run.model), run, labels, provenance, facts)


def initialise_sharded(module: nn.Module, run: ResolvedRun) -> None:
    """Gives a sharded network without values those that `starting_network` would have drawn."""
    network: Any = module.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(run.seed))
        draw_parameters(network, initialise)
    run.objective.prepare_head(network)


def fill_fixed_tables(module: nn.Module) -> None:
    """Fixed tables make themselves; all else a checkpoint brings."""
    for part in module.modules():
        if getattr(part, "fixed", False) and callable(fill := getattr(part, "initialise", None)):
            fill()


def with_config(bundle: Bundle, changes: dict[str, Any]) -> Bundle:
    return replace(bundle, config=adapt_config(bundle.config, **changes))


def redraw_positions(bundle: Bundle, seed: int) -> Bundle:
    """With the grid's positions as a network of this size would start with; a class token keeps its own."""
    drawn = build_fresh_network(bundle.config, seed).state_dict()
    return replace(bundle, tensors=network_class(bundle.config).redraw_positions(bundle.tensors, drawn, bundle.config))


def build_fresh_network(config: ModelConfig, seed: int) -> Model:
    """Initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(seed))
        return build(config)


def start_seed(seed: int) -> int:
    return int(hash_keys(hash_word("initialise"), seed)[0] >> 1)


Values: TypeAlias = Callable[[nn.Module], None]  # gives them to a module that has storage and nothing in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    objective: Objective
    parallel: Parallel
    optimiser: Optimiser
    average: Average | None
    step: TrainingStep
    feed: TrainBatches
    cost: RunCost


def assemble(
    run: ResolvedRun,
    splits: DataSplits,
    world: World,
    ledger: UnreadableLog,
    *,
    saved: SavedCheckpoint | None,
    head: tuple[Tensor, Tensor] | None = None,
) -> Parts:
    """Everything in its place, with the values of a checkpoint where there is one; `head` is what the last layer
    starts with instead of zeros."""
    network, values = make_network(run, splits, world, saved, head)
    objective, parallel = place_objective(run, splits, world, network, values)
    optimiser = Optimiser(group_parameters(objective, run.optim), run.optim)
    average = Average(dict(objective.named_parameters()), run.average) if run.average else None
    if saved is not None:
        restore_state(collect_state(objective, optimiser, average), saved)
    return Parts(
        objective=objective,
        parallel=parallel,
        optimiser=optimiser,
        average=average,
        step=TrainingStep(
            objective,
            parallel,
            optimiser,
            average,
            world=world,
            seed=run.seed,
            clip=run.optim.clip,
            graphs=run.compile in RECORDED,
        ),
        feed=TrainBatches(
            splits.train,
            objective.views(run.augmentation),
            run.data,
            batch=run.batch,
            seed=run.seed,
            world=world,
            ledger=ledger,
            targets=targets_of(run.objective),
        ),
        cost=RunCost(
            macs=run.objective.macs_per_image(run.model),
            samples=len(splits.train),
            devices=world.size,
            peak=peak_flops(world.device),
        ),
    )


def make_network(
    run: ResolvedRun,
    splits: DataSplits,
    world: World,
    saved: SavedCheckpoint | None,
    head: tuple[Tensor, Tensor] | None,
) -> tuple[Model, Values | None]:
    """The network of the start; or one without storage where it will be sharded, and what gives it values then."""
    task = task_of(run.objective)
    labels = () if task is None else splits.class_names
    facts = {} if task is None else {"task": task.name, **task.card_facts(run.objective, splits.train)}
    if run.sharding in ("fsdp", "hsdp") and world.size > 1 and not (run.weights and saved is None):
        network = build_bare_network(run, labels, facts)
        return network, fill_fixed_tables if saved is not None else partial(initialise_sharded, run=run)
    network = build_starting_network(run, labels, facts, fresh=saved is not None)
    if head is not None:
        put_head(network, head)
    return network, None


def place_objective(
    run: ResolvedRun, splits: DataSplits, world: World, network: Model, values: Values | None
) -> tuple[Objective, Parallel]:
    """The objective around the network, on its devices, with the values that the run starts from."""
    network.class_token_only = True
    objective = build_objective(
        run.objective,
        network,
        classes=len(splits.class_names),
        preprocessing=run.preprocessing,
        mix=run.mix,
        steps=run.steps,
        seed=run.seed,
        world=world,
    )
    if objective.config.needs_whole_batch and run.batch // world.size > run.micro:
        raise ConfigError(
            f"micro={run.micro} would cut the {run.batch // world.size} samples of a process's batch, but this "
            "objective compares the samples of a batch; use a smaller batch, more processes or recompute=on"
        )
    freeze(objective, run.optim)
    parallel = parallelise(
        objective,
        world=world,
        sharding=run.sharding,
        precision=run.precision,
        compile=run.compile in ("on", "graphs"),
        recompute=run.recompute,
        values=values,
    )
    objective.on_start()
    return objective, parallel

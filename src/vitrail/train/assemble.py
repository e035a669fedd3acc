"""Builds the parts of a run: network, objective, optimiser, average, batches.

A run starts from a fresh network, or from existing weights with a new head and resized positions (3.2).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.checkpoint.weights import build_network, graft_encoder, replace_head_and_resize, resize_like
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
from vitrail.objectives.objective import Objective, ObjectiveContext
from vitrail.objectives.registry import build_objective
from vitrail.optim.groups import freeze, group_parameters
from vitrail.optim.optimiser import Average, Optimiser
from vitrail.tasks.registry import task_of
from vitrail.train.closed_form_baseline import HeadWeights
from vitrail.train.config import ResolvedRun
from vitrail.train.data import DataSplits, TrainBatches
from vitrail.train.metrics import RunCost, peak_flops
from vitrail.train.resume import collect_state, restore_state
from vitrail.train.step import TrainingStep

REGULARISERS = ("dropout", "attention_dropout", "stochastic_depth")
InitialValues: TypeAlias = Callable[[nn.Module], None]  # fills a module whose storage is still empty


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run consists of, from its configuration to its optimiser."""

    run: ResolvedRun
    splits: DataSplits
    world: World
    ledger: UnreadableLog
    objective: Objective
    parallel: Parallel
    optimiser: Optimiser
    average: Average | None
    step: TrainingStep
    batches: TrainBatches
    cost: RunCost

    @property
    def is_sharded(self) -> bool:
        return self.run.sharding in ("fsdp", "hsdp")

    @property
    def evaluation_precision(self) -> Any:
        return "autocast" if self.world.device.type == "cuda" else "float32"

    def state(self) -> dict[str, Tensor]:
        return collect_state(self.objective, self.optimiser, self.average)


def assemble(
    run: ResolvedRun,
    splits: DataSplits,
    world: World,
    ledger: UnreadableLog,
    *,
    saved: SavedCheckpoint | None,
    head: HeadWeights | None = None,
) -> Parts:
    """Builds everything, with the values of a checkpoint if there is one. `head` holds the initial weights of the last
    layer, which otherwise starts at zero."""
    network, values = make_network(run, splits, world, saved, head)
    objective, parallel = place_objective(run, splits, world, network, values)
    groups = group_parameters(objective, run.optim, has_encoder_rate=run.schedule.encoder_warmup > 0)
    optimiser = Optimiser(groups, run.optim)
    average = Average(dict(objective.named_parameters()), run.average) if run.average else None
    if saved is not None:
        restore_state(collect_state(objective, optimiser, average), saved)
    step = TrainingStep(objective, parallel, optimiser, average, world, run)
    batches = TrainBatches(run, splits.train, objective.views(run.augmentation), world, ledger)
    macs, peak = run.macs_per_image, peak_flops(world.device)
    cost = RunCost(macs=macs, samples=len(splits.train), devices=world.size, peak=peak)
    return Parts(run, splits, world, ledger, objective, parallel, optimiser, average, step, batches, cost)


def make_network(
    run: ResolvedRun, splits: DataSplits, world: World, saved: SavedCheckpoint | None, head: HeadWeights | None
) -> tuple[Model, InitialValues | None]:
    """The network that the run starts from, with the card that its weights will carry, in training mode. A network that
    will be sharded is returned without storage, together with a function that fills it."""
    task = task_of(run.objective)
    labels = () if task is None else splits.class_names
    facts: dict[str, Any] = {} if task is None else {"task": task.name, **task.card_facts(run.objective, splits.train)}
    values, provenance = None, {}
    if run.sharding in ("fsdp", "hsdp") and world.size > 1 and not (run.weights and saved is None):
        network = build_on_meta(run.model)  # no process ever needs to hold all of it
        provenance = {"from": {"weights": run.weights}} if run.weights else {}
        values = fill_fixed_tables if saved is not None else partial(initialise_sharded, run=run)
    elif run.weights and saved is None:
        network, provenance = load_starting_network(run, len(labels))
    else:
        network = build_fresh_network(run.model, run.seed)
        run.objective.prepare_head(network)
    network.card = Card(preprocessing=run.preprocessing, labels=labels or None, provenance=provenance, **facts)
    if head is not None:
        last: Any = getattr(network.head, "classifier", network.head)
        with torch.no_grad():
            last.weight.copy_(head[0])
            last.bias.copy_(head[1])
    return network.train(), values


def load_starting_network(run: ResolvedRun, num_classes: int) -> tuple[Model, dict[str, Any]]:
    """The network of `run.weights` with the run's regularisers and image size and a new head (or untrained queries),
    and its provenance."""
    bundle = find_weights(run.weights)
    moved = bundle.config.grid != run.model.grid
    known = [name for name in REGULARISERS if hasattr(bundle.config, name) and hasattr(run.model, name)]
    config = adapt_config(bundle.config, **{name: getattr(run.model, name) for name in known})
    bundle = resize_like(replace(bundle, config=config), run.model)
    if run.model.has_queries:
        bundle = graft_encoder(bundle, run.model, build_fresh_network(run.model, run.seed).state_dict())
    else:
        kind = "patches" if run.model.has_patch_head else "linear"
        bundle = replace_head_and_resize(bundle, num_classes, kind=kind)
    if moved and run.positions == "drawn":  # the grid's positions as in a fresh network; a class token keeps its own
        fresh = build_fresh_network(bundle.config, run.seed).state_dict()
        tensors = network_class(bundle.config).redraw_positions(bundle.tensors, fresh, bundle.config)
        bundle = replace(bundle, tensors=tensors)
    return build_network(bundle), {"from": {"weights": run.weights, **bundle.card.provenance}}


def build_fresh_network(config: ModelConfig, seed: int) -> Model:
    """Initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(seed))
        return build(config)


def initialise_sharded(module: nn.Module, run: ResolvedRun) -> None:
    """Fills a sharded network with the values that `build_fresh_network` would have drawn."""
    network: Any = module.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start_seed(run.seed))
        draw_parameters(network, initialise)
    run.objective.prepare_head(network)


def fill_fixed_tables(module: nn.Module) -> None:
    """Fixed tables fill themselves; everything else comes from a checkpoint."""
    for part in module.modules():
        if getattr(part, "fixed", False) and callable(fill := getattr(part, "initialise", None)):
            fill()


def start_seed(seed: int) -> int:
    return int(hash_keys(hash_word("initialise"), seed)[0] >> 1)


def place_objective(
    run: ResolvedRun, splits: DataSplits, world: World, network: Model, values: InitialValues | None
) -> tuple[Objective, Parallel]:
    """Builds the objective around the network, on its devices, with the values that the run starts from."""
    network.class_token_only = True
    context = ObjectiveContext(len(splits.class_names), run.preprocessing, run.mix, run.steps, world)
    objective = build_objective(run.objective, network, context, seed=run.seed)
    local = run.batch // world.size
    if objective.config.needs_whole_batch and local > run.micro:
        reason = f"micro={run.micro} would split a process's {local} samples, which this objective compares"
        raise ConfigError(f"{reason}; use a smaller batch, more processes or recompute=on")
    freeze(objective, run.optim)
    settings: dict[str, Any] = {"sharding": run.sharding, "precision": run.precision, "recompute": run.recompute}
    compiled = run.compile in ("on", "graphs")
    settings |= {"compile": compiled, "variants": len(run.networks)}
    parallel = parallelise(objective, world=world, values=values, **settings)
    objective.on_start()
    return objective, parallel

"""Puts a run's parts together: network, objective, optimiser, average, data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from vitrail.checkpoint.store.saved import Saved
from vitrail.core.errors import ConfigError
from vitrail.data.ledger import Ledger
from vitrail.distributed.parallel import Parallel, parallelise
from vitrail.distributed.world import World
from vitrail.models.build import Model
from vitrail.objectives.build import build_objective
from vitrail.objectives.objective import Objective
from vitrail.optim.averaging import Average
from vitrail.optim.groups import freeze, groups
from vitrail.optim.optimiser import Optimiser
from vitrail.tasks.registry import targets_of, task_of
from vitrail.train.baseline import put_head
from vitrail.train.config import RECORDED, ResolvedRun
from vitrail.train.cost import Cost, peak_flops
from vitrail.train.feed import Feed
from vitrail.train.network import bare_network, drawn, starting_network, tables_only
from vitrail.train.pictures import Pictures
from vitrail.train.state import restore, state_of
from vitrail.train.step import Step

Values: TypeAlias = Callable[[nn.Module], None]  # gives them to a module that has storage and nothing in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    objective: Objective
    parallel: Parallel
    optimiser: Optimiser
    average: Average | None
    step: Step
    feed: Feed
    cost: Cost


def assemble(
    run: ResolvedRun,
    pictures: Pictures,
    world: World,
    ledger: Ledger,
    *,
    saved: Saved | None,
    head: tuple[Tensor, Tensor] | None = None,
) -> Parts:
    """Everything in its place, with the values of a checkpoint where there is one; `head` is what the last layer
    starts with instead of zeros."""
    network, values = network_of(run, pictures, world, saved, head)
    objective, parallel = placed(run, pictures, world, network, values)
    optimiser = Optimiser(groups(objective, run.optim), run.optim)
    average = Average(dict(objective.named_parameters()), run.average) if run.average else None
    if saved is not None:
        restore(state_of(objective, optimiser, average), saved)
    return Parts(
        objective=objective,
        parallel=parallel,
        optimiser=optimiser,
        average=average,
        step=Step(
            objective,
            parallel,
            optimiser,
            average,
            world=world,
            seed=run.seed,
            clip=run.optim.clip,
            graphs=run.compile in RECORDED,
        ),
        feed=Feed(
            pictures.train,
            objective.views(run.augmentation),
            run.data,
            batch=run.batch,
            seed=run.seed,
            world=world,
            ledger=ledger,
            targets=targets_of(run.objective),
        ),
        cost=Cost(
            macs=run.objective.work(run.model),
            samples=len(pictures.train),
            devices=world.size,
            peak=peak_flops(world.device),
        ),
    )


def network_of(
    run: ResolvedRun, pictures: Pictures, world: World, saved: Saved | None, head: tuple[Tensor, Tensor] | None
) -> tuple[Model, Values | None]:
    """The network of the start; or one without storage where it will be sharded, and what gives it values then."""
    task = task_of(run.objective)
    labels = () if task is None else pictures.classes
    facts = {} if task is None else {"task": task.name, **task.card_facts(run.objective, pictures.train)}
    if run.sharding in ("fsdp", "hsdp") and world.size > 1 and not (run.weights and saved is None):
        network = bare_network(run, labels, facts)
        return network, tables_only if saved is not None else partial(drawn, run=run)
    network = starting_network(run, labels, facts, fresh=saved is not None)
    if head is not None:
        put_head(network, head)
    return network, None


def placed(
    run: ResolvedRun, pictures: Pictures, world: World, network: Model, values: Values | None
) -> tuple[Objective, Parallel]:
    """The objective around the network, on its devices, with the values that the run starts from."""
    network.class_token_only = True
    objective = build_objective(
        run.objective,
        network,
        classes=len(pictures.classes),
        preprocessing=run.preprocessing,
        mix=run.mix,
        steps=run.steps,
        seed=run.seed,
        world=world,
    )
    if objective.config.couples and run.batch // world.size > run.micro:
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
    objective.start()
    return objective, parallel

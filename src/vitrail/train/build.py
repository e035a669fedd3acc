"""Puts a run's parts together: network, objective, optimiser, average, data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor, nn

from vitrail.checkpoint.store.saved import Saved
from vitrail.core.errors import ConfigError
from vitrail.data.ledger import Ledger
from vitrail.distributed.parallel import Parallel, Precision, Sharding, parallelise
from vitrail.distributed.world import World
from vitrail.models.walk import macs
from vitrail.objectives.classification import Classify
from vitrail.objectives.objective import Objective
from vitrail.optim.averaging import Average
from vitrail.optim.groups import freeze, groups
from vitrail.optim.optimiser import Optimiser
from vitrail.train.baseline import put_head
from vitrail.train.config import Run
from vitrail.train.cost import Cost, peak_flops
from vitrail.train.feed import Feed
from vitrail.train.network import bare_network, drawn, starting_network, tables_only
from vitrail.train.pictures import Pictures
from vitrail.train.state import restore, state_of
from vitrail.train.step import Step


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
    run: Run,
    pictures: Pictures,
    world: World,
    ledger: Ledger,
    *,
    saved: Saved | None,
    head: tuple[Tensor, Tensor] | None = None,
) -> Parts:
    """Everything in its place, with the values of a checkpoint where there is one; `head` is what the last layer
    starts with instead of zeros."""
    assert run.model is not None
    assert run.preprocessing is not None
    values: Callable[[nn.Module], None] | None = None
    if run.sharding in ("fsdp", "hsdp") and world.size > 1 and not (run.weights and saved is None):
        network = bare_network(run, pictures.classes)
        values = tables_only if saved is not None else partial(drawn, run=run)
    else:
        network = starting_network(run, pictures.classes, fresh=saved is not None)
        if head is not None:
            put_head(network, head)
    objective = Classify(network, run.objective, len(pictures.classes), run.preprocessing, run.mix)
    if objective.couples and run.batch // world.size > run.micro:
        raise ConfigError(
            f"micro={run.micro} would cut the {run.batch // world.size} samples of a process's batch, but this "
            "objective compares the samples of a batch; use a smaller batch, more processes or recompute=on"
        )
    freeze(objective, run.optim)
    parallel = parallelise(
        objective,
        world=world,
        sharding=cast(Sharding, run.sharding),  # no longer "auto"
        precision=cast(Precision, run.precision),
        compile=run.compile in ("on", "graphs"),
        recompute=run.recompute,
        values=values,
    )
    optimiser = Optimiser(groups(objective, run.optim), run.optim)
    average = Average(dict(objective.named_parameters()), run.average) if run.average else None
    if saved is not None:
        restore(state_of(objective, optimiser, average), saved)
    feed = Feed(
        pictures.train,
        objective.views(run.augmentation),
        run.data,
        batch=run.batch,
        seed=run.seed,
        world=world,
        ledger=ledger,
    )
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
            graphs=run.compile == "graphs",
        ),
        feed=feed,
        cost=Cost(macs=macs(run.model), samples=len(pictures.train), devices=world.size, peak=peak_flops(world.device)),
    )

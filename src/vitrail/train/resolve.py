"""From a run as configured to a run with every choice made: nothing is "auto" afterwards, and all of it is printed."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size
from vitrail.data.device_dataset import first_size
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import World, name_device
from vitrail.evaluation.speed import training_flops
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config, network_name
from vitrail.objectives.registry import count_weights
from vitrail.optim.schedules import learning_rate
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import targets_of, task_of
from vitrail.train import metrics as memory
from vitrail.train.closed_form_baseline import is_enabled
from vitrail.train.config import RECORDED, Compilation, ResolvedData, ResolvedRun, Run, to_stage
from vitrail.train.data import DataSplits, can_reside

MOST_ON_HOST = 128  # images at once on a CPU: more is not a faster
MOST_ON_DEVICE = 1024
COMPILED = {"on": ", compiled", "graphs": ", compiled and recorded", "recorded": ", recorded", "off": ""}
EVALUATIONS = 20  # a run, where nothing else is said
SMALL_STEP = 3e12  # FLOPs, of which a GPU does a hundred times as many a second
SMALL_PICTURES = 1 << 26  # bytes: on a CPU a set this small is quicker without loader processes


def resolve(run: Run, splits: DataSplits, world: World) -> ResolvedRun:
    """All of "auto" and 0 replaced by what they stand for here. What contradicts itself is refused here."""
    model = fit_network(run, len(splits.class_names))
    steps = run.steps or max(round(run.epochs * len(splits.train) / run.batch), 1)
    learning_rate(run.schedule, run.optim.lr, 0, steps)  # a warm-up that outlasts the run is refused here
    if run.batch % world.size:
        raise ConfigError(
            f"batch={run.batch} cannot be split over {world.size} processes; "
            f"use {run.batch - run.batch % world.size or world.size} or a multiple of {world.size}"
        )
    check_mixing(run, world)
    if run.evaluation.patience and not splits.can_select_best:
        raise ConfigError(
            f"evaluation.patience={run.evaluation.patience} needs a split with labels to choose by that is not the "
            "end's: hold out a part, data.dev=0.1 and data.watch=dev"
        )
    cuda = world.device.type == "cuda"
    precision = run.precision if run.precision != "auto" else "bfloat16" if cuda else "float32"
    sharding = run.sharding if run.sharding != "auto" else "ddp" if world.size > 1 else "none"
    if sharding == "none" and world.size > 1:
        raise ConfigError(f"sharding=none with {world.size} processes would train {world.size} networks; use ddp")
    run = replace(run, model=model, steps=steps, epochs=0.0, precision=precision, sharding=sharding)
    return to_stage(
        ResolvedRun,
        run,
        data=resolve_data(run, splits, world.device),
        preprocessing=run.preprocessing or Preprocessing(image=model.image),
        micro=choose_micro_batch(run, world),
        baseline="on" if is_enabled(run, splits) else "off",
        compile=choose_compilation(run, world),
        evaluation=replace(run.evaluation, every=run.evaluation.every or max(steps // EVALUATIONS, 1)),
    )


def resolve_data(run: Run, splits: DataSplits, device: torch.device) -> ResolvedData:
    """The data with the names of the splits that are scored, and where the training images lie."""
    return to_stage(
        ResolvedData,
        run.data,
        watch=splits.watch_name or "none",
        test=splits.test_name or "none",
        resident="on" if is_resident(run, splits, device) else "off",
    )


def fit_network(run: Run, classes: int) -> ModelConfig:
    """The network with the head that the objective wants: one for the classes of the data, or none."""
    model = run.model
    if model.channels != 3:
        raise ConfigError(f"the network takes images of {model.channels} channels; they are read as RGB, with 3")
    task, kind = task_of(run.objective), type(run.objective).__name__
    if task is None and not model.tokens:
        raise ConfigError(f"objective={kind} is for a ViT, and the model is {network_name(model)}")
    if (task is None or not task.mixes) and (run.mix.mixup or run.mix.cutmix):
        raise ConfigError(f"objective={kind} has no labels to mix; set mix.mixup=0 and mix.cutmix=0")
    if (task is None or not task.has_closed_form) and (run.baseline == "on" or run.start == "closed-form"):
        asked = "start=closed-form" if run.start == "closed-form" else "baseline=on"
        raise ConfigError(f"{asked} is of a classifier, which objective={kind} does not train; leave it out")
    if task is None:
        return adapt_config(model, **model.without_head())
    return task.fit_model(model, classes, new_head=bool(run.weights))


def choose_compilation(run: Run, world: World) -> Compilation:
    """How the step is compiled: on a GPU, unless something else was asked for; recorded as a graph where launching the
    kernels of so small a step would take longer than they do."""
    cuda = world.device.type == "cuda"
    if run.compile in RECORDED and (not cuda or world.size > 1):
        raise ConfigError(f"compile={run.compile} is for one process with a GPU; use compile=auto")
    if run.compile != "auto":
        return run.compile
    small = training_flops(run.objective.macs_per_image(run.model), run.batch) < SMALL_STEP
    return "off" if not cuda else "graphs" if small and world.size == 1 else "on"


def check_mixing(run: Run, world: World) -> None:
    """Every process must hold whole pairs of partners, and no image may be its own."""
    mix, repeats, local = run.mix, run.data.repeats, run.batch // world.size
    if not mix.probability or not (mix.mixup or mix.cutmix):
        return
    if mix.stride % repeats:
        raise ConfigError(
            f"data.repeats={repeats} sets views of an image side by side, which mix.stride={mix.stride} would mix "
            f"with each other; use mix.stride={repeats}"
        )
    if local % (2 * mix.stride):
        raise ConfigError(
            f"mixing with mix.stride={mix.stride} takes pairs, and a process has {local} images of each batch; "
            f"use a batch that is a multiple of {2 * mix.stride * world.size}"
        )


def summarise_run(run: ResolvedRun, splits: DataSplits, world: World, out: Path) -> tuple[str, ...]:
    """A run in a few lines: where, what, on what, how."""
    optim, local = run.optim, run.batch // world.size
    watched = f", {len(splits.watch):,} watched ({splits.watch_name})" if splits.watch is not None else ""
    without = splits.without
    dropped = "" if without is None else f" ({len(without.indices):,} left out by {run.data.without})"
    parts = f"{world.size} x {memory.count_micro_batches(local, run.micro)} x {describe_micro_batch(local, run.micro)}"
    device = name_device(world.device)
    return (
        f"run folder {out}; report {out / 'report.html'}",
        f"{network_name(run.model)}: {run.model.parameters:,} parameters, {format_size(run.model.image)} px, from "
        f"{run.weights or 'scratch'}",
        f"{splits.title}: {len(splits.train):,} images{dropped}, {describe_targets(run, splits)}{watched}",
        f"{run.steps:,} steps of {run.batch} ({parts}), {run.steps * run.batch / len(splits.train):,.1f} epochs; "
        f"{optim.kind} at {optim.lr:g}, {run.schedule.decay}; {run.precision}"
        f"{COMPILED[run.compile]}, {world.size} x {device}",
    )


def describe_targets(run: Run, splits: DataSplits) -> str:
    """What the images are annotated with, in words."""
    task = task_of(run.objective) or CLASSIFICATION
    return task.describe_outputs(splits.class_names) if splits.class_names else "no labels"


def describe_micro_batch(local: int, micro: int) -> str:
    """The size of a process's micro-batches, in words."""
    return f"at most {micro}" if local % micro else str(micro)


def is_resident(run: Run, splits: DataSplits, device: torch.device) -> bool:
    """Whether the set lies on the device: where it can, and where that is quicker."""
    if run.data.resident == "off":
        return False
    views, targets = run.objective.views(run.augmentation), targets_of(run.objective)
    can, reason = can_reside(splits.train, views, device, targets)
    if run.data.resident == "on" and not can:
        raise ConfigError(f"data.resident=on is not possible: {reason}")
    if run.data.resident == "on" or device.type == "cuda" or not can:
        return can
    if device.type == "mps":  # whose kernels nobody has tried images on
        return False
    height, width = first_size(splits.train)
    return len(splits.train) * 3 * height * width <= SMALL_PICTURES


def count_shards(run: Run, world: World) -> int:
    """In how many parts the state of the network lies."""
    return world.size if run.sharding == "fsdp" else world.local_size if run.sharding == "hsdp" else 1


def choose_micro_batch(run: Run, world: World) -> int:
    """What a process takes at once: as asked for, or as many as its memory holds."""
    local = run.batch // world.size
    if run.micro:
        if run.micro > local:
            raise ConfigError(
                f"micro={run.micro} is more than the {local} images a process has of each batch; "
                f"use {local} or fewer, or 0 for as many as fit"
            )
        return run.micro
    if run.objective.needs_whole_batch:
        return local
    cuda = world.device.type == "cuda"
    state, each = estimate_memory(run, world)
    room = memory.free_bytes(world.device) // (1 if cuda else world.local_size) - state
    return memory.fit_micro_batch(local, each, room, MOST_ON_DEVICE if cuda else MOST_ON_HOST)


def estimate_memory(run: Run, world: World) -> tuple[int, int]:
    """Bytes of memory for the state of a run in one process, and for each image of a micro-batch."""
    low, average, model = run.precision != "float32", run.average > 0, run.model
    state = memory.state_bytes(model, run.optim, low=low, average=average, shards=count_shards(run, world))
    each = memory.image_bytes(model, low=low, recompute=run.recompute)
    if run.objective.labelled:
        return state, each
    trained, kept = count_weights(run.objective, model, world)
    state = memory.weights_bytes(trained, kept, run.optim, low=low, average=average) // count_shards(run, world)
    # Passes without a gradient leave nothing behind, and a part of the tokens leaves a part: this is no less.
    return state, math.ceil(each * max(1.0, run.objective.macs_per_image(model) / model.macs))

"""From a configured run to a resolved one: nothing is "auto" afterwards, and all choices are printed.

The micro-batch follows from the memory a run takes, in closed form. A parameter takes 4 bytes for itself, 4 for its
gradient, and the optimiser's moments; its bfloat16 copy another 2, an average another 4. An image takes whatever the
backward pass reads again. For a ViT block that is, per token: the inputs of both norms and their outputs (4D), q, k and
v (3D), the output of attention (D), and the MLP's hidden layer before and after GELU (2M); docs/scale.md compares this
with measurements. With recomputation only the inputs of the blocks stay, and what one block needs at its peak (10D +
3M). For a ResNet it is about four times the output of each unit.
"""

import math
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from vitrail.core.errors import ConfigError
from vitrail.core.precision import HALF
from vitrail.core.text import format_size, join_words
from vitrail.data.device_dataset import first_size
from vitrail.data.preprocessing import Preprocessing
from vitrail.distributed.process_group import World, name_device
from vitrail.evaluation.speed import training_flops
from vitrail.models.blocks import RESIDUAL
from vitrail.models.build import build_on_meta
from vitrail.models.family import ModelConfig
from vitrail.models.kernels.float8_layers import float8_obstacle
from vitrail.models.zoo import adapt_config, network_name
from vitrail.objectives.registry import count_weights
from vitrail.optim.config import Optim
from vitrail.optim.schedules import check_warmup
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.registry import targets_of, task_of
from vitrail.train.closed_form_baseline import can_start, is_enabled
from vitrail.train.config import RECORDED, Compilation, ResolvedData, ResolvedRun, Run, to_stage
from vitrail.train.data import DataSplits, can_reside
from vitrail.train.step_shape import check_step_shapes, describe_step_shapes

MOST_ON_HOST = 128  # images at once on a CPU: more is not faster
MOST_ON_DEVICE = 1024
COMPILED = {"on": ", compiled", "graphs": ", compiled and recorded", "recorded": ", recorded", "off": ""}
EVALUATIONS = 20  # per run, by default
SMALL_STEP = 3e12  # FLOPs; a GPU does a hundred times as many per second
SMALL_DATASET = 1 << 26  # bytes: on a CPU a dataset this small is faster without loader processes
CUDA_OWN = 1 << 30  # context, libraries, workspaces
USED = 0.85  # of the free memory; the allocator leaves gaps


def resolve(run: Run, splits: DataSplits, world: World) -> ResolvedRun:
    """Replaces every "auto" and 0 by the value it stands for here. ConfigError if the run contradicts itself."""
    model = fit_network(run, len(splits.class_names))
    check_step_shapes(run)
    steps = run.steps or max(round(run.epochs * len(splits.train) / run.batch), 1)
    check_warmup(run.schedule, steps)
    if run.batch % world.size:
        fit = run.batch - run.batch % world.size or world.size
        reason = f"batch={run.batch} cannot be split over {world.size} processes"
        raise ConfigError(f"{reason}; use {fit} or a multiple of {world.size}")
    check_mixing(run, world)
    if run.evaluation.patience and not splits.can_select_best:
        reason = "needs a labelled split that is not the test split: hold out a part, data.dev=0.1 and data.watch=dev"
        raise ConfigError(f"evaluation.patience={run.evaluation.patience} {reason}")
    cuda = world.device.type == "cuda"
    precision = run.precision if run.precision != "auto" else "bfloat16" if cuda else "float32"
    check_float8(run, world)
    sharding = run.sharding if run.sharding != "auto" else "ddp" if world.size > 1 else "none"
    if sharding == "none" and world.size > 1:
        raise ConfigError(f"sharding=none with {world.size} processes would train {world.size} networks; use ddp")
    run = replace(run, model=model, steps=steps, epochs=0.0, precision=precision, sharding=sharding)
    names = {"watch": splits.watch_name or "none", "test": splits.test_name or "none"}
    resident = "on" if is_resident(run, splits, world.device) else "off"
    every = run.evaluation.every or max(steps // EVALUATIONS, 1)
    chosen: dict[str, Any] = {"data": to_stage(ResolvedData, run.data, resident=resident, **names)}
    preprocessing = run.preprocessing or Preprocessing(image=model.image)
    chosen |= {"preprocessing": preprocessing.adapt_channels(model.channels)}
    chosen |= {"micro": choose_micro_batch(run, world), "baseline": "on" if is_enabled(run, splits) else "off"}
    chosen |= {"compile": choose_compilation(run, world), "evaluation": replace(run.evaluation, every=every)}
    return to_stage(ResolvedRun, run, **chosen)


def fit_network(run: Run, num_classes: int) -> ModelConfig:
    """The network with the head that the objective needs: one for the classes of the data, or none."""
    model = run.model
    if model.channels not in (1, 3):
        raise ConfigError(f"the network takes images of {model.channels} channels; images are read as RGB or greyscale")
    task, kind = task_of(run.objective), type(run.objective).__name__
    if task is None and not model.tokens:
        raise ConfigError(f"objective={kind} is for a ViT, and the model is {network_name(model)}")
    if (task is None or not task.mixes) and (run.mix.mixup or run.mix.cutmix):
        raise ConfigError(f"objective={kind} has no labels to mix; set mix.mixup=0 and mix.cutmix=0")
    if (task is None or not task.has_closed_form) and (run.baseline == "on" or run.start == "closed-form"):
        requested = "start=closed-form" if run.start == "closed-form" else "baseline=on"
        raise ConfigError(f"{requested} is for classes of images or pixels, not for objective={kind}; remove it")
    if run.start == "closed-form" and not can_start(run):
        raise ConfigError("start=closed-form gives a linear head its weights, and this network has queries; remove it")
    if task is None:
        return adapt_config(model, **model.linear_head(0))
    return task.fit_model(model, num_classes, new_head=bool(run.weights))


def check_float8(run: Run, world: World) -> None:
    """ConfigError if fp8 is requested and this network or device cannot compute in it."""
    if run.precision != "fp8":
        return
    if reason := float8_obstacle(world.device) or build_on_meta(run.model).float8_obstacle():
        raise ConfigError(f"precision=fp8 is not for this run: {reason}; use precision=bfloat16")


def choose_compilation(run: Run, world: World) -> Compilation:
    """How the step is compiled. On a GPU it is, by default, and it is also recorded as a graph if the step is so small
    that launching its kernels would take longer than running them."""
    cuda = world.device.type == "cuda"
    if run.compile in RECORDED and (not cuda or world.size > 1):
        raise ConfigError(f"compile={run.compile} is for one process with a GPU; use compile=auto")
    if run.compile != "auto":
        return run.compile
    is_small = training_flops(run.macs_per_image, run.batch) < SMALL_STEP
    return "off" if not cuda else "graphs" if is_small and world.size == 1 else "on"


def check_mixing(run: Run, world: World) -> None:
    """ConfigError unless every process holds whole pairs of partners, and no image is its own partner."""
    mix, repeats, local = run.mix, run.data.repeats, run.batch // world.size
    if not mix.probability or not (mix.mixup or mix.cutmix):
        return
    if mix.stride % repeats:
        reason = f"data.repeats={repeats} puts views of an image next to each other"
        raise ConfigError(f"{reason}, and mix.stride={mix.stride} would mix them; use mix.stride={repeats}")
    if local % (pair := 2 * mix.stride):
        reason = f"mix.stride={mix.stride} mixes pairs, and a process has {local} images of each batch"
        raise ConfigError(f"{reason}; use a batch that is a multiple of {pair * world.size}")


def summarise_run(run: ResolvedRun, splits: DataSplits, world: World, out: Path) -> tuple[str, ...]:
    """A run in a few lines: where, what, on which images, how."""
    optim, local = run.optim, run.batch // world.size
    watched = f", {len(splits.watch):,} watched ({splits.watch_name})" if splits.watch is not None else ""
    dropped = f" ({len(splits.without.indices):,} dropped by {run.data.without})" if splits.without is not None else ""
    each = f"at most {run.micro}" if local % run.micro else str(run.micro)
    parts = f"{world.size} x {count_micro_batches(local, run.micro)} x {each}"
    return (
        f"run folder {out}; report {out / 'report.html'}",
        f"{network_name(run.model)}: {run.model.parameters:,} parameters, {format_size(run.model.image)} px"
        f"{describe_step_shapes(run)}, from {run.weights or 'scratch'}",
        f"{splits.title}: {len(splits.train):,} images{dropped}, {describe_targets(run, splits)}{watched}",
        f"{run.steps:,} steps of {run.batch} ({parts}), {run.steps * run.batch / len(splits.train):,.1f} epochs; "
        f"{optim.kind} at {optim.lr:g}, {run.schedule.decay}; {run.precision}"
        f"{COMPILED[run.compile]}, {world.size} x {name_device(world.device)}",
        *describe_kernels(run, world),
    )


def describe_kernels(run: ResolvedRun, world: World) -> tuple[str, ...]:
    """What a step on a GPU runs in vitrail's own kernels."""
    if world.device.type != "cuda":
        return ()
    found = list[str]()
    if run.precision in HALF:
        found = build_on_meta(run.model).to(torch.bfloat16).train().list_kernels(world.device)
    if run.recompute or run.sharding in ("fsdp", "hsdp"):  # these kernels pass a sum from block to block
        found = [name for name in found if name != RESIDUAL]
    found += ["quantising to fp8"] if run.precision == "fp8" else []
    return (f"own kernels: {join_words(found) or 'none'}",)


def describe_targets(run: Run, splits: DataSplits) -> str:
    """What the images are annotated with: "10 classes", "no labels"."""
    task = task_of(run.objective) or CLASSIFICATION
    return task.describe_outputs(splits.class_names) if splits.class_names else "no labels"


def is_resident(run: Run, splits: DataSplits, device: torch.device) -> bool:
    """Whether the training images lie on the device: if they can, and if that is faster."""
    if run.data.resident == "off":
        return False
    views, targets = run.objective.views(run.augmentation), targets_of(run.objective)
    can, reason = can_reside(splits.train, views, device, targets)
    if run.data.resident == "on" and not can:
        raise ConfigError(f"data.resident=on is not possible: {reason}")
    if run.data.resident == "on" or device.type == "cuda" or not can:
        return can
    if device.type == "mps":  # untested there
        return False
    height, width = first_size(splits.train)
    return len(splits.train) * 3 * height * width <= SMALL_DATASET


def choose_micro_batch(run: Run, world: World) -> int:
    """How many images a process takes at once: as configured, or as many as its memory holds."""
    local = run.batch // world.size
    if run.micro > local:
        reason = f"micro={run.micro} is more than the {local} images a process has of each batch"
        raise ConfigError(f"{reason}; use {local} or fewer, or 0 for as many as fit")
    if run.micro or run.objective.needs_whole_batch:
        return run.micro or local
    cuda = world.device.type == "cuda"
    state, each = estimate_memory(run, world)
    room = free_bytes(world.device) // (1 if cuda else world.local_size) - state
    most = min(MOST_ON_DEVICE if cuda else MOST_ON_HOST, int(room * USED) // max(each, 1))
    return balance_micro_batch(local, max(1, most))


def estimate_memory(run: Run, world: World) -> tuple[int, int]:
    """Bytes for the state of a run in one process, and for each image of a micro-batch."""
    low, model = run.precision != "float32", run.model
    each = max(image_bytes(network, low=low, recompute=run.recompute) for network in run.networks)
    trained, kept = model.parameters, 0
    if not run.objective.labelled:
        trained, kept = count_weights(run.objective, model, world)
        # Passes without a gradient and passes over a part of the tokens need less than this.
        each = math.ceil(each * max(1.0, run.objective.macs_per_image(model) / model.macs))
    shards = world.size if run.sharding == "fsdp" else world.local_size if run.sharding == "hsdp" else 1
    return state_bytes(trained, run.optim, kept=kept, low=low, average=run.average > 0) // shards, each


def state_bytes(trained: int, optim: Optim, *, kept: int = 0, low: bool, average: bool) -> int:
    """Memory of parameters, gradients and moments. The `kept` ones, a teacher's, have neither gradient nor moments."""
    moments = (2 if optim.momentum_type == "bfloat16" else 4) + (4 if optim.kind == "adamw" else 0)
    always = 4 + (2 if low else 0) + (4 if average else 0)
    return trained * (always + 4 + moments) + kept * always


def image_bytes(config: ModelConfig, *, low: bool, recompute: bool) -> int:
    """Memory that one image adds while a step runs."""
    pixels = prod(config.image) * config.channels * 5  # as bytes and as floats
    return pixels + config.activation_bytes(2 if low else 4, recompute=recompute)


def free_bytes(device: torch.device) -> int:
    """Memory that this process may take."""
    if device.type == "cuda":
        return max(torch.cuda.mem_get_info(device)[0] - CUDA_OWN, 0)
    known = getattr(os, "sysconf_names", {})  # Windows has none, and macOS does not report free pages
    if "SC_AVPHYS_PAGES" in known:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if "SC_PHYS_PAGES" in known:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def balance_micro_batch(local: int, most: int) -> int:
    """How many of `local` samples to take at once, at most `most`: a divisor, so that all parts have one shape, unless
    that is less than half of `most`; then as even as possible."""
    divisor = next(size for size in range(min(local, most), 0, -1) if local % size == 0)
    return divisor if 2 * divisor > min(local, most) else -(-local // count_micro_batches(local, most))


def count_micro_batches(local: int, micro: int) -> int:
    """How many micro-batches there are; the last may be smaller."""
    return -(-local // micro)

"""Steps outside a run: a dry run that forecasts time and memory and looks for mistakes, and the replay of one step.

Trained weights are discarded.
"""

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store.reader import latest
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.text import format_bytes, format_size, pluralise
from vitrail.data.targets import ClassTargets
from vitrail.data.transforms.augmentation import Mix
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World, synchronise
from vitrail.evaluation.speed import training_flops
from vitrail.models.zoo import network_name
from vitrail.optim.config import Schedule
from vitrail.optim.optimiser import total_norm
from vitrail.optim.schedules import Rates, learning_rate
from vitrail.tasks.registry import TASKS, targets_of, task_of
from vitrail.train.assemble import Parts, assemble
from vitrail.train.closed_form_baseline import read_head
from vitrail.train.config import ResolvedRun, Run, RunRequest
from vitrail.train.data import DataSplits
from vitrail.train.resolve import COMPILED, count_micro_batches, describe_targets, estimate_memory, free_bytes, resolve
from vitrail.train.step import seed_generators, split_micro_batches
from vitrail.train.step_shape import describe_step_shapes, list_stages

WARM_UP = 2
TIMED_STEPS = 20
TIMED_S = 8.0
SAMPLED = 64  # images that are decoded
TRIAL_BATCH: Final = 8  # images per process and step when timing an image
TRIAL_STEPS: Final = 4  # after the first, at most
TRIAL_S: Final = 6.0


@dataclass(kw_only=True, slots=True)
class Forecast:
    """The result of a dry run: the resolved run, figures by name, and warnings."""

    run: ResolvedRun
    figures: dict[str, str] = field(default_factory=dict[str, str])
    warnings: list[str] = field(default_factory=list[str])
    images_per_s: float = 0.0
    seconds: float = 0.0


def dry_run(run: Run, splits: DataSplits, world: World, *, base: RunRequest | None = None) -> Forecast:
    """Reads some images, builds the run and times a few steps. `base` is the recipe before any changes."""
    resolved = resolve(run, splits, world)
    forecast = Forecast(run=resolved)
    forecast.warnings += [*splits.notes, *data_warnings(resolved, splits), *weights_warnings(resolved)]
    forecast.warnings += schedule_warnings(resolved, splits, base)
    describe_run(forecast, splits, world)
    parts = assemble(resolved, splits, world, UnreadableLog(), saved=None)
    seconds = time_steps(parts, warm=WARM_UP, most=TIMED_STEPS, limit_s=TIMED_S)
    forecast.images_per_s, forecast.seconds = resolved.batch / seconds, seconds * resolved.steps
    forecast.figures["speed"] = f"{forecast.images_per_s:,.0f} images/s, {seconds * 1e3:,.0f} ms per step"
    if world.device.type == "cuda":
        forecast.figures["speed"] += f", MFU {parts.cost.utilisation(forecast.images_per_s):.0%}"
        forecast.figures["memory"] += f"; {torch.cuda.max_memory_allocated() / 1e9:.2f} GB measured"
    return forecast


def describe_run(forecast: Forecast, splits: DataSplits, world: World) -> None:
    """Adds to the forecast what is known without running a step."""
    run, figures = forecast.run, forecast.figures
    macs = run.macs_per_image
    samples, local = len(splits.train), run.batch // world.size
    watched = f", {len(splits.watch):,} watched ({splits.watch_name})" if splits.watch is not None else ""
    tested = f", {len(splits.test):,} for the final test ({splits.test_name})" if splits.test is not None else ""
    figures["images"] = f"{samples:,} to train on{watched}{tested}; {describe_targets(run, splits)}"
    size = f"{run.model.parameters:,} parameters, {macs / 1e9:.3g} GMAC per image of {format_size(run.model.image)}"
    figures["network"] = f"{network_name(run.model)}: {size}{describe_step_shapes(run)}"
    processes = pluralise(world.size, "process", "processes")
    parts = pluralise(count_micro_batches(local, run.micro), "micro-batch", "micro-batches")
    each = f"at most {run.micro}" if local % run.micro else str(run.micro)
    figures["batch"] = f"{run.batch}: {processes} x {parts} x {each} images"
    figures["steps"] = f"{run.steps:,}, which is {run.steps * run.batch / samples:,.1f} epochs"
    state, image = estimate_memory(run, world)
    need, free = state + image * run.micro, free_bytes(world.device)
    parts = f"{format_bytes(state)} for the network, {format_bytes(image * run.micro)} for {run.micro} images"
    figures["memory"] = f"about {format_bytes(need)} ({parts}) of {format_bytes(free)} free"
    if need > free:
        reason = f"the run needs about {format_bytes(need)} and {format_bytes(free)} are free"
        forecast.warnings.append(f"{reason}; try recompute=on, or sharding=fsdp on several devices")
    figures["compute"] = f"{training_flops(macs, run.batch) / 1e12:,.3g} TFLOP per step"
    if not run.weights:  # to compare with Table 6
        figures["compute"] += f", {training_flops(macs, run.batch * run.steps) / 1e18:,.3g} exaFLOPs in all"
    figures["numbers"] = f"{run.precision}{COMPILED[run.compile]}, sharding {run.sharding}"


def time_steps(parts: Parts, *, warm: int, most: int, limit_s: float) -> float:
    """Seconds per real step, after `warm` steps that are not timed: reading, forward and backward, by the main
    process's clock. If a run has stages, the mean over them."""
    stages = list_stages(parts.run)
    each = [len(stage) * time_stage(parts, stage, warm=warm, most=most, limit_s=limit_s) for stage in stages]
    return sum(each) / parts.run.steps


def time_stage(parts: Parts, steps: range, *, warm: int, most: int, limit_s: float) -> float:
    run, world = parts.run, parts.world
    batches = parts.batches.iterate(steps.start, steps.stop)
    if len(steps) <= warm:  # too short to time: repeats its steps
        batches = itertools.cycle(list(batches))
    start, count = time.perf_counter(), 0
    for count, batch in enumerate(batches, start=1 - warm):
        parts.step(batch, step=batch.step, rates=Rates(0.0, 0.0), micro=run.micro)
        synchronise(world.device)
        if count == 0:
            start = time.perf_counter()
        elif count > 0 and world.broadcast(count == most or time.perf_counter() - start > limit_s):
            break
    return world.broadcast((time.perf_counter() - start) / max(count, 1))


def data_warnings(run: ResolvedRun, splits: DataSplits) -> list[str]:
    """Decodes some images with their targets, and compares their size with that of the network."""
    task, train = task_of(run.objective), splits.train
    samples = np.linspace(0, len(train) - 1, min(SAMPLED, len(train))).astype(int).tolist()
    found, bad, sides = list[str](), list[str](), list[int]()
    for index in samples:
        try:
            image = train.open_image(index)
            image.rgb()
            sides.append(min(image.size))
            if task is not None and task.targets.moves:
                task.targets.read(train, index, image.size)
        except DataError as error:
            name, text = train.name(index), str(error)
            bad.append(text if name in text else f"{name}: {text}")
    if bad:
        found.append(f"{len(bad)} of {len(samples)} sampled images cannot be read, first {bad[0]}")
    size = min(run.augmentation.size)
    if sides and np.median(sides) * 4 <= size:
        found.append(f"the images are {int(np.median(sides))} px on their shorter side and are enlarged to {size} px")
    if task is not None:
        found += task.check_targets(run.objective, train, splits.class_names)
    if run.batch > len(train):
        found.append(f"batch={run.batch} is more than the {len(train):,} training images")
    return found


def weights_warnings(run: ResolvedRun) -> list[str]:
    """Warnings if the weights expect another normalisation, or have other classes."""
    if not run.weights:
        return []
    bundle = find_weights(run.weights)
    found: list[str] = []
    theirs, ours = bundle.card.preprocessing, run.preprocessing
    if (ours.mean, ours.std) != (theirs.mean, theirs.std):
        before, now = (f"mean {one.mean} and std {one.std}" for one in (theirs, ours))
        found.append(f"the weights were trained on pixels with {before}, this run uses {now}")
    task, before, outputs = task_of(run.objective), TASKS.get(bundle.card.task), bundle.config.classes
    old = f"{outputs:,} outputs" if before is None else before.describe_outputs([""] * outputs)
    new = "" if task is None else task.describe_outputs([""] * run.model.classes)
    if outputs and old != new:
        found.append(f"the weights' head for {old} is {f'replaced by one for {new}' if new else 'removed'}")
    return found


def schedule_warnings(run: ResolvedRun, splits: DataSplits, base: RunRequest | None) -> list[str]:
    """Warnings if the batch was changed but not the learning rate that goes with it, or if the run is too short."""
    found: list[str] = []
    if base is not None and base.batch != run.batch:
        factor = run.batch / base.batch
        usual = base.optim.lr * (factor if run.optim.kind == "sgd" else math.sqrt(factor))
        if not 0.4 < run.optim.lr / usual < 2.5:
            recipe = f"the recipe's {base.optim.lr:g} at batch {base.batch}; about {usual:.2g} would match"
            found.append(f"optim.lr={run.optim.lr:g} at batch {run.batch} is far from {recipe}")
    if run.average and (left := run.average**run.steps) > 0.05:
        average = f"average={run.average} over {run.steps:,} steps leaves {left:.0%} of the initial weights"
        found.append(f"{average} in the average; {1 - 5 / run.steps:.4g} or less would fit")
    if run.steps * run.batch < len(splits.train):
        found.append("the run ends before it has seen every image once")
    last = learning_rate(run.steps - 1, run.schedule, base=run.optim.lr, total=run.steps)
    if last > 0.5 * run.optim.lr and run.schedule.decay != "constant":
        found.append("the learning rate hardly decays before the end; is the warm-up too long?")
    return found


def seconds_per_image(run: Run, splits: DataSplits, world: World) -> float:
    """Measures the seconds it takes to train on one image, after one step of warm-up."""
    short = replace(run, batch=TRIAL_BATCH * world.size, micro=0, steps=1 + TRIAL_STEPS, epochs=0.0, compile="off")
    short = replace(short, mix=Mix(), schedule=Schedule(), start="zero", baseline="off")
    short = replace(short, evaluation=replace(run.evaluation, patience=0))
    trial = resolve(short, splits, world)
    cuda = world.device.type == "cuda"
    with torch.random.fork_rng(devices=[world.device] if cuda else []):
        parts = assemble(trial, splits, world, UnreadableLog(), saved=None)
        return time_steps(parts, warm=1, most=TRIAL_STEPS, limit_s=TRIAL_S) / trial.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedImage:
    """An image of the batch, as the network saw it (the first of several views), and its own loss; if the objective
    compares the images of a batch with each other, the loss of the batch."""

    name: str
    label: str  # empty unless targets are classes of whole images
    loss: float
    pixels: NDArray[np.uint8]  # [H, W, 3], augmented and mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A replayed step, with the weights of the checkpoint of `weights_step` (-1: the initial ones)."""

    step: int
    weights_step: int
    loss: float
    norm: float
    images: tuple[ReplayedImage, ...]  # non-finite losses first, then the largest

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm))


def replay(run: Run, splits: DataSplits, folder: Path, step: int, world: World) -> Replay:
    """Runs the batch of a global step forward and backward, with the newest saved weights."""
    resolved = resolve(run, splits, world)
    if not 0 <= step < resolved.steps:
        raise ConfigError(f"step {step} is not among the steps 0 to {resolved.steps - 1} of this run")
    saved = latest(folder / "checkpoints", lambda note: None)
    head = read_head(folder) if saved is None and resolved.start == "closed-form" else None
    parts = assemble(resolved, splits, world, UnreadableLog(), saved=saved, head=head)
    batch = next(iter(parts.batches.iterate(step, step + 1)))
    micro = resolved.micro if saved is None else int(saved.facts["micro"])
    inputs = parts.step.prepare_inputs(batch, step)
    parts.step.set_patch(step)
    output = parts.step.compute_gradients(inputs, step, micro)
    count = output.count.clamp(min=1.0)
    norm = total_norm(parts.optimiser.gradients()) / count
    parts.optimiser.zero_grad()
    loss = float(output.total / count)
    labels = [""] * len(batch)
    if isinstance(targets_of(run.objective), ClassTargets):  # the first class of each image
        first: list[int] = batch.target.reshape(len(batch), -1)[:, 0].tolist()
        labels = [splits.class_names[label] if label >= 0 else "none" for label in first]
    images: list[ReplayedImage] = []
    with torch.no_grad():
        for at, part in enumerate(split_micro_batches(inputs, 1)):
            seed_generators(world.device, resolved.seed, step, world.rank, at)
            alone = loss if resolved.objective.needs_whole_batch else float(parts.objective(*part).total)
            name, pixels = splits.train.name(int(batch.sample[at])), part[0][0].permute(1, 2, 0).cpu().numpy()
            images.append(ReplayedImage(name=name, label=labels[at], loss=alone, pixels=pixels))
    images.sort(key=lambda one: (np.isfinite(one.loss), -one.loss if np.isfinite(one.loss) else 0.0))
    parts.step.set_patch(None)
    weights_step = -1 if saved is None else saved.step
    return Replay(step=step, weights_step=weights_step, loss=loss, norm=float(norm), images=tuple(images))

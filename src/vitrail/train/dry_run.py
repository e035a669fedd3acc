"""Before the start: what a run will take, and what looks wrong about it. Trains a few steps that nobody keeps.

How long an image takes to train on here: a few steps that nobody keeps.

One step of a run again, from (seed, step): which images it had, and what each of them did.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.store.reader import latest
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import Pair, format_size
from vitrail.data.dataset import ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.targets import ClassTargets
from vitrail.data.transforms.augmentation import Mix
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World, synchronise
from vitrail.evaluation.speed import training_flops
from vitrail.models.zoo import network_name
from vitrail.optim.config import Schedule
from vitrail.optim.optimiser import total_norm
from vitrail.optim.schedules import learning_rate
from vitrail.tasks.registry import TASKS, targets_of, task_of
from vitrail.tasks.task import Task
from vitrail.train import metrics as memory
from vitrail.train.assemble import Parts, assemble
from vitrail.train.closed_form_baseline import read_head
from vitrail.train.config import ResolvedRun, Run, RunRequest
from vitrail.train.data import DataSplits
from vitrail.train.resolve import COMPILED, describe_micro_batch, describe_targets, estimate_memory, resolve
from vitrail.train.step import seed_generators, split_micro_batches

WARM_UP = 2
TIMED_S = 8.0
LOOKED_AT = 64  # images that are decoded to see whether they can be


@dataclass(kw_only=True, slots=True)
class Forecast:
    """What was found: the run with every choice made, figures by name, and warnings."""

    run: ResolvedRun
    figures: dict[str, str] = field(default_factory=dict[str, str])
    warnings: list[str] = field(default_factory=list[str])
    images_per_s: float = 0.0
    seconds: float = 0.0


def dry_run(run: Run, splits: DataSplits, world: World, *, base: RunRequest | None = None) -> Forecast:
    """Reads, builds, times and stops. `base` is the recipe before anybody changed it."""
    resolved = resolve(run, splits, world)
    forecast = Forecast(run=resolved)
    forecast.warnings += [*splits.notes, *data_warnings(resolved, splits), *weights_warnings(resolved)]
    forecast.warnings += rate_warnings(resolved, base) + length_warnings(resolved, splits)
    describe_run(forecast, splits, world)
    parts = assemble(resolved, splits, world, UnreadableLog(), saved=None)
    time_steps(forecast, parts, world)
    return forecast


def describe_run(forecast: Forecast, splits: DataSplits, world: World) -> None:
    """All that needs no step to be known."""
    run, figures = forecast.run, forecast.figures
    work = run.objective.macs_per_image(run.model)
    samples, local = len(splits.train), run.batch // world.size
    watched = f", {len(splits.watch):,} watched ({splits.watch_name})" if splits.watch is not None else ""
    tested = f", {len(splits.test):,} for the end ({splits.test_name})" if splits.test is not None else ""
    figures["pictures"] = f"{samples:,} to train on{watched}{tested}; {describe_targets(run, splits)}"
    figures["network"] = (
        f"{network_name(run.model)}: {run.model.parameters:,} parameters, {work / 1e9:.3g} GMAC an image "
        f"of {format_size(run.model.image)}"
    )
    figures["batch"] = (
        f"{run.batch}: {world.size} process{'es' if world.size > 1 else ''} x "
        f"{memory.count_micro_batches(local, run.micro)} micro-batch{'es' if local > run.micro else ''} x "
        f"{describe_micro_batch(local, run.micro)} images"
    )
    figures["steps"] = f"{run.steps:,}, which is {run.steps * run.batch / samples:,.1f} epochs"
    state, each = estimate_memory(run, world)
    need, free = state + each * run.micro, memory.free_bytes(world.device)
    figures["memory"] = (
        f"about {size(need)} ({size(state)} for the network, {size(each * run.micro)} for {run.micro} images) of "
        f"{size(free)} free"
    )
    if need > free:
        forecast.warnings.append(
            f"the run needs about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; try recompute=on, or "
            "sharding=fsdp on several devices"
        )
    figures["compute"] = f"{training_flops(work, run.batch) / 1e12:,.3g} TFLOP a step"
    if not run.weights:  # to set next to Table 6
        figures["compute"] += f", {training_flops(work, run.batch * run.steps) / 1e18:,.3g} exaFLOPs in all"
    figures["numbers"] = f"{run.precision}{COMPILED[run.compile]}, sharding {run.sharding}"


def size(count: int) -> str:
    """1,234,567 -> "1.2 MB"."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def time_steps(forecast: Forecast, parts: Parts, world: World) -> None:
    """A few real steps: their speed, and from it the time of the whole."""
    run = forecast.run
    batches = parts.feed.stream(0, run.steps)
    if run.steps <= WARM_UP:  # too short to time: the same step again
        batches = repeated(batches)
    for batch in itertools.islice(batches, WARM_UP):
        parts.step(batch, step=batch.step, rate=0.0, micro=run.micro)
    settle(world)
    start, count = time.perf_counter(), 0
    for batch in batches:
        parts.step(batch, step=batch.step, rate=0.0, micro=run.micro)
        settle(world)
        count += 1
        if time.perf_counter() - start > TIMED_S or count >= 20:
            break
    seconds = (time.perf_counter() - start) / max(count, 1)
    forecast.images_per_s = run.batch / seconds
    forecast.seconds = seconds * run.steps
    forecast.figures["speed"] = f"{forecast.images_per_s:,.0f} images/s, {seconds * 1e3:,.0f} ms a step"
    if world.device.type == "cuda":
        forecast.figures["speed"] += f", MFU {parts.cost.utilisation(forecast.images_per_s):.0%}"
        forecast.figures["memory"] += f"; {torch.cuda.max_memory_allocated() / 1e9:.2f} GB measured"


def repeated(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The few there are, again and again."""
    return itertools.cycle(list(batches))


def settle(world: World) -> None:
    synchronise(world.device)


def data_warnings(run: ResolvedRun, splits: DataSplits) -> list[str]:
    """Decodes some images, with what lies on them; compares their size with what the network takes."""
    found: list[str] = []
    task = task_of(run.objective)
    chosen = np.linspace(0, len(splits.train) - 1, min(LOOKED_AT, len(splits.train))).astype(int)
    bad: list[str] = []
    sides: list[int] = []
    for index in chosen.tolist():
        try:
            picture = splits.train.open_image(index)
            picture.rgb()
            sides.append(min(picture.size))
            if task is not None and task.targets.moves:
                read_target(task, splits.train, index, picture.size)
        except DataError as error:
            bad.append(str(error))
    if bad:
        found.append(f"{len(bad)} of {len(chosen)} images looked at cannot be read, first {bad[0]}")
    size = min(run.augmentation.size)
    if sides and np.median(sides) * 4 <= size:
        found.append(f"the images are {int(np.median(sides))} px on their shorter side and are blown up to {size} px")
    if task is not None:
        found += task.check_targets(run.objective, splits.train, splits.class_names)
    if run.batch > len(splits.train):
        found.append(f"batch={run.batch} is more than the {len(splits.train):,} training images")
    return found


def read_target(task: Task, source: ImageDataset, index: int, size: Pair) -> None:
    """Raises BadImage, with the image's name, where the target cannot be used."""
    try:
        task.targets.read(source, index, size)
    except BadImage as error:
        raise BadImage(f"{source.name(index)}: {error}") from None


def weights_warnings(run: ResolvedRun) -> list[str]:
    """Whether the weights expect other pixels, or had other classes."""
    if not run.weights:
        return []
    bundle = find_weights(run.weights)
    found: list[str] = []
    card = bundle.card
    prepared = run.preprocessing
    if (prepared.mean, prepared.std) != (card.preprocessing.mean, card.preprocessing.std):
        found.append(
            f"the weights were trained on pixels with mean {card.preprocessing.mean} and std {card.preprocessing.std}, "
            f"this run gives them mean {prepared.mean} and std {prepared.std}"
        )
    task, before = task_of(run.objective), describe_head(bundle)
    now = "" if task is None else task.describe_outputs([""] * run.model.classes)
    if before and before != now:
        found.append(f"the weights' head for {before} is {f'replaced by one for {now}' if now else 'left out'}")
    return found


def describe_head(bundle: Bundle) -> str:
    """What the head of weights answers, in words; nothing where they have none."""
    task, outputs = TASKS.get(bundle.card.task), bundle.config.classes
    if not outputs:
        return ""
    return f"{outputs:,} outputs" if task is None else task.describe_outputs([""] * outputs)


def rate_warnings(run: ResolvedRun, base: RunRequest | None) -> list[str]:
    """A learning rate belongs to its batch."""
    if base is None or base.batch == run.batch:
        return []
    factor = run.batch / base.batch
    scaled = factor if run.optim.kind == "sgd" else math.sqrt(factor)
    usual = base.optim.lr * scaled
    if 0.4 < run.optim.lr / usual < 2.5:
        return []
    return [
        f"optim.lr={run.optim.lr:g} at batch {run.batch} is far from the recipe's {base.optim.lr:g} at batch "
        f"{base.batch}; about {usual:.2g} would go with it"
    ]


def length_warnings(run: ResolvedRun, splits: DataSplits) -> list[str]:
    found: list[str] = []
    if run.average and run.average**run.steps > 0.05:
        found.append(
            f"average={run.average} over {run.steps:,} steps leaves {run.average**run.steps:.0%} of the initial "
            f"weights in the average; {1 - 5 / run.steps:.4g} or less would fit"
        )
    if run.steps * run.batch < len(splits.train):
        found.append("the run ends before it has seen every image once")
    if (
        learning_rate(run.schedule, run.optim.lr, run.steps - 1, run.steps) > 0.5 * run.optim.lr
        and run.schedule.decay != "constant"
    ):
        found.append("the learning rate hardly decays before the end; is the warm-up too long?")
    return found


TRIED: Final = 8  # images a process in each step
TIMED: Final = 4  # steps after the first, at most
ENOUGH_S: Final = 6.0


def seconds_per_image(run: Run, splits: DataSplits, world: World) -> float:
    """Of training: reading, forward and backward, by the clock of the first process. The first step is not counted."""
    short = replace(
        run,
        batch=TRIED * world.size,
        micro=0,
        steps=1 + TIMED,
        epochs=0.0,
        mix=Mix(),
        schedule=Schedule(),
        start="zero",
        baseline="off",
        compile="off",
        evaluation=replace(run.evaluation, patience=0),
    )
    trial = resolve(short, splits, world)
    cuda = world.device.type == "cuda"
    with torch.random.fork_rng(devices=[world.device] if cuda else []):
        parts = assemble(trial, splits, world, UnreadableLog(), saved=None)
        images, begun = 0, time.perf_counter()
        for batch in parts.feed.stream(0, trial.steps):
            parts.step(batch, step=batch.step, rate=0.0, micro=trial.micro)
            if cuda:
                torch.cuda.synchronize(world.device)
            if batch.step == 0:
                begun = time.perf_counter()
                continue
            images += trial.batch
            if world.broadcast(time.perf_counter() - begun > ENOUGH_S):
                break
    return world.broadcast((time.perf_counter() - begun) / images)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedImage:
    """An image of the batch, as the network saw it (of several views the first), and its loss by itself; where the
    images of a batch are compared with each other there is no such thing, and it is that of the batch."""

    name: str
    label: str  # empty where targets are no classes of whole images
    loss: float
    pixels: NDArray[np.uint8]  # [H, W, 3], augmented and mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A step again, with the weights of the checkpoint of `weights_step` (-1: as the run began)."""

    step: int
    weights_step: int
    loss: float
    norm: float
    seen: tuple[ReplayedImage, ...]  # those that are not finite first, then by loss

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm))


def replay(run: Run, splits: DataSplits, folder: Path, step: int, world: World) -> Replay:
    """The batch of global step `step`, forward and backward, with the newest weights that were saved."""
    resolved = resolve(run, splits, world)
    if not 0 <= step < resolved.steps:
        raise ConfigError(f"step {step} is not among the steps 0 to {resolved.steps - 1} of this run")
    notes: list[str] = []
    saved = latest(folder / "checkpoints", notes.append)
    head = read_head(folder) if saved is None and resolved.start == "closed-form" else None
    parts = assemble(resolved, splits, world, UnreadableLog(), saved=saved, head=head)
    batch = next(iter(parts.feed.stream(step, step + 1)))
    micro = resolved.micro if saved is None else int(saved.facts["micro"])
    inputs = parts.objective.inputs(batch, seed=resolved.seed, step=step)
    outcome = parts.step.gradients(inputs, step, micro)
    count = outcome.count.clamp(min=1.0)
    norm = total_norm(parts.optimiser.gradients()) / count
    parts.optimiser.zero_grad()
    loss = float(outcome.total / count)
    seen: list[ReplayedImage] = []
    labels = name_labels(batch, splits.class_names) if isinstance(targets_of(run.objective), ClassTargets) else None
    with torch.no_grad():
        for at, part in enumerate(split_micro_batches(inputs, 1)):
            seed_generators(world.device, resolved.seed, step, world.rank, at)
            alone = loss if resolved.objective.needs_whole_batch else float(parts.objective(*part).total)
            seen.append(
                ReplayedImage(
                    name=splits.train.name(int(batch.sample[at])),
                    label="" if labels is None else labels[at],
                    loss=alone,
                    pixels=part[0][0].permute(1, 2, 0).cpu().numpy(),
                )
            )
    seen.sort(key=lambda one: (np.isfinite(one.loss), -one.loss if np.isfinite(one.loss) else 0.0))
    return Replay(
        step=step,
        weights_step=-1 if saved is None else saved.step,
        loss=loss,
        norm=float(norm),
        seen=tuple(seen),
    )


def name_labels(batch: Batch, classes: Sequence[str]) -> list[str]:
    """The first class of each image."""
    numbers: list[int] = batch.target.reshape(len(batch), -1)[:, 0].tolist()
    return [classes[number] if number >= 0 else "none" for number in numbers]

"""One step of a run again, from (seed, step): which images it had, and what each of them did."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoint.store.reader import latest
from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.data.targets import ClassLabels
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import World
from vitrail.optim.optimiser import total_norm
from vitrail.tasks.registry import targets_of
from vitrail.train.assemble import assemble
from vitrail.train.closed_form_baseline import kept_head
from vitrail.train.config import Run
from vitrail.train.data_splits import Pictures
from vitrail.train.resolve import resolve
from vitrail.train.step import divided, seed_generators


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
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
    seen: tuple[Seen, ...]  # those that are not finite first, then by loss

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm))


def replay(run: Run, pictures: Pictures, folder: Path, step: int, world: World) -> Replay:
    """The batch of global step `step`, forward and backward, with the newest weights that were saved."""
    resolved = resolve(run, pictures, world)
    if not 0 <= step < resolved.steps:
        raise ConfigError(f"step {step} is not among the steps 0 to {resolved.steps - 1} of this run")
    notes: list[str] = []
    saved = latest(folder / "checkpoints", notes.append)
    head = kept_head(folder) if saved is None and resolved.start == "closed-form" else None
    parts = assemble(resolved, pictures, world, UnreadableLog(), saved=saved, head=head)
    batch = next(iter(parts.feed.stream(step, step + 1)))
    micro = resolved.micro if saved is None else int(saved.facts["micro"])
    inputs = parts.objective.inputs(batch, seed=resolved.seed, step=step)
    outcome = parts.step.gradients(inputs, step, micro)
    count = outcome.count.clamp(min=1.0)
    norm = total_norm(parts.optimiser.gradients()) / count
    parts.optimiser.zero_grad()
    loss = float(outcome.total / count)
    seen: list[Seen] = []
    labels = name_labels(batch, pictures.classes) if isinstance(targets_of(run.objective), ClassLabels) else None
    with torch.no_grad():
        for at, part in enumerate(divided(inputs, 1)):
            seed_generators(world.device, resolved.seed, step, world.rank, at)
            alone = loss if resolved.objective.needs_whole_batch else float(parts.objective(*part).total)
            seen.append(
                Seen(
                    name=pictures.train.name(int(batch.sample[at])),
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

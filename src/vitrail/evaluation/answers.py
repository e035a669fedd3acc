"""What a network said to every picture of a split: one row a picture, so that all else can be counted on the host.

    said = answers(network, sweep(source, preprocessing, batch=256), preprocessing, count=len(source), classes=1000,
                   labels={"original": source.labels, "ReaL": real}, device="cpu")

Processes that share a split each fill their own rows, and the sum of their tables is the whole: the same numbers to the
last bit, however many there are, since no row is ever added to another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.labels import NONE, Labels
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.accuracy import TOP, Together, losses_of
from vitrail.evaluation.rest import Precision, at_rest, prepared


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answers:
    """N rows. Where `seen` is false the picture could not be read; where `top` is -1 the logits were no numbers."""

    classes: int
    seen: NDArray[np.bool_]  # [N]
    top: NDArray[np.int64]  # [N, 5], the likeliest classes in their order; fewer columns where there are fewer classes
    confidence: NDArray[np.float32]  # [N], the probability of the first
    losses: Mapping[str, NDArray[np.float32]]  # [N] for each of the labellings
    scores: NDArray[np.float32] | None = None  # [N, K], each class by itself, where they were asked for

    def __len__(self) -> int:
        return len(self.seen)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """The M answers that count for one labelling: those to pictures that were read and that have a label."""

    sample: NDArray[np.int64]  # [M], their places in the source
    truth: NDArray[np.int64]  # of several labels the one that was said, else the first
    said: NDArray[np.int64]
    right: NDArray[np.bool_]
    among: NDArray[np.bool_]  # whether a label is among the five likeliest
    confidence: NDArray[np.float32]
    loss: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.sample)


def answers(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    *,
    count: int,
    classes: int,
    labels: Mapping[str, Labels],
    device: torch.device | str,
    world: Together | None = None,
    precision: Precision = "float32",
    progress: Callable[[int], None] | None = None,
    multi_label: bool = False,
) -> Answers:
    """The answers to all `count` samples of a source, from batches of its `sweep`. With a `world` each process brings
    its part of them, and all get the whole. `progress` hears how many samples have gone by here. Of a
    `multi_label` network the sigmoid of every class is kept."""
    device = torch.device(device)
    prepare, top = prepared(preprocessing, device, precision), min(TOP, classes)
    # A row more than there are samples: places without a picture go there.
    whole = torch.zeros(count + 1, top + 1, dtype=torch.int64, device=device)
    kept = classes if multi_label else 0
    parts = torch.zeros(count + 1, 1 + len(labels) + kept, dtype=torch.float32, device=device)
    done = 0
    with at_rest(network, device, precision):
        for batch in batches:
            rows = [torch.from_numpy(rows_of(one, batch)).to(device, non_blocking=True) for one in labels.values()]
            moved = batch.to(device)
            logits = network(prepare(moved.pixels))
            if logits.shape != (len(batch), classes):
                raise ConfigError(f"the network gave {tuple(logits.shape)}; for {classes} classes it is [B, {classes}]")
            place = torch.where(moved.valid, moved.sample, count)
            logits = logits.float()
            logs = logits.log_softmax(-1)
            sound = ~logs[:, 0].isnan()  # one logit that is no number makes all of the row so
            best = torch.where(sound[:, None], logits.topk(top).indices, -1)
            sure = torch.where(sound, logs.max(-1).values.exp(), 0.0)
            whole[place] = torch.cat([torch.ones_like(best[:, :1]), best], 1)
            facts = torch.stack([sure, *(losses_of(logs, row, classes) for row in rows)], 1)
            parts[place] = torch.cat([facts, logits.sigmoid().nan_to_num(0.0)[:, :kept]], 1)
            done += len(batch)
            if progress is not None:
                progress(min(done, count))
    whole[count], parts[count] = 0, 0.0
    if world is not None and world.size > 1:
        world.sum_(whole)
        world.sum_(parts)
    numbers, values = whole[:count].cpu().numpy(), parts[:count].cpu().numpy()
    return Answers(
        classes=classes,
        seen=numbers[:, 0] > 0,
        top=numbers[:, 1:],
        confidence=values[:, 0],
        losses={name: values[:, 1 + at] for at, name in enumerate(labels)},
        scores=values[:, 1 + len(labels) :] if multi_label else None,
    )


def rows_of(labels: Labels, batch: Batch) -> NDArray[np.int64]:
    """Labels of a batch's samples [B, M], filled up with -1; of a place past the end those of the first sample, which
    count for nothing."""
    rows = labels.rows(np.maximum(batch.sample.cpu().numpy(), 0))
    return rows if rows.ndim == 2 else rows[:, None]


def judge(said: Answers, labels: Labels, name: str) -> Judged:
    """The answers under one of the labellings that they were asked for with."""
    rows = labels.rows(np.arange(len(said)))
    rows = rows if rows.ndim == 2 else rows[:, None]
    counted = np.flatnonzero(said.seen & (rows != NONE).any(1))
    rows, top = rows[counted], said.top[counted]
    known = rows != NONE  # an answer that is none is -1, as what fills up a row is
    hit = (top[:, :, None] == rows[:, None, :]) & known[:, None, :]
    right = hit[:, 0].any(1)
    first = rows[np.arange(len(rows)), known.argmax(1)]
    return Judged(
        sample=counted,
        truth=np.where(right, top[:, 0], first),
        said=top[:, 0],
        right=right,
        among=hit.any((1, 2)),
        confidence=said.confidence[counted],
        loss=said.losses[name][counted],
    )

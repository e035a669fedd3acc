"""What a network said to every picture of a split: one row a picture, so that all else can be counted on the host.

    table = PredictionTable(len(source), 1000, {"original": source.labels, "ReaL": real}, device)
    said = score_batches(network, sweep(source, preprocessing, batch=256), preprocessing, table, device=device)

Processes that share a split each fill their own rows, and the sum of their tables is the whole: the same numbers to the
last bit, however many there are, since no row is ever added to another.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.labels import Labels
from vitrail.data.loader import Batch
from vitrail.evaluation.accuracy import TOP, check_logits, sound_only
from vitrail.evaluation.correctness import cross_entropies, judge_predictions, label_rows
from vitrail.evaluation.metric import Together


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


class PredictionTable:
    """A metric: a row for each of `count` samples, on the device. A process leaves the rows of the others at zero, so
    that the sum of their tables is the whole. Of a `multi_label` network the sigmoid of every class is kept."""

    def __init__(
        self, count: int, classes: int, labels: Mapping[str, Labels], device: torch.device, *, multi_label: bool = False
    ) -> None:
        self.count, self.classes = count, classes
        self.labels = {name: rows_of(one).to(device) for name, one in labels.items()}
        self.kept = classes if multi_label else 0
        # A row more than there are samples: places without a picture go there.
        self.whole = torch.zeros(count + 1, min(TOP, classes) + 1, dtype=torch.int64, device=device)
        self.parts = torch.zeros(count + 1, 1 + len(labels) + self.kept, dtype=torch.float32, device=device)

    def update(self, outputs: Tensor, batch: Batch) -> None:
        logits = check_logits(outputs, batch, self.classes)
        place = torch.where(batch.valid, batch.sample, self.count)
        logs = logits.log_softmax(-1)
        best = sound_only(logits.topk(min(TOP, self.classes)).indices, logs)
        sure = logs.max(-1).values.exp().nan_to_num(0.0)
        self.whole[place] = torch.cat([torch.ones_like(best[:, :1]), best], 1)
        # A place past the end takes the labels of the first sample, which count for nothing.
        rows = [labels[batch.sample.clamp(min=0)] for labels in self.labels.values()]
        facts = torch.stack([sure, *(cross_entropies(logs, row) for row in rows)], 1)
        self.parts[place] = torch.cat([facts, logits.sigmoid().nan_to_num(0.0)[:, : self.kept]], 1)

    def merge(self, world: Together) -> None:
        for table in (self.whole, self.parts):
            table[self.count] = 0
            world.sum_(table)

    def result(self) -> Answers:
        numbers, values = self.whole[: self.count].cpu().numpy(), self.parts[: self.count].cpu().numpy()
        return Answers(
            classes=self.classes,
            seen=numbers[:, 0] > 0,
            top=numbers[:, 1:],
            confidence=values[:, 0],
            losses={name: values[:, 1 + at] for at, name in enumerate(self.labels)},
            scores=values[:, 1 + len(self.labels) :] if self.kept else None,
        )


def rows_of(labels: Labels) -> Tensor:
    """All labels of a source [N, M], filled up with -1."""
    return label_rows(torch.from_numpy(labels.rows(np.arange(len(labels)))))


def judge(said: Answers, labels: Labels, name: str) -> Judged:
    """The answers under one of the labellings that they were asked for with."""
    top = torch.from_numpy(said.top)
    found = judge_predictions(top[:, 0], top, rows_of(labels))
    counted = np.flatnonzero(said.seen & found.labelled.numpy())
    return Judged(
        sample=counted,
        truth=found.truth.numpy()[counted],
        said=said.top[counted, 0],
        right=found.right.numpy()[counted],
        among=found.among.numpy()[counted],
        confidence=said.confidence[counted],
        loss=said.losses[name][counted],
    )

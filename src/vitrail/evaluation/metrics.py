"""Metrics: objects that count over the batches of a split, and the one loop that feeds them.

    score = score_batches(network, batches, preprocessing, ClassificationMetric(10, device), device=device)

A metric holds sums or rows that processes can add up, and never averages averages. A task defines its own: a class with
the three methods of `Metric`, whose result names its numbers and the criteria that select the best weights.

Accuracy, top-5, loss and confusion over a split count every image once.

    score = evaluate(network, sweep(source, preprocessing, batch=256), preprocessing, classes=10, device="cpu")
    score.accuracy, score.loss, score.confusion

Sums stay on the device and are read once, after the last batch.

One rule decides when a prediction is right, in training, evaluation and the check of an export. A sample has one label,
several of which any one counts (ReaL), or none, and then it does not count. Labels are [N], or [N, M] padded with -1.
The loss of several labels is minus the log of their total probability. A prediction of -1 is never right.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.dataset import Labels
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import one_hot
from vitrail.distributed.process_group import widest_float
from vitrail.evaluation.frozen.features import Precision, inference_context, make_normaliser

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class SupportsAllReduce(Protocol):
    """The processes that share a split, as in `vitrail.distributed`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum_(self, tensor: Tensor, /) -> object: ...  # over all processes, in place


class Metric(Protocol[ResultT_co]):
    """Scores a network's outputs on the device, without blocking it."""

    def update(self, outputs: Tensor, batch: Batch, /) -> None:
        """Counts one batch, which is on the metric's device. Rows where `batch.valid` is false have no image and
        do not count."""
        ...

    def merge(self, world: SupportsAllReduce, /) -> None:
        """Adds up the counts of all processes; each then has the total."""
        ...

    def result(self) -> ResultT_co:
        """The result, on the host."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """A number of a result by which weights are selected. Relative differences below `rounding` do not count."""

    name: str  # in rows of metrics
    title: str = ""  # for people; the name if empty
    share: bool = False  # between 0 and 1, shown in percent
    larger: bool = True  # larger is better, else smaller
    rounding: float = 0.0

    def is_better(self, value: float, than: float) -> bool:
        rounding = math.copysign(self.rounding, than)
        return value > than * (1 + rounding) if self.larger else value < than * (1 - rounding)


def is_better(new: Mapping[str, float], old: Mapping[str, float | None], criteria: Sequence[Criterion]) -> bool:
    """Whether the first criterion prefers the new numbers; if its two are equal, the next one decides. A number that is
    missing from the old ones decides nothing."""
    for criterion in criteria:
        value, before = new[criterion.name], old[criterion.name]
        if before is None or value != before:
            return before is not None and criterion.is_better(value, before)
    return False


def score_batches(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    metric: Metric[ResultT],
    *,
    device: torch.device | str,
    world: SupportsAllReduce | None = None,
    precision: Precision = "float32",
    progress: Callable[[int], None] | None = None,
) -> ResultT:
    """The result of a network, compiled, wrapped or plain, over batches of `sweep`. With a `world` each process has its
    share of them, and all get the total result. `progress` is called with the number of samples so far."""
    device = torch.device(device)
    prepare, done = make_normaliser(preprocessing, device, precision), 0
    with inference_context(network, device, precision):
        for batch in batches:
            moved = batch.to(device)
            metric.update(network(prepare(moved.pixels)), moved)
            done += len(batch)
            if progress is not None:
                progress(done)
    if world is not None and world.size > 1:
        metric.merge(world)
    return metric.result()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """How N predictions compare with one set of labels, [N] each."""

    labelled: Tensor  # whether the sample has a label; others do not count
    right: Tensor
    among: Tensor  # whether a label is among the top classes
    truth: Tensor  # the predicted label if it is one of several, else the first; -1 without a label


def label_rows(labels: Tensor) -> Tensor:
    """Labels [N] or [N, M] as [N, M]."""
    return labels if labels.ndim == 2 else labels[:, None]


def has_label(labels: Tensor) -> Tensor:
    """Whether each sample [N] has a label."""
    return (label_rows(labels) >= 0).any(1)


def is_right(predicted: Tensor, labels: Tensor) -> Tensor:
    """Whether each prediction [N], or any of T guesses [N, T], is one of the sample's labels."""
    rows, guesses = label_rows(labels), label_rows(predicted)
    return ((guesses[:, :, None] == rows[:, None, :]) & (rows >= 0)[:, None, :]).flatten(1).any(1)


def count_right(predicted: Tensor, labels: Tensor) -> tuple[int, int]:
    """The number of correct predictions and of samples with a label, which add up over parts of a set."""
    return int(is_right(predicted, labels).sum()), int(has_label(labels).sum())


def judge_predictions(predicted: Tensor, likeliest: Tensor, labels: Tensor) -> Verdicts:
    """Compares predictions [N] and the top classes [N, T] with the labels."""
    rows = label_rows(labels)
    right = is_right(predicted, rows)
    first = rows.gather(1, (rows >= 0).int().argmax(1, keepdim=True))[:, 0]
    return Verdicts(
        labelled=has_label(rows),
        right=right,
        among=is_right(likeliest, rows),
        truth=torch.where(right, predicted, first),
    )


def cross_entropies(logs: Tensor, labels: Tensor) -> Tensor:
    """[N], from log-probabilities [N, K]: of several labels, minus the log of the probability they have together."""
    rows = label_rows(labels)
    if rows.shape[1] == 1:
        return -logs.gather(1, rows.clamp(min=0))[:, 0]
    return -logs.masked_fill(one_hot(rows, logs.shape[1]) == 0, -torch.inf).logsumexp(1)


CONFUSION: Final = 1024  # classes above which there is no confusion matrix
TOP: Final = 5


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """The prediction for one sample and its probability."""

    sample: int
    label: int
    predicted: int
    probability: float
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassificationScore:
    """The score over all readable samples with a label. `correct5` is None for five classes or fewer. The confusion
    matrix [K, K] has true classes as rows. `best` are the most confident correct predictions, `worst` those with the
    largest loss."""

    count: int
    correct: int
    correct5: int | None
    loss: float
    unreadable: int
    criteria: ClassVar[tuple[Criterion, ...]] = (
        Criterion(name="accuracy", share=True),
        Criterion(name="loss", larger=False, rounding=1e-6),
    )
    confusion: NDArray[np.int64] | None = None
    best: tuple[ScoredSample, ...] = ()
    worst: tuple[ScoredSample, ...] = ()

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def top5(self) -> float | None:
        return None if self.correct5 is None else self.correct5 / self.count

    def row(self) -> dict[str, float | int | None]:
        """The row of a run's metrics."""
        return {"accuracy": self.accuracy, "loss": self.loss, "top5": self.top5, "count": self.count}


def evaluate(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    *,
    classes: int,
    device: torch.device | str,
    world: SupportsAllReduce | None = None,
    precision: Precision = "float32",
    extremes: int = 0,
) -> ClassificationScore:
    """The score of a network, compiled, wrapped or plain, over batches of `sweep`. With a `world` each process brings
    its part of them, and all get the score of the whole. `extremes` answers are kept of the best and of the worst."""
    metric = ClassificationMetric(classes, torch.device(device), extremes)
    return score_batches(network, batches, preprocessing, metric, device=device, world=world, precision=precision)


class ClassificationMetric:
    """Sums on the device. Counts are int64, so they are exact and independent of the order of processes."""

    def __init__(self, classes: int, device: torch.device, extremes: int = 0) -> None:
        self.classes = classes
        exact = widest_float(device)
        self.loss = torch.zeros(1, dtype=exact, device=device)
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)  # count, correct, correct5, unreadable
        cells = classes**2 if classes <= CONFUSION else 0
        self.cells = torch.zeros(cells, dtype=torch.int64, device=device)
        self.best, self.worst = TopSamples(extremes, exact, device), TopSamples(extremes, exact, device)

    def update(self, outputs: Tensor, batch: Batch) -> None:
        """Adds one batch's logits [B, K]; rows without an image or a label do not count."""
        logits = check_logits(outputs, batch, self.classes)
        logs = logits.log_softmax(-1)
        sure, predicted = logs.max(-1)
        top = logits.topk(TOP).indices if self.classes > TOP else predicted[:, None]  # [B, 5]
        found = judge_predictions(mask_nan(predicted, logs), mask_nan(top, logs), batch.target)
        counted = batch.valid & found.labelled
        losses, truth = cross_entropies(logs, batch.target), found.truth.clamp(min=0)
        absent = ~batch.valid & (batch.sample >= 0)
        tests = torch.stack([counted, counted & found.right, counted & found.among, absent])
        self.counts += tests.sum(1)
        # A row that does not count may hold anything, NaN included, so it is replaced, not multiplied by zero.
        self.loss += torch.where(counted, losses, 0.0).to(self.loss.dtype).sum()
        if len(self.cells):
            self.cells.scatter_add_(0, truth * self.classes + predicted, counted.long())
        if self.best.most:
            answers = torch.stack([batch.sample, truth, predicted], 1), torch.stack([sure.exp(), losses], 1)
            surest = torch.where(counted & found.right, sure, -torch.inf)
            self.best.add(surest.nan_to_num(-torch.inf, neginf=-torch.inf), *answers)
            self.worst.add(torch.where(counted, losses.nan_to_num(torch.inf, torch.inf), -torch.inf), *answers)

    def merge(self, world: SupportsAllReduce) -> None:
        for sums in (self.loss, self.counts, self.cells):
            if len(sums):
                world.sum_(sums)
        self.best.share(world)
        self.worst.share(world)

    def result(self) -> ClassificationScore:
        count, correct, correct5, unreadable = (int(value) for value in self.counts.tolist())
        if not count:
            raise DataError(
                f"no image could be scored: {unreadable} are unreadable and the rest have no label; choose another "
                "split"
            )
        cells = self.cells.view(self.classes, self.classes).cpu().numpy() if len(self.cells) else None
        return ClassificationScore(
            count=count,
            correct=correct,
            correct5=correct5 if self.classes > TOP else None,
            loss=float(self.loss.item()) / count,
            unreadable=unreadable,
            confusion=cells,
            best=self.best.read(),
            worst=self.worst.read(),
        )


def check_logits(outputs: Tensor, batch: Batch, classes: int) -> Tensor:
    """The outputs as float32 logits [B, K]; ConfigError if the shape differs."""
    if outputs.shape != (len(batch), classes):
        raise ConfigError(f"the network's outputs are {tuple(outputs.shape)}; {classes} classes need [B, {classes}]")
    return outputs.float()


def mask_nan(predicted: Tensor, logs: Tensor) -> Tensor:
    """Predictions [B] or [B, T], -1 where the log-probabilities [B, K] are NaN, which one NaN logit causes."""
    sound = ~logs[:, 0].isnan()
    return torch.where(sound if predicted.ndim == 1 else sound[:, None], predicted, -1)


class TopSamples:
    """The samples with the largest keys so far. Ties go to the earlier sample, so the result does not depend on the
    batch size."""

    def __init__(self, most: int, exact: torch.dtype, device: torch.device) -> None:
        self.most = most
        self.keys = torch.full((most,), -torch.inf, dtype=exact, device=device)
        self.names = torch.full((most, 3), -1, dtype=torch.int64, device=device)  # sample, label, predicted
        self.values = torch.zeros((most, 2), dtype=exact, device=device)  # probability, loss

    def add(self, keys: Tensor, names: Tensor, values: Tensor) -> None:
        """Adds candidates: keys [B], where -inf means none; names [B, 3] and values [B, 2]."""
        self.take(
            torch.cat([self.keys, keys.to(self.keys.dtype)]),
            torch.cat([self.names, names]),
            torch.cat([self.values, values.to(self.values.dtype)]),
        )

    def take(self, keys: Tensor, names: Tensor, values: Tensor) -> None:
        order = names[:, 0].argsort(stable=True)
        order = order[keys[order].argsort(descending=True, stable=True)][: self.most]
        self.keys, self.names, self.values = keys[order], names[order], values[order]

    def share(self, world: SupportsAllReduce) -> None:
        """Merges all processes: each writes its own rows into a table of zeros, and the tables are summed."""
        if not self.most:
            return
        tables: list[Tensor] = []
        for mine in (self.keys, self.names, self.values):
            table = mine.new_zeros(world.size, *mine.shape)
            table[world.rank] = mine
            world.sum_(table)
            tables.append(table.flatten(0, 1))
        self.take(*tables)

    def read(self) -> tuple[ScoredSample, ...]:
        rows = zip(self.keys.tolist(), self.names.tolist(), self.values.tolist(), strict=True)
        return tuple(
            ScoredSample(sample, label, predicted, probability, loss)
            for key, (sample, label, predicted), (probability, loss) in rows
            if key > -torch.inf
        )


def score_predictions(predicted: Tensor, labels: Tensor) -> tuple[int, int]:
    """`count_right`; BadLabels if no sample has a label. `predicted` is [N], or [N, T] if any of T guesses may be
    right."""
    right, count = count_right(predicted, labels)
    if not count:
        raise BadLabels("no sample has a label, so a classifier cannot be scored")
    return right, count


def keep_single_labels(labels: Tensor) -> Tensor:
    """[N], -1 for samples with no label or several: a classifier is fitted on samples of one class."""
    if labels.ndim == 1:
        return labels
    return torch.where((labels >= 0).sum(1) == 1, labels.amax(1), -1)


def count_single_labels(labels: Labels, classes: int) -> NDArray[np.int64]:
    """For every class [K], the number of samples with this class alone."""
    if labels.starts is None:
        return labels.counts(classes)
    alone = labels.values[labels.starts[:-1][np.diff(labels.starts) == 1]]
    return np.bincount(alone[alone >= 0], minlength=classes)

"""Metrics: objects that count over the batches of a split, and the one loop that feeds them.

    score = score_batches(network, batches, preprocessing, ClassificationMetric(10, device), device=device)

A metric holds sums or rows that processes can add up, and never averages averages. A task defines its own: a class with
the three methods of `Metric`, whose result names its numbers and the criteria that select the best weights.

Accuracy, top-5, loss and confusion over a split count every image once. Rows stay on the device and are read once,
after the last batch. Processes that share a split gather their rows, so the numbers are the same to the last bit for
any number of processes.

One rule decides when a prediction is right, in training, evaluation and the check of an export. A sample has one label,
several labels of which any one counts as right (ReaL), or none, and then it does not count. Labels are [N], or [N, M]
padded with -1. The loss of several labels is minus the log of their total probability. A prediction of -1 is never
right.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.core.precision import Precision
from vitrail.data.dataset import Labels
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import one_hot
from vitrail.distributed.process_group import World
from vitrail.evaluation.frozen.features import inference_context, make_normaliser
from vitrail.models.query_output import Output

REMEDY: Final = "choose another split, or check it with `vitrail data`"  # where nothing could be scored

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Metric(Protocol[ResultT_co]):
    """Scores a network's outputs on the device, without blocking it."""

    def update(self, outputs: Any, batch: Batch, /) -> None:
        """Counts one batch, which is on the metric's device: an `Output` of the network. Rows where `batch.valid` is
        false have no image and do not count."""
        ...

    def merge(self, world: World, /) -> None:
        """Adds up the counts of all processes; each then has the total."""
        ...

    def result(self) -> ResultT_co:
        """The result, on the host."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """A number of a result that selects the best weights. Relative differences below `rounding` do not count."""

    name: str  # in rows of metrics
    title: str = ""  # for people; the name if empty
    share: bool = False  # between 0 and 1, shown in percent
    larger: bool = True  # larger is better, else smaller
    rounding: float = 0.0

    def is_better(self, value: float, than: float) -> bool:
        rounding = math.copysign(self.rounding, than)
        return value > than * (1 + rounding) if self.larger else value < than * (1 - rounding)


def is_better(new: Mapping[str, float], old: Mapping[str, float | None], criteria: Sequence[Criterion]) -> bool:
    """Whether the first criterion prefers the new numbers; on a tie, the next one decides. A number that is missing
    from the old ones decides nothing."""
    for criterion in criteria:
        value, before = new[criterion.name], old[criterion.name]
        if before is None or value != before:
            return before is not None and criterion.is_better(value, before)
    return False


def score_batches(
    network: Callable[[Tensor], Output],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    metric: Metric[ResultT],
    *,
    device: torch.device | str,
    world: World | None = None,
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


def judge_predictions(top: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compares the top classes [N, T], the predicted one first, with the labels: whether the prediction is right [N],
    whether any of them is, and the true class: the predicted one if it is one of several, else the first; -1 without a
    label."""
    rows = label_rows(labels)
    right = is_right(top[:, 0], rows)
    first = rows.gather(1, (rows >= 0).int().argmax(1, keepdim=True))[:, 0]
    return right, is_right(top, rows), torch.where(right, top[:, 0], first)


def cross_entropies(logs: Tensor, labels: Tensor) -> Tensor:
    """Losses [N] from log-probabilities [N, K]; for several labels, minus the log of their total probability."""
    rows = label_rows(labels)
    if rows.shape[1] == 1:
        return -logs.gather(1, rows.clamp(min=0))[:, 0]
    return -logs.masked_fill(one_hot(rows, logs.shape[1]) == 0, -torch.inf).logsumexp(1)


CONFUSION: Final = 1024  # classes up to which a confusion matrix is kept
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassPredictions:
    """The predictions for M readable images, in the order of the source."""

    sample: NDArray[np.int64]  # [M], their places in the source
    top: NDArray[np.int64]  # [M, 5], the likeliest classes in order, or all of fewer; -1 where the logits are NaN
    truth: NDArray[np.int64]  # the predicted label if it is one of several, else the first; -1 without a label
    right: NDArray[np.bool_]
    among: NDArray[np.bool_]  # whether a label is among the top five
    confidence: NDArray[np.float32]  # the probability of the first
    loss: NDArray[np.float32]
    scores: NDArray[np.float32]  # [M, K], sigmoid of each class; [M, 0] if not requested

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def predicted(self) -> NDArray[np.int64]:
        return self.top[:, 0]

    def judge(self, labels: Labels | None = None) -> "ClassPredictions":
        """Those that have a label; with `labels` they are compared with these instead of the source's own."""
        found = self
        if labels is not None:
            rows = torch.from_numpy(labels.rows(self.sample))
            right, among, truth = (part.numpy() for part in judge_predictions(torch.from_numpy(self.top), rows))
            found = replace(self, right=right, among=among, truth=truth)
        known = found.truth >= 0
        return ClassPredictions(**{one.name: getattr(found, one.name)[known] for one in fields(found)})

    def count_confusions(self) -> NDArray[np.int64]:
        """The non-empty cells of the confusion matrix: rows of true class, predicted class and count. NaN predictions
        have no cell."""
        pairs = np.stack([self.truth, self.predicted], 1)[self.predicted >= 0]
        cells, counts = np.unique(pairs, axis=0, return_counts=True)
        return np.concatenate([cells, counts[:, None]], 1)

    def confusion_matrix(self, classes: int) -> NDArray[np.int64] | None:
        """[K, K], true classes as rows; None for too many classes."""
        if classes > CONFUSION:
            return None
        truth, said, count = self.count_confusions().T
        whole = np.zeros((classes, classes), np.int64)
        whole[truth, said] = count
        return whole

    def extremes(self, most: int) -> tuple[tuple[ScoredSample, ...], tuple[ScoredSample, ...]]:
        """The most confident correct predictions, and those with the largest loss. Ties go to the earlier sample."""
        right = np.flatnonzero(self.right)
        best = right[np.argsort(-self.confidence[right], kind="stable")]
        worst = np.argsort(-np.nan_to_num(self.loss, nan=np.inf, posinf=np.inf), kind="stable")
        columns = (self.sample, self.truth, self.predicted, self.confidence, self.loss)

        def read(places: NDArray[np.int64]) -> tuple[ScoredSample, ...]:
            rows = zip(*(column[places[:most]].tolist() for column in columns), strict=True)
            return tuple(ScoredSample(*row) for row in rows)

        return read(best), read(worst)


class ClassificationMetric:
    """One row per image, on the device. With `scores` it also keeps the sigmoid of every class."""

    def __init__(self, classes: int, device: torch.device, extremes: int = 0, *, scores: bool = False) -> None:
        self.classes, self.most, self.kept = classes, extremes, classes if scores else 0
        # Sample, whether it is readable, right, among, truth, and the top classes; confidence, loss and scores.
        self.whole = [torch.zeros(0, 5 + min(TOP, classes), dtype=torch.int64, device=device)]
        self.parts = [torch.zeros(0, 2 + self.kept, device=device)]

    def update(self, outputs: Tensor, batch: Batch) -> None:
        """Adds one batch's logits [B, K]."""
        if outputs.shape != (len(batch), self.classes):
            needed = f"{self.classes} classes need [B, {self.classes}]"
            raise ConfigError(f"the network's outputs are {tuple(outputs.shape)}; {needed}")
        logits = outputs.float()
        logs = logits.log_softmax(-1)
        sure, first = logs.max(-1, keepdim=True)  # NaN if any logit is
        rest = logits.scatter(1, first, -torch.inf).topk(min(TOP, self.classes) - 1).indices
        top = torch.where(sure.isnan(), -1, torch.cat([first, rest], 1))
        facts = torch.stack([batch.sample, batch.valid, *judge_predictions(top, batch.target)], 1)
        self.whole.append(torch.cat([facts, top], 1))
        losses, scores = cross_entropies(logs, batch.target)[:, None], logits.sigmoid()[:, : self.kept]
        self.parts.append(torch.cat([sure.exp().nan_to_num(0.0), losses, scores.nan_to_num(0.0)], 1))

    def merge(self, world: World) -> None:
        self.whole = [gather_rows(torch.cat(self.whole), world)]
        self.parts = [gather_rows(torch.cat(self.parts), world)]

    def predictions(self) -> tuple[ClassPredictions, int]:
        """All predictions for readable images, and the number of unreadable ones."""
        whole, parts = torch.cat(self.whole).cpu().numpy(), torch.cat(self.parts).cpu().numpy()
        order = np.argsort(whole[:, 0], kind="stable")
        readable = order[whole[order, 1] > 0]
        sample, _, right, among, truth, *_ = whole[readable].T
        found = ClassPredictions(
            sample=sample,
            top=whole[readable, 5:],
            truth=truth,
            right=right > 0,
            among=among > 0,
            confidence=parts[readable, 0],
            loss=parts[readable, 1],
            scores=parts[readable, 2:],
        )
        return found, int((whole[:, 0] >= 0).sum()) - len(readable)

    def result(self) -> ClassificationScore:
        every, unreadable = self.predictions()
        found = every.judge()
        if not len(found):
            rest = f"{unreadable} are unreadable and the rest have no label"
            raise DataError(f"no image could be scored: {rest}; {REMEDY}")
        best, worst = found.extremes(self.most)
        return ClassificationScore(
            count=len(found),
            correct=int(found.right.sum()),
            correct5=int(found.among.sum()) if self.classes > TOP else None,
            loss=float(found.loss.mean(dtype=np.float64)),
            unreadable=unreadable,
            confusion=found.confusion_matrix(self.classes),
            best=best,
            worst=worst,
        )


def gather_rows(mine: Tensor, world: World) -> Tensor:
    """The rows of all processes, which have equally many: each writes its own into a table of zeros, and the tables are
    summed."""
    table = mine.new_zeros(world.size, *mine.shape)
    table[world.rank] = mine
    world.sum_(table)
    return table.flatten(0, 1)


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

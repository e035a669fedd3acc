"""What an export says to given pictures, beside what the network says."""

from dataclasses import dataclass

import torch

from vitrail.core.errors import DataError
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import CLASS_LABELS
from vitrail.evaluation.metric import Criterion, Metric
from vitrail.export.check import Forward
from vitrail.export.pictures import Pictures
from vitrail.tasks.task import Task, TaskScore


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of `count` readable pictures: to how many of them both gave one answer, or none where answers are never quite the
    same; of `labelled` ones, the number by which their task judges each; which could not be read."""

    count: int
    agree: float | None
    criterion: Criterion
    labelled: int = 0
    network: float = 0.0
    export: float = 0.0
    unread: tuple[str, ...] = ()

    @property
    def agreement(self) -> float | None:
        return None if self.agree is None else self.agree / self.count

    @property
    def difference(self) -> float:
        """The export's number less the network's."""
        return self.export - self.network


@torch.inference_mode()
def score(
    reference: Forward,
    candidate: Forward,
    pictures: Pictures,
    preprocessing: Preprocessing,
    task: Task,
    *,
    outputs: int,
    pixels: bool = False,
) -> Scores:
    """Both on every picture once, in the words of a task. With `pixels` both get bytes, else normalised pictures."""
    count, shares = 0, list[float]()
    device = torch.device("cpu")
    mine, theirs = (task.metric(outputs, device) for _ in range(2))
    for batch in pictures.batches(preprocessing, task.targets if pictures.has_targets else CLASS_LABELS):
        if not bool(batch.valid.any()):
            continue
        images = batch.pixels if pixels else preprocessing.normalise(batch.pixels)
        own, other = reference(images), candidate(images)
        count += int(batch.valid.sum())
        same = task.agreement(own, other)
        if same is not None:
            shares.append(float(same[batch.valid].sum()))
        if pictures.has_targets:
            mine.update(own, batch)
            theirs.update(other, batch)
    if not count:
        raise DataError("none of the pictures could be read")
    criterion = task.criteria[0]
    scored = read_scores(mine, theirs) if pictures.has_targets else ()
    values = [float(one.row()[criterion.name]) for one in scored]
    return Scores(
        count=count,
        agree=sum(shares) if shares else None,
        criterion=criterion,
        labelled=scored[0].count if scored else 0,
        network=values[0] if values else 0.0,
        export=values[1] if values else 0.0,
        unread=tuple(map(str, pictures.ledger.known.values())),
    )


def read_scores(*metrics: Metric[TaskScore]) -> tuple[TaskScore, ...]:
    """Of the network and the export; none where no picture had a target."""
    try:
        return tuple(metric.result() for metric in metrics)
    except DataError:
        return ()

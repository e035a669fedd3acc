"""When a prediction is right: the one rule that training, every evaluation and the check of an export count by.

A sample has one label, several of which any one counts (ReaL), or none, and then it is left out. Labels are [N], or
[N, M] filled up with -1. A prediction of -1 means none was made, and is never right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.transforms.mix import one_hot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """What N predictions are worth under one labelling, [N] each."""

    labelled: Tensor  # whether the sample has a label; without one it does not count
    right: Tensor
    among: Tensor  # whether a label is among the likeliest classes
    truth: Tensor  # the label that was predicted, else the first one; -1 without a label


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
    """How many predictions are right, and of how many samples with a label; parts of a set can be added up."""
    return int(is_right(predicted, labels).sum()), int(has_label(labels).sum())


def judge_predictions(predicted: Tensor, likeliest: Tensor, labels: Tensor) -> Verdicts:
    """Compares predictions [N] and the likeliest classes [N, T] with the labels."""
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

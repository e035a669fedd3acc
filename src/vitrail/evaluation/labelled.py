"""Labels of features as they were extracted: one a sample [N], or several [N, M], filled up with -1."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.core.errors import BadLabels
from vitrail.data.labels import Labels
from vitrail.evaluation.correctness import count_right


def tally(predicted: Tensor, labels: Tensor) -> tuple[int, int]:
    """Right answers, and how many samples they are of. `predicted` is [N], or [N, T] where any of T guesses may be
    right. Of several labels any one is right, and a sample without one is out."""
    right, count = count_right(predicted, labels)
    if not count:
        raise BadLabels("there are no labelled samples to score a classifier on")
    return right, count


def single(labels: Tensor) -> Tensor:
    """[N], -1 where a sample has no label or several: a classifier is made from those that are of one class."""
    if labels.ndim == 1:
        return labels
    return torch.where((labels >= 0).sum(1) == 1, labels.amax(1), -1)


def labelled(labels: Labels, classes: int) -> NDArray[np.int64]:
    """How many samples of a source have this class alone, for every class [K]."""
    if labels.starts is None:
        return labels.counts(classes)
    alone = labels.values[labels.starts[:-1][np.diff(labels.starts) == 1]]
    return np.bincount(alone[alone >= 0], minlength=classes)

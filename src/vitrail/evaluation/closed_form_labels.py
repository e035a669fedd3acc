"""The closed-form classifier where a sample may have several labels: each class is a question of its own.

Least squares to {-1, 1}^K (fewshot.py) answers all of them at once, a column each. What turns a score s into the logit
of a sigmoid is Platt's (1999): a s + b with one a and one b for all classes, by the likelihood of answers that were
held out. Few samples cannot tell more, and how rare a class is stands in its scores already. The penalty is the one
under which those answers are most likely.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels
from vitrail.evaluation.closed_form import CLEAR, DRAWS, HELD, MOST, SCALES, SHARE, Head, folded
from vitrail.evaluation.fewshot import PENALTIES, PENALTY, decompose

FEWEST: Final = 4  # samples, below which none are held out
STEPS: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelHead:
    """The layer, and what it said to the samples held out: scores [M, K] in [0, 1] and the truth; in how many draws."""

    head: Head
    scores: NDArray[np.float32]
    truth: NDArray[np.bool_]
    draws: int


def fit_label_head(features: Tensor, truth: Tensor, *, penalty: float | None = None, share: float = SHARE) -> LabelHead:
    """The head of features [n, D] and truth [n, K] as booleans."""
    count, classes = truth.shape
    if not truth.any():
        raise BadLabels("no sample has a label, so there is nothing to learn")
    parts = [(held, decompose(features[rest], truth[rest], classes)) for held, rest in label_draws(count, share)]
    if not parts:
        taken = PENALTY if penalty is None else penalty
        head = folded(decompose(features, truth, classes).classifier(taken), math.log(CLEAR / (1 - CLEAR)), taken, None)
        return LabelHead(
            head=head, scores=np.zeros((0, classes), np.float32), truth=np.zeros((0, classes), bool), draws=0
        )
    known = torch.cat([truth[held] for held, _ in parts])
    best: tuple[float, float, float, float, Tensor] | None = None
    for one in reversed(PENALTIES) if penalty is None else (penalty,):
        scores = torch.cat([part.classifier(one).scores(features[held]) for held, part in parts])
        slope, offset, loss = platt(scores, known)
        if best is None or loss < best[0]:
            best = (loss, one, slope, offset, scores)
    assert best is not None
    _, taken, slope, offset, scores = best
    head = folded(decompose(features, truth, classes).classifier(taken), slope, taken, None)
    return LabelHead(
        head=replace(head, bias=head.bias + offset),
        scores=(slope * scores + offset).sigmoid().float().numpy(),
        truth=known.numpy(),
        draws=len(parts),
    )


def label_draws(count: int, share: float) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what is held out and what is left, by their places, drawn until there are about a hundred."""
    if not share or count < FEWEST:
        return []
    held = min(max(round(share * count), 1), MOST)
    rounds = min(DRAWS, -(-HELD // held), count // held)
    orders = [torch.from_numpy(np.random.default_rng(seed).permutation(count)) for seed in range(rounds)]
    return [(order[:held].sort().values, order[held:].sort().values) for order in orders]


def platt(scores: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """The slope and offset under which the truth is most likely, and the loss; by Newton's method. Targets are Platt's,
    (N + 1) / (N + 2) of N true answers, so that answers without a mistake do not ask for infinite sureness."""
    s, yes = scores.double().flatten(), int(truth.sum())
    no = truth.numel() - yes
    t = torch.where(truth.flatten(), (yes + 1) / (yes + 2), 1 / (no + 2)).double()
    at = torch.tensor([1.0, 0.0], dtype=torch.float64)
    x = torch.stack([s, torch.ones_like(s)], 1)
    for _ in range(STEPS):
        p = (x @ at).sigmoid()
        slope = x.T @ (p - t)
        curve = (x * (p * (1 - p))[:, None]).T @ x + 1e-9 * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curve, slope)
        at = at - step * min(1.0, 4.0 / max(float(step.abs().max()), 1e-12))
        if float(step.abs().max()) < 1e-9:
            break
    a = min(max(float(at[0]), SCALES[0]), SCALES[1])
    b = float(at[1])
    loss = F.binary_cross_entropy_with_logits(a * s + b, t)
    return a, b, float(loss)

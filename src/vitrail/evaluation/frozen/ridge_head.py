"""The closed-form classifier of Section 4.1 as the last layer of a network: what it takes next to least squares.

Least squares from whitened features to {-1, 1}^K (fewshot.py) leaves three things open.

The penalty. It is the one that is right most often on images held out, the same share of every class; among equals
the more likely one, then the larger. A small set is held out from several times, each time drawn again, until some
hundred answers are there to choose by. Then the classifier is made again from all images.

The scale. Scores near 1 and -1 are no logits: a softmax over them is nearly even. One factor on all of them leaves
their order as it is, so it is chosen by the likelihood of the images held out, with the targets that Platt (1999)
takes, (N + 1) / (N + 2) instead of 1, so that N right answers out of N do not ask for infinite sureness. The likelihood
is concave in the factor, and its slope is followed to zero.

The layer. With whitening z = (y - μ) / σ and the constant 100 next to it, s · [z, 100] W = y Vᵀ + b for

    V = s (W_z / σ)ᵀ     and     b = 100 s w_100 - V μ,

where b takes V as it was rounded, so that at the mean of the features nothing is lost.

The closed-form classifier where a sample may have several labels: each class is a question of its own.

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

from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.dataset import Labels
from vitrail.data.splits import split_stratified
from vitrail.evaluation.defaults import SHARE
from vitrail.evaluation.frozen.fewshot import CONSTANT, PENALTIES, PENALTY, ROWS, RidgeClassifier, decompose
from vitrail.evaluation.metrics import count_right

HELD: Final = 200  # answers to choose by, for which small sets are drawn from several times
DRAWS: Final = 8  # at most
MOST: Final = 5000  # images held out of a large set
SCALES: Final = (0.05, 1000.0)
CLEAR: Final = 0.9  # the probability of an answer like the targets themselves, where nothing could be held out


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCounts:
    """What the images held out said: right answers, of how many, in how many draws, and accuracy by penalty."""

    right: int
    count: int
    draws: int
    by_penalty: dict[float, float]

    @property
    def accuracy(self) -> float:
        return self.right / self.count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RidgeHead:
    """A linear layer, weight [K, D] and bias [K] in float32, from features to logits. `held` is none where there were
    too few images to hold any out: then penalty and scale are the usual ones, and probabilities mean little."""

    weight: Tensor
    bias: Tensor
    penalty: float
    scale: float
    held: HeldOutCounts | None

    def logits(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, K]."""
        return torch.nn.functional.linear(features.float(), self.weight, self.bias)

    def predict(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Class numbers [N], and how sure each is."""
        found = [self.logits(part).softmax(-1).max(-1) for part in features.split(ROWS)]
        return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


def fit_head(
    features: Tensor, labels: Tensor, classes: int, *, penalty: float | None = None, share: float = SHARE
) -> RidgeHead:
    """The head of features [n, D] and labels [n]. With a `penalty` that one is taken; `share` is held out of every
    class to choose it and the scale, at least about one image a class."""
    if classes < 2:
        raise BadLabels(f"{classes} class: there must be two at least to tell apart")
    if not 0 <= share < 1:
        raise ConfigError(f"a share of {share} cannot be held out; it must be at least 0 and below 1")
    if penalty is not None and not 0 < penalty < math.inf:
        raise ConfigError(f"penalty={penalty} must be above 0 and finite")
    parts = [(held, decompose(features[rest], labels[rest], classes)) for held, rest in draws(labels, classes, share)]
    if not parts:
        taken = PENALTY if penalty is None else penalty
        made = decompose(features, labels, classes).classifier(taken)
        return folded(made, math.log(CLEAR / (1 - CLEAR) * (classes - 1)) / 2, taken, None)
    tried = PENALTIES if penalty is None else (penalty,)
    right = {one: sum(hits(part.classifier(one), features, labels, held) for held, part in parts) for one in tried}
    best = [one for one in tried if right[one] == max(right.values())]
    truth = torch.cat([labels[held] for held, _ in parts])
    likely: dict[float, tuple[float, float]] = {}
    for one in best:
        scores = torch.cat([part.classifier(one).scores(features[held]) for held, part in parts])
        scale = scale_of(scores, truth)
        likely[one] = (loss(scale, scores, truth), scale)
    taken = min(reversed(best), key=lambda one: likely[one][0])
    count = len(truth)
    held = HeldOutCounts(
        right=right[taken], count=count, draws=len(parts), by_penalty={one: hit / count for one, hit in right.items()}
    )
    return folded(decompose(features, labels, classes).classifier(taken), likely[taken][1], taken, held)


def draws(labels: Tensor, classes: int, share: float) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what is held out and what is left, by their places; none where no class has two images."""
    count, plain = len(labels), Labels(labels.cpu().numpy())
    several = int((plain.counts(classes) >= 2).sum())
    if not share or not several:
        return []
    fraction = max(min(share, MOST / count), min(several / count, 0.5))
    found: list[tuple[Tensor, Tensor]] = []
    for seed in range(DRAWS):
        held = split_stratified(plain, fraction, seed=seed)
        if not len(held):
            break
        rest = np.setdiff1d(np.arange(count), held)
        found.append((torch.from_numpy(held), torch.from_numpy(rest)))
        if len(held) * len(found) >= HELD:
            break
    return found


def hits(made: RidgeClassifier, features: Tensor, labels: Tensor, held: Tensor) -> int:
    return count_right(made.predict(features[held]), labels[held])[0]


def scale_of(scores: Tensor, labels: Tensor) -> float:
    """The factor on scores [N, K] under which labels [N] are most likely, within bounds."""
    low, high = (math.log(bound) for bound in SCALES)
    wanted = float(expected(scores, labels).mean())
    for _ in range(30):
        middle = (low + high) / 2
        given = (scores * math.exp(middle)).softmax(-1)
        if float((given * scores).sum(-1).mean()) < wanted:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def loss(scale: float, scores: Tensor, labels: Tensor) -> float:
    """The mean negative log-likelihood of scaled scores, with Platt's targets."""
    return float(((scores * scale).logsumexp(-1) - scale * expected(scores, labels)).mean())


def expected(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean score [N] under the targets: (N + 1) / (N + 2) for the label, the rest for all others alike."""
    doubt = 1 / (len(labels) + 2)
    own = scores.gather(1, labels[:, None])[:, 0]
    return (1 - doubt) * own + doubt * (scores.sum(-1) - own) / (scores.shape[1] - 1)


def folded(made: RidgeClassifier, scale: float, penalty: float, held: HeldOutCounts | None) -> RidgeHead:
    """Whitening, constant and scale in one linear layer."""
    weight = (scale * made.weight[:-1] / made.std[:, None]).T.float()
    bias = scale * CONSTANT * made.weight[-1] - weight.double() @ made.mean
    return RidgeHead(weight=weight.contiguous(), bias=bias.float(), penalty=penalty, scale=scale, held=held)


FEWEST: Final = 4  # samples, below which none are held out
STEPS: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MultiLabelHead:
    """The layer, and what it said to the samples held out: scores [M, K] in [0, 1] and the truth; in how many draws."""

    head: RidgeHead
    scores: NDArray[np.float32]
    truth: NDArray[np.bool_]
    draws: int


def fit_multi_label_head(
    features: Tensor, truth: Tensor, *, penalty: float | None = None, share: float = SHARE
) -> MultiLabelHead:
    """The head of features [n, D] and truth [n, K] as booleans."""
    count, classes = truth.shape
    if not truth.any():
        raise BadLabels("no sample has a label, so there is nothing to learn")
    parts = [(held, decompose(features[rest], truth[rest], classes)) for held, rest in label_draws(count, share)]
    if not parts:
        taken = PENALTY if penalty is None else penalty
        head = folded(decompose(features, truth, classes).classifier(taken), math.log(CLEAR / (1 - CLEAR)), taken, None)
        return MultiLabelHead(
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
    return MultiLabelHead(
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

"""The closed-form classifier of Section 4.1 as the last layer of a network.

Least squares from whitened features to {-1, 1}^K (fewshot.py) leaves three choices open.

The penalty is the one with the highest accuracy on held-out images, the same share of every class; ties go to the
higher likelihood, then to the larger penalty. A small set is split several times, until about two hundred predictions
are available. Then the classifier is fitted again on all images.

The scale turns scores near 1 and -1 into logits; a softmax over the scores themselves is nearly even. One factor keeps
their order, so the likelihood of the held-out images chooses it, with the targets of Platt (1999), (N + 1) / (N + 2)
instead of 1, so that N correct predictions out of N do not lead to infinite confidence. The likelihood is concave in
the factor, and bisection finds where its slope is zero.

The layer. With whitening z = (y - μ) / σ and the constant 100 next to it, s · [z, 100] W = y Vᵀ + b for

    V = s (W_z / σ)ᵀ     and     b = 100 s w_100 - V μ,

where b uses the rounded V, so that nothing is lost at the mean of the features.

If a sample may have several labels, each class is decided separately. Least squares to {-1, 1}^K solves for all of them
at once, one column each. Platt scaling turns a score s into the logit a s + b of a sigmoid, with one a and one b for
all classes, fitted to held-out predictions: few samples cannot determine more, and the scores of a class already
reflect its frequency. The penalty is the one under which those predictions are most likely.
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
from vitrail.evaluation import SHARE
from vitrail.evaluation.frozen.fewshot import CONSTANT, PENALTIES, PENALTY, ROWS, RidgeClassifier, decompose
from vitrail.evaluation.metrics import count_right

HELD: Final = 200  # predictions to choose by; small sets are split several times to get them
DRAWS: Final = 8  # splits at most
MOST: Final = 5000  # images held out of a large set
SCALES: Final = (0.05, 1000.0)
CLEAR: Final = 0.9  # probability of a score equal to the target, if nothing could be held out


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCounts:
    """Correct predictions on held-out images, of how many, in how many splits."""

    right: int
    count: int
    draws: int

    @property
    def accuracy(self) -> float:
        return self.right / self.count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RidgeHead:
    """A linear layer, weight [K, D] and bias [K] in float32, from features to logits. `held` is None if there
    were too few images to hold any out; then penalty and scale are defaults, and probabilities mean little."""

    weight: Tensor
    bias: Tensor
    penalty: float
    scale: float
    held: HeldOutCounts | None

    def logits(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, K]."""
        return torch.nn.functional.linear(features.float(), self.weight, self.bias)

    def predict(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted classes [N] and their probabilities [N]."""
        found = [self.logits(part).softmax(-1).max(-1) for part in features.split(ROWS)]
        return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


def fit_head(
    features: Tensor, labels: Tensor, classes: int, *, penalty: float | None = None, share: float = SHARE
) -> RidgeHead:
    """The head of features [n, D] and labels [n]. The share `share` of every class, at least about one image, is held
    out to choose the penalty, unless one is given, and the scale."""
    if classes < 2:
        raise BadLabels(f"{classes} class given, and at least two are needed")
    if not 0 <= share < 1:
        raise ConfigError(f"held-out share {share} must be at least 0 and below 1")
    if penalty is not None and not 0 < penalty < math.inf:
        raise ConfigError(f"penalty={penalty} must be above 0 and finite")
    splits = split_by_class(labels, classes, share)
    parts = [(held, decompose(features[rest], labels[rest], classes)) for held, rest in splits]
    if not parts:
        taken = PENALTY if penalty is None else penalty
        made = decompose(features, labels, classes).classifier(taken)
        return fold_head(made, math.log(CLEAR / (1 - CLEAR) * (classes - 1)) / 2, taken, None)
    tried = PENALTIES if penalty is None else (penalty,)
    right = {
        one: sum(count_right(part.classifier(one).predict(features[held]), labels[held])[0] for held, part in parts)
        for one in tried
    }
    best = [one for one in tried if right[one] == max(right.values())]
    truth = torch.cat([labels[held] for held, _ in parts])
    likely: dict[float, tuple[float, float]] = {}
    for one in best:
        scores = torch.cat([part.classifier(one).scores(features[held]) for held, part in parts])
        scale = find_scale(scores, truth)
        likely[one] = (scaled_loss(scale, scores, truth), scale)
    taken = min(reversed(best), key=lambda one: likely[one][0])
    held = HeldOutCounts(right=right[taken], count=len(truth), draws=len(parts))
    return fold_head(decompose(features, labels, classes).classifier(taken), likely[taken][1], taken, held)


def split_by_class(labels: Tensor, classes: int, share: float) -> list[tuple[Tensor, Tensor]]:
    """Indices of held-out and remaining samples for each split; empty if no class has two images."""
    count, plain = len(labels), Labels(labels.cpu().numpy())
    several = int((plain.counts(classes) >= 2).sum())
    if not share or not several:
        return []
    fraction = max(min(share, MOST / count), min(several / count, 0.5))
    found: list[tuple[Tensor, Tensor]] = []
    for seed in range(DRAWS):
        held = split_stratified(plain, fraction, seed=seed)
        if not len(held) or len(held) * len(found) >= HELD:
            break
        rest = np.setdiff1d(np.arange(count), held)
        found.append((torch.from_numpy(held), torch.from_numpy(rest)))
    return found


def find_scale(scores: Tensor, labels: Tensor) -> float:
    """The factor on scores [N, K] that maximises the likelihood of labels [N], within bounds."""
    low, high = (math.log(bound) for bound in SCALES)
    wanted = float(mean_target_score(scores, labels).mean())
    for _ in range(30):
        middle = (low + high) / 2
        given = (scores * math.exp(middle)).softmax(-1)
        if float((given * scores).sum(-1).mean()) < wanted:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def scaled_loss(scale: float, scores: Tensor, labels: Tensor) -> float:
    """The mean negative log-likelihood of scaled scores, with Platt's targets."""
    return float(((scores * scale).logsumexp(-1) - scale * mean_target_score(scores, labels)).mean())


def mean_target_score(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean score [N] under the targets: (N + 1) / (N + 2) for the label, the rest spread evenly over the others."""
    doubt = 1 / (len(labels) + 2)
    own = scores.gather(1, labels[:, None])[:, 0]
    return (1 - doubt) * own + doubt * (scores.sum(-1) - own) / (scores.shape[1] - 1)


def fold_head(made: RidgeClassifier, scale: float, penalty: float, held: HeldOutCounts | None) -> RidgeHead:
    """Folds whitening, constant and scale into one linear layer."""
    weight = (scale * made.weight[:-1] / made.std[:, None]).T.float()
    bias = scale * CONSTANT * made.weight[-1] - weight.double() @ made.mean
    return RidgeHead(weight=weight.contiguous(), bias=bias.float(), penalty=penalty, scale=scale, held=held)


FEWEST: Final = 4  # samples below which none are held out
STEPS: Final = 50


def fit_multi_label_head(
    features: Tensor, truth: Tensor, *, penalty: float | None = None, share: float = SHARE
) -> tuple[RidgeHead, NDArray[np.float32], NDArray[np.bool_]]:
    """The head of features [n, D] and truth [n, K] as booleans; its held-out predictions, scores [M, K] in [0, 1], and
    their truth."""
    count, classes = truth.shape
    if not truth.any():
        raise BadLabels("no sample has a label; at least one is needed")
    parts = [(held, decompose(features[rest], truth[rest], classes)) for held, rest in split_randomly(count, share)]
    whole = decompose(features, truth, classes)
    if not parts:
        taken = PENALTY if penalty is None else penalty
        head = fold_head(whole.classifier(taken), math.log(CLEAR / (1 - CLEAR)), taken, None)
        return head, np.zeros((0, classes), np.float32), np.zeros((0, classes), bool)
    known = torch.cat([truth[held] for held, _ in parts])
    tried: list[tuple[tuple[float, float, float], float, Tensor]] = []
    for one in reversed(PENALTIES) if penalty is None else (penalty,):
        scores = torch.cat([part.classifier(one).scores(features[held]) for held, part in parts])
        tried.append((fit_platt(scores, known), one, scores))
    (slope, offset, _), taken, scores = min(tried, key=lambda one: one[0][2])
    head = fold_head(whole.classifier(taken), slope, taken, None)
    head = replace(head, bias=head.bias + offset)
    return head, (slope * scores + offset).sigmoid().float().numpy(), known.numpy()


def split_randomly(count: int, share: float) -> list[tuple[Tensor, Tensor]]:
    """Indices of held-out and remaining samples for each random split."""
    if not share or count < FEWEST:
        return []
    held = min(max(round(share * count), 1), MOST)
    rounds = min(DRAWS, -(-HELD // held), count // held)
    orders = [torch.from_numpy(np.random.default_rng(seed).permutation(count)) for seed in range(rounds)]
    return [(order[:held].sort().values, order[held:].sort().values) for order in orders]


def fit_platt(scores: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """The slope and offset that maximise the likelihood of the truth, and the loss, by Newton's method, with Platt's
    targets."""
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
    a, b = min(max(float(at[0]), SCALES[0]), SCALES[1]), float(at[1])
    return a, b, float(F.binary_cross_entropy_with_logits(a * s + b, t))

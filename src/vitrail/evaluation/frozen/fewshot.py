"""Few-shot accuracy in closed form (Section 4.1): regularised least squares from frozen features to {-1, 1}^K.

With features X [n, d], targets Y [n, K] and a penalty λ, the classifier is

    W = argmin ||X W - Y||² + λ ||W||².

The gradient is zero where (XᵀX + λI) W = XᵀY: d equations. With fewer samples than features the other Gram matrix is
the smaller one. From Xᵀ (XXᵀ + λI) = (XᵀX + λI) Xᵀ follows (XᵀX + λI)⁻¹ Xᵀ = Xᵀ (XXᵀ + λI)⁻¹, so that

    W = (XᵀX + λI)⁻¹ XᵀY                         (n ≥ d: in the space of the features)
    W = Xᵀ (XXᵀ + λI)⁻¹ Y                        (n < d: in the space of the samples)

are equal. A Gram matrix is symmetric and positive semidefinite, so with λ > 0 it has a Cholesky factor, the fastest way
to a single W. For a sweep of penalties it is decomposed once, XᵀX = Q Λ Qᵀ or XXᵀ = Q Λ Qᵀ; since Q Qᵀ = I,

    W = Q (Λ + λI)⁻¹ Qᵀ XᵀY  =  A (Λ + λI)⁻¹ B   with A = Q,    B = Qᵀ XᵀY      (n ≥ d)
    W = Xᵀ Q (Λ + λI)⁻¹ QᵀY  =  A (Λ + λI)⁻¹ B   with A = XᵀQ,  B = QᵀY         (n < d)

with an A [d, m] and a B [m, K] that do not depend on λ. Y is 2 on a sample's class less 1 everywhere, so column k of
XᵀY is twice the sum of the samples of class k, less the sum of all: a product with Y would cost more than XᵀX itself.

The features are first whitened by the mean and standard deviation of the training samples, and a constant of 100 is
appended: a bias that the penalty hardly affects. Everything is in float64; the same code serves five shots per class
and a whole training set.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.dataset import Labels
from vitrail.data.splits import select_few_shot
from vitrail.evaluation.intervals import Interval, wilson_interval
from vitrail.evaluation.metrics import score_predictions

PENALTY: Final = 1024.0
PENALTIES: Final = tuple(2.0**power for power in range(-10, 20))  # of the sweep variant
CONSTANT: Final = 100.0
EPS: Final = 1e-5
ROWS: Final = 4096  # samples scored at a time
BLOCK: Final = 192  # columns of a Gram matrix at a time; narrower blocks save more products and run slower


@dataclass(frozen=True, slots=True, eq=False)
class RidgeClassifier:
    """Whitening by mean and std [D], and weights [D + 1, K], the last row for the constant. float64."""

    mean: Tensor
    std: Tensor
    weight: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, K], near 1 for the class and -1 for others."""
        return F.pad((features.double() - self.mean) / self.std, (0, 1), value=CONSTANT) @ self.weight

    def predict(self, features: Tensor) -> Tensor:
        """Predicted classes [N]."""
        return torch.cat([self.scores(part).argmax(-1) for part in features.split(ROWS)])

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """The share of correct predictions; any of several labels [N, M] counts, and samples without a label do not."""
        right, count = score_predictions(self.predict(features), labels)
        return right / count


@dataclass(frozen=True, slots=True, eq=False)
class RidgeDecomposition:
    """The solution for any penalty: A [D + 1, m], Λ [m] and B [m, K]."""

    mean: Tensor
    std: Tensor
    a: Tensor
    eigenvalues: Tensor
    b: Tensor

    def classifier(self, penalty: float) -> RidgeClassifier:
        if not penalty > 0:
            raise ConfigError(f"penalty={penalty} must be above 0")
        return RidgeClassifier(self.mean, self.std, self.a @ (self.b / (self.eigenvalues + penalty)[:, None]))


def fit_ridge(features: Tensor, labels: Tensor, classes: int, penalty: float = PENALTY) -> RidgeClassifier:
    """The classifier of features [n, D] and labels [n] for one penalty, by Cholesky."""
    if not penalty > 0:
        raise ConfigError(f"penalty={penalty} must be above 0")
    mean, std, x = whiten(features, labels, classes)
    solve = solve_by_features if x.shape[0] >= x.shape[1] else solve_by_samples
    return RidgeClassifier(mean, std, solve(x, labels, classes, penalty))


def solve_by_features(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    """W [d, K] = (XᵀX + λI)⁻¹ XᵀY."""
    return torch.cholesky_solve(sum_targets(x, labels, classes), factorise(compute_gram(x), penalty), upper=True)


def solve_by_samples(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    """W [d, K] = Xᵀ (XXᵀ + λI)⁻¹ Y."""
    factor = factorise(compute_gram(x.T), penalty)
    return x.T @ torch.cholesky_solve(encode_targets(labels, classes), factor, upper=True)


def factorise(upper: Tensor, penalty: float) -> Tensor:
    """The upper Cholesky factor of a Gram matrix, given by its upper half, with the penalty on its diagonal."""
    upper.diagonal().add_(penalty)
    found, failed = torch.linalg.cholesky_ex(upper, upper=True)
    if failed:
        raise ConfigError(f"penalty={penalty:g} is too small for features of this size; use a larger one, such as 1")
    return found


def decompose(features: Tensor, labels: Tensor, classes: int) -> RidgeDecomposition:
    """Decomposes features [n, D] with labels [n], or with the truth [n, K] if samples may have several, for any
    penalty."""
    mean, std, x = whiten(features, labels, classes)
    if x.shape[0] >= x.shape[1]:
        eigenvalues, q = torch.linalg.eigh(compute_gram(x), UPLO="U")
        a, b = q, q.T @ sum_targets(x, labels, classes)
    else:
        eigenvalues, q = torch.linalg.eigh(compute_gram(x.T), UPLO="U")
        a, b = x.T @ q, q.T @ encode_targets(labels, classes)
    return RidgeDecomposition(mean, std, a, eigenvalues.clamp(min=0), b)  # rounding may leave one a little below


def whiten(features: Tensor, labels: Tensor, classes: int, constant: float = CONSTANT) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and std [D] of the features, and X [n, D + 1]: whitened, next to the constant."""
    several = labels.dtype == torch.bool and labels.shape == (len(features), classes)
    if (labels.ndim != 1 and not several) or len(labels) != len(features) or not len(labels):
        shapes = f"features are {tuple(features.shape)} and labels {tuple(labels.shape)}"
        raise BadLabels(f"a linear classifier needs one label per sample; {shapes}")
    low, high = int(labels.min()), int(labels.max())
    if not several and not 0 <= low <= high < classes:
        raise BadLabels(f"labels from {low} to {high} are out of range for {classes} classes")
    x = features.new_full((len(features), features.shape[1] + 1), constant, dtype=torch.float64)
    white = x[:, :-1].copy_(features)  # in place: this is most of the memory
    mean = white.mean(0)
    if not mean.isfinite().all():
        raise DataError("the features are not finite; the network overflows on some image")
    std = white.sub_(mean).square().mean(0).sqrt_().add_(EPS)
    white.div_(std)
    return mean, std, x


def compute_gram(x: Tensor) -> Tensor:
    """The upper half of XᵀX [d, d]; below the diagonal blocks there are zeros."""
    found = x.new_zeros(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], BLOCK):
        found[start : start + BLOCK, start:] = x[:, start : start + BLOCK].T @ x[:, start:]
    return found


def encode_targets(labels: Tensor, classes: int) -> Tensor:
    """Y [n, K]."""
    return 2.0 * (labels if labels.ndim == 2 else F.one_hot(labels.long(), classes)).double() - 1.0


def sum_targets(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """XᵀY [d, K], without building Y if every sample has one class."""
    if labels.ndim == 2:
        return x.T @ encode_targets(labels, classes)
    sums = x.new_zeros(classes, x.shape[1]).index_add_(0, labels.long(), x)
    return 2.0 * sums.T - sums.sum(0)[:, None]


Points = tuple[Tensor, Tensor]  # features [N, D], labels [N]


def score_few_shot(
    train: Points, test: Points, classes: int, shots: int, seeds: Sequence[int] = (0, 1, 2), penalty: float = PENALTY
) -> list[float]:
    """The test accuracy for each seed, with `shots` training samples per class, drawn as in the reference."""
    (features, labels), accuracies = train, list[float]()
    for seed in seeds:
        drawn = torch.from_numpy(select_few_shot(require_single_labels(labels), classes, shots, seed=seed))
        accuracies.append(fit_ridge(features[drawn], labels[drawn], classes, penalty).accuracy(*test))
    return accuracies


def sweep_penalties(train: Points, test: Points, classes: int, shots: int) -> dict[float, float]:
    """The sweep variant, closer to the paper: the first `shots` samples of each class, and the test accuracy of every
    penalty. `choose_penalty` chooses one for several data sets."""
    features, labels = train
    drawn = torch.from_numpy(select_few_shot(require_single_labels(labels), classes, shots, seed=None))
    parts = decompose(features[drawn], labels[drawn], classes)
    return {penalty: parts.classifier(penalty).accuracy(*test) for penalty in PENALTIES}


def choose_penalty(tables: Sequence[Mapping[float, float]]) -> float:
    """The penalty with the best mean rank over several data sets, given the accuracy by penalty of each. Ties share
    their rank; of equal mean ranks the larger penalty wins."""
    penalties = sorted(tables[0])
    accuracies = np.array([[table[penalty] for penalty in penalties] for table in tables])  # [sets, penalties]
    mine, others = accuracies[:, :, None], accuracies[:, None, :]
    ranks = ((others < mine).sum(2) + ((others == mine).sum(2) - 1) / 2).mean(0)  # 0 is the worst
    return penalties[int(np.flatnonzero(ranks == ranks.max())[-1])]


def estimate_interval(accuracies: Sequence[float], count: int) -> Interval:
    """The 95% interval of the mean over draws, for other draws and other test images: Student's interval over the draws
    (zero for one draw) and Wilson's over `count` images, added in quadrature."""
    mean = statistics.fmean(accuracies)
    (low, high), draws = wilson_interval(round(mean * count), count), len(accuracies)
    over = student_quantile(draws - 1) * statistics.stdev(accuracies) / math.sqrt(draws) if draws > 1 else 0.0
    return Interval(max(mean - math.hypot(mean - low, over), 0.0), min(mean + math.hypot(high - mean, over), 1.0))


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, accurate to 0.01: from a table, then by expansion around the normal one."""
    known = (12.706, 4.303, 3.182, 2.776)
    if freedom <= len(known):
        return known[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def require_single_labels(labels: Tensor) -> Labels:
    if labels.ndim != 1:
        raise BadLabels("a few-shot draw needs one label per sample")
    return Labels(labels.cpu().numpy())

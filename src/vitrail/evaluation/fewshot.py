"""Few-shot accuracy in closed form (Section 4.1): regularised least squares from frozen features to {-1, 1}^K.

With features X [n, d], targets Y [n, K] and a penalty λ, the classifier is

    W = argmin ||X W - Y||² + λ ||W||².

The gradient is zero where (XᵀX + λI) W = XᵀY. XᵀX is symmetric and not negative, so with its eigenvectors Q and
eigenvalues Λ, XᵀX = Q Λ Qᵀ, and since Q Qᵀ = I,

    W = Q (Λ + λI)⁻¹ Qᵀ Xᵀ Y                     (n ≥ d).

With fewer samples than features the other Gram matrix is the smaller one. From Xᵀ (XXᵀ + λI) = (XᵀX + λI) Xᵀ follows
(XᵀX + λI)⁻¹ Xᵀ = Xᵀ (XXᵀ + λI)⁻¹, so that with XXᵀ = Q Λ Qᵀ

    W = Xᵀ Q (Λ + λI)⁻¹ Qᵀ Y                     (n < d).

Either way W = A (Λ + λI)⁻¹ B with an A [d, m] and a B [m, K] that do not depend on λ: one decomposition serves a whole
sweep of penalties. The features are first whitened by the mean and standard deviation of the samples that the
classifier is made from, and a constant of 100 is put beside them: a bias that the penalty hardly touches. All of it is
in float64; the same lines serve five shots a class and a whole training set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.labels import Labels
from vitrail.data.splits import few_shot, first_shots

PENALTY: Final = 1024.0
PENALTIES: Final = tuple(2.0**power for power in range(-10, 20))  # of the sweep variant
CONSTANT: Final = 100.0
EPS: Final = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Whitening by mean and std [D], and weights [D + 1, K], the last row for the constant. float64."""

    mean: Tensor
    std: Tensor
    weight: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, K], near 1 for yes and -1 for no."""
        return beside_constant((features.double() - self.mean) / self.std) @ self.weight

    def predict(self, features: Tensor) -> Tensor:
        """Class numbers [N]."""
        return self.scores(features).argmax(-1)

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """The share of right answers; of several labels [N, M], any one is right, and a sample without one is out."""
        rows = labels if labels.ndim == 2 else labels[:, None]
        labelled = (rows >= 0).any(1)
        if not labelled.any():
            raise BadLabels("there are no labelled samples to score a classifier on")
        right = (self.predict(features)[:, None] == rows).any(1)
        return int((right & labelled).sum()) / int(labelled.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Decomposed:
    """All of the solution but the penalty: A [D + 1, m], Λ [m] and B [m, K]."""

    mean: Tensor
    std: Tensor
    a: Tensor
    eigenvalues: Tensor
    b: Tensor

    def classifier(self, penalty: float) -> Classifier:
        if not penalty > 0:
            raise ConfigError(f"penalty={penalty} must be above 0")
        return Classifier(self.mean, self.std, self.a @ (self.b / (self.eigenvalues + penalty)[:, None]))


def decompose(features: Tensor, labels: Tensor, classes: int) -> Decomposed:
    """Features [n, D] and labels [n]: whitened, set beside the constant, and taken apart."""
    if labels.ndim != 1 or len(labels) != len(features) or not len(labels):
        raise BadLabels(
            f"a closed-form classifier needs one label a sample; {tuple(features.shape)} features came with "
            f"{tuple(labels.shape)} labels"
        )
    if not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise BadLabels(f"labels from {int(labels.min())} to {int(labels.max())} are not those of {classes} classes")
    wide = features.double()
    mean, std = wide.mean(0), wide.std(0, correction=0) + EPS
    x = beside_constant((wide - mean) / std)
    y = 2.0 * F.one_hot(labels.long(), classes).double() - 1.0
    if x.shape[0] >= x.shape[1]:
        eigenvalues, q = torch.linalg.eigh(x.T @ x)
        a, b = q, q.T @ (x.T @ y)
    else:
        eigenvalues, q = torch.linalg.eigh(x @ x.T)
        a, b = x.T @ q, q.T @ y
    return Decomposed(mean, std, a, eigenvalues, b)


def ridge(features: Tensor, labels: Tensor, classes: int, penalty: float = PENALTY) -> Classifier:
    """The classifier of features [n, D] and labels [n], whatever n."""
    return decompose(features, labels, classes).classifier(penalty)


def fewshot(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    shots: int,
    seeds: Sequence[int] = (0, 1, 2),
    penalty: float = PENALTY,
) -> list[float]:
    """The test accuracy for each seed's draw of `shots` training samples a class, as the reference draws them."""
    pool, accuracies = one_label(train_labels), list[float]()
    for seed in seeds:
        drawn = torch.from_numpy(few_shot(pool, classes, shots, seed=seed))
        made = ridge(train_features[drawn], train_labels[drawn], classes, penalty)
        accuracies.append(made.accuracy(test_features, test_labels))
    return accuracies


def fewshot_sweep(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    shots: int,
    penalties: Sequence[float] = PENALTIES,
) -> dict[float, float]:
    """The sweep variant, nearer to the paper's time: the first `shots` samples of each class, and the test accuracy of
    every penalty. Over several sets the penalty of the best mean rank is the one to take for all."""
    drawn = torch.from_numpy(first_shots(one_label(train_labels), classes, shots))
    parts = decompose(train_features[drawn], train_labels[drawn], classes)
    return {penalty: parts.classifier(penalty).accuracy(test_features, test_labels) for penalty in penalties}


def one_label(labels: Tensor) -> Labels:
    if labels.ndim != 1:
        raise BadLabels("a few-shot draw needs one label a sample")
    return Labels(labels.numpy())


def beside_constant(features: Tensor) -> Tensor:
    """[N, D] -> [N, D + 1]."""
    return F.pad(features, (0, 1), value=CONSTANT)

"""A linear probe: multinomial logistic regression on frozen features, to convergence.

With whitened features X [n, D], labels y and a penalty λ, weights W [D, K] and a bias b [K] minimise

    1/n Σᵢ -log softmax(W ᵀxᵢ + b)[yᵢ]  +  λ/2 ||W||²,

which is convex, so there is one solution, and the gradient shows how near it is. The loss is a mean, so a penalty has
the same meaning for any n; scikit-learn's C is 1 / (n λ). L-BFGS starts from zero, in float64, without randomness: the
same features give the same probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.dataset import Labels
from vitrail.data.splits import split_stratified
from vitrail.evaluation import ITERATIONS
from vitrail.evaluation.frozen.fewshot import whiten
from vitrail.evaluation.metrics import score_predictions

PENALTIES: Final = tuple(10.0**power for power in range(1, -7, -1))  # strong to weak: each starts from the previous one
TOLERANCE: Final = 1e-6  # for the largest entry of the gradient
ROUGH: Final = 1e-4  # the same during the search for a penalty
HISTORY: Final = 20
ROWS: Final = 8192  # samples processed at a time
DEV: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LinearProbe:
    """Whitening by mean and std [D], weights [D, K] and bias [K], float64; and how the optimisation ended."""

    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: Tensor
    penalty: float
    iterations: int
    loss: float  # on the training samples, including the penalty
    gradient: float  # its largest entry
    tolerance: float

    @property
    def converged(self) -> bool:
        return self.gradient <= self.tolerance

    def scores(self, features: Tensor) -> Tensor:
        """[N, D] -> log-probabilities up to a constant [N, K]."""
        return ((features.double() - self.mean) / self.std) @ self.weight + self.bias

    def top(self, features: Tensor, guesses: int) -> Tensor:
        """The likeliest classes [N, guesses], in descending order."""
        return torch.cat([self.scores(part).topk(guesses, dim=1).indices for part in features.split(ROWS)])

    def loss_on(self, features: Tensor, labels: Tensor) -> float:
        """Mean cross-entropy without the penalty, for labels [N]."""
        parts = zip(features.split(ROWS), labels.split(ROWS), strict=True)
        return sum(float(F.cross_entropy(self.scores(x), y, reduction="sum")) for x, y in parts) / len(labels)


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    penalty: float,
    *,
    start: LinearProbe | None = None,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> LinearProbe:
    """The probe of features [n, D] and labels [n] for one penalty, starting from zero or from another probe."""
    if not penalty > 0:
        raise ConfigError(f"penalty={penalty} must be above 0")
    if iterations < 1:
        raise ConfigError(f"iterations={iterations} must be at least 1")
    mean, std, x = whiten(features, labels, classes, constant=1.0)
    at = x.new_zeros(x.shape[1], classes)  # the last row, of the constant, is the bias
    if start is not None:
        at.copy_(torch.cat([start.weight, start.bias[None]]))
    at.requires_grad_()
    optimiser = torch.optim.LBFGS(
        [at],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=tolerance,
        history_size=HISTORY,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",  # stops by the gradient, not by the length of a step
    )

    def closure() -> float:
        loss, at.grad = compute_gradient(x, labels, at.detach(), penalty)
        return loss

    optimiser.step(closure)
    final = at.detach()
    loss, gradient = compute_gradient(x, labels, final, penalty)
    steps, slope = int(optimiser.state[at]["n_iter"]), float(gradient.abs().max())
    weight, bias = final[:-1].clone(), final[-1].clone()
    return LinearProbe(mean, std, weight, bias, penalty, steps, loss, slope, tolerance)


def compute_gradient(x: Tensor, labels: Tensor, at: Tensor, penalty: float) -> tuple[float, Tensor]:
    """The loss and its gradient [D + 1, K]; the last row, the bias, is not penalised. The gradient of cross-entropy
    with respect to the scores is probabilities minus the one-hot label, so no autograd graph is needed."""
    gradient, loss = torch.zeros_like(at), 0.0
    for rows, truth in zip(x.split(ROWS), labels.long().split(ROWS), strict=True):
        logs = (rows @ at).log_softmax(1)
        loss -= float(logs.gather(1, truth[:, None]).sum())
        slope = logs.exp_()
        slope[torch.arange(len(truth), device=truth.device), truth] -= 1.0
        gradient.addmm_(rows.T, slope)
    gradient /= len(x)
    gradient[:-1] += penalty * at[:-1]
    return loss / len(x) + penalty / 2 * float(at[:-1].square().sum()), gradient


def search_penalty(
    features: Tensor, labels: Tensor, classes: int, penalties: Sequence[float] = PENALTIES, *, dev: float = DEV
) -> tuple[float, dict[float, float]]:
    """The penalty with the highest accuracy on held-out training samples, the same share of every class, and the
    accuracy of all penalties there. Ties go to the smaller loss."""
    held = torch.from_numpy(split_stratified(Labels(labels.cpu().numpy()), dev))
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[held] = False
    if not len(held) or not bool(rest.any()):
        few = f"{len(labels)} samples are too few to choose a penalty on held-out ones"
        raise BadLabels(f"{few}; give one with --penalty")
    found, last = dict[float, tuple[int, float]](), None
    for penalty in sorted(penalties, reverse=True):
        last = fit_probe(features[rest], labels[rest], classes, penalty, start=last, tolerance=ROUGH)
        right, _ = score_predictions(last.top(features[held], 1), labels[held])
        found[penalty] = (right, -last.loss_on(features[held], labels[held]))
    best = max(found, key=lambda penalty: found[penalty])
    return best, {penalty: right / len(held) for penalty, (right, _) in found.items()}

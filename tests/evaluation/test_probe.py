"""The probe is at the minimum of the loss it states: where scikit-learn finds it, and where the gradient vanishes."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import BadLabels, ConfigError
from vitrail.evaluation.frozen import probe as module
from vitrail.evaluation.frozen.probe import PENALTIES, compute_gradient, fit_probe, search_penalty
from vitrail.evaluation.metrics import score_predictions


def drawn(count: int, seed: int, classes: int = 5, width: int = 9, apart: float = 0.8) -> tuple[Tensor, Tensor]:
    fixed = np.random.default_rng(9)
    centres, scale = fixed.normal(size=(classes, width)) * apart, fixed.uniform(0.2, 4, width)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    features = (centres[labels] + rng.normal(size=(count, width))) * scale + 3
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels)


@pytest.mark.parametrize(("classes", "penalty"), [(2, 1e-2), (5, 1.0), (5, 1e-3)])
def test_scikit_learn_finds_the_same(classes: int, penalty: float) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    features, labels = drawn(400, 0, classes)
    made = fit_probe(features, labels, classes, penalty, tolerance=2e-8)
    assert made.converged
    x = features.double().numpy()
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    c = (2 if classes == 2 else 1) / (400 * penalty)  # two classes are one row of weights there, and half of it here
    judge = linear.LogisticRegression(C=c, tol=1e-10, max_iter=5000).fit(x, labels.numpy())
    ours = torch.softmax(made.scores(features), 1).numpy()
    np.testing.assert_allclose(ours, judge.predict_proba(x), atol=1e-5)
    if classes > 2:  # of two it writes down the difference
        weight = made.weight - made.weight.mean(1, keepdim=True)
        np.testing.assert_allclose(weight.numpy().T, judge.coef_, atol=1e-4)


def test_the_gradient_is_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 7)
    rng = torch.Generator().manual_seed(0)
    x, at = torch.randn(30, 4, generator=rng).double(), torch.randn(4, 3, generator=rng).double().requires_grad_()
    labels = torch.arange(30) % 3
    loss = F.cross_entropy(x @ at, labels) + 0.3 / 2 * at[:-1].square().sum()
    loss.backward()
    value, gradient = compute_gradient(x, labels, at.detach(), 0.3)
    assert value == pytest.approx(loss.item())
    assert at.grad is not None
    torch.testing.assert_close(gradient, at.grad)


def test_the_same_features_give_the_same_probe_and_it_says_how_it_ended() -> None:
    one, other = fit_probe(*drawn(300, 0), 5, 1e-3), fit_probe(*drawn(300, 0), 5, 1e-3)
    assert torch.equal(one.weight, other.weight)
    assert one.gradient <= 1e-6
    assert 3 < one.iterations < 1000
    early = fit_probe(*drawn(300, 0), 5, 1e-3, iterations=3)
    assert not early.converged
    assert early.iterations <= 3
    again = fit_probe(*drawn(300, 0), 5, 1e-3, start=one)
    assert again.iterations < one.iterations / 2


def test_the_bias_is_not_penalised() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    made = fit_probe(torch.zeros(100, 3), labels, 2, 10.0)
    assert torch.softmax(made.scores(torch.zeros(1, 3)), 1)[0, 1].item() == pytest.approx(0.1, abs=1e-4)


@pytest.mark.slow
def test_the_penalty_that_generalises_is_found() -> None:
    """With more features than samples a weak penalty fits noise; with many samples a strong one is too simple."""
    noisy = drawn(60, 0, 2, 50, apart=0.25)
    best, tried = search_penalty(*noisy, 2, dev=0.4)
    assert sorted(tried) == sorted(PENALTIES)
    assert tried[best] == max(tried.values())
    assert best > min(PENALTIES)
    many = drawn(3000, 0, 5, apart=0.8)
    best, tried = search_penalty(*many, 5)
    assert best < 1.0
    assert tried[10.0] < tried[best]
    test, labels = drawn(1000, 1)
    made = fit_probe(*many, 5, best)
    right, count = score_predictions(made.top(test, 1), labels)
    assert right / count == pytest.approx(tried[best], abs=0.06)


def test_top_guesses_are_in_order() -> None:
    features, labels = drawn(300, 0)
    made = fit_probe(features, labels, 5, 1e-2)
    assert torch.equal(made.top(features, 1)[:, 0], made.scores(features).argmax(1))
    assert torch.equal(made.top(features, 5), made.scores(features).argsort(1, descending=True))
    assert made.loss_on(features, labels) < made.loss


def test_mistakes_are_named() -> None:
    features, labels = drawn(20, 0)
    with pytest.raises(ConfigError, match="penalty=0"):
        fit_probe(features, labels, 5, 0)
    with pytest.raises(BadLabels):
        fit_probe(features, labels, 3, 1.0)
    with pytest.raises(BadLabels, match="--penalty"):
        search_penalty(features[:2], torch.tensor([0, 1]), 5)

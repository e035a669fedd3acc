"""The closed form is the solution of the equation it claims to solve, in both regimes and for both variants."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.core.errors import BadLabels, ConfigError, DataError
from vitrail.data.dataset import Labels
from vitrail.data.splits import select_few_shot
from vitrail.evaluation.frozen.fewshot import (
    PENALTIES,
    choose_penalty,
    decompose,
    estimate_interval,
    fit_ridge,
    require_single_labels,
    score_few_shot,
    solve_by_features,
    solve_by_samples,
    student_quantile,
    sweep_penalties,
    whiten,
)
from vitrail.evaluation.intervals import wilson_interval


def drawn(count: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of uneven scale and offset, and labels of which every class has some."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, width)) * rng.uniform(0.1, 9, width) + rng.normal(size=width)
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(rng.permutation(np.arange(count) % classes))


def blobs(count: int, width: int, classes: int, apart: float, seed: int) -> tuple[Tensor, Tensor]:
    centres = np.random.default_rng(9).normal(size=(classes, width)) * apart
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    return torch.from_numpy((centres[labels] + rng.normal(size=(count, width))).astype(np.float32)), torch.from_numpy(
        labels
    )


def designed(features: Tensor, labels: Tensor, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """X and Y as the reference makes them, in numpy."""
    x = features.numpy().astype(np.float64)
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    return np.concatenate([x, np.full((len(x), 1), 100.0)], 1), 2 * np.eye(classes)[labels.numpy()] - 1


@pytest.mark.parametrize(("count", "width"), [(12, 40), (40, 40), (41, 40), (300, 20)])  # below, at and above D + 1
@pytest.mark.parametrize("penalty", [2.0**-10, 1.0, 1024.0, 2.0**19])
def test_the_weights_solve_the_normal_equations(count: int, width: int, penalty: float) -> None:
    features, labels = drawn(count, width, 4)
    x, y = designed(features, labels, 4)
    direct = np.linalg.solve(x.T @ x + penalty * np.eye(width + 1), x.T @ y)
    made = fit_ridge(features, labels, 4, penalty)
    np.testing.assert_allclose(made.weight.numpy(), direct, rtol=0, atol=1e-8)
    np.testing.assert_allclose(made.scores(features).numpy(), x @ direct, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("count", "width"), [pytest.param(12, 40, marks=pytest.mark.slow), (300, 20)])
def test_scikit_learn_finds_the_same(count: int, width: int) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    features, labels = drawn(count, width, 3)
    x, y = designed(features, labels, 3)
    judge = linear.Ridge(alpha=1024.0, fit_intercept=False, solver="svd").fit(x, y)
    np.testing.assert_allclose(fit_ridge(features, labels, 3).weight.numpy(), judge.coef_.T, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("count", "width"), [(30, 500), (200, 200), pytest.param(1500, 260, marks=pytest.mark.slow)]
)  # more than a block of columns
@pytest.mark.parametrize("penalty", [2.0**-10, 1.0, 1024.0, 2.0**19])
def test_it_equals_scipy_in_float64_and_both_spaces_agree(count: int, width: int, penalty: float) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    features, labels = drawn(count, width, 7)
    x, y = designed(features, labels, 7)
    exact = linalg.solve(x.T @ x + penalty * np.eye(width + 1), x.T @ y, assume_a="pos")
    made = fit_ridge(features, labels, 7, penalty)
    np.testing.assert_allclose(made.weight.numpy(), exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(made.scores(features).numpy(), x @ exact, rtol=0, atol=1e-6)
    _, _, ours = whiten(features, labels, 7)
    one, other = (solve(ours, labels, 7, penalty) for solve in (solve_by_features, solve_by_samples))
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(one.numpy(), exact, rtol=0, atol=1e-6)
    swept = decompose(features, labels, 7).classifier(penalty)
    np.testing.assert_allclose(swept.weight.numpy(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("count", "width"), [(900, 50), (20, 50)])
def test_one_penalty_needs_no_eigenvectors(count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **settings: object) -> None:
        raise AssertionError("an eigendecomposition for one penalty")

    monkeypatch.setattr(torch.linalg, "eigh", refused)
    fit_ridge(*drawn(count, width, 5), 5)
    with pytest.raises(AssertionError):
        decompose(*drawn(count, width, 5), 5)


def test_the_smaller_system_is_the_one_that_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    sides, real = list[int](), torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda matrix, upper: sides.append(len(matrix)) or real(matrix, upper=upper)
    )
    fit_ridge(*drawn(12, 40, 3), 3)
    fit_ridge(*drawn(100, 40, 3), 3)
    assert sides == [12, 41]


def test_a_penalty_below_all_rounding_is_refused() -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 3)  # of rank 4
    with pytest.raises(ConfigError):
        fit_ridge(features, torch.arange(50) % 5, 5, 1e-18)


def test_new_samples_are_whitened_by_the_old_ones_statistics() -> None:
    features, labels = drawn(60, 10, 3)
    made = fit_ridge(features, labels, 3)
    alone = torch.stack([made.scores(row[None])[0] for row in features])
    torch.testing.assert_close(alone, made.scores(features))
    assert made.mean.dtype == made.weight.dtype == torch.float64


def test_the_bias_is_hardly_penalised() -> None:
    """Without signal the scores are the mean target, -1 + 2/K, though the penalty is large."""
    features = torch.zeros(50, 4)
    scores = fit_ridge(features, torch.arange(50) % 5, 5).scores(features)
    torch.testing.assert_close(scores, torch.full((50, 5), -0.6, dtype=torch.float64), rtol=0, atol=2e-3)


def test_separable_blobs_are_separated_and_noise_is_not() -> None:
    train, test = blobs(600, 16, 6, 3.0, 0), blobs(300, 16, 6, 3.0, 1)
    assert fit_ridge(*train, 6).accuracy(*test) == 1.0
    noise, other = blobs(600, 16, 6, 0.0, 0), blobs(600, 16, 6, 0.0, 1)
    assert abs(fit_ridge(*noise, 6).accuracy(*other) - 1 / 6) < 0.06


def test_more_shots_know_more() -> None:
    train, test = blobs(600, 16, 6, 0.6, 0), blobs(600, 16, 6, 0.6, 1)
    means = [float(np.mean(score_few_shot(train, test, 6, shots))) for shots in (1, 5, 25, 100)]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.2


def test_the_draws_are_those_of_the_reference() -> None:
    train, test = blobs(200, 8, 5, 0.7, 0), blobs(200, 8, 5, 0.7, 1)
    rows = score_few_shot(train, test, 5, 3, seeds=(4, 0))
    for seed, accuracy in zip((4, 0), rows, strict=True):
        chosen = select_few_shot(Labels(train[1].numpy()), 5, 3, seed=seed)
        x, y = designed(train[0][chosen], train[1][chosen], 5)
        mean, std = train[0][chosen].numpy().astype(np.float64).mean(0), train[0][chosen].double().numpy().std(0)
        weight = np.linalg.solve(x.T @ x + 1024 * np.eye(9), x.T @ y)
        seen = np.concatenate([(test[0].numpy() - mean) / (std + 1e-5), np.full((200, 1), 100.0)], 1)
        assert accuracy == float(((seen @ weight).argmax(1) == test[1].numpy()).mean())
    assert rows[0] != rows[1]


def test_the_sweep_takes_the_first_shots_and_every_penalty() -> None:
    train, test = blobs(200, 8, 5, 0.7, 0), blobs(200, 8, 5, 0.7, 1)
    found = sweep_penalties(train, test, 5, 4)
    assert tuple(found) == PENALTIES
    assert (PENALTIES[0], PENALTIES[-1], len(PENALTIES)) == (2.0**-10, 2.0**19, 30)
    first = torch.arange(20)  # the classes come in turn
    assert found[1024.0] == fit_ridge(train[0][first], train[1][first], 5).accuracy(*test)


def test_the_penalty_for_all_sets_has_the_best_mean_rank() -> None:
    # Ranks from the worst, 0, on: (0, 2, 1), (2, 1, 0) and (0, 1, 2) have the means 2/3, 4/3 and 1.
    tables = [{1.0: 0.1, 2.0: 0.9, 4.0: 0.2}, {1.0: 0.52, 2.0: 0.51, 4.0: 0.5}, {1.0: 0.3, 2.0: 0.31, 4.0: 0.9}]
    assert choose_penalty(tables) == 2.0
    assert choose_penalty(tables[1:2]) == 1.0
    # The mean accuracy would say 4; its rank is the mean of two that are equal.
    assert (
        choose_penalty([{1.0: 0.6, 2.0: 0.5, 4.0: 0.5}, {1.0: 0.6, 2.0: 0.1, 4.0: 0.7}, {1.0: 0.3, 2.0: 0.3, 4.0: 0.1}])
        == 1.0
    )
    assert choose_penalty([{4.0: 0.5, 1.0: 0.5, 2.0: 0.5}]) == 4.0


def test_the_interval_holds_draws_and_pictures() -> None:
    assert estimate_interval([0.7], 1000) == pytest.approx(wilson_interval(700, 1000))
    spread = estimate_interval([0.6, 0.7, 0.8], 10**9)  # of endless images only the draws are left
    assert spread == pytest.approx((0.7 - 4.303 * 0.1 / 3**0.5, 0.7 + 4.303 * 0.1 / 3**0.5), abs=1e-3)
    both = estimate_interval([0.6, 0.7, 0.8], 100)
    assert both[0] < spread[0]
    assert both[1] > spread[1]
    assert estimate_interval([1.0, 1.0], 5)[1] == 1.0
    assert estimate_interval([0.0, 0.9], 5)[0] == 0.0


def test_students_points_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 5, 6, 9, 29, 1000):
        assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=5e-3)


def test_any_of_several_test_labels_is_right_and_none_is_left_out() -> None:
    features, labels = blobs(60, 8, 3, 5.0, 0)
    made = fit_ridge(features, labels, 3)
    rows = torch.stack([(labels + 1) % 3, labels], 1)
    rows[0] = -1
    assert made.accuracy(features, rows) == 1.0
    assert made.accuracy(features, rows[:, :1]) == 0.0
    with pytest.raises(BadLabels):
        made.accuracy(features, torch.full((60,), -1))


def test_a_whole_training_set_of_features_is_a_small_matter() -> None:
    features, labels = drawn(3680, 192, 37)
    x, y = designed(features, labels, 37)
    direct = np.linalg.solve(x.T @ x + 1024 * np.eye(193), x.T @ y)
    np.testing.assert_allclose(decompose(features, labels, 37).classifier(1024).weight.numpy(), direct, atol=1e-8)


def test_mistakes_are_named() -> None:
    features, labels = drawn(20, 4, 2)
    with pytest.raises(ConfigError, match="penalty=0"):
        fit_ridge(features, labels, 2, 0)
    with pytest.raises(BadLabels):
        fit_ridge(features, labels[:5], 2)
    with pytest.raises(BadLabels):
        score_few_shot((features, torch.zeros(20, 2, dtype=torch.int64)), (features, labels), 2, 1)
    with pytest.raises(BadLabels):
        fit_ridge(features, labels, 1)
    with pytest.raises(BadLabels):
        score_few_shot((features, labels), (features, labels), 2, 11)
    features[3, 1] = torch.inf
    with pytest.raises(DataError):
        fit_ridge(features, labels, 2)


def test_labels_may_lie_where_the_features_do() -> None:
    class Away(torch.Tensor):
        """As on an accelerator: no numpy of it but by way of the host."""

        def numpy(self) -> object:  # type: ignore[override]
            raise TypeError("can't convert device type tensor to numpy")

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor)

    labels = torch.tensor([1, 0, 1]).as_subclass(Away)
    assert require_single_labels(labels).values.tolist() == [1, 0, 1]

"""Indicators of collapse against numpy, and what they must not depend on."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.evaluation.frozen.knn import measure_collapse


def noise(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def reference(features: Tensor) -> tuple[float, float, float]:
    """Slow and plain: a whole singular value decomposition, and every pair."""
    x = features.double().numpy()
    singular = np.linalg.svd(x - x.mean(0), compute_uv=False)
    p = singular / singular.sum()
    p = p[p > 1e-9]
    z = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = [z[i] @ z[j] for i in range(len(z)) for j in range(i)]
    return float(np.exp(-(p * np.log(p)).sum())), float(np.mean(cosines)), float(z.std(0).mean() * z.shape[1] ** 0.5)


@pytest.mark.parametrize(("count", "width"), [(60, 12), (12, 60), (2, 5)])
def test_they_are_what_a_slow_reference_says(count: int, width: int) -> None:
    features = noise(count, width) * torch.linspace(0.1, 3, width) + 0.5
    found = measure_collapse(features)
    assert (found.rank, found.similarity, found.spread) == pytest.approx(reference(features), rel=1e-6)
    assert found.width == width


def test_noise_has_all_directions_and_one_direction_has_one() -> None:
    found = measure_collapse(noise(4000, 16))
    assert 15.9 < found.rank <= 16
    assert found.similarity == pytest.approx(0, abs=1e-2)
    assert found.spread == pytest.approx(1, rel=1e-2)
    line = noise(100, 1) * noise(1, 16, seed=1) + 3
    assert measure_collapse(line).rank == pytest.approx(1, abs=1e-4)
    three = noise(500, 3) @ torch.linalg.qr(noise(16, 3, seed=2))[0].T
    assert 2.9 < measure_collapse(three).rank <= 3


def test_scale_rotation_and_order_change_nothing_and_a_shift_no_rank() -> None:
    features = noise(200, 10) * torch.linspace(0.2, 2, 10)
    turn = torch.linalg.qr(noise(10, 10, seed=3))[0]
    plain, turned, scaled = (
        measure_collapse(features),
        measure_collapse(features @ turn),
        measure_collapse(1e-4 * features.flip(0)),
    )
    assert turned.rank == pytest.approx(plain.rank, rel=1e-5)
    assert turned.similarity == pytest.approx(plain.similarity, abs=1e-6)
    assert scaled.rank == pytest.approx(plain.rank, rel=1e-5)
    assert scaled.spread == pytest.approx(plain.spread, rel=1e-5)
    assert measure_collapse(features + 5).rank == pytest.approx(plain.rank, rel=1e-4)


def test_equal_features_have_no_rank_even_where_rounding_differs() -> None:
    same = torch.ones(50, 8) * torch.linspace(1, 2, 8)
    assert measure_collapse(same).rank == 0
    rounded = measure_collapse(same * (1 + 1e-7 * noise(50, 8)))
    assert rounded.rank == 0, "the noise of float32 has every direction, and would look like the best of features"
    assert rounded.similarity == pytest.approx(1, abs=1e-6)
    assert rounded.spread < 1e-6
    assert measure_collapse(torch.zeros(3, 4)).rank == 0


def test_what_is_no_number_is_said_and_one_picture_is_refused() -> None:
    assert math.isnan(measure_collapse(torch.tensor([[1.0, math.nan], [0.0, 1.0]])).rank)
    with pytest.raises(ConfigError):
        measure_collapse(noise(1, 4))

"""Neighbours are those of a full sort, whatever the blocks, and the votes are scikit-learn's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.evaluation.frozen.knn import find_nearest, rank_stably, vote_classes


def drawn(count: int, seed: int, classes: int = 6, width: int = 12) -> tuple[Tensor, Tensor]:
    centres = np.random.default_rng(9).normal(size=(classes, width))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    features = (centres[labels] * 0.6 + rng.normal(size=(count, width))) * rng.uniform(0.1, 5, (count, 1))
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels)


TRAIN, LABELS = drawn(250, 0)
TEST, _ = drawn(90, 1)


@pytest.mark.parametrize("k", [1, 2, 5, 20, 250])
def test_scikit_learn_votes_the_same(k: int) -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    near = find_nearest(TRAIN, TEST, k)
    x, y, t = TRAIN.double().numpy(), LABELS.numpy(), TEST.double().numpy()
    plain = neighbors.KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(x, y)
    weighted = neighbors.KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(x, y)
    distance, index = plain.kneighbors(t)
    assert near.index.tolist() == index.tolist()
    np.testing.assert_allclose(near.similarity.numpy(), 1 - distance, atol=1e-6)
    assert vote_classes(near, LABELS, 6, k, None).tolist() == plain.predict(t).tolist()
    assert vote_classes(near, LABELS, 6, k).tolist() == weighted.predict(t).tolist()


@pytest.mark.parametrize(("tested", "compared"), [(1, 100), (7, 130), (90, 540), (1000, 30)])
def test_blocks_change_nothing(tested: int, compared: int) -> None:
    doubled, labels = (
        torch.cat([TRAIN, TRAIN.flip(0), TRAIN[:40] * 3]),
        torch.cat([LABELS, LABELS.flip(0), LABELS[:40]]),
    )
    whole, parts = find_nearest(doubled, TEST, 30), find_nearest(doubled, TEST, 30, tested=tested, compared=compared)
    assert parts.index.tolist() == whole.index.tolist()
    assert torch.equal(parts.similarity, whole.similarity)
    assert torch.equal(vote_classes(parts, labels, 6, 30), vote_classes(whole, labels, 6, 30))


def test_of_copies_the_earlier_is_nearer() -> None:
    copies = TRAIN[[3, 5, 3, 5, 3, 7]]
    near = find_nearest(copies, TRAIN[[3]], 5, compared=2)
    assert near.index[0, :3].tolist() == [0, 2, 4]
    assert find_nearest(copies, TRAIN[[3]], 2).index.tolist() == [[0, 2]]


def test_the_largest_come_first_and_the_first_of_equal_ones() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0] * 6])
    assert rank_stably(values, 3).tolist() == [[1, 3, 2], [0, 1, 2]]
    many = torch.randint(0, 5, (40, 200), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(rank_stably(many, 17), many.sort(dim=1, descending=True, stable=True).indices[:, :17])


def test_of_equal_votes_the_smaller_class_wins() -> None:
    train = torch.eye(4)
    near = find_nearest(train, torch.ones(1, 4), 4)
    assert vote_classes(near, torch.tensor([3, 2, 3, 2]), 4, 4, None).tolist() == [2]
    assert vote_classes(near, torch.tensor([3, 2, 3, 2]), 4, 4).tolist() == [2]
    assert vote_classes(near, torch.tensor([3, 2, 3, 2]), 4, 3).tolist() == [3]


def test_a_near_neighbour_outweighs_many_far_ones() -> None:
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    near, labels = find_nearest(train, torch.tensor([[1.0, 0.1]]), 4), torch.tensor([1, 0, 0, 0])
    assert vote_classes(near, labels, 2, 4).tolist() == [1]
    assert vote_classes(near, labels, 2, 4, None).tolist() == [0]
    assert vote_classes(near, labels, 2, 4, 1e-6).tolist() == [1]  # exp(10 ** 6) would be no number


def test_features_of_nothing_are_similar_to_nothing() -> None:
    near = find_nearest(TRAIN, torch.zeros(1, 12), 3)
    assert near.index.tolist() == [[0, 1, 2]]
    assert near.similarity.tolist() == [[0.0, 0.0, 0.0]]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError):
        find_nearest(TRAIN, TEST, 251)
    near = find_nearest(TRAIN, TEST, 3)
    with pytest.raises(ConfigError):
        vote_classes(near, LABELS, 6, 4)
    with pytest.raises(ConfigError, match="temperature=0"):
        vote_classes(near, LABELS, 6, 2, 0)

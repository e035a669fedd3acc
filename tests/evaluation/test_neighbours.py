"""Neighbours and their vote against brute force, and which images are looked at."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.data.dataset import Labels
from vitrail.evaluation.frozen.features import FrozenFeatures
from vitrail.evaluation.frozen.knn import find_similar_samples, pick_samples, score_vote


def frozen(count: int, *, seed: int, classes: int = 3, first: int = 0, labels: Tensor | None = None) -> FrozenFeatures:
    """Noise around the mean of a class, of samples that are not numbered from nought."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, 6, generator=torch.Generator().manual_seed(99))
    return FrozenFeatures(
        features=centres[drawn] + 0.7 * torch.randn(count, 6, generator=generator),
        samples=torch.arange(first, first + 2 * count, 2),
        labels=drawn if labels is None else labels,
    )


def cosines(queries: FrozenFeatures, train: FrozenFeatures) -> np.ndarray:
    a, b = (one.features.double().numpy() for one in (queries, train))
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


def test_neighbours_are_those_of_every_pair() -> None:
    train, queries = frozen(50, seed=0, first=7), frozen(9, seed=1)
    similar = cosines(queries, train)
    for at, found in enumerate(find_similar_samples(queries, train)):
        nearest = np.argsort(-similar[at])[:5]
        assert found.sample == queries.samples[at]
        assert [one.sample for one in found.neighbours] == train.samples[nearest].tolist()
        assert [one.similarity for one in found.neighbours] == pytest.approx(similar[at][nearest].tolist(), abs=1e-6)
        assert [one.same for one in found.neighbours] == (train.labels[nearest] == queries.labels[at]).tolist()


def test_the_vote_is_that_of_twenty_weighed_by_similarity() -> None:
    train, test = frozen(80, seed=0), frozen(40, seed=1)
    similar = cosines(test, train)
    right = 0
    for at in range(40):
        votes = np.zeros(3)
        for index in np.argsort(-similar[at])[:20]:
            votes[train.labels[index]] += np.exp(similar[at][index] / 0.07)
        right += int(votes.argmax() == test.labels[at])
    assert score_vote(train, test, 3) == (right, 40)
    assert 13 < right < 40


def test_samples_without_a_label_neither_vote_nor_count() -> None:
    train, test = frozen(30, seed=0), frozen(20, seed=1)
    half = test.labels.clone()
    half[::2] = -1
    counted = score_vote(train, FrozenFeatures(features=test.features, samples=test.samples, labels=half), 3)
    assert counted is not None
    assert counted[1] == 10
    known = train.labels.clone()
    known[10:] = -1
    some = FrozenFeatures(features=train.features, samples=train.samples, labels=known)
    alone = FrozenFeatures(features=train.features[:10], samples=train.samples[:10], labels=train.labels[:10])
    assert score_vote(some, test, 3) == score_vote(alone, test, 3), "ten can vote, whoever else is near"
    none = torch.full((20,), -1)
    assert score_vote(train, FrozenFeatures(features=test.features, samples=test.samples, labels=none), 3) is None
    assert score_vote(train, test, 0) is None
    unknown = find_similar_samples(FrozenFeatures(features=test.features, samples=test.samples, labels=none), train)
    assert {one.same for found in unknown for one in found.neighbours} == {None}


def test_a_picture_is_no_neighbour_of_its_own_and_of_few_all_are_shown() -> None:
    train = frozen(4, seed=0)
    for found in find_similar_samples(train, train, itself=True):
        assert found.sample not in [one.sample for one in found.neighbours]
        assert len(found.neighbours) == 3
    assert len(find_similar_samples(train, train)[0].neighbours) == 4


def test_of_several_labels_one_in_common_is_enough() -> None:
    several = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    three = FrozenFeatures(features=torch.eye(3), samples=torch.arange(3), labels=several)
    found = find_similar_samples(
        FrozenFeatures(features=torch.eye(3)[:1], samples=torch.tensor([9]), labels=torch.tensor([[1, 2]])), three
    )
    assert {one.sample: one.same for one in found[0].neighbours} == {0: True, 1: True, 2: None}


def test_the_pictures_to_show_are_of_many_classes_and_stay_the_same() -> None:
    labels = Labels(np.repeat(np.arange(4), 25))
    shown = pick_samples(labels, 6)
    assert len(set(shown.tolist())) == 6
    assert set(labels.values[shown[:4]]) == {0, 1, 2, 3}
    assert shown.tolist() == pick_samples(labels, 6).tolist()
    assert shown[:4].tolist() == pick_samples(labels, 4).tolist()
    assert len(pick_samples(Labels.none(3), 8)) == 3
    assert len(set(pick_samples(Labels.none(100), 8).tolist())) == 8

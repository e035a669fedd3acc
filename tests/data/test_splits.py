"""Dev splits, nested subsets and few-shot draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pictures import listed
from vitrail.core.errors import BadLabels, ConfigError
from vitrail.data.dataset import NONE, Labels
from vitrail.data.splits import (
    DEV,
    dev_split,
    select_few_shot,
    split_share,
    split_stratified,
)


@given(
    values=st.lists(st.integers(0, 6), min_size=4, max_size=300),
    fraction=st.floats(0.01, 0.6),
    seed=st.integers(0, 1000),
)
def test_a_fraction_of_every_class(values: list[int], fraction: float, seed: int) -> None:
    labels = Labels(np.array(values))
    held = split_stratified(labels, fraction, seed=seed)
    assert np.array_equal(held, np.unique(held))
    whole, taken = labels.counts(7), labels.take(held).counts(7)
    assert (np.abs(taken - whole * fraction) < 1 + 1e-9).all()
    assert (taken[whole > 0] < whole[whole > 0]).all()
    assert len(held) <= round(len(values) * fraction)


@pytest.mark.parametrize(
    ("name", "classes", "each", "held"),
    [("cifar10", 10, 5000, 1000), ("cifar100", 100, 500, 1000), ("flowers102", 102, 10, 102), ("pets", 37, 100, 370)],
)
def test_the_papers_dev_splits(name: str, classes: int, each: int, held: int) -> None:
    labels = Labels(np.repeat(np.arange(classes), each))
    chosen = split_stratified(labels, DEV[name])
    assert set(labels.take(chosen).counts(classes).tolist()) == {held // classes}


def test_the_total_is_met_though_every_class_rounds_down() -> None:
    labels = Labels(np.repeat(np.arange(100), 7))
    chosen = split_stratified(labels, 0.1)
    assert len(chosen) == 70
    assert set(labels.take(chosen).counts(100).tolist()) <= {0, 1}


def test_seeds_differ_and_the_draw_does_not_follow_the_order() -> None:
    labels = Labels(np.zeros(1000, np.int64))
    one, other = split_stratified(labels, 0.1, seed=0), split_stratified(labels, 0.1, seed=1)
    assert 2 <= len(np.intersect1d(one, other)) <= 25
    assert 350 < one.mean() < 650


def test_several_labels_or_none_are_drawn_without_classes() -> None:
    assert len(split_stratified(Labels.none(50), 0.1)) == 5
    assert len(split_stratified(Labels.several([[0, 1]] * 50), 0.1)) == 5
    with pytest.raises(ConfigError, match="fraction=1"):
        split_stratified(Labels.none(5), 1.0)


def test_few_shot_is_the_references_draw() -> None:
    """numpy's generator of the seed permutes the indices of class after class; the first `shots` of each."""
    labels = Labels(np.random.default_rng(1).integers(0, 5, 200))
    generator = np.random.default_rng(2)
    wanted = np.concatenate([generator.permutation(np.where(labels.values == c)[0])[:10] for c in range(5)])
    assert np.array_equal(select_few_shot(labels, 5, 10, seed=2), wanted)
    first = select_few_shot(labels, 5, 3, seed=None)
    assert first[:3].tolist() == np.flatnonzero(labels.values == 0)[:3].tolist()
    assert labels.take(first).counts(5).tolist() == [3] * 5


def test_too_few_samples_of_a_class_are_named() -> None:
    with pytest.raises(BadLabels, match="class 1 has 1 samples, 2 shots"):
        select_few_shot(Labels(np.array([0, 0, 1])), 2, 2)
    for seed in (0, None):
        with pytest.raises(BadLabels, match="one label"):
            select_few_shot(Labels.several([[0]]), 1, 1, seed=seed)


def test_selections_say_what_they_are() -> None:
    source = listed(30)
    train, dev = dev_split(source, 0.2)
    assert sorted([*train.indices.tolist(), *dev.indices.tolist()]) == list(range(30))
    assert dev.rule == {"name": "dev", "fraction": 0.2, "seed": 0, "part": "dev"}


@given(
    st.lists(st.integers(-1, 4), min_size=1, max_size=200),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.integers(0, 5),
)
def test_shares_are_even_over_classes_and_lie_in_each_other(
    values: list[int], one: float, other: float, seed: int
) -> None:
    labels = Labels(np.array(values))
    found = []
    for fraction in sorted((one, other)):
        try:
            chosen = split_share(labels, fraction, seed=seed)
        except BadLabels:
            sizes = [values.count(label) for label in set(values) if label != NONE or set(values) == {NONE}]
            assert any(size * fraction < 0.5 for size in sizes)
            return
        found.append(set(chosen.tolist()))
        assert chosen.tolist() == sorted(found[-1])
        for label in set(values) - {NONE}:
            taken, size = sum(values[at] == label for at in chosen), values.count(label)
            assert abs(taken - size * fraction) <= 0.5
            assert taken > 0
    assert found[0] <= found[1]


def test_a_share_of_samples_with_several_labels_is_drawn_from_all() -> None:
    labels = Labels.several([[0, 1], [1], [], [0]] * 10)
    assert len(split_share(labels, 0.25)) == 10
    with pytest.raises(BadLabels, match=r"leaves nothing of a set of 40 samples; use 0.013 or more"):
        split_share(labels, 0.001)
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        split_share(labels, 0.0)

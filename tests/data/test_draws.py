"""Random numbers without a state: the same for one sample and for a batch, even, and independent of each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.randomness import CounterRng, hash_keys, splitmix64


def test_one_sample_draws_what_it_draws_in_a_batch() -> None:
    samples, epochs = np.arange(50), np.arange(50) % 3
    batch = CounterRng.for_samples(seed=3, epoch=epochs, sample=samples, view=1)
    for i in range(50):
        alone = CounterRng.for_samples(seed=3, epoch=int(epochs[i]), sample=i, view=1)
        assert np.array_equal(alone.uniform("crop", 5)[0], batch.uniform("crop", 5)[i])
        assert np.array_equal(batch.row(i).integers("op", 14, 2), alone.integers("op", 14, 2))


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50, unique=True))
def test_mixing_is_a_bijection(numbers: list[int]) -> None:
    assert len(set(splitmix64(np.array(numbers, np.uint64)).tolist())) == len(numbers)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_number_counts_as_an_array_of_it_does(parts: list[int], alone: list[bool]) -> None:
    arrays = [np.array([part]) for part in parts]
    several = [part if one else array for part, array, one in zip(parts, arrays, alone, strict=False)]
    assert hash_keys(*several).tolist() == hash_keys(*arrays).tolist() == hash_keys(*parts).tolist()


def test_every_part_of_the_key_counts() -> None:
    base = {"seed": 1, "epoch": 2, "sample": 3, "view": 4}
    drawn = [CounterRng.for_samples(**base).uniform("a")[0, 0]]
    drawn += [CounterRng.for_samples(**{**base, name: value + 1}).uniform("a")[0, 0] for name, value in base.items()]
    drawn += [CounterRng.for_samples(**base).uniform("b")[0, 0], CounterRng.for_samples(**base).uniform("a", 2)[0, 1]]
    drawn += [CounterRng.for_samples(seed=2, epoch=1, sample=3, view=4).uniform("a")[0, 0]]  # the places are not alike
    assert len(set(drawn)) == len(drawn)


def test_more_numbers_do_not_shift_the_first_ones() -> None:
    draws = CounterRng.for_samples(seed=0, epoch=0, sample=np.arange(4))
    assert np.array_equal(draws.uniform("x", 9)[:, :2], draws.uniform("x", 2))


def test_they_are_even_and_uncorrelated() -> None:
    count = 20_000
    draws = CounterRng.for_samples(seed=0, epoch=0, sample=np.arange(count)).uniform("x", 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    cells = np.bincount((draws[:, 0] * 50).astype(int), minlength=50)
    assert ((cells - count / 50) ** 2 / (count / 50)).sum() < 49 + 5 * math.sqrt(98)
    for one, other in ((draws[:, 0], draws[:, 1]), (draws[:-1, 0], draws[1:, 0]), (draws[:, 1], draws[:, 2])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(count)


def test_a_generator_of_ones_own() -> None:
    draws = CounterRng.for_samples(seed=0, epoch=0, sample=np.arange(3))
    assert np.array_equal(draws.generator("noise", 2).normal(size=4), draws.row(2).generator("noise").normal(size=4))
    assert not np.array_equal(draws.generator("noise", 1).normal(size=4), draws.generator("noise", 2).normal(size=4))


def test_large_and_negative_parts_are_taken() -> None:
    assert len({int(hash_keys(part)[0]) for part in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5

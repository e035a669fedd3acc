"""The order of an epoch: a permutation for every seed and epoch, computed at any place, in no memory."""

import itertools
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.core.errors import ConfigError
from vitrail.data.randomness import EpochOrder

LENGTHS = st.one_of(st.integers(1, 50), st.integers(51, 20_000))


@given(length=LENGTHS, seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_every_sample_exactly_once_an_epoch(length: int, seed: int, epoch: int) -> None:
    samples = EpochOrder(length, seed)(epoch, np.arange(length))
    assert np.array_equal(np.sort(samples), np.arange(length))


@given(length=LENGTHS, seed=st.integers(0, 2**63), data=st.data())
def test_a_place_is_the_same_alone_and_in_company(length: int, seed: int, data: st.DataObject) -> None:
    order = EpochOrder(length, seed)
    place = data.draw(st.integers(0, length - 1))
    assert order(3, np.array([place]))[0] == order(3, np.arange(length))[place]


@pytest.mark.slow
def test_small_sets_see_all_their_permutations_about_equally_often() -> None:
    """Chi-square over all permutations: its mean is their number less one; five sigma above is allowed."""
    for length in (2, 4):
        seen = Counter(tuple(EpochOrder(length, seed)(0, np.arange(length)).tolist()) for seed in range(1200))
        expected = 1200 / math.factorial(length)
        chi = sum((seen[p] - expected) ** 2 / expected for p in itertools.permutations(range(length)))
        freedom = math.factorial(length) - 1
        assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_are_strangers() -> None:
    """No trend, no runs: the correlation of place and sample, and of neighbours, is that of chance."""
    length = 100_000
    samples = EpochOrder(length, 7)(0, np.arange(length)).astype(float)
    for one, other in ((np.arange(length), samples), (samples[:-1], samples[1:]), (samples[:-7], samples[7:])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(length)


def test_epochs_and_seeds_differ() -> None:
    orders = [EpochOrder(1000, seed)(epoch, np.arange(1000)) for seed in range(4) for epoch in range(4)]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) < 12  # by chance about one place agrees


def test_the_order_is_pinned() -> None:
    """What a run of last year read at step s is what it reads today."""
    assert EpochOrder(10, 0)(0, np.arange(10)).tolist() == PINNED_TEN
    assert EpochOrder(300_000_000, 1)(2, np.array([0, 1, 299_999_999])).tolist() == PINNED_LARGE


PINNED_TEN = [5, 4, 1, 8, 2, 7, 9, 0, 6, 3]
PINNED_LARGE = [92191296, 35584287, 108319727]


@given(length=st.integers(1, 40), repeats=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_stream_goes_on_from_epoch_to_epoch(length: int, repeats: int, seed: int) -> None:
    at = EpochOrder(length, seed, repeats).locate(np.arange(3 * length * repeats))
    for epoch in range(3):
        inside = at.epoch == epoch
        assert np.array_equal(np.bincount(at.sample[inside], minlength=length), np.full(length, repeats))
    assert np.array_equal(at.repeat, np.arange(3 * length * repeats) % repeats)


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch of 5"):
        EpochOrder(5, 0)(0, np.array([5]))
    with pytest.raises(ConfigError, match="epoch of 5"):
        EpochOrder(5, 0)(0, np.array([-1]))
    with pytest.raises(ConfigError, match="at least one"):
        EpochOrder(0, 0)


WHOLE = """
import resource, numpy as np
from vitrail.data.randomness import EpochOrder
n, order = {count}, EpochOrder({count}, 5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seen = np.zeros(n // 8 + 1, np.uint8) if {whole} else None
for first in range(0, n if {whole} else 2**20, 2**16):
    samples = order(0, np.arange(first, min(first + 2**16, n)))
    if seen is not None:
        np.bitwise_or.at(seen, samples >> 3, (1 << (samples & 7)).astype(np.uint8))
order(0, np.array([n - 1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) / 1024, -1 if seen is None else int(np.bitwise_count(seen).sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_three_hundred_million_in_little_memory(whole: bool) -> None:
    """Under 50 MB; in the slow lane every sample is ticked off, for which the ticks alone take 37.5 MB."""
    script = WHOLE.format(count=300_000_000, whole=whole)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert float(said[0]) < 50
    assert int(said[1]) == (300_000_000 if whole else -1)

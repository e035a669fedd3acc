"""Draws on the device: what the host would compute, and permutations that are fair."""

import itertools

import torch
from torch import Tensor

from vitrail.data import randomness as draws
from vitrail.objectives import patch_ops as masks

STEP = int(draws.GOLDEN)


def splitmix64(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def numbers(
    samples: int, count: int, *, purpose: str = "a", seed: int = 3, step: int = 11, epoch: int = 4, first: int = -1
) -> Tensor:
    sample = torch.arange(samples) * 7 + first
    return masks.draw_bits(purpose, count, seed=seed, step=step, epoch=torch.full((samples,), epoch), sample=sample)


def test_numbers_are_splitmix_of_all_that_they_depend_on() -> None:
    """In Python's whole numbers, of any size, cut off at 64 bits."""
    found = numbers(5, 6)
    start = int(draws.hash_keys(draws.hash_word("a"), 3, 11)[0])
    for row in range(5):
        key = splitmix64((start + (4 * 2**40 + 7 * row - 1) * STEP) % 2**64)
        for at in range(6):
            assert int(found[row, at]) % 2**64 == splitmix64((key + (at + 1) * STEP) % 2**64)


def test_what_is_drawn_depends_on_each_part_of_the_key() -> None:
    base = numbers(50, 20)
    assert len(set(base.flatten().tolist())) == 1_000
    others = [numbers(50, 20, purpose="b"), numbers(50, 20, seed=4), numbers(50, 20, step=12)]
    others += [numbers(50, 20, epoch=5), numbers(50, 20, first=2)]
    for other in others:
        assert not set(base.flatten().tolist()) & set(other.flatten().tolist())
    assert torch.equal(numbers(1, 20, first=7 * 49 - 1)[0], base[49])  # and on nothing that comes with it


def test_a_permutation_holds_everything_once_and_all_are_as_likely() -> None:
    count = 24_000
    found = masks.draw_permutations(numbers(count, 4))
    assert (found.sort(1).values == torch.arange(4)).all()
    digits = (found * torch.tensor([64, 16, 4, 1])).sum(1)
    seen = [int((digits == 64 * a + 16 * b + 4 * c + d).sum()) for a, b, c, d in itertools.permutations(range(4))]
    square = sum((number - count / 24) ** 2 / (count / 24) for number in seen)
    assert square < 50  # chi-square with 23 degrees of freedom: beyond 50 once in a thousand


def test_uniform_and_whole_numbers_fill_their_range() -> None:
    uniform = masks.to_uniform(numbers(2_000, 10))
    assert 0 <= float(uniform.min()) < 0.001
    assert 0.999 < float(uniform.max()) < 1
    assert abs(float(uniform.mean()) - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5
    whole = masks.to_integers(numbers(2_000, 10), 5)
    shares = torch.bincount(whole.flatten(), minlength=5) / whole.numel()
    assert shares.shape == (5,)
    assert float((shares - 0.2).abs().max()) < 5 * (0.2 * 0.8 / 20_000) ** 0.5

"""Sizes are (height, width)."""

import pytest

from vitrail.core.text import format_size, pair


def test_one_number_is_a_square() -> None:
    assert pair(14) == (14, 14)


@pytest.mark.parametrize("size", [(14, 24), [14, 24]])
def test_two_numbers_are_height_and_width(size: tuple[int, int] | list[int]) -> None:
    assert pair(size) == (14, 24)
    assert isinstance(pair(size), tuple)


def test_sizes_are_written_as_in_the_paper() -> None:
    assert format_size((14, 24)) == "14x24"

"""Things are prepared ahead, in order, so many and no more; what fails stays in its place."""

import threading
import time

import pytest

from vitrail.core.errors import BadImage
from vitrail.predict.image_input import prepare_ahead, split_batches


def slowly(number: int) -> int:
    time.sleep(0.002 * (number % 3))
    if number % 5 == 4:
        raise BadImage(f"{number} is bad")
    return 10 * number


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_order_is_kept_and_failures_stay_in_their_place(threads: int) -> None:
    found = list(prepare_ahead(range(40), slowly, ahead=8, threads=threads))
    assert [thing for thing, _ in found] == list(range(40))
    for thing, made in found:
        assert str(made) == (f"{thing} is bad" if thing % 5 == 4 else str(10 * thing))


def test_no_more_is_held_than_was_agreed() -> None:
    lock, held, most = threading.Lock(), 0, 0

    def make(number: int) -> int:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        return number

    for _ in prepare_ahead(range(100), make, ahead=6, threads=3):
        time.sleep(0.0005)
        with lock:
            held -= 1
    assert 1 < most <= 7


def test_another_error_is_not_taken_for_a_bad_picture() -> None:
    def broken(number: int) -> int:
        raise KeyError(number)

    with pytest.raises(KeyError):
        list(prepare_ahead(range(3), broken, ahead=2, threads=2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]


def test_groups() -> None:
    assert list(split_batches(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(split_batches([], 3)) == []

"""Images that are decoded share one budget of memory."""

import threading

import pytest

from vitrail.serve.batch_queue import Reservation, Room
from vitrail.serve.http_errors import Refused
from vitrail.serve.settings import Settings


def test_the_second_waits_for_the_first() -> None:
    room, order = Room(100, wait_s=30), list[str]()
    first = Reservation(room)
    first.take(80)

    def second() -> None:
        with Reservation(room) as mine:
            mine.take(60)
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    order.append("first")
    assert room.held == 80
    first.__exit__(None, None, None)
    thread.join(30)
    assert order == ["first", "second"]
    assert room.held == 0


def test_small_ones_fit_beside() -> None:
    room = Room(100, wait_s=30)
    with Reservation(room) as one, Reservation(room) as two:
        one.take(80)
        two.take(20)
        assert room.held == 100


def test_who_waits_too_long_is_told_503() -> None:
    room = Room(100, wait_s=0.01)
    with Reservation(room) as one:
        one.take(100)
        with pytest.raises(Refused) as caught, Reservation(room) as two:
            two.take(1)
    assert caught.value.status == 503
    assert "Retry-After" in caught.value.headers
    assert room.held == 0


def test_one_at_the_limit_always_fits_and_has_it_alone() -> None:
    settings = Settings()
    room = Room(settings.decode_bytes, wait_s=1)
    with Reservation(room) as one:
        one.take(20 * settings.max_pixels + 2 * settings.max_bytes)
    with Reservation(room) as one:
        one.take(10**15)
        assert room.held == room.most
    assert room.most < 2 * 16 * settings.max_pixels  # two of 40 megapixels in WebP never at once

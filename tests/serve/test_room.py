"""Images that are decoded share one budget of memory."""

import threading

import pytest

from vitrail.serve.batch_queue import MemoryBudget
from vitrail.serve.http_errors import RequestError, unavailable
from vitrail.serve.settings import ServeSettings


def decoding_budget(limit: int, wait_s: float) -> MemoryBudget:
    return MemoryBudget(limit, lambda: unavailable("full", "try again"), wait_s)


def test_the_second_waits_for_the_first() -> None:
    room, order = decoding_budget(100, wait_s=30), list[str]()
    first = room.reserve()
    first.__enter__()(80)

    def second() -> None:
        with room.reserve() as mine:
            mine(60)
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
    room = decoding_budget(100, wait_s=30)
    with room.reserve() as one, room.reserve() as two:
        one(80)
        two(20)
        assert room.held == 100


def test_who_waits_too_long_is_told_503() -> None:
    room = decoding_budget(100, wait_s=0.01)
    with room.reserve() as one:
        one(100)
        with pytest.raises(RequestError) as caught, room.reserve() as two:
            two(1)
    assert caught.value.status == 503
    assert "Retry-After" in caught.value.headers
    assert room.held == 0


def test_one_at_the_limit_always_fits_and_has_it_alone() -> None:
    settings = ServeSettings()
    room = decoding_budget(settings.decode_bytes, wait_s=1)
    with room.reserve() as one:
        one(20 * settings.max_pixels + 2 * settings.max_bytes)
    with room.reserve() as one:
        one(10**15)
        assert room.held == room.limit
    assert room.limit < 2 * 16 * settings.max_pixels  # two of 40 megapixels in WebP never at once

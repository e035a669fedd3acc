"""Work done in advance: the same items in the same order, errors where they are due, and no thread left behind."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from vitrail.core.errors import ConfigError
from vitrail.data.device_dataset import prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_the_items_of_the_iterator_in_order() -> None:
    assert list(prefetch(iter(range(100)), depth=3)) == list(range(100))
    assert list(prefetch(iter(()), depth=1)) == []
    assert list(prefetch(iter([None, 0, StopIteration()]), depth=2))[:2] == [
        None,
        0,
    ]  # items are not mistaken for the end
    assert not threads()


def test_no_more_are_made_than_there_is_room_for() -> None:
    made = list[int]()
    items = prefetch((made.append(number) or number for number in itertools.count()), depth=4)
    for taken in (1, 2):
        assert next(items) == taken - 1
        deadline = time.monotonic() + 10
        while len(made) < 4 + taken and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == list(range(4 + taken))
    items.close()


def test_an_error_comes_after_what_was_made_before_it_and_only_once() -> None:
    def faulty() -> Iterator[int]:
        yield from range(3)
        raise ConfigError("no fourth")

    items = prefetch(faulty(), depth=8)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="no fourth"):
        next(items)
    assert next(items, "nothing") == "nothing"
    assert not threads()


def test_the_thread_ends_when_closed_dropped_or_lost_in_a_circle() -> None:
    closed = prefetch(itertools.count(), depth=2)
    next(closed)
    closed.close()
    closed.close()
    assert not threads()
    assert next(closed, None) is None

    dropped = prefetch(itertools.count(), depth=2)
    next(dropped)
    assert len(threads()) == 1
    del dropped
    assert not threads()

    circle = [prefetch(itertools.count(), depth=2)]
    next(circle[0])
    circle.append(circle)  # type: ignore[arg-type]
    del circle
    gc.collect()
    assert not threads()


@pytest.mark.slow
def test_python_ends_quietly_with_one_at_work() -> None:
    code = (
        "import itertools, time\n"
        "from vitrail.data.device_dataset import prefetch\n"
        "items = prefetch((time.sleep(0.001) or n for n in itertools.count()), depth=4)\n"
        "blocked = prefetch(itertools.count(), depth=1)\n"
        "print(next(items), next(blocked))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0 0\n", "")

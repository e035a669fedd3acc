"""Images prepared by threads, ahead of the network, in the order they were given.

Decoding and resizing let go of Python's lock, so threads are enough: nothing has to be started or sent to another
process, and one image is as quick as it can be. No more than `ahead` images are ever held.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from PIL import Image

from vitrail.core.errors import BadImage

Item = TypeVar("Item")
Made = TypeVar("Made")


def default_threads() -> int:
    """As many as there are cores, up to eight: the network wants them, too."""
    return min(os.cpu_count() or 1, 8)


def prepare_ahead(
    given: Iterable[Item], prepare: Callable[[Item], Made], *, ahead: int, threads: int
) -> "Generator[tuple[Item, Made | BadImage]]":
    """Each thing with what `prepare` makes of it, or with the reason why that is nothing. Without threads it is made
    when it is asked for."""
    things = iter(given)
    if threads < 1:
        yield from ((thing, attempt(prepare, thing)) for thing in things)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
    waiting = deque[tuple[Item, "Future[Made | BadImage]"]]()
    try:
        while True:
            for thing in islice(things, max(ahead, 1) - len(waiting)):
                waiting.append((thing, submit_one(pool, prepare, thing)))
            if not waiting:
                return
            thing, future = waiting.popleft()
            yield thing, future.result()
    finally:  # also where the reader goes away
        pool.shutdown(wait=True, cancel_futures=True)


def submit_one(pool: ThreadPoolExecutor, prepare: Callable[[Item], Made], thing: Item) -> "Future[Made | BadImage]":
    """A Pillow image is made here and now: it may be opened but not decoded, given twice, and two threads must not
    decode it at once."""
    if not isinstance(thing, Image.Image):
        return pool.submit(attempt, prepare, thing)
    future: Future[Made | BadImage] = Future()
    future.set_result(attempt(prepare, thing))
    return future


def attempt(prepare: Callable[[Item], Made], thing: Item) -> Made | BadImage:
    try:
        return prepare(thing)
    except BadImage as error:
        return error


def split_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """So many at a time; the last ones may be fewer."""
    items = iter(items)
    while some := list(islice(items, size)):
        yield some

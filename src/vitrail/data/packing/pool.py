"""Samples encoded by several processes, and handed over in the order of the source."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final

from vitrail.core.errors import WorkerDied
from vitrail.data.packing.encode import Encoding, Left, Packed
from vitrail.data.source import Source

CHUNK: Final = 8  # samples a task
WAITING: Final = 4  # tasks a process, so that memory stays bounded while one is slow
IDLE: Final = -1

mine: dict[str, Any] = {}  # in a worker process: its source, its encoding and where it says what it reads


def in_order(source: Source, start: int, encoding: Encoding, workers: int | None) -> Iterator[Packed | Left]:
    """Samples from `start` on. With one worker all is done here."""
    workers = cores() if workers is None else workers
    if workers <= 1 or len(source) - start <= CHUNK:
        for index in range(start, len(source)):
            yield encoding(source, index)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")  # threads do not fork
    # Without a lock: a process that is ended while it holds one would never give it back. Each writes to its own place.
    reading: Any = context.Array("q", [IDLE] * workers, lock=False)
    slots: Any = context.Value("i", 0)
    pool = ProcessPoolExecutor(workers, context, prepare, (source, encoding, reading, slots))
    waiting: deque[Future[list[Packed | Left]]] = deque()
    try:
        for first in range(start, len(source), CHUNK):
            waiting.append(pool.submit(encode, first, min(first + CHUNK, len(source))))
            if len(waiting) >= WAITING * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        names = [source.name(index) for index in reading if index != IDLE]
        said = f"while it read one of: {', '.join(names)}" if names else "before it read anything"
        raise WorkerDied(f"a process of the pack ended {said}; out of memory, or a picture that crashes it?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(source: Source, encoding: Encoding, reading: Any, slots: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that packs hears it, and ends this one
    with slots.get_lock():
        slot = slots.value
        slots.value += 1
    mine.update(source=source, encoding=encoding, reading=reading, slot=slot)


def encode(first: int, last: int) -> list[Packed | Left]:
    results: list[Packed | Left] = []
    for index in range(first, last):
        mine["reading"][mine["slot"]] = index
        results.append(mine["encoding"](mine["source"], index))
    mine["reading"][mine["slot"]] = IDLE
    return results

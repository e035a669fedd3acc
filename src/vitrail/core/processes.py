"""Cores this process may use, and a pool of processes that all work on the same data."""

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

from vitrail.core.errors import WorkerDied

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")


def available_cores() -> int:
    """Cores this process may use: its CPU affinity, within the CPU quota of its container. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota() -> float | None:
    """The CPU time that the control group allows, in cores; None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, then version 1
        try:
            words = " ".join(Path("/sys/fs/cgroup", name).read_text("utf-8") for name in files).split()
        except OSError:
            continue
        if len(words) == 2 and all(number.isdecimal() and int(number) for number in words):
            return int(words[0]) / int(words[1])
    return None


KEPT: Final = 1 << 30  # bytes of free memory at the end of the heap
MALLOC_SETTINGS: Final = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory for its next allocations, if the C library is glibc and none of glibc's own
    variables is set. By default glibc returns large blocks to the system at once, and every batch on a CPU requests
    the same ones again, page by page. Returns whether it took effect."""
    if sys.platform != "linux" or any(name in os.environ for name in MALLOC_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    no_maps, trim = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD
    return bool(mallopt(no_maps, 0) and mallopt(trim, KEPT))


def map_in_processes(
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Sequence[Task],
    *,
    workers: int,
    describe_loss: Callable[[Sequence[Task]], str],
    ahead: int = 4,
) -> Iterator[Result]:
    """Yields function(shared, task) for every task, in order, computed by `workers` processes; with no workers or a
    single task it runs here. `shared` is sent to each process once. At most `ahead` tasks per process are in flight.
    If a process dies, raises WorkerDied with `describe_loss(unfinished tasks)` as its message."""
    if not workers or len(tasks) < 2:
        for task in tasks:
            yield function(shared, task)
        return
    # Processes are spawned because a fork next to running threads can hang.
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _receive, (function, shared))
    waiting: deque[tuple[Task, Future[Result]]] = deque()
    try:
        for task in tasks:
            waiting.append((task, pool.submit(_call, task)))
            if len(waiting) >= ahead * workers:
                yield waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool:
        raise WorkerDied(describe_loss([task for task, _ in waiting])) from None
    finally:
        pool.shutdown(cancel_futures=True)


_received: list[Any] = []  # of a worker process: the function and the shared data


def _receive(function: Callable[[Any, Any], Any], shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    _received[:] = function, shared


def _call(task: Any) -> Any:
    function, shared = _received
    return function(shared, task)

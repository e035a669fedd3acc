"""One benchmark measures at a time: those that share a GPU compile at once, and take turns for what they measure."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def add_lock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lock", type=Path, help="a file that benchmarks on one GPU share: one measures at a time")


@contextmanager
def take_turn(lock: Path | None) -> Iterator[None]:
    """Waits until no other benchmark with the same lock file measures, and keeps the others waiting until it ends."""
    if lock is None:
        yield
        return
    import fcntl  # not on Windows

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

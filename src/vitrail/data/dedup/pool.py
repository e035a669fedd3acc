"""The two kinds of work on blocks, here or in several processes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

from vitrail.core.errors import WorkerDied
from vitrail.data.dedup.blocks import Blocks, sweep, write_arrays
from vitrail.data.dedup.pairs import Pairs
from vitrail.data.dedup.prints import load_prints, prints_of, save_prints
from vitrail.data.dedup.search import Method, compare
from vitrail.data.source import Source

Task = tuple[int, int]  # a source, TRAIN is 0, and a block of it
Kind = Literal["print", "search"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """What a process needs to know, sent to it once."""

    sources: Sequence[Source]  # TRAIN, then the test sets
    blocks: Sequence[Blocks]
    parts: Blocks
    method: Method
    within: bool

    def do(self, kind: Kind, task: Task) -> None:
        """One block: what comes of it is a file."""
        of, block = task
        if kind == "print":
            save_prints(self.blocks[of].path(block), prints_of(self.sources[of], *self.blocks[of].span(block)))
        else:
            write_arrays(self.parts.path(block), {"pairs": self.search(block)})

    def search(self, block: int) -> Pairs:
        """A block of TRAIN against all the rest."""
        train = load_prints(self.blocks[0].path(block))

        def compared(source: int, other: int, where: int) -> Pairs:
            return compare(train, load_prints(self.blocks[source].path(other)), self.method, where)

        return sweep(block, self.blocks, self.within, compared)


class Here:
    """The work of a process in the pool."""

    work: Work


def start(work: Work) -> None:
    Here.work = work


def do(kind: Kind, task: Task) -> Task:
    Here.work.do(kind, task)
    return task


class Pool:
    """Those who do the work: this process, or several that are spawned (a fork beside threads may hang) when there is
    something to share out. To be left as a context."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work, self.workers = work, workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)

    def run(self, kind: Kind, tasks: Sequence[Task], done: Callable[[int], None]) -> None:
        """Every task once; `done` is told how many are."""
        if not self.workers or len(tasks) < 2:
            for count, task in enumerate(tasks, 1):
                self.work.do(kind, task)
                done(count)
            return
        if self.executor is None:
            self.executor = ProcessPoolExecutor(self.workers, get_context("spawn"), start, (self.work,))
        waiting = set(tasks)
        try:
            for future in as_completed([self.executor.submit(do, kind, task) for task in tasks]):
                waiting.discard(future.result())
                done(len(tasks) - len(waiting))
        except BrokenProcessPool:
            of, block = min(waiting)
            first, last = self.work.blocks[of].span(block)
            raise WorkerDied(
                f"a process that compares pictures was killed, by lack of memory perhaps, at samples {first} to "
                f"{last - 1} ({self.work.sources[of].name(first)} ...) or later; try fewer workers or smaller blocks"
            ) from None

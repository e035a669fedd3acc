"""The whole comparison of a training set with test sets: prints, search, and what is written of it.

    outcome = find(Job(train=train, tests={"pets": pets}, out=Path("runs/dedup"), workers=2))
    clean = outcome.selection.apply(train)

Work is dealt out by blocks of TRAIN and passes through files, so memory stays flat, a run that was cut short goes on
where it was, and several ranks that share the output folder split the work between them: each calls `find` with its own
`rank`, and each gets the whole outcome. The result is the same for any number of workers and ranks.

The two kinds of work on blocks, here or in several processes.
"""

import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replacing
from vitrail.core.errors import ConfigError, DataError, WorkerDied
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup.block_files import (
    KINDS,
    WITHIN,
    Blocks,
    Pairs,
    groups,
    joined,
    read_arrays,
    sweep,
    waited_for,
    write_arrays,
)
from vitrail.data.dedup.fingerprints import VERSION, blocks_of, load_prints, prints_of, save_prints
from vitrail.data.dedup.match import Embed, Method, alike, compare, embeddings_of, load_vectors, write_embeddings
from vitrail.data.dedup.record import Checked, Record, counted
from vitrail.data.splits import Selection

Task = tuple[int, int]  # a source, TRAIN is 0, and a block of it
Kind = Literal["print", "search"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """What a process needs to know, sent to it once."""

    sources: Sequence[ImageDataset]  # TRAIN, then the test sets
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
    """Those who do the work: this process, or several that are spawned (a fork next to threads may hang) when there is
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
                f"a process that compares images was killed, by lack of memory perhaps, at samples {first} to "
                f"{last - 1} ({self.work.sources[of].name(first)} ...) or later; try fewer workers or smaller blocks"
            ) from None


BLOCK: Final = 2048  # images
NAMED: Final = 100  # unreadable images that the record names, a set

DEFAULT: Final = Method()

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """What to compare, how, and who does which share of it. `embed` turns B images into B vectors and is called in
    this process; `method.embedding` names it."""

    train: ImageDataset
    tests: Mapping[str, ImageDataset]
    out: Path
    called: str = "train"
    method: Method = DEFAULT
    within: bool = False  # TRAIN against itself, too
    embed: Embed | None = None
    workers: int = 0  # processes; with none the work is done here
    rank: int = 0
    world: int = 1
    block: int = BLOCK
    cache: Path | None = None  # of prints; ranks share the output folder instead, unless one is given
    progress: Progress = silent

    def __post_init__(self) -> None:
        if not (self.tests or self.within):
            raise ConfigError(f"{self.called} is to be compared with nothing: name a test set, or ask for within")
        if not len(self.train):
            raise DataError(f"{self.called} has no images")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank={self.rank} of world={self.world}: from 0 to {self.world - 1}")
        if self.workers < 0 or self.block < 1:
            raise ConfigError(f"workers={self.workers}, block={self.block}: at least 0 and 1")
        if (self.embed is None) != (not self.method.embedding):
            raise ConfigError("embeddings need both: the function that makes them, and its name in the method")

    @property
    def store(self) -> Path:
        """Where prints are kept."""
        return self.cache or (cache_folder("dedup") if self.world == 1 else self.out / "prints")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """The record, the filter for training, and every pair."""

    record: Record
    selection: Selection
    pairs: Pairs


def find(job: Job) -> Outcome:
    """Compares, and writes dedup.json, drop.json (the selection), pairs.csv and parts/ into the output folder (rank 0
    does); `parts` and prints of a run that was cut short are used again."""
    sources = [job.train, *job.tests.values()]
    blocks = [blocks_of(source, job.store, job.block) for source in sources]
    parts = Blocks(folder=job.out / "parts" / key(job, blocks), length=len(job.train), size=job.block)
    work = Work(sources=sources, blocks=blocks, parts=parts, method=job.method, within=job.within)
    with Pool(work, job.workers) as pool:
        tasks = missing(job, blocks)
        pool.run("print", tasks, lambda done: job.progress("reading images", done, len(tasks)))
        await_all(blocks if job.within else blocks[1:])
        mine = [(0, b) for b in parts.missing() if b % job.world == job.rank]
        pool.run("search", mine, lambda done: job.progress("comparing", done, len(mine)))
    found = [read_arrays(path)["pairs"] for path in waited_for(map(parts.path, range(len(parts))))]
    if job.embed is not None:
        found += by_embedding(job, job.embed, sources, blocks, parts)
    return concluded(job, sources, blocks, joined(found))


def missing(job: Job, blocks: list[Blocks]) -> list[tuple[int, int]]:
    """This rank's share of the blocks that are not there yet; the test sets first, for everyone waits on them."""
    order = [*range(1, len(blocks)), 0]
    return [(s, b) for s in order for b in blocks[s].missing() if b % job.world == job.rank]


def await_all(blocks: list[Blocks]) -> None:
    for some in blocks:
        for _ in waited_for(map(some.path, range(len(some)))):
            pass


def key(job: Job, blocks: list[Blocks]) -> str:
    """Names the parts of this very comparison."""
    said = json.dumps([[b.folder.name for b in blocks], asdict(job.method), job.within, VERSION])
    return sha256(said.encode()).hexdigest()[:16]


def by_embedding(
    job: Job, embed: Embed, sources: list[ImageDataset], prints: list[Blocks], parts: Blocks
) -> list[Pairs]:
    """The same in vectors, in this process, for the network is here."""
    blocks = [embeddings_of(one, job.out / "embeddings", job.method.embedding) for one in prints]
    tasks = missing(job, blocks)
    for done, (s, b) in enumerate(tasks, 1):
        write_embeddings(sources[s], embed, blocks[s], b)
        job.progress("embedding", done, len(tasks))
    await_all(blocks if job.within else blocks[1:])
    out = Blocks(folder=parts.folder.with_name(f"{parts.folder.name}-embedding"), length=parts.length, size=parts.size)
    for block in out.missing():
        if block % job.world == job.rank:
            write_arrays(out.path(block), {"pairs": sweep(block, blocks, job.within, compared(job, blocks, block))})
    return [read_arrays(path)["pairs"] for path in waited_for(map(out.path, range(len(out))))]


def compared(job: Job, blocks: list[Blocks], block: int) -> Callable[[int, int, int], Pairs]:
    """How a block of TRAIN is compared with others, in vectors."""
    train = load_vectors(blocks[0], block)
    return lambda source, other, where: alike(train, load_vectors(blocks[source], other), job.method.cosine, where)


def concluded(job: Job, sources: list[ImageDataset], blocks: list[Blocks], pairs: Pairs) -> Outcome:
    """Counts, chooses what goes, and writes it down."""
    dropped = {where: drops(pairs, where, len(job.train)) for where in ([WITHIN] if job.within else [])}
    dropped |= {where: drops(pairs, where, len(job.train)) for where in range(len(job.tests))}
    gone = np.unique(np.concatenate([np.zeros(0, np.int64), *dropped.values()]))
    names = dict(zip(job.tests, (source.fingerprint for source in sources[1:]), strict=True))
    selection = Selection(
        source=job.train.fingerprint,
        rule={
            "name": "dedup",
            "against": names,
            "within": job.within,
            "method": asdict(job.method),
            "version": VERSION,
        },
        indices=gone,
        drop=True,
    )
    bad = [unreadable(some) for some in blocks]
    titles = {WITHIN: job.called, **dict(enumerate(job.tests))}
    checked: list[Checked] = []
    for where, going in dropped.items():
        duplicates, kinds = counted(pairs, where, going)
        checked.append(
            Checked(
                name=titles[where],
                fingerprint=sources[where + 1].fingerprint,
                pictures=len(sources[where + 1]),
                unreadable=len(bad[where + 1]),
                duplicates=duplicates,
                kinds=kinds,
                dropped=len(going),
                within=where == WITHIN,
            )
        )
    record = Record(
        train=job.called,
        fingerprint=job.train.fingerprint,
        filtered=selection.apply(job.train).fingerprint,
        pictures=len(job.train),
        unreadable=len(bad[0]),
        checked=tuple(checked),
        method=job.method,
        selection=selection.hash,
        dropped=len(gone),
        bad={name: tuple(some[:NAMED]) for name, some in zip([job.called, *job.tests], bad, strict=True) if some},
    )
    if job.rank == 0:
        selection.save(job.out / "drop.json")
        write_csv(job.out / "pairs.csv", job, pairs)
        record.save(job.out / "dedup.json")
        if job.world == 1:
            shutil.rmtree(job.out / "parts", ignore_errors=True)
    return Outcome(record=record, selection=selection, pairs=pairs)


def drops(pairs: Pairs, where: int, length: int) -> NDArray[np.int64]:
    """The images of TRAIN that go because of one set: all that are in a test set; within TRAIN, all but the first of
    each group."""
    mine = pairs[pairs["set"] == where]
    if where != WITHIN:
        return np.unique(mine["train"])
    first = groups(length, mine["train"], mine["test"])
    return np.flatnonzero(first != np.arange(length))


def unreadable(blocks: Blocks) -> list[str]:
    paths = waited_for(map(blocks.path, range(len(blocks))))
    return [reason for path in paths for _, reason in sorted(load_prints(path).bad.items())]


def write_csv(path: Path, job: Job, pairs: Pairs) -> None:
    """Every pair with its names, for whoever would rather use a spreadsheet."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["compared with", "kind", "distance", "train index", "train name", "index", "name"])
    sources = [job.train, *job.tests.values()]
    titles = ["itself", *job.tests]
    for where, train, test, kind, distance in pairs.tolist():
        names = job.train.name(train), sources[where + 1].name(test)
        table.writerow([titles[where + 1], KINDS[kind], f"{distance:.4f}", train, names[0], test, names[1]])
    with replacing(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))

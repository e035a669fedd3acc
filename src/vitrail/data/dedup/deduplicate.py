"""Compares a training set with test sets: fingerprints, search, and the files that come out of it.

    result = deduplicate(DedupJob(train=train, tests={"pets": pets}, out=Path("runs/dedup"), workers=2))
    clean = result.selection.apply(train)

Work is split by blocks of the training set and passes through files, so memory stays flat and an interrupted run
resumes. Several ranks that share the output folder split the work: each calls `deduplicate` with its own `rank`, and
each gets the full result. The result is the same for any number of workers and ranks.
"""

import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import ConfigError, DataError
from vitrail.core.processes import map_in_processes
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup import fingerprints as fp
from vitrail.data.dedup import match
from vitrail.data.dedup.fingerprints import VERSION, BlockFiles, load_fingerprints, read_arrays, write_arrays
from vitrail.data.dedup.match import KINDS, WITHIN, Embed, MatchRule, PairArray
from vitrail.data.dedup.record import ComparedSet, DedupRecord, count_duplicates
from vitrail.data.splits import Selection

BLOCK: Final = 2048  # images
LISTED: Final = 100  # unreadable images that the record lists, per set
DEFAULT: Final = MatchRule()

BlockTask = tuple[Literal["fingerprint", "search"], int, int]  # what to do, number of the source, block
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DedupJob:
    """What to compare, how, and which share of it. `embed` maps B images to B vectors and is called in this process;
    `method.embedding` is its name."""

    train: ImageDataset
    tests: Mapping[str, ImageDataset]
    out: Path
    called: str = "train"
    method: MatchRule = DEFAULT
    within: bool = False  # compare the training set with itself, too
    embed: Embed | None = None
    workers: int = 0  # processes; with none the work is done here
    rank: int = 0
    world: int = 1
    block: int = BLOCK
    cache: Path | None = None  # of fingerprints; ranks share the output folder instead, unless one is given
    progress: Progress = lambda stage, done, total: None

    def __post_init__(self) -> None:
        if not (self.tests or self.within):
            raise ConfigError(f"nothing to compare {self.called} with; name a test set, or ask for within")
        if not len(self.train):
            raise DataError(f"{self.called} has no images")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank={self.rank} of world={self.world} must be between 0 and {self.world - 1}")
        if self.workers < 0 or self.block < 1:
            raise ConfigError(f"workers={self.workers} and block={self.block} must be at least 0 and 1")
        if (self.embed is None) != (not self.method.embedding):
            raise ConfigError("embeddings need both the function that computes them and its name in the method")

    @property
    def store(self) -> Path:
        """The folder of the fingerprints."""
        return self.cache or (cache_folder("dedup") if self.world == 1 else self.out / "prints")

    @property
    def sources(self) -> list[ImageDataset]:
        """The training set, then the test sets."""
        return [self.train, *self.tests.values()]

    def share(self, blocks: BlockFiles) -> list[int]:
        """The missing blocks that this rank computes."""
        return [block for block in blocks.missing() if block % self.world == self.rank]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DedupResult:
    """The record, the filter for training, and every pair."""

    record: DedupRecord
    selection: Selection
    pairs: PairArray


# What each worker process needs: data sets, their fingerprints, the files of pairs, and how to compare.
SharedWork: TypeAlias = tuple[Sequence[ImageDataset], Sequence[BlockFiles], BlockFiles, MatchRule, bool]


def run_task(work: SharedWork, task: BlockTask) -> None:
    """Computes one block; the result is a file."""
    (sources, prints, parts, method, within), (kind, source, block) = work, task
    path = prints[source].path(block)
    if kind == "fingerprint":
        fp.save_fingerprints(path, fp.compute_fingerprints(sources[source], *prints[source].span(block)))
        return
    train = load_fingerprints(path)

    def compare(source: int, other: int, where: int) -> PairArray:
        return match.match_blocks(train, load_fingerprints(prints[source].path(other)), method, where)

    write_arrays(parts.path(block), {"pairs": match.match_all(block, prints, within, compare)})


def deduplicate(job: DedupJob) -> DedupResult:
    """Compares, and writes dedup.json, drop.json (the selection), pairs.csv and parts/ into the output folder (rank 0
    does). `parts` and fingerprints of an interrupted run are reused."""
    folders = [job.store / f"{fp.hash_source(source)[:32]}-{VERSION}-{job.block}" for source in job.sources]
    pairs_of = zip(folders, job.sources, strict=True)
    prints = [BlockFiles(folder=folder, length=len(source), size=job.block) for folder, source in pairs_of]
    key = json.dumps([[blocks.folder.name for blocks in prints], asdict(job.method), job.within, VERSION])
    folder = job.out / "parts" / sha256(key.encode()).hexdigest()[:16]
    parts = BlockFiles(folder=folder, length=len(job.train), size=job.block)
    work = job.sources, prints, parts, job.method, job.within
    order = [*range(1, len(prints)), 0]  # test sets first, because every rank waits for them
    run_tasks(job, work, "reading images", [("fingerprint", s, b) for s in order for b in job.share(prints[s])])
    for blocks in prints if job.within else prints[1:]:
        blocks.wait()
    run_tasks(job, work, "comparing", [("search", 0, b) for b in job.share(parts)])
    found = [read_arrays(path)["pairs"] for path in parts.wait()]
    if job.embed is not None:
        found += compare_embeddings(job, job.embed, prints, parts)
    return conclude(job, prints, match.merge_pairs(found))


def run_tasks(job: DedupJob, work: SharedWork, stage: str, tasks: list[BlockTask]) -> None:
    def describe_loss(tasks: Sequence[BlockTask]) -> str:
        _, source, block = tasks[0]
        first, last = work[1][source].span(block)
        place = f"samples {first} to {last - 1} ({job.sources[source].name(first)} ...) or later"
        return f"a process was killed, perhaps for lack of memory, at {place}; try fewer workers or smaller blocks"

    results = map_in_processes(run_task, work, tasks, workers=job.workers, describe_loss=describe_loss)
    for done, _ in enumerate(results, 1):
        job.progress(stage, done, len(tasks))


def compare_embeddings(job: DedupJob, embed: Embed, prints: list[BlockFiles], parts: BlockFiles) -> list[PairArray]:
    """Compares vectors, in this process, where the network is."""
    name = sha256(job.method.embedding.encode()).hexdigest()[:12]
    blocks = [replace(one, folder=job.out / "embeddings" / f"{one.folder.name}-{name}") for one in prints]
    tasks = [(s, b) for s in [*range(1, len(blocks)), 0] for b in job.share(blocks[s])]
    for done, (s, b) in enumerate(tasks, 1):
        match.write_embeddings(job.sources[s], embed, blocks[s], b)
        job.progress("embedding", done, len(tasks))
    for some in blocks if job.within else blocks[1:]:
        some.wait()
    out = replace(parts, folder=parts.folder.with_name(f"{parts.folder.name}-embedding"))
    for block in job.share(out):
        train = match.load_vectors(blocks[0], block)

        def compare(source: int, other: int, where: int, train: NDArray[np.float32] = train) -> PairArray:
            return match.match_embeddings(train, match.load_vectors(blocks[source], other), job.method.cosine, where)

        write_arrays(out.path(block), {"pairs": match.match_all(block, blocks, job.within, compare)})
    return [read_arrays(path)["pairs"] for path in out.wait()]


def conclude(job: DedupJob, prints: list[BlockFiles], pairs: PairArray) -> DedupResult:
    """Counts, chooses what to drop, and writes the files."""
    sets = [*([WITHIN] if job.within else []), *range(len(job.tests))]
    dropped: dict[int, NDArray[np.int64]] = {}
    for where in sets:  # all that are in a test set; within the training set, all but the first of each group
        mine = pairs[pairs["set"] == where]
        first = match.find_groups(len(job.train), mine["train"], mine["test"]) if where == WITHIN else None
        dropped[where] = np.unique(mine["train"]) if first is None else np.flatnonzero(first != np.arange(len(first)))
    gone = np.unique(np.concatenate([np.zeros(0, np.int64), *dropped.values()]))
    against = {name: source.fingerprint for name, source in job.tests.items()}
    rule = {"name": "dedup", "against": against, "within": job.within, "method": asdict(job.method), "version": VERSION}
    selection = Selection(source=job.train.fingerprint, rule=rule, indices=gone, drop=True)
    bad = [[r for path in one.wait() for _, r in sorted(load_fingerprints(path).bad.items())] for one in prints]
    names = [job.called, *job.tests]
    checked: list[ComparedSet] = []
    for where, going in dropped.items():
        name, source, unreadable = names[where + 1], job.sources[where + 1], len(bad[where + 1])
        counts = len(source), unreadable, *count_duplicates(pairs, where, going), len(going)
        checked.append(ComparedSet(name, source.fingerprint, *counts, within=where == WITHIN))
    listed = {name: tuple(reasons[:LISTED]) for name, reasons in zip(names, bad, strict=True) if reasons}
    filtered, counts = selection.apply(job.train).fingerprint, (len(job.train), len(bad[0]))
    result = tuple(checked), job.method, selection.hash, len(gone), listed
    record = DedupRecord(job.called, job.train.fingerprint, filtered, *counts, *result)
    if job.rank == 0:
        selection.save(job.out / "drop.json")
        write_csv(job.out / "pairs.csv", job, pairs)
        record.save(job.out / "dedup.json")
        if job.world == 1:
            shutil.rmtree(job.out / "parts", ignore_errors=True)
    return DedupResult(record=record, selection=selection, pairs=pairs)


def write_csv(path: Path, job: DedupJob, pairs: PairArray) -> None:
    """Every pair with its names, for a spreadsheet."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["compared with", "kind", "distance", "train index", "train name", "index", "name"])
    titles = ["itself", *job.tests]
    for where, train, test, kind, distance in pairs.tolist():
        names = job.train.name(train), job.sources[where + 1].name(test)
        table.writerow([titles[where + 1], KINDS[kind], f"{distance:.4f}", train, names[0], test, names[1]])
    with replace_on_success(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))

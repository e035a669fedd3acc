"""Compares a training set with test sets by their fingerprints, and writes the results: the record (dedup.json), the
selection of images to drop, all pairs, and a page that shows them.

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
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import cache_folder, replace_on_success
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.processes import map_in_processes
from vitrail.data.dataset import ImageDataset
from vitrail.data.dedup import fingerprints as fp
from vitrail.data.dedup import match
from vitrail.data.dedup.fingerprints import VERSION, BlockFiles, load_fingerprints, read_arrays, write_arrays
from vitrail.data.dedup.match import KINDS, WITHIN, Embed, MatchRule, PairArray
from vitrail.data.splits import Selection
from vitrail.report import page as report

FORMAT: Final = "vitrail dedup 1"
COLUMNS: Final = ("training set", "compared with", "images", "duplicates", "share", *KINDS, "dropped", "unreadable")
PAIRS_SHOWN: Final = 500
BLOCK: Final = 2048  # images
LISTED: Final = 100  # unreadable images that the record lists, per set
DEFAULT: Final = MatchRule()

BlockTask = tuple[Literal["fingerprint", "search"], int, int]  # action, index of the source, block
Progress = Callable[[str, int, int], None]  # stage, tasks done, tasks in total


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DedupJob:
    """What to compare, how, and which share of the work is this rank's. `embed` maps B images to B vectors and is
    called in this process; `method.embedding` is its name."""

    train: ImageDataset
    tests: Mapping[str, ImageDataset]
    out: Path
    called: str = "train"
    method: MatchRule = DEFAULT
    within: bool = False  # also compare the training set with itself
    embed: Embed | None = None
    workers: int = 0  # processes; 0 works in this one
    rank: int = 0
    world: int = 1
    block: int = BLOCK
    cache: Path | None = None  # of fingerprints; by default the user's cache, or the output folder if there are ranks
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
        """Returns the missing blocks that this rank computes."""
        return [block for block in blocks.missing() if block % self.world == self.rank]


@dataclass(frozen=True, slots=True)
class ComparedSet:
    """A set that the training set was compared with (itself if `within`), and how many of its images are in the
    training set: in total, and by their most certain kind. `dropped` counts the training images that it removes."""

    name: str
    fingerprint: str
    images: int
    unreadable: int
    duplicates: int
    kinds: dict[str, int]
    dropped: int
    within: bool = False


@dataclass(frozen=True, slots=True)
class DedupRecord:
    """The contents of dedup.json. `filtered` is the fingerprint of the training set after the selection is dropped. In
    the file, the number of images is called "pictures"."""

    train: str
    fingerprint: str
    filtered: str
    images: int
    unreadable: int
    checked: tuple[ComparedSet, ...]
    method: MatchRule
    selection: str  # the selection's hash
    dropped: int
    bad: dict[str, tuple[str, ...]]  # by set: unreadable images with their reasons, the first hundred of each

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        body = rename_key(asdict(self), "images", "pictures")
        body["checked"] = [rename_key(one, "images", "pictures") for one in body["checked"]]
        with replace_on_success(path) as file:
            file.write(json.dumps({"kind": FORMAT, **body}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "DedupRecord":
        """Reads a file that `save` wrote."""
        try:
            body = rename_key(json.loads(path.read_text("utf-8")), "pictures", "images")
            if body.pop("kind") != FORMAT:
                raise ValueError("it has another format")
            body["checked"] = tuple(ComparedSet(**rename_key(one, "pictures", "images")) for one in body["checked"])
            body["method"] = MatchRule(**body["method"])
            body["bad"] = {name: tuple(reasons) for name, reasons in body["bad"].items()}
            return cls(**body)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a record of a de-duplication: {error}") from None

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table rows for COLUMNS: one per pair of sets, counted as in BiT, with a dash for kinds that were
        not searched for."""
        rule = self.method
        searched = {"exact": rule.exact, "near": rule.near, "flipped": rule.near, "embedding": bool(rule.embedding)}
        rows: list[tuple[str, ...]] = []
        for one in self.checked:
            counts = f"{one.images:,}", f"{one.duplicates:,}", f"{100 * one.duplicates / max(1, one.images):.2f}%"
            kinds = [f"{one.kinds[kind]:,}" if searched[kind] else "-" for kind in KINDS]
            name, ends = "itself" if one.within else one.name, (f"{one.dropped:,}", f"{one.unreadable:,}")
            rows.append((self.train, name, *counts, *kinds, *ends))
        return rows


def rename_key(body: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in body.items()}


class DedupResult(NamedTuple):
    """The record, the filter for training, and every pair."""

    record: DedupRecord
    selection: Selection
    pairs: PairArray


# What each worker process needs: data sets, their fingerprints, the files of pairs, the rule, and `within`.
SharedWork: TypeAlias = tuple[Sequence[ImageDataset], Sequence[BlockFiles], BlockFiles, MatchRule, bool]


def run_task(work: SharedWork, task: BlockTask) -> None:
    """Computes one block and writes the result to a file."""
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
    """Runs the comparison. Rank 0 writes dedup.json, drop.json (the selection) and pairs.csv to the output folder. The
    fingerprints and parts/ of an interrupted run are reused."""
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
    """Compares embeddings, in this process, because the network is here."""
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
    for where in sets:  # drops all images in a test set, and all but the first of each group of duplicates within train
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
    """Writes every pair with its names, for a spreadsheet."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["compared with", "kind", "distance", "train index", "train name", "index", "name"])
    titles = ["itself", *job.tests]
    for where, train, test, kind, distance in pairs.tolist():
        names = job.train.name(train), job.sources[where + 1].name(test)
        table.writerow([titles[where + 1], KINDS[kind], f"{distance:.4f}", train, names[0], test, names[1]])
    with replace_on_success(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))


def count_duplicates(pairs: PairArray, where: int, dropped: NDArray[np.int64]) -> tuple[int, dict[str, int]]:
    """Counts the images of the set `where` with a duplicate in the training set, in total and by their most certain
    kind. Within the training set only the `dropped` ones count: all but the first of each group."""
    mine = pairs[pairs["set"] == where]
    numbers, kinds = mine["test"], mine["kind"].astype(np.int64)
    if where == WITHIN:
        numbers = np.concatenate([mine["test"], mine["train"]])
        counts = np.isin(numbers, dropped)
        numbers, kinds = numbers[counts], np.tile(kinds, 2)[counts]
    images, at = np.unique(numbers, return_inverse=True)
    surest = np.full(len(images), len(KINDS), np.int64)
    np.minimum.at(surest, at, kinds)
    return len(images), {kind: int((surest == i).sum()) for i, kind in enumerate(KINDS)}


def write_page(
    path: Path,
    record: DedupRecord,
    pairs: PairArray,
    train: ImageDataset,
    tests: Mapping[str, ImageDataset],
    *,
    shown: int = PAIRS_SHOWN,
) -> None:
    """Writes the page: the table, then the pairs side by side, the most distant, and so most doubtful, first within
    each kind. Each set gets an equal share of the `shown` pairs, evenly spaced over the full range if it has more."""
    titles = {WITHIN: record.train, **dict(enumerate(tests))}
    sources = {WITHIN: train, **dict(enumerate(tests.values()))}
    present = [where for where in titles if (pairs["set"] == where).any()]
    sections: list[report.Section] = [report.Table(columns=COLUMNS, rows=record.rows(), left=2)]
    for where in present:
        mine = pairs[pairs["set"] == where]
        most, kind = max(1, shown // len(present)), -mine["kind"].astype(np.int64)
        # The least certain kind first, and within it the most distant pair first.
        chosen = mine[np.lexsort((mine["test"], mine["train"], -mine["distance"], kind))]
        chosen = chosen if len(chosen) <= most else chosen[np.arange(most) * len(chosen) // most]
        left, sides = len(mine) - len(chosen), (record.train, titles[where])
        title = f"Within {record.train}" if where == WITHIN else f"{titles[where]} in {record.train}"
        shown_pairs = [show_pair(row, train, sources[where]) for row in chosen.tolist()]
        more = f"{left:,} more in pairs.csv." if left else ""
        sections.append(report.Pairs(title=title, pairs=shown_pairs, sides=sides, more=more))
    unreadable = {record.train: record.unreadable, **{one.name: one.unreadable for one in record.checked}}
    for name, reasons in record.bad.items():
        left = unreadable[name] - len(reasons)
        more = f"{left:,} more." if left > 0 else ""
        sections.append(report.Notes(title=f"Unreadable in {name}", lines=reasons, more=more))
    report.save_page(path, report.render_page(f"Duplicates in {record.train}", sections, lead=summarise(record)))


def summarise(record: DedupRecord) -> str:
    rule, ways = record.method, list[str]()
    ways += ["the same decoded pixels"] if rule.exact else []
    ways += [f"perceptual hash and thumbnail (distance up to {rule.distance})"] if rule.near else []
    ways += [f"embeddings of {rule.embedding} (cosine from {rule.cosine})"] if rule.embedding else []
    compared = f"{record.images:,} images of {record.train} were compared by {', '.join(ways)}."
    return f"{compared} The selection {record.selection[:12]} (drop.json) skips {record.dropped:,} of them."


def show_pair(row: Sequence[float], train: ImageDataset, other: ImageDataset) -> report.Pair:
    _, first, second, kind, distance = row
    note = "same pixels" if distance == 0 and not kind else f"distance {distance:.4f}"
    one, two = show_image(train, int(first)), show_image(other, int(second))
    return report.Pair(one=one, other=two, kind=KINDS[int(kind)], note=note)


def show_image(source: ImageDataset, index: int) -> report.Shot:
    try:
        uri = report.to_data_uri(fp.decode(source, index))
    except BadImage:  # the file changed since the comparison; the page shows a blank
        uri = ""
    return report.Shot(caption=source.name(index), picture=uri)

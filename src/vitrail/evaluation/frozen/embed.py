"""The features of a whole collection in one file, whatever its size, with exact resume.

    embed(network, {"train": source}, Path("pets.parquet"), batch=64)

The samples are split into parts. Each is computed in batches that begin where the part begins, and written atomically
to OUT.parts with the hash of the weights, the fingerprint of the images, all settings and a checksum. After a kill only
the missing parts are computed, several processes share the parts, and the joined file is always the same to the byte.
One part is in memory at a time.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.config_overrides import diff_plain
from vitrail.core.errors import ConfigError, DataError, VitrailError, WeightsError, unknown_name
from vitrail.core.locks import FileLock, LockTaken
from vitrail.data.dataset import ConcatDataset, ImageDataset, RelabelledDataset, SubsetDataset
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.unreadable_log import UnreadableSample
from vitrail.distributed.process_group import World
from vitrail.evaluation import Stored
from vitrail.evaluation.frozen.embedding_file import FORMATS, EmbeddingPart, join_parts, read_description, to_printable
from vitrail.evaluation.frozen.features import (
    Precision,
    compute_features,
    hash_images,
    hash_network,
    inference_context,
    make_normaliser,
)
from vitrail.models.build import Model

KIND: Final = "vitrail embeddings 1"
ROWS: Final = 4096  # samples in a part, at most: some megabytes
PARTS: Final = 16  # that a small set is cut into, so that several processes have something to do

TYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSummary:
    """The written file. `found` is how many of the parts existed before; all if the file existed."""

    path: Path
    pictures: int
    width: int
    unreadable: int  # images; all of them are named in OUT.unreadable.txt
    first: tuple[UnreadableSample, ...]  # some of them
    parts: int
    found: int


def embed(
    network: Model,
    splits: Mapping[str, ImageDataset],
    out: Path,
    *,
    preprocessing: Preprocessing | None = None,
    world: World | None = None,
    dtype: Stored = "float32",
    precision: Precision = "float32",
    batch: int = 64,
    workers: int = 0,
    origin: Mapping[str, Any] | None = None,
    force: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> EmbeddingSummary:
    """Writes the features of every image of some splits to OUT, .parquet or .npz.

    `origin`, the names of weights and images, is stored in the file with the facts. A file or parts of other weights,
    images or settings raise ConfigError, unless `force` replaces them. `tell` is called with (done, total).
    All processes of a `world` call this, each with the network on its device."""
    world = world or World(device=next(network.parameters()).device)
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out}: embeddings are written as {' or '.join(FORMATS)}; give such a name")
    if dtype not in get_args(Stored):
        raise unknown_name("type", str(dtype), get_args(Stored))
    if batch < 1:
        raise ConfigError(f"batch={batch} must be at least 1")
    source = concatenate_splits(splits)
    work = EmbeddingJob(
        network=network,
        source=source,
        preprocessing=preprocessing or get_card(network).preprocessing,
        out=out,
        rows=batch * max(min(ROWS // batch, -(-len(source) // (PARTS * batch))), 1),
        batch=batch,
        dtype=dtype,
        precision=precision,
    )
    facts = work.facts(world)
    with open_job(work, facts, world, force=force) as todo:
        if todo is not None:
            work.compute(todo[world.rank :: world.size], facts, world, workers=workers, tell=tell)
            world.barrier()  # every part is there
            run_on_main(world, lambda: work.finish(facts, splits, origin or {}))
        described = run_on_main(world, lambda: read_description(out))
    return EmbeddingSummary(
        path=out,
        pictures=int(described["pictures"]),
        width=int(described["width"]),
        unreadable=int(described["unreadable"]),
        first=tuple(UnreadableSample(**entry) for entry in described["first"]),
        parts=work.parts,
        found=work.parts - (0 if todo is None else len(todo)),
    )


def concatenate_splits(splits: Mapping[str, ImageDataset]) -> ImageDataset:
    """All splits as one source; a split without labels gets the classes of the others."""
    if not splits or not all(len(source) for source in splits.values()):
        raise DataError("there are no images to embed")
    classes = next((source.classes for source in splits.values() if source.classes), ())
    parts = [
        part if part.classes == classes else RelabelledDataset(part, part.labels, classes) for part in splits.values()
    ]
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def run_on_main(world: World, work: Callable[[], Any]) -> Any:
    """Runs a function in the main process and returns its result, or raises its error, in all of them."""
    value, refused = None, None
    if world.is_main:
        try:
            value = work()
        except VitrailError as error:
            refused = error
    value, refused = world.broadcast((value, refused))
    if refused is not None:
        raise refused
    return value


@contextlib.contextmanager
def open_job(work: "EmbeddingJob", facts: dict[str, Any], world: World, *, force: bool) -> Generator[list[int] | None]:
    """The missing parts, the same list in all processes; None if the file is complete. The main process holds a lock on
    the folder meanwhile."""
    held: list[FileLock] = []

    def find_missing_parts() -> list[int] | None:
        check_writable(work.out)
        if work.out.exists() and not force:
            check_unchanged(str(work.out), read_description(work.out)["facts"], facts)
            work.clear()  # a kill after the last step may leave parts
            return None
        try:
            work.folder.mkdir(parents=True, exist_ok=True)
            held.append(lock_folder(work.folder))
        except OSError as error:
            raise ConfigError(f"{work.folder} cannot be written ({error.strerror}); name another place") from error
        for left in work.folder.glob(".vitrail-*.tmp"):
            left.unlink(missing_ok=True)
        return [number for number in range(work.parts) if not work.is_done(number, facts, force=force)]

    try:
        todo: list[int] | None = run_on_main(world, find_missing_parts)
        yield todo
        if todo is not None and world.is_main:
            work.clear()
    finally:
        for lock in held:
            lock.release()


def check_unchanged(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """ConfigError that lists the differences if a file has other weights, images or settings."""
    changes = diff_plain(old, new)
    if changes:
        shown = "; ".join(line if len(line) < 120 else f"{line[:117]}..." for line in changes)
        raise ConfigError(
            f"{what} holds embeddings of other weights, images or settings ({shown}); give what it had, name another "
            "file, or add --force to make it again"
        )


def lock_folder(folder: Path) -> FileLock:
    """A lock until it is released or this process ends."""
    try:
        return FileLock(folder / "lock")
    except LockTaken:
        raise ConfigError(f"another process is at work in {folder}; wait for it, or name another file") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingJob:
    """A source in parts of `rows` samples, of which each holds whole batches."""

    network: Model
    source: ImageDataset
    preprocessing: Preprocessing
    out: Path
    rows: int
    batch: int
    dtype: Stored
    precision: Precision

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")

    @property
    def unreadable_list(self) -> Path:
        return self.out.with_name(f"{self.out.name}.unreadable.txt")

    @property
    def parts(self) -> int:
        return -(-len(self.source) // self.rows)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def span(self, number: int) -> range:
        return range(number * self.rows, min((number + 1) * self.rows, len(self.source)))

    def facts(self, world: World) -> dict[str, Any]:
        """Everything that the numbers depend on, as plain data."""
        return json.loads(
            json.dumps(
                {
                    "kind": KIND,
                    "weights": hash_network(self.network),
                    "pictures": hash_images(self.source),
                    "preprocessing": self.preprocessing.to_dict(),
                    "type": self.dtype,
                    "precision": self.precision,
                    "batch": self.batch,
                    "rows": self.rows,
                    "device": world.device.type,
                    "versions": {"vitrail": __version__, "torch": torch.__version__},
                }
            )
        )

    def is_done(self, number: int, facts: Mapping[str, Any], *, force: bool) -> bool:
        """Whether a part exists, intact and with the same facts. A damaged one is computed again."""
        path = self.path(number)
        if not path.exists():
            return False
        try:
            found = read_weights(path).description or {}
        except WeightsError:
            return False
        if not force:
            check_unchanged(str(self.folder), found.get("facts", {}), facts)
        return found.get("facts") == facts

    def compute(
        self,
        mine: list[int],
        facts: Mapping[str, Any],
        world: World,
        *,
        workers: int,
        tell: Callable[[int, int], None] | None,
    ) -> None:
        """Computes the parts of this process in order; the loader prefetches across their ends."""
        if not mine:
            return
        places = np.concatenate([np.asarray(self.span(number), np.int64) for number in mine])
        batches = eval_batches(
            SubsetDataset(self.source, places),
            self.preprocessing,
            batch=self.batch,
            workers=workers,
            pin=world.device.type == "cuda",
        )
        prepare, done = make_normaliser(self.preprocessing, world.device, self.precision), 0
        with inference_context(self.network, world.device, self.precision):
            for number in mine:
                size = len(self.span(number))
                rows, bad = list[tuple[Tensor, Tensor, Tensor]](), list[UnreadableSample]()
                for batch in itertools.islice(batches, -(-size // self.batch)):
                    moved = batch.to(world.device)
                    rows.append(
                        (compute_features(self.network, prepare(moved.pixels)).float(), batch.sample, batch.valid)
                    )
                    bad += self.relocate_unreadable(batch, places)
                    done += int((batch.sample >= 0).sum())
                    if tell is not None:
                        tell(done, len(places))
                self.write(number, rows, places, bad, facts)

    def relocate_unreadable(
        self, batch: Batch, places: np.ndarray[Any, np.dtype[np.int64]]
    ) -> Iterator[UnreadableSample]:
        return (UnreadableSample(int(places[bad.sample]), bad.name, bad.reason) for bad in batch.unreadable)

    def write(
        self,
        number: int,
        rows: list[tuple[Tensor, Tensor, Tensor]],
        places: np.ndarray[Any, np.dtype[np.int64]],
        bad: list[UnreadableSample],
        facts: Mapping[str, Any],
    ) -> None:
        """Writes one part: features [n, D] and samples [n] of readable images, and the names of unreadable ones."""
        valid = torch.cat([one for _, _, one in rows])
        features = torch.cat([one for one, _, _ in rows]).cpu()[valid]
        samples = torch.from_numpy(places)[torch.cat([one for _, one, _ in rows])[valid]]
        stored = features.to(TYPES[self.dtype])
        wrong = (~stored.isfinite()).any(1).nonzero()
        if len(wrong):
            name = self.source.name(int(samples[wrong[0, 0]]))
            cause = (
                "the network overflows" if not features[wrong[0, 0]].isfinite().all() else "float16 cannot hold them"
            )
            raise DataError(f"the features of {name} are not finite: {cause}")
        described = [{"sample": one.sample, "name": one.name, "reason": one.reason} for one in bad]
        description = {"kind": KIND, "facts": dict(facts), "unreadable": described}
        write_sealed(self.path(number), {"features": stored, "samples": samples}, description)

    def read(self) -> Iterator[EmbeddingPart]:
        """All parts in order, each verified."""
        for number in range(self.parts):
            found = read_weights(self.path(number))
            described = (found.description or {}).get("unreadable", [])
            yield EmbeddingPart(
                features=found.tensors["features"], samples=found.tensors["samples"], unreadable=described
            )

    def finish(self, facts: dict[str, Any], splits: Mapping[str, ImageDataset], origin: Mapping[str, Any]) -> None:
        """Joins the parts into one file, renamed when it is complete."""
        counts = {name: len(source) for name, source in splits.items()}
        about = {"facts": facts, **origin, "splits": counts, "width": self.network.num_features}
        temporary = self.folder / f"joined{self.out.suffix}"  # here, so that a kill leaves nothing next to the file
        try:
            bad = join_parts(self.read, self.source, splits, about, temporary)
            self.unreadable_list.unlink(missing_ok=True)
            if bad:
                lines = "".join(f"{to_printable(one['name'])}: {one['reason']}\n" for one in bad)
                inside = self.folder / "joined.unreadable"
                write_file(inside, lines.encode())
                os.replace(inside, self.unreadable_list)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.out)
        except OSError as error:
            raise ConfigError(
                f"{self.out} cannot be written ({error.strerror or error}); free some space, then run the "
                "same command to resume"
            ) from error

    def clear(self) -> None:
        """Deletes the parts, and their folder if it is empty then."""
        for pattern in ("part-*.safetensors", ".vitrail-*.tmp", "joined.*", "lock"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

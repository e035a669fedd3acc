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
from dataclasses import asdict, dataclass
from functools import cached_property
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
from vitrail.core.precision import Precision
from vitrail.data.dataset import ConcatDataset, ImageDataset, RelabelledDataset, SubsetDataset
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.unreadable_log import UnreadableSample
from vitrail.distributed.process_group import World
from vitrail.evaluation import Stored
from vitrail.evaluation.frozen.embedding_file import FORMATS, EmbeddingPart, join_parts, read_description, to_printable
from vitrail.evaluation.frozen.features import hash_images, hash_network, iterate_features
from vitrail.models.build import Model

KIND: Final = "vitrail embeddings 1"
ROWS: Final = 4096  # most samples in a part: a few megabytes
PARTS: Final = 16  # least number of parts of a small set, so that every process has work

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
        raise ConfigError(f"{out}: embeddings are written as {' or '.join(FORMATS)}; use one of these suffixes")
    if dtype not in get_args(Stored):
        raise unknown_name("type", str(dtype), get_args(Stored))
    if batch < 1:
        raise ConfigError(f"batch={batch} must be at least 1")
    if not splits or not all(len(one) for one in splits.values()):
        raise DataError("there are no images to embed")
    # A split without labels gets the classes of the others.
    classes = next((one.classes for one in splits.values() if one.classes), ())
    joined = [one if one.classes == classes else RelabelledDataset(one, one.labels, classes) for one in splits.values()]
    source = joined[0] if len(joined) == 1 else ConcatDataset(joined)
    rows = batch * max(min(ROWS // batch, -(-len(source) // (PARTS * batch))), 1)
    preprocessing = preprocessing or get_card(network).preprocessing
    work = EmbeddingJob(network, source, preprocessing, out, rows, batch, dtype, precision, world)
    with work.open(force=force) as todo:
        if todo is not None:
            work.compute(todo[world.rank :: world.size], workers, tell)
            world.barrier()  # every part is there
            run_on_main(world, lambda: work.finish(splits, origin or {}))
        described = run_on_main(world, lambda: read_description(out))
    return EmbeddingSummary(
        path=out,
        first=tuple(UnreadableSample(**entry) for entry in described["first"]),
        parts=work.parts,
        found=work.parts - (0 if todo is None else len(todo)),
        **{name: int(described[name]) for name in ("pictures", "width", "unreadable")},
    )


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


def check_unchanged(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """ConfigError that lists the differences if a file has other weights, images or settings."""
    changes = diff_plain(old, new)
    if changes:
        shown = "; ".join(line if len(line) < 120 else f"{line[:117]}..." for line in changes)
        remedy = "give what it had, name another file, or add --force to replace it"
        raise ConfigError(f"{what} holds embeddings of other weights, images or settings ({shown}); {remedy}")


@dataclass(frozen=True)
class EmbeddingJob:
    """A source in parts of `rows` samples, each of which holds whole batches."""

    network: Model
    source: ImageDataset
    preprocessing: Preprocessing
    out: Path
    rows: int
    batch: int
    dtype: Stored
    precision: Precision
    world: World

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")

    @property
    def parts(self) -> int:
        return -(-len(self.source) // self.rows)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def span(self, number: int) -> range:
        return range(number * self.rows, min((number + 1) * self.rows, len(self.source)))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as plain data."""
        inputs = {"kind": KIND, "weights": hash_network(self.network), "pictures": hash_images(self.source)}
        kinds = {"preprocessing": self.preprocessing.to_dict(), "type": self.dtype, "precision": self.precision}
        versions = {"vitrail": __version__, "torch": torch.__version__}
        where = {"batch": self.batch, "rows": self.rows, "device": self.world.device.type, "versions": versions}
        return json.loads(json.dumps(inputs | kinds | where))  # tuples become lists, as in a file

    @contextlib.contextmanager
    def open(self, *, force: bool) -> Generator[list[int] | None]:
        """The missing parts, the same list in all processes; None if the file is complete. The main process holds a
        lock on the folder meanwhile."""
        with contextlib.ExitStack() as held:
            todo: list[int] | None = run_on_main(self.world, lambda: self.find_missing_parts(held, force=force))
            yield todo
            if todo is not None and self.world.is_main:
                self.clear()

    def find_missing_parts(self, held: contextlib.ExitStack, *, force: bool) -> list[int] | None:
        check_writable(self.out)
        if self.out.exists() and not force:
            check_unchanged(str(self.out), read_description(self.out)["facts"], self.facts)
            self.clear()  # a kill after the last step may have left parts
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held.callback(FileLock(self.folder / "lock").release)
        except LockTaken:
            raise ConfigError(f"another process is writing to {self.folder}; wait, or name another file") from None
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written ({error.strerror}); name another place") from error
        for left in self.folder.glob(".vitrail-*.tmp"):
            left.unlink(missing_ok=True)
        return [number for number in range(self.parts) if not self.is_done(number, force=force)]

    def is_done(self, number: int, *, force: bool) -> bool:
        """Whether a part exists, intact and with the same facts. A damaged one is computed again."""
        try:
            found = read_weights(self.path(number)).description or {}
        except WeightsError:  # or it does not exist
            return False
        if not force:
            check_unchanged(str(self.folder), found.get("facts", {}), self.facts)
        return found.get("facts") == self.facts

    def compute(self, mine: list[int], workers: int, tell: Callable[[int, int], None] | None) -> None:
        """Computes the parts of this process in order; the loader prefetches across their ends."""
        places = np.concatenate([np.zeros(0, np.int64), *(np.asarray(self.span(number)) for number in mine)])
        source, device = SubsetDataset(self.source, places), self.world.device
        pin = device.type == "cuda"
        batches = eval_batches(source, self.preprocessing, batch=self.batch, workers=workers, pin=pin)
        found = iterate_features(self.network, batches, self.preprocessing, device, precision=self.precision)
        done = 0
        for number in mine:
            rows, bad = list[tuple[Tensor, Tensor, Tensor]](), list[dict[str, Any]]()
            for features, batch in itertools.islice(found, -(-len(self.span(number)) // self.batch)):
                rows.append((features, batch.sample, batch.valid))
                bad += [asdict(one) | {"sample": int(places[one.sample])} for one in batch.unreadable]
                done = min(done + len(batch), len(places))
                if tell is not None:
                    tell(done, len(places))
            features, sample, valid = (torch.cat(column).cpu() for column in zip(*rows, strict=True))
            self.write(number, features[valid], torch.from_numpy(places)[sample[valid]], bad)

    def write(self, number: int, features: Tensor, samples: Tensor, bad: list[dict[str, Any]]) -> None:
        """Writes one part: features [n, D] and samples [n] of readable images, and the names of unreadable ones."""
        stored = features.to(TYPES[self.dtype])
        wrong = (~stored.isfinite()).any(1).nonzero()
        if len(wrong):
            name, overflows = self.source.name(int(samples[wrong[0, 0]])), not features[wrong[0, 0]].isfinite().all()
            cause = "the network overflows" if overflows else "float16 cannot hold them"
            raise DataError(f"the features of {name} are not finite: {cause}")
        description = {"kind": KIND, "facts": self.facts, "unreadable": bad}
        write_sealed(self.path(number), {"features": stored, "samples": samples}, description)

    def read(self) -> Iterator[EmbeddingPart]:
        """All parts in order, each verified."""
        for number in range(self.parts):
            found = read_weights(self.path(number))
            yield EmbeddingPart(**found.tensors, unreadable=(found.description or {}).get("unreadable", []))

    def finish(self, splits: Mapping[str, ImageDataset], origin: Mapping[str, Any]) -> None:
        """Joins the parts into one file, renamed when it is complete."""
        counts = {name: len(source) for name, source in splits.items()}
        about = {"facts": self.facts, **origin, "splits": counts, "width": self.network.num_features}
        temporary = self.folder / f"joined{self.out.suffix}"  # here, so that a kill leaves nothing next to the file
        try:
            bad = join_parts(self.read, self.source, splits, about, temporary)
            unreadable = self.out.with_name(f"{self.out.name}.unreadable.txt")
            unreadable.unlink(missing_ok=True)
            if bad:
                lines = "".join(f"{to_printable(one['name'])}: {one['reason']}\n" for one in bad)
                inside = self.folder / "joined.unreadable"
                write_file(inside, lines.encode())
                os.replace(inside, unreadable)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.out)
        except OSError as error:
            remedy = "free some space, then run the same command to resume"
            raise ConfigError(f"{self.out} cannot be written ({error.strerror or error}); {remedy}") from error

    def clear(self) -> None:
        """Deletes the parts, and their folder if it is empty then."""
        for pattern in ("part-*.safetensors", ".vitrail-*.tmp", "joined.*", "lock"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

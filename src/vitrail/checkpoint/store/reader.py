"""Finds, checks and reads checkpoints, in whatever pieces a process needs."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vitrail.checkpoint.files.checks import DOWNLOAD_AGAIN, quote, refuse, shorten
from vitrail.checkpoint.files.safetensors import Seal, TensorEntry, open_seal, read_header, read_tensor
from vitrail.checkpoint.store import layout
from vitrail.checkpoint.store.layout import REMEDY, Manifest, ShardNote, list_checkpoints, unreadable_is_damage
from vitrail.core.errors import CorruptWeights, MismatchedWeights, WeightsError


class Spec(NamedTuple):
    """A full tensor, over any number of shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CheckpointShard:
    """A shard whose header has been verified."""

    path: Path
    data: int  # where the tensors begin
    entries: tuple[TensorEntry, ...]
    seal: Seal

    def read(self, entry: TensorEntry, first: int = 0, count: int | None = None) -> Tensor:
        """Reads an entry and compares it with its checksum, or reads some of its rows, which have none."""
        whole = count is None or not entry.shape or count == entry.shape[0]
        if count is not None and not whole:
            row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
            begin = entry.start + first * row
            entry = replace(entry, shape=(count, *entry.shape[1:]), start=begin, stop=begin + count * row)
        with self.path.open("rb") as file:
            return read_tensor(self.path, file, self.data, entry, self.seal if whole else None)


class Rows(NamedTuple):
    """The rows of a tensor that an entry of a shard holds."""

    start: int
    stop: int
    shard: CheckpointShard
    entry: TensorEntry


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(Manifest):
    """A checkpoint whose headers are intact and whose shards together hold every tensor completely. `names` has the
    shape and type of each."""

    path: Path
    names: dict[str, Spec]
    shards: tuple[CheckpointShard, ...]
    rows: dict[str, list[Rows]]

    def read(self, name: str, start: int = 0, length: int | None = None) -> Tensor:
        """Reads rows `start` to `start + length` of a tensor (to the end if no length is given), assembled from the
        shards that hold them."""
        spec = self.names.get(name)
        if spec is None:
            raise refuse(MismatchedWeights, self.path, f"holds no tensor {quote(name)}", "see its names")
        if not spec.shape:
            return self.rows[name][0].shard.read(self.rows[name][0].entry)
        stop = spec.shape[0] if length is None else start + length
        if not 0 <= start <= stop <= spec.shape[0]:
            cause = f"tensor {quote(name)} has {spec.shape[0]} rows, and {start} to {stop} were requested"
            raise refuse(MismatchedWeights, self.path, cause, "request rows that it has")
        found: list[Tensor] = []
        at = start
        while at < stop:
            rows = _holding(self.path, name, self.rows[name], at)
            count = min(rows.stop, stop) - at
            found.append(rows.shard.read(rows.entry, at - rows.start, count))
            at += count
        return found[0] if len(found) == 1 else torch.cat([torch.empty((0, *spec.shape[1:]), dtype=spec.dtype), *found])


def open_saved(path: Path) -> SavedCheckpoint:
    """Opens the checkpoint in a folder and checks all of it except the tensors' bytes, which `verify` reads."""
    manifest = layout.read_manifest(path / layout.MANIFEST)
    shards = tuple(_open_shard(path, note, manifest.step) for note in manifest.notes)
    names: dict[str, Spec] = {}
    rows: dict[str, list[Rows]] = {}
    for shard in shards:
        pieces = cast(dict[str, dict[str, Any]], shard.seal.description["pieces"])
        for entry in shard.entries:
            spec, start = Spec(tuple(pieces[entry.name]["shape"]), entry.dtype), int(pieces[entry.name]["start"])
            if names.setdefault(entry.name, spec) != spec:
                cause = f"tensor {quote(entry.name)} is {spec} here and {names[entry.name]} in another shard"
                raise refuse(CorruptWeights, shard.path, cause, REMEDY)
            stop = start + entry.shape[0] if entry.shape else 1
            rows.setdefault(entry.name, []).append(Rows(start, stop, shard, entry))
    for name, spec in names.items():
        at, end = 0, spec.shape[0] if spec.shape else 1
        while at < end:
            at = _holding(path, name, rows[name], at).stop
    return SavedCheckpoint(**vars(manifest), path=path, names=names, shards=shards, rows=rows)


def describe_shard(path: Path) -> ShardNote:
    """The manifest's entry for a shard that was just written."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        header = read_header(path, file, size)
    return ShardNote(file=path.name, size=size, header=hashlib.sha256(header.raw).hexdigest())


def verify(saved: SavedCheckpoint, part: int = 0, parts: int = 1) -> None:
    """Compares tensors with their checksums, and raises CorruptWeights at the first that differs. Each of `parts`
    processes may check one part, of about equal size."""
    entries = [(shard, entry) for shard in saved.shards for entry in shard.entries]
    total = sum(entry.stop - entry.start for _, entry in entries)
    at = 0
    for shard, entry in entries:
        middle = at + (entry.stop - entry.start) / 2
        at += entry.stop - entry.start
        if min(int(middle * parts / max(total, 1)), parts - 1) == part:
            with unreadable_is_damage(shard.path):
                shard.read(entry)


def latest(
    folder: Path,
    tell: Callable[[str], None],
    *,
    before: int | None = None,
    part: int = 0,
    parts: int = 1,
    agree: Callable[[str | None], str | None] = lambda said: said,
) -> SavedCheckpoint | None:
    """The newest checkpoint that is intact, with every byte checked; None if there are no checkpoints.

    A damaged checkpoint is reported, with the file and the cause, and the one before it is tried. If none is left,
    CorruptWeights names them all. With `before`, only earlier steps count.

    Several processes call this together, and each checks its part. `agree` gives them the same answer: each passes its
    own finding, and all get the first one that is not None, in the order of ranks (None if there is none).
    """
    bad: list[tuple[int, str]] = []
    found: SavedCheckpoint | None = None
    while found is None:
        bound = bad[-1][0] if bad else before
        newest = next((step for step in list_checkpoints(folder) if bound is None or step < bound), None)
        chosen = agree(None if newest is None else str(newest))
        if chosen is None:
            break
        step = int(chosen)
        place = list_checkpoints(folder).get(step, folder / layout.step_name(step))  # the first may have tidied
        fault: str | None = None
        try:
            found = open_saved(place)
            if found.step != step:
                raise refuse(CorruptWeights, place, f"holds step {found.step}", REMEDY)
            verify(found, part, parts)
        except (CorruptWeights, OSError) as error:
            # Other errors, such as a newer format, are raised: falling back would discard an intact checkpoint.
            fault = describe_fault(error)
        if (fault := agree(fault)) is not None:
            bad.append((step, fault))
            found = None
    if found is None and bad:
        listed = "; ".join(fault for _, fault in bad)
        raise CorruptWeights(f"{folder}: no checkpoint is intact ({listed}); start again in another folder")
    if found is not None:
        for step, fault in bad:
            tell(f"checkpoint of step {step} is damaged: {fault}; the one before it, step {found.step}, is used")
    return found


def describe_fault(error: BaseException) -> str:
    """The file and what is wrong with it, without remedies that apply only to weights from elsewhere."""
    if isinstance(error, WeightsError):
        text = str(error)
        for remedy in (DOWNLOAD_AGAIN, REMEDY, "nothing was replaced"):
            text = text.removesuffix(f"; {remedy}")
        return text
    if isinstance(error, OSError):
        what = error.strerror or shorten(error)
        return f"{error.filename}: {what}" if error.filename else what
    return f"{type(error).__name__}: {shorten(error)}"


def _open_shard(folder: Path, note: ShardNote, step: int) -> CheckpointShard:
    path = folder / note.file
    try:
        with unreadable_is_damage(path), path.open("rb") as file:
            size = file.seek(0, 2)
            if size != note.size:
                raise refuse(CorruptWeights, path, f"has {size} bytes instead of {note.size}", REMEDY)
            header = read_header(path, file, size)
    except WeightsError as error:  # a flipped bit can also make a file look "unsafe" or "mismatched"
        raise CorruptWeights(str(error)) from error
    if hashlib.sha256(header.raw).hexdigest() != note.header:
        raise refuse(CorruptWeights, path, "its header does not match the checkpoint's manifest", REMEDY)
    seal = open_seal(path, header)
    if seal is None or seal.description.get("step") != step:
        raise refuse(CorruptWeights, path, f"is not a shard of step {step}", REMEDY)
    return CheckpointShard(path, len(header.raw), tuple(header.entries), seal)


def _holding(path: Path, name: str, rows: list[Rows], at: int) -> Rows:
    """The rows that contain row `at`; if several do, those that extend furthest."""
    holding = [piece for piece in rows if piece.start <= at < piece.stop]
    if not holding:
        raise refuse(CorruptWeights, path, f"row {at} of tensor {quote(name)} is in none of its shards", REMEDY)
    return max(holding, key=lambda piece: piece.stop)

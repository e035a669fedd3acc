"""The layout of a run's `checkpoints` folder, what each name in it guarantees, and the manifest of a checkpoint.

    00001000/                                complete: every byte was on disk before it took this name
        shard-00000-of-00002.safetensors     what one process held, sealed
        shard-00001-of-00002.safetensors
        checkpoint.json                      step, facts and the digest of every shard's header
    .saving-00001100-TOKEN/                  being written, or interrupted while written
    .replaced-00001000-TOKEN/                complete, set aside for a new one of the same step
    .removing-00000900-TOKEN/                being removed

So a crash at any moment leaves complete checkpoints under their names, and otherwise only files that the next start
removes. `reached` is called at each point of a save where a crash would leave a different state behind, so that tests
can crash there.

    {"format": 1, "step": 1000, "world": 2,
     "shards": [{"file": ..., "size": ..., "header": sha256 of its header}, ...],
     "facts": {...}, "checksum": sha256 of this file with these 64 digits as zeros}

A shard's header holds the checksum of each of its tensors, so the one digest of `checkpoint.json` covers everything.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from vitrail.checkpoint.files.checks import quote, refuse, shorten
from vitrail.core.atomic_files import ignore_point, replace_on_success, sync_folder
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights, WeightsError

reached: Callable[[str], None] = ignore_point
"""Called at each point of a save. Only tests replace it."""


def crash_point(what: str, moment: str) -> None:
    """Calls `reached` with a moment in writing `what`."""
    reached(f"{what}: {moment}")


FOLDER: Final = "checkpoints"
MANIFEST: Final = "checkpoint.json"
STEP_FOLDER: Final = re.compile(r"([0-9]{8,})")
REPLACED_FOLDER: Final = re.compile(r"\.replaced-([0-9]{8,})-.*")


def step_name(step: int) -> str:
    return f"{step:08d}"


def part_name(rank: int) -> str:
    """The file in which a process reports its shard to the first one; removed once the checkpoint is complete."""
    return f"part-{rank:05d}.json"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The path of each step's checkpoint, newest first. One that was set aside counts until its successor has taken the
    name."""
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(folder.iterdir()):  # names with a dot sort first, so plain ones override them
            if name := STEP_FOLDER.fullmatch(entry.name) or REPLACED_FOLDER.fullmatch(entry.name):
                found[int(name[1])] = entry
    return dict(sorted(found.items(), reverse=True))


def list_unfinished(folder: Path) -> list[int]:
    """The steps whose save was interrupted or is in progress."""
    names = [re.fullmatch(r"\.saving-(\d+)-[^-]*", entry.name) for entry in folder.glob(".saving-*")]
    return sorted(int(name[1]) for name in names if name)


def commit(source: Path, target: Path, token: str) -> None:
    """Gives a complete folder its name. An existing one is set aside first, and restored if this fails; `tidy` removes
    it."""
    aside = target.with_name(f".replaced-{target.name}-{token}")
    standing = target.exists()
    if standing:
        crash_point("replaced", "before rename")
        os.rename(target, aside)
        crash_point("replaced", "after rename")
    try:
        crash_point("checkpoint", "before rename")
        os.rename(source, target)
    except BaseException:
        if standing:
            os.rename(aside, target)
        raise
    crash_point("checkpoint", "after rename")
    sync_folder(target.parent)
    crash_point("checkpoint", "after folder sync")


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a half-removed one is never taken for complete."""
    doomed = checkpoint.with_name(f".removing-{checkpoint.name.strip('.')}-{secrets.token_hex(4)}")
    crash_point("old", "before rename")
    os.rename(checkpoint, doomed)
    sync_folder(checkpoint.parent)
    crash_point("old", "after rename")
    remove(doomed)


def remove(folder: Path) -> None:
    """Removes a folder whose name guarantees nothing."""
    for entry in sorted(folder.iterdir()):
        crash_point("old", "before unlink")
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        crash_point("old", "after unlink")
    folder.rmdir()
    crash_point("old", "after remove")


def tidy(folder: Path, token: str) -> None:
    """Removes what crashes left behind. Only for the one process that may write here; files with `token` belong to this
    start."""
    standing = list_checkpoints(folder)
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith((".saving-", ".removing-")) and not entry.name.endswith(f"-{token}"):
            with contextlib.suppress(FileNotFoundError):
                remove(entry)
        elif aside := REPLACED_FOLDER.fullmatch(entry.name):
            if standing[int(aside[1])] == entry:
                os.rename(entry, folder / aside[1])
            else:
                discard(entry)
    sync_folder(folder)


FORMAT: Final = 1
BEFORE: Final = b'"checksum": "'
AFTER: Final = b'"\n}\n'
ZEROS: Final = b"0" * 64
FLOAT: Final = "__float__"
REMEDY: Final = "use an earlier checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardNote:
    """A shard in the manifest: its file, its size and the digest of its header."""

    file: str
    size: int
    header: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `checkpoint.json`."""

    step: int
    world: int  # how many processes wrote it; any number may read it
    notes: tuple[ShardNote, ...]
    facts: dict[str, Any]


def encode_facts(facts: Mapping[str, Any]) -> str:
    """Encodes the current facts as JSON. NaN and infinities, which JSON lacks, are written as text; tuples become
    lists."""
    try:
        return json.dumps(_encode_floats(facts), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the facts of a checkpoint are not JSON ({shorten(error)}); use plain values") from None


def write_manifest(path: Path, *, step: int, world: int, shards: list[ShardNote], facts: str) -> None:
    """Writes `checkpoint.json`, which is on disk when this returns."""
    content = {"format": FORMAT, "step": step, "world": world, "shards": [asdict(shard) for shard in shards]}
    content |= {"facts": json.loads(facts), "checksum": ZEROS.decode()}
    raw = json.dumps(content, indent=1, allow_nan=False).encode("ascii") + b"\n"
    digest = hashlib.sha256(raw).hexdigest().encode()
    write(path, "manifest", raw[: -len(ZEROS + AFTER)] + digest + AFTER)


def write(path: Path, what: str, content: bytes, *, folder_too: bool = True) -> None:
    """Writes a small file, reported as `what` to `reached`."""
    with replace_on_success(path, partial(crash_point, what), folder_too=folder_too) as file:
        crash_point(what, "before write")
        file.write(content)
        crash_point(what, "after write")


@contextlib.contextmanager
def unreadable_is_damage(path: Path) -> Generator[None]:
    """Raises CorruptWeights if a part of a checkpoint is missing or cannot be read."""
    try:
        yield
    except OSError as error:
        fault = f"cannot be read ({error.strerror or shorten(error)})"
        cause = "is missing" if isinstance(error, FileNotFoundError) else fault
        raise refuse(CorruptWeights, path, cause, REMEDY) from error


def read_manifest(path: Path) -> Manifest:
    """Reads `checkpoint.json` and verifies its checksum."""
    with unreadable_is_damage(path):
        raw = path.read_bytes()
    head, digest = raw[: -len(ZEROS + AFTER)], raw[-len(ZEROS + AFTER) : -len(AFTER)]
    if not head.endswith(BEFORE) or not raw.endswith(AFTER):
        raise refuse(CorruptWeights, path, "is cut short, or not the manifest of a checkpoint", REMEDY)
    if hashlib.sha256(head + ZEROS + AFTER).hexdigest().encode() != digest:
        raise refuse(CorruptWeights, path, "does not match its checksum", REMEDY)
    content = json.loads(raw, object_hook=_decode_float)  # as it was written: the checksum says so
    if content["format"] != FORMAT:
        cause = f"has format {quote(content['format'])}, and this vitrail reads {FORMAT}"
        raise refuse(WeightsError, path, cause, "upgrade vitrail")
    notes = tuple(ShardNote(**shard) for shard in content["shards"])
    return Manifest(step=content["step"], world=content["world"], notes=notes, facts=content["facts"])


def _encode_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, Mapping):
        fields = cast(Mapping[Any, Any], value)
        if any(not isinstance(name, str) or name == FLOAT for name in fields):
            raise TypeError(f"a name must be a text other than {FLOAT}")
        return {name: _encode_floats(item) for name, item in fields.items()}
    if isinstance(value, list | tuple):
        return [_encode_floats(item) for item in cast(list[Any], value)]
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    return float(value[FLOAT]) if set(value) == {FLOAT} else value


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The rows of a tensor that a process holds: `tensor` has the rows from `start` on of a full tensor of shape
    `shape`, split along its first axis."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0


@dataclass(slots=True)
class Snapshot:
    """Host copies of pieces, valid once `settle` has returned."""

    tensors: dict[str, Tensor]
    where: dict[str, dict[str, Any]]  # shape and start
    copied: list[torch.cuda.Event]

    def settle(self) -> None:
        """Waits until the device has finished the copies. Called from a thread, so that training does not wait."""
        for event in self.copied:
            event.synchronize()


def take_snapshot(pieces: Mapping[str, TensorPiece]) -> Snapshot:
    """Copies the current values of the pieces. Copies from a GPU are queued on the current stream, so work launched
    later may overwrite the tensors, and nothing waits here."""
    tensors: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, piece in pieces.items():
        shape, start, local = piece.shape, piece.start, tuple(piece.tensor.shape)
        fits = local == shape and start == 0
        if shape and len(local) == len(shape) and start >= 0:
            fits = local[1:] == shape[1:] and start + local[0] <= shape[0]
        if not fits:
            raise MismatchedWeights(f"piece {name!r} of shape {local} at row {start} does not lie in {shape}")
        tensor = piece.tensor.detach()
        if tensor.is_cuda:
            devices.add(tensor.device)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensors[name] = host.copy_(tensor, non_blocking=True)
        else:
            tensors[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    copied: list[torch.cuda.Event] = []
    for device in devices:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        copied.append(event)
    where = {name: {"shape": list(piece.shape), "start": piece.start} for name, piece in pieces.items()}
    return Snapshot(tensors, where, copied)

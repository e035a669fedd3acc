"""`checkpoint.json`: what a checkpoint is made of, and the digest that covers every byte of it.

    {"format": 1, "step": 1000, "world": 2,
     "shards": [{"file": ..., "size": ..., "header": sha256 of its header}, ...],
     "facts": {...}, "checksum": sha256 of this file with these 64 digits as zeros}

A shard's header holds the checksum of each of its tensors, so the one digest here vouches for everything.

What a process gives to a checkpoint: its rows of each tensor, copied to the host without holding up the device.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from vitrail.checkpoint.files.weight_errors import refusal, shown, told
from vitrail.checkpoint.store.layout import at
from vitrail.core.atomic_files import replacing
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights, WeightsError

FORMAT: Final = 1
BEFORE: Final = b'"checksum": "'
AFTER: Final = b'"\n}\n'
ZEROS: Final = b"0" * 64
FLOAT: Final = "__float__"
REMEDY: Final = "use an earlier checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardNote:
    """A shard as the manifest names it: its file, its size and the digest of its header."""

    file: str
    size: int
    header: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What `checkpoint.json` says."""

    step: int
    world: int
    shards: tuple[ShardNote, ...]
    facts: dict[str, Any]


def frozen_facts(facts: Mapping[str, Any]) -> str:
    """The facts as they are now, as JSON. NaN and the infinities, which JSON lacks, are kept in words; tuples come back
    as lists."""
    try:
        return json.dumps(_worded(facts), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the facts of a checkpoint cannot be written as JSON ({told(error)}); use plain values"
        ) from None


def write_manifest(path: Path, *, step: int, world: int, shards: list[ShardNote], facts: str) -> None:
    """Write `checkpoint.json`, on disk when this returns."""
    content = {
        "format": FORMAT,
        "step": step,
        "world": world,
        "shards": [asdict(shard) for shard in shards],
        "facts": json.loads(facts),
        "checksum": ZEROS.decode(),
    }
    raw = json.dumps(content, indent=1, allow_nan=False).encode("ascii") + b"\n"
    digest = hashlib.sha256(raw).hexdigest().encode()
    tell = at("manifest")
    with replacing(path, tell) as file:
        tell("before write")
        file.write(raw[: -len(ZEROS + AFTER)] + digest + AFTER)
        tell("after write")


def read_manifest(path: Path) -> Manifest:
    """Read `checkpoint.json` and hold it to its checksum."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        cause = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise refusal(CorruptWeights, path, cause, REMEDY) from error
    head, digest = raw[: -len(ZEROS + AFTER)], raw[-len(ZEROS + AFTER) : -len(AFTER)]
    if not head.endswith(BEFORE) or not raw.endswith(AFTER):
        raise refusal(CorruptWeights, path, "is cut short, or no list of a checkpoint", REMEDY)
    if hashlib.sha256(head + ZEROS + AFTER).hexdigest().encode() != digest:
        raise refusal(CorruptWeights, path, "does not match its checksum", REMEDY)
    content = cast(dict[str, Any], json.loads(raw))  # as it was written: the checksum says so
    if content["format"] != FORMAT:
        cause = f"has format {shown(content['format'])}, and this vitrail reads {FORMAT}"
        raise refusal(WeightsError, path, cause, "upgrade vitrail")
    return Manifest(
        step=content["step"],
        world=content["world"],
        shards=tuple(ShardNote(**shard) for shard in content["shards"]),
        facts=_numbered(content["facts"]),
    )


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, Mapping):
        fields = cast(Mapping[Any, Any], value)
        if any(not isinstance(name, str) or name == FLOAT for name in fields):
            raise TypeError(f"a name must be a text other than {FLOAT}")
        return {name: _worded(item) for name, item in fields.items()}
    if isinstance(value, list | tuple):
        return [_worded(item) for item in cast(list[Any], value)]
    return value


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        if set(fields) == {FLOAT}:
            return float(fields[FLOAT])
        return {name: _numbered(item) for name, item in fields.items()}
    if isinstance(value, list):
        return [_numbered(item) for item in cast(list[Any], value)]
    return value


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of a tensor that a process holds: `tensor` is rows `start` onward of a whole one of shape `shape`, cut
    along its first axis."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @staticmethod
    def whole(tensor: Tensor) -> "Piece":
        """A tensor that one process holds alone."""
        return Piece(tensor, tuple(tensor.shape))


@dataclass(slots=True)
class Snapshot:
    """Host copies of pieces, which hold their values once `settle` has returned."""

    tensors: dict[str, Tensor]
    where: dict[str, tuple[tuple[int, ...], int]]  # shape and start
    copied: list[torch.cuda.Event]

    def settle(self) -> None:
        """Wait until the device has finished the copies. Called where waiting harms nobody."""
        for event in self.copied:
            event.synchronize()

    def description(self) -> dict[str, object]:
        return {name: {"shape": list(shape), "start": start} for name, (shape, start) in self.where.items()}


def check_piece(name: str, piece: Piece) -> None:
    """A piece must be rows of the whole that it names."""
    shape, start, local = piece.shape, piece.start, tuple(piece.tensor.shape)
    fits = local == shape and start == 0
    if shape and len(local) == len(shape) and start >= 0:
        fits = local[1:] == shape[1:] and start + local[0] <= shape[0]
    if not fits:
        raise MismatchedWeights(f"piece {name!r} of shape {local} at row {start} does not lie in a tensor of {shape}")


def take(pieces: Mapping[str, Piece]) -> Snapshot:
    """Copy what the pieces hold now. Copies from a GPU join the current stream, so whatever is launched afterwards may
    overwrite the tensors at once, and nobody waits here."""
    tensors: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, piece in pieces.items():
        check_piece(name, piece)
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
    return Snapshot(tensors, {name: (piece.shape, piece.start) for name, piece in pieces.items()}, copied)

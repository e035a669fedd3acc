"""The header of a .safetensors file: which tensors lie where, checked until nothing is left to interpretation.

The library's own parser refuses over-long headers, overlaps, holes and trailing bytes. It lets a name appear twice
(the last one wins), ignores fields that it does not know and does not always say which tensor is at fault; this one
refuses the first two and names the tensor.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vitrail.checkpoint.files.weight_errors import DOWNLOAD_AGAIN, RESAVE, refusal, shown
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, reason_of

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # bytes; the format's own bound
MOST_AXES = 64  # torch's own bound

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor: its type, its shape and its bytes, counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the header says, and the bytes that say it (with the eight of the length), for the seal to cover."""

    raw: bytes
    entries: list[Entry]
    metadata: dict[str, str]


def header_length(path: Path, first_bytes: bytes, file_size: int) -> int:
    """The length that the file declares for its header, once it is known to be possible."""
    length = int(struct.unpack("<Q", first_bytes)[0])
    if length > HEADER_LIMIT:
        raise refusal(
            UnsafeWeights, path, f"declares a header of {length} bytes, over the limit of {HEADER_LIMIT}", RESAVE
        )
    if LENGTH_BYTES + length > file_size:
        raise refusal(
            CorruptWeights, path, f"ends inside its header ({file_size} bytes, header of {length})", DOWNLOAD_AGAIN
        )
    return length


def parse_header(path: Path, raw: bytes, data_size: int) -> Header:
    """Read the header in ``raw`` (length bytes first) of a file with ``data_size`` bytes of data behind it."""
    try:
        content = json.loads(raw[LENGTH_BYTES:].decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise refusal(
            CorruptWeights, path, f"header is not JSON as it should be ({reason_of(error)})", DOWNLOAD_AGAIN
        ) from None
    if not isinstance(content, dict):
        raise refusal(CorruptWeights, path, "header is not a JSON object", DOWNLOAD_AGAIN)
    fields = cast(dict[str, Any], content)
    metadata = fields.pop("__metadata__", None)
    if metadata is not None and not _texts(metadata):
        raise refusal(CorruptWeights, path, "header metadata is not a table of texts", DOWNLOAD_AGAIN)
    entries = [_entry(path, name, value) for name, value in fields.items()]
    _check_cover(path, entries, data_size)
    return Header(raw=raw, entries=entries, metadata=cast(dict[str, str], metadata or {}))


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name appears twice; which of two values counts is otherwise up to the reader."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"name {shown(twice)} appears twice")
    return found


def is_count(value: object) -> bool:
    """Whether a value from JSON is a whole number from 0 to what 63 bits hold (true and false are not)."""
    return type(value) is int and 0 <= value < 1 << 63


def _texts(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(text, str) for text in cast(dict[str, Any], value).values())


def _counts(value: object) -> list[int] | None:
    if not isinstance(value, list) or not all(is_count(item) for item in cast(list[object], value)):
        return None
    return cast(list[int], value)


def _entry(path: Path, name: str, value: object) -> Entry:
    """One tensor's line of the header, with its size recomputed from type and shape."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    well_formed = set(fields) == {"dtype", "shape", "data_offsets"} and isinstance(fields["dtype"], str)
    if not well_formed or shape is None or offsets is None or len(offsets) != 2 or len(shape) > MOST_AXES:
        raise refusal(
            CorruptWeights, path, f"tensor {shown(name)} is not described by dtype, shape and offsets", DOWNLOAD_AGAIN
        )
    dtype = DTYPES.get(cast(str, fields["dtype"]))
    if dtype is None:
        cause = f"tensor {shown(name)} has type {shown(fields['dtype'])}, which vitrail does not read"
        raise refusal(MismatchedWeights, path, cause, f"convert it to one of {', '.join(DTYPES)}")
    start, stop = offsets
    if math.prod(shape) * dtype.itemsize != stop - start:
        cause = f"tensor {shown(name)} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes"
        raise refusal(CorruptWeights, path, f"{cause} but has the range {start} to {stop}", DOWNLOAD_AGAIN)
    return Entry(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _check_cover(path: Path, entries: Iterable[Entry], data_size: int) -> None:
    """The ranges must follow each other without hole or overlap and end with the file."""
    reached = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != reached:
            kind = "overlaps the one before it" if entry.start < reached else "leaves a hole before it"
            cause = f"tensor {shown(entry.name)} starts at byte {entry.start}, which {kind} (expected {reached})"
            raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN)
        reached = entry.stop
    if reached != data_size:
        kind = "too few" if reached > data_size else "trailing"
        cause = f"{abs(data_size - reached)} bytes {kind}: its tensors take {reached}, the file holds {data_size}"
        raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN)

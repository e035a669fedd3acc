"""Reads .safetensors files, and writes vitrail's own: one .safetensors file that describes and checks itself.

The header is parsed twice. The library refuses over-long headers, overlaps, holes and trailing bytes, but lets a name
appear twice (the last one wins), ignores unknown fields and does not always name the tensor at fault; our parser
refuses the first two and names the tensor. The data is read, not mapped: if a mapped file is truncated, the process is
killed, and if it is rewritten, tensors change after they were checked.

Any reader of safetensors opens our own files. The one metadata entry ``vitrail`` holds a JSON text:

    {"format": 1, ...description..., "checksums": {tensor: sha256 of its bytes}, "seal": sha256}

The checksums cover the data. The seal covers everything else: the eight length bytes and the whole header, with its own
64 digits as zeros. So any flipped bit is detected, and the damaged tensor is named. A file is written next to its
target and renamed onto it, so that there is a complete file under the name at every moment. Tensors with NaN or
infinity are neither written nor read: they would spread to every output.
"""

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoint.files.checks import RESAVE, corrupt, quote, refuse, shorten
from vitrail.core.atomic_files import WriteFailed, ignore_point, replace_on_success
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # bytes; the format's own bound
MOST_AXES = 64  # torch's own bound

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EIGHT_BITS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_EIGHT_BITS_ONE_NAN = {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
_SIGNED = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "C64": torch.complex64}
_UNSIGNED = {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES = _FLOATS | _EIGHT_BITS | _EIGHT_BITS_ONE_NAN | _SIGNED | _UNSIGNED


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor: its type, its shape and its bytes, counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """The parsed header, and its raw bytes (with the eight of the length), which the seal covers."""

    raw: bytes
    entries: list[TensorEntry]
    metadata: dict[str, str]


def parse_header(path: Path, raw: bytes, data_size: int) -> SafetensorsHeader:
    """Read the header in ``raw`` (length bytes first) of a file with ``data_size`` bytes of data after it."""
    try:
        fields = parse_object(raw[LENGTH_BYTES:].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"header is not valid JSON ({shorten(error)})") from None
    metadata: Any = fields.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or {type(text) for text in cast(dict[str, Any], metadata).values()} - {str}:
        raise corrupt(path, "header metadata is not an object with string values")
    entries = [_parse_entry(path, name, value) for name, value in fields.items()]
    _check_cover(path, entries, data_size)
    return SafetensorsHeader(raw=raw, entries=entries, metadata=cast(dict[str, str], metadata))


def parse_object(text: str) -> dict[str, Any]:
    """Parses a JSON object in which no name appears twice: readers differ in which of two values they use."""
    content: object = json.loads(text, object_pairs_hook=unique_pairs)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return cast(dict[str, Any], content)


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common()
        raise ValueError(f"name {quote(twice)} appears twice")
    return dict(pairs)


def is_count(value: object) -> bool:
    """Whether a value from JSON is a whole number from 0 to what 63 bits hold (true and false are not)."""
    return type(value) is int and 0 <= value < 1 << 63


def _parse_entry(path: Path, name: str, value: object) -> TensorEntry:
    """One tensor's line of the header, with its size recomputed from type and shape."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    kind, shape, offsets = (fields.get(part) for part in ("dtype", "shape", "data_offsets"))
    if len(fields) != 3 or not (isinstance(kind, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise corrupt(path, f"tensor {quote(name)} is not described by dtype, shape and offsets")
    shape, offsets = cast(list[int], shape), cast(list[int], offsets)
    if len(offsets) != 2 or len(shape) > MOST_AXES or not all(is_count(number) for number in shape + offsets):
        raise corrupt(path, f"tensor {quote(name)} is not described by dtype, shape and offsets")
    if (dtype := DTYPES.get(kind)) is None:
        cause = f"tensor {quote(name)} has type {quote(kind)}, which vitrail does not read"
        raise refuse(MismatchedWeights, path, cause, f"convert it to one of {', '.join(DTYPES)}")
    start, stop = offsets
    if (size := math.prod(shape) * dtype.itemsize) != stop - start:
        cause = f"tensor {quote(name)} of shape {shape} needs {size} bytes but has the range {start} to {stop}"
        raise corrupt(path, cause)
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _check_cover(path: Path, entries: Iterable[TensorEntry], data_size: int) -> None:
    """The ranges must follow each other without hole or overlap and end with the file."""
    reached = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != reached:
            kind = "overlaps the one before it" if entry.start < reached else "leaves a hole before it"
            raise corrupt(path, f"tensor {quote(entry.name)} starts at byte {entry.start}, which {kind} ({reached})")
        reached = entry.stop
    if reached != data_size:
        fault = f"{abs(data_size - reached)} bytes {'too few' if reached > data_size else 'trailing'}"
        raise corrupt(path, f"{fault}: its tensors take {reached}, the file holds {data_size}")


# The eight-bit floats are not checked: torch has no such test for them, and some have no infinity to find.
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def first_unsound(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first tensor with values that no valid weight has, and what they are; None if all are valid."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.dtype in CHECKED and not _finite(tensor.detach()):
            return name, "NaN or infinity"
        if tensor.numel() and tensor.dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
            return name, "bytes other than 0 and 1 in a boolean tensor"
    return None


def _finite(tensor: Tensor) -> bool:
    """Checks the extremes, which are NaN if any value is: this needs no temporaries and is many times as fast."""
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(numbers))


KEY = "vitrail"
FORMAT = 1
RESERVED = ("format", "checksums", "seal")
UNSEALED = "0" * 64
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# As the seal stands in the raw header, where the JSON text is itself quoted: the last field of that text.
SEAL_TEXT = re.compile(rb'\\"seal\\":\\"([0-9a-f]{64})\\"\}"')
# Together they reveal a sealed file whose key was damaged, which would otherwise pass for a foreign one.
MARKS = (b'\\"seal\\":', b'\\"checksums\\":')


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """The description in a sealed file, whose header has been verified."""

    description: dict[str, Any]
    checksums: dict[str, str]


def open_seal(path: Path, header: SafetensorsHeader) -> Seal | None:
    """Checks the seal of a header; None if the file is not vitrail's."""
    text = header.metadata.get(KEY)
    if text is None:
        if all(mark in header.raw for mark in MARKS):
            raise _refuse_altered(path, f"carries a seal but no {KEY!r} entry")
        return None
    try:
        fields = parse_object(text)
    except (ValueError, RecursionError) as error:
        raise _refuse_altered(path, f"its description is not JSON ({shorten(error)})") from None
    version = fields.get("format")
    if type(version) is not int or version < 1:
        raise _refuse_altered(path, f"its format is {quote(version)}")
    if version > FORMAT:
        cause = f"written by a newer vitrail (format {version}, this one reads up to {FORMAT})"
        raise refuse(WeightsError, path, cause, "upgrade vitrail")
    found = list(SEAL_TEXT.finditer(header.raw))
    if len(found) != 1 or fields.get("seal") != found[0][1].decode():
        raise _refuse_altered(path, "its seal is missing or not in its place")
    if _seal_of(header.raw, found[0].start(1)) != fields["seal"]:
        raise _refuse_altered(path, "its header does not match its seal")
    checksums = fields.get("checksums")
    if not isinstance(checksums, dict) or set(cast(dict[str, Any], checksums)) != {e.name for e in header.entries}:
        raise _refuse_altered(path, "its checksums and its tensors do not have the same names")
    description = {name: value for name, value in fields.items() if name not in RESERVED}
    return Seal(description=description, checksums=cast(dict[str, str], checksums))


def write_sealed(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    reached: Callable[[str], None] = ignore_point,
) -> None:
    """Write tensors and their description as one sealed file; equal input gives equal bytes.

    Tensors are written one at a time, so a model on another device needs no second copy in host memory. If anything
    fails before the rename, an existing file of that name is left untouched. `reached` is called at each write.
    """
    path = Path(path)
    _check_writable(path, tensors)
    # Wide types first, as in the library, so that every tensor is aligned to the size of its items.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    checksums = dict.fromkeys(ordered, UNSEALED)
    header = _build_header(path, ordered, description, checksums)
    _apply_seal(path, header)
    try:
        with replace_on_success(path, reached) as file:

            def write(content: bytes | memoryview) -> None:
                reached("before write")
                file.write(content)

            write(header)
            for name, tensor in ordered.items():
                dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
                content = dense.reshape(-1).view(torch.uint8).numpy().data
                checksums[name] = hashlib.sha256(content).hexdigest()
                write(content)
            file.seek(0)
            write(_apply_seal(path, _build_header(path, ordered, description, checksums)))
            reached("after write")
    except WriteFailed as error:
        cause = f"was written, but its folder could not be synced to disk ({error.strerror or shorten(error)})"
        raise refuse(WeightsError, path, cause, "check the disk before relying on it") from error
    except OSError as error:
        cause = f"cannot be written ({error.strerror or shorten(error)})"
        raise refuse(WeightsError, path, cause, "free space or choose another folder; nothing was replaced") from error


def _refuse_altered(path: Path, cause: str) -> CorruptWeights:
    return corrupt(path, f"altered since vitrail wrote it: {cause}")


def _seal_of(header: bytes, at: int) -> str:
    """The digest over length and header, the seal's own digits counted as zeros."""
    return hashlib.sha256(header[:at] + UNSEALED.encode() + header[at + len(UNSEALED) :]).hexdigest()


def _apply_seal(path: Path, header: bytes) -> bytes:
    """The header with its seal in place."""
    found = list(SEAL_TEXT.finditer(header))
    if len(found) != 1:
        raise refuse(MismatchedWeights, path, "a tensor has a name that looks like a seal", "rename it")
    at = found[0].start(1)
    return header[:at] + _seal_of(header, at).encode() + header[at + len(UNSEALED) :]


def _build_header(
    path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any], checksums: Mapping[str, str]
) -> bytes:
    """Length and header; its length does not depend on the digests, so it can be written before they are known."""
    if reserved := set(RESERVED) & set(description):
        raise ConfigError(f"description field {min(reserved)!r} is vitrail's own; rename it")
    try:
        own = json.dumps(dict(description), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its description is not JSON ({shorten(error)}); use plain values") from None
    rest = json.dumps({"checksums": checksums, "seal": UNSEALED}, separators=(",", ":"))
    text = f'{{"format":{FORMAT},{own[1:-1]}{"," if description else ""}{rest[1:]}'
    content: dict[str, Any] = {"__metadata__": {KEY: text}}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.dtype.itemsize
        content[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    header = json.dumps(content, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > HEADER_LIMIT:
        raise refuse(WeightsError, path, f"its header would take {len(header)} bytes", "shorten the description")
    return struct.pack("<Q", len(header)) + header


def _check_writable(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what could not be read back, before the first byte is written."""
    if path.is_dir():
        raise refuse(WeightsError, path, "is a folder", "name a file inside it")
    if not path.parent.is_dir():
        raise refuse(WeightsError, path, f"its folder {path.parent} does not exist", "create it first")
    if not tensors:
        raise refuse(MismatchedWeights, path, "there are no tensors to write", "pass a state dict")
    for name, tensor in tensors.items():
        if name in ("", "__metadata__") or name.encode("utf-8", "replace").decode() != name:  # a lone surrogate
            raise refuse(MismatchedWeights, path, f"a tensor cannot be called {quote(name)}", "rename it")
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            cause = f"tensor {quote(name)} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be stored"
            raise refuse(MismatchedWeights, path, cause, "make it a dense tensor of a plain type")
    if unsound := first_unsound(tensors):
        cause = f"tensor {quote(unsound[0])} holds {unsound[1]}"
        raise refuse(CorruptWeights, path, cause, "nothing was written; go back to an earlier state")


DIAGNOSED = 8 << 20  # bytes; a longer header that the library refuses is not parsed again for a better message


def read_safetensors(path: Path, file: BufferedReader, size: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and our own description (None for a foreign file), all checked."""
    header = read_header(path, file, size)
    seal = open_seal(path, header)
    tensors = {entry.name: read_tensor(path, file, len(header.raw), entry, seal) for entry in header.entries}
    return tensors, None if seal is None else seal.description


def read_header(path: Path, file: BufferedReader, size: int) -> SafetensorsHeader:
    """Reads the header, on which two parsers must agree."""
    file.seek(0)
    first_bytes = file.read(LENGTH_BYTES)
    length = int(struct.unpack("<Q", first_bytes)[0])
    if length > HEADER_LIMIT:
        cause = f"declares a header of {length} bytes, over the limit of {HEADER_LIMIT}"
        raise refuse(UnsafeWeights, path, cause, RESAVE)
    if LENGTH_BYTES + length > size:
        raise corrupt(path, f"ends inside its header ({size} bytes, header of {length})")
    verdict = _library_verdict(path)
    if verdict is not None and length > DIAGNOSED:
        raise corrupt(path, verdict)
    text = file.read(length)
    if len(text) != length:
        raise corrupt(path, "ends inside its header")
    header = parse_header(path, first_bytes + text, size - LENGTH_BYTES - length)
    if verdict is not None:
        raise corrupt(path, verdict)
    return header


def _library_verdict(path: Path) -> str | None:
    """The safetensors library's objection to the header, or None."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            return None
    except SafetensorError as error:
        return shorten(error)


def read_tensor(path: Path, file: BufferedReader, data_start: int, entry: TensorEntry, seal: Seal | None) -> Tensor:
    """Reads one tensor's bytes into memory of its own and compares them with its checksum."""
    content = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    view = content.numpy().data
    file.seek(data_start + entry.start)
    if file.readinto(view) != len(view):
        raise corrupt(path, f"ends inside tensor {quote(entry.name)}")
    if seal is not None and hashlib.sha256(view).hexdigest() != seal.checksums[entry.name]:
        raise corrupt(path, f"tensor {quote(entry.name)} does not match its checksum")
    return content.view(entry.dtype).reshape(entry.shape)

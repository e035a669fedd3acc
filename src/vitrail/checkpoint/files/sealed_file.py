"""vitrail's own weight file: one .safetensors file that describes and checks itself.

Any reader of safetensors opens it. The one metadata entry ``vitrail`` holds a JSON text:

    {"format": 1, ...description..., "checksums": {tensor: sha256 of its bytes}, "seal": sha256}

The checksums cover the data. The seal covers everything else: it is taken over the eight length bytes and the whole
header, with its own 64 digits as zeros. So any flipped bit is noticed, and a tensor at fault is named. The file is
written next to its target and renamed onto it, so that there is at every moment one whole file under the name.

Whether tensors hold numbers: a NaN in a weight file spreads to every answer, so it is found before the first one.
"""

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.checkpoint.files.safetensors_header import DTYPES, HEADER_LIMIT, LENGTH_BYTES, Header, unique_pairs
from vitrail.checkpoint.files.weight_errors import DOWNLOAD_AGAIN, refusal, shown, told
from vitrail.core.atomic_files import NotOnDisk, replacing, unobserved
from vitrail.core.errors import ConfigError, CorruptWeights, MismatchedWeights, WeightsError

# The eight-bit floats are left out: torch has no such test for them, and some have no infinity to find.
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def first_unsound(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first tensor that holds what no honest weight does, and what that is; None when all are sound."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.dtype in CHECKED and not _finite(tensor.detach()):
            return name, "NaN or infinity"
        if tensor.numel() and tensor.dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
            return name, "bytes other than 0 and 1 in a boolean tensor"
    return None


def _finite(tensor: Tensor) -> bool:
    """Through the extremes, which a NaN anywhere turns into NaN: no temporaries, and many times as quick."""
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    least, most = torch.aminmax(numbers)
    return bool(torch.isfinite(least) and torch.isfinite(most))


KEY = "vitrail"
FORMAT = 1
RESERVED = ("format", "checksums", "seal")
UNSEALED = "0" * 64
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# As the seal stands in the raw header, where the JSON text is itself quoted: the last field of that text.
SEAL_TEXT = re.compile(rb'\\"seal\\":\\"([0-9a-f]{64})\\"\}"')
# Together they betray a sealed file whose key was damaged, which would otherwise pass for a foreign one.
MARKS = (b'\\"seal\\":', b'\\"checksums\\":')


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """What a sealed file says of itself, its header already found intact."""

    description: dict[str, Any]
    checksums: dict[str, str]


def open_seal(path: Path, header: Header) -> Seal | None:
    """Check the seal of a header; None when the file is not one of vitrail's."""
    text = header.metadata.get(KEY)
    if text is None:
        if all(mark in header.raw for mark in MARKS):
            raise _broken(path, f"carries a seal but no {KEY!r} entry")
        return None
    try:
        content = cast(object, json.loads(text, object_pairs_hook=unique_pairs))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its description is not JSON ({told(error)})") from None
    if not isinstance(content, dict):
        raise _broken(path, "its description is not a JSON object")
    fields = cast(dict[str, Any], content)
    _check_format(path, fields.get("format"))
    found = list(SEAL_TEXT.finditer(header.raw))
    if len(found) != 1 or fields.get("seal") != found[0][1].decode():
        raise _broken(path, "its seal is missing or not in its place")
    if _seal_of(header.raw, found[0].start(1)) != fields["seal"]:
        raise _broken(path, "its header does not match its seal")
    checksums = fields.get("checksums")
    if not isinstance(checksums, dict) or set(cast(dict[str, Any], checksums)) != {e.name for e in header.entries}:
        raise _broken(path, "its checksums and its tensors do not have the same names")
    description = {name: value for name, value in fields.items() if name not in RESERVED}
    return Seal(description=description, checksums=cast(dict[str, str], checksums))


def write_sealed(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    reached: Callable[[str], None] = unobserved,
) -> None:
    """Write tensors and their description as one sealed file; equal input gives equal bytes.

    Tensors pass one at a time, so a model on another device needs no second copy in host memory. Whatever fails
    before the rename, a file that stood under the name still stands there. `reached` hears of each write.
    """
    path = Path(path)
    _check_writable(path, tensors)
    # Wide types first, as the library does it, so that every tensor lies at a multiple of its item's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    checksums = dict.fromkeys(ordered, UNSEALED)
    header = _header(path, ordered, description, checksums)
    _sealed(path, header)
    try:
        with replacing(path, reached) as file:
            reached("before write")
            file.write(header)
            for name, tensor in ordered.items():
                content = _bytes_of(tensor)
                checksums[name] = hashlib.sha256(content).hexdigest()
                reached("before write")
                file.write(content)
            file.seek(0)
            reached("before write")
            file.write(_sealed(path, _header(path, ordered, description, checksums)))
            reached("after write")
    except NotOnDisk as error:
        cause = f"is written, but its folder could not be put on disk ({error.strerror or told(error)})"
        raise refusal(WeightsError, path, cause, "check the disk before relying on it") from error
    except OSError as error:
        cause = f"cannot be written ({error.strerror or told(error)})"
        raise refusal(WeightsError, path, cause, "free space or choose another folder; nothing was replaced") from error


def _broken(path: Path, cause: str) -> CorruptWeights:
    return refusal(CorruptWeights, path, f"altered since vitrail wrote it: {cause}", DOWNLOAD_AGAIN)


def _check_format(path: Path, found: object) -> None:
    if type(found) is not int or found < 1:
        raise _broken(path, f"its format is {shown(found)}")
    if found > FORMAT:
        cause = f"written by a newer vitrail (format {found}, this one reads up to {FORMAT})"
        raise refusal(WeightsError, path, cause, "upgrade vitrail")


def _seal_of(header: bytes, at: int) -> str:
    """The digest over length and header, the seal's own digits counted as zeros."""
    digest = hashlib.sha256(memoryview(header)[:at])
    digest.update(UNSEALED.encode())
    digest.update(memoryview(header)[at + len(UNSEALED) :])
    return digest.hexdigest()


def _sealed(path: Path, header: bytes) -> bytes:
    """The header with its seal in place."""
    found = list(SEAL_TEXT.finditer(header))
    if len(found) != 1:
        raise refusal(MismatchedWeights, path, "a tensor's name reads like a seal", "rename it")
    at = found[0].start(1)
    return header[:at] + _seal_of(header, at).encode() + header[at + len(UNSEALED) :]


def _header(
    path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any], checksums: Mapping[str, str]
) -> bytes:
    """Length and header; its length does not depend on the digests, so it can be written before they are known."""
    reserved = sorted(set(RESERVED) & set(description))
    if reserved:
        raise ConfigError(f"description field {reserved[0]!r} is vitrail's own; rename it")
    try:
        own = json.dumps(dict(description), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the description of {path} cannot be written as JSON ({told(error)}); use plain values"
        ) from None
    rest = json.dumps({"checksums": checksums, "seal": UNSEALED}, separators=(",", ":"))
    text = f'{{"format":{FORMAT},{own[1:-1]}{"," if description else ""}{rest[1:]}'
    content: dict[str, Any] = {"__metadata__": {KEY: text}}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.dtype.itemsize
        content[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    header = json.dumps(content, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > HEADER_LIMIT:
        raise refusal(WeightsError, path, f"its header would take {len(header)} bytes", "shorten the description")
    return struct.pack("<Q", len(header)) + header


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy where it already lies so in host memory."""
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _check_writable(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what could not be read back, before the first byte is written."""
    if path.is_dir():
        raise refusal(WeightsError, path, "is a folder", "name a file inside it")
    if not path.parent.is_dir():
        raise refusal(WeightsError, path, f"its folder {path.parent} does not exist", "create it first")
    if not tensors:
        raise refusal(MismatchedWeights, path, "there are no tensors to write", "pass a state dict")
    for name, tensor in tensors.items():
        if name in ("", "__metadata__") or name.encode("utf-8", "replace").decode() != name:  # half of a surrogate pair
            raise refusal(MismatchedWeights, path, f"a tensor cannot be called {shown(name)}", "rename it")
        if tensor.dtype not in NAMES or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            cause = f"tensor {shown(name)} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be stored"
            raise refusal(MismatchedWeights, path, cause, "make it a dense tensor of a plain type")
    unsound = first_unsound(tensors)
    if unsound is not None:
        cause = f"tensor {shown(unsound[0])} holds {unsound[1]}"
        raise refusal(CorruptWeights, path, cause, "nothing was written; go back to an earlier state")

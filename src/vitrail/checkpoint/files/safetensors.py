"""Read a .safetensors file into tensors of its own, and hold it to its seal when it has one.

The bytes are read, not mapped: a mapped file that somebody shortens kills the process, and one that somebody
rewrites changes tensors that were already checked.
"""

import hashlib
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoint.files.safetensors_header import LENGTH_BYTES, Entry, Header, header_length, parse_header
from vitrail.checkpoint.files.sealed_file import Seal, open_seal
from vitrail.checkpoint.files.weight_errors import DOWNLOAD_AGAIN, refusal, shown, told
from vitrail.core.errors import CorruptWeights

DIAGNOSED = 8 << 20  # bytes; a longer header that the library refuses is not parsed again for a better message


def read_safetensors(
    path: Path, file: BufferedReader, size: int
) -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, str]]:
    """Tensors, our own description (None for a foreign file) and the other metadata, all checked."""
    header = read_header(path, file, size)
    seal = open_seal(path, header)
    tensors = {entry.name: read_tensor(path, file, len(header.raw), entry, seal) for entry in header.entries}
    if seal is None:
        return tensors, None, header.metadata
    return tensors, seal.description, {}


def read_header(path: Path, file: BufferedReader, size: int) -> Header:
    """The header, as two parsers agree on it."""
    file.seek(0)
    first_bytes = file.read(LENGTH_BYTES)
    length = header_length(path, first_bytes, size)
    verdict = _library_verdict(path)
    if verdict is not None and length > DIAGNOSED:
        raise refusal(CorruptWeights, path, verdict, DOWNLOAD_AGAIN)
    text = file.read(length)
    if len(text) != length:
        raise refusal(CorruptWeights, path, "ends inside its header", DOWNLOAD_AGAIN)
    header = parse_header(path, first_bytes + text, size - LENGTH_BYTES - length)
    if verdict is not None:
        raise refusal(CorruptWeights, path, verdict, DOWNLOAD_AGAIN)
    return header


def _library_verdict(path: Path) -> str | None:
    """What the safetensors library objects to in the header, or None."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            return None
    except SafetensorError as error:
        return told(error)


def read_tensor(path: Path, file: BufferedReader, data_start: int, entry: Entry, seal: Seal | None) -> Tensor:
    """One tensor's bytes, read into memory of its own and compared with its checksum before anyone sees them."""
    content = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    view = content.numpy().data
    file.seek(data_start + entry.start)
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise refusal(CorruptWeights, path, f"ends inside tensor {shown(entry.name)}", DOWNLOAD_AGAIN)
        filled += count
    if seal is not None and hashlib.sha256(view).hexdigest() != seal.checksums[entry.name]:
        cause = f"tensor {shown(entry.name)} does not match its checksum"
        raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN)
    return content.view(entry.dtype).reshape(entry.shape)

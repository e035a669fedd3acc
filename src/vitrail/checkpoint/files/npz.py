"""Read a .npz archive of NumPy arrays into tensors, without NumPy's own reader.

That reader unpickles when asked and allocates what a header asks for. Here a header is held to a strict form, its
size is compared with the member's before anything is allocated, and no object ever comes out of it.
"""

import math
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from vitrail.checkpoint.files.safetensors_header import MOST_AXES, is_count
from vitrail.checkpoint.files.torch_file import opened_member, pieces
from vitrail.checkpoint.files.weight_errors import DOWNLOAD_AGAIN, RESAVE, refusal, shown
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights

SUFFIX = ".npy"
MAGIC = b"\x93NUMPY"
HEADER_LIMIT = 1 << 16  # bytes
FIELD = re.compile(r"'(descr|fortran_order|shape)' ?: ?('[^']{1,16}'|True|False|\((?:\d{1,20}, ?)*(?:\d{1,20})?\))")
FRAME = re.compile(r"\{ ?, ?, ?,? ?\}\s*")  # what is left of an honest header once its three fields are taken out

KINDS: dict[str, torch.dtype] = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "b1": torch.bool,
    "V2": torch.bfloat16,  # NumPy has no name for it; JAX saves it as two opaque bytes
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """How one array lies in its member."""

    dtype: torch.dtype
    swapped: bool  # big-endian
    columns_first: bool  # Fortran order
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """The arrays of an archive that ``open_archive`` found sound, under their names in it."""
    tensors: dict[str, Tensor] = {}
    for member in archive.infolist():
        if not member.filename.endswith(SUFFIX):
            cause = f"member {shown(member.filename)} is not a {SUFFIX} array"
            raise refusal(CorruptWeights, path, cause, "re-save with numpy.savez, arrays only")
        with opened_member(path, archive, member) as stream:
            tensors[member.filename.removesuffix(SUFFIX)] = _read_array(path, stream, member)
    return tensors


def _read_array(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> Tensor:
    layout, header_size = _read_layout(path, stream, member)
    if header_size + layout.size != member.file_size:
        cause = f"array {shown(member.filename)} of shape {layout.shape} needs {layout.size} bytes"
        raise refusal(
            CorruptWeights, path, f"{cause} but its member holds {member.file_size - header_size}", DOWNLOAD_AGAIN
        )
    content = torch.empty(layout.size, dtype=torch.uint8)
    view, filled = content.numpy().data, 0
    for piece in pieces(path, stream, member, layout.size):
        view[filled : filled + len(piece)] = piece
        filled += len(piece)
    stream.read(1)  # an empty array has not reached its CRC yet
    if layout.swapped:
        # Real and imaginary part are swapped each for itself.
        item = layout.dtype.itemsize // 2 if layout.dtype.is_complex else layout.dtype.itemsize
        content = content.reshape(-1, item).flip(1).reshape(-1)
    tensor = content.view(layout.dtype)
    if layout.columns_first:
        return tensor.reshape(layout.shape[::-1]).permute(*reversed(range(len(layout.shape)))).contiguous()
    return tensor.reshape(layout.shape)


def _read_layout(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> tuple[_Layout, int]:
    """The array's layout and the bytes that its header takes."""
    name = shown(member.filename)
    start = stream.read(len(MAGIC) + 2)
    if len(start) != len(MAGIC) + 2 or not start.startswith(MAGIC) or start[-2] not in (1, 2, 3):
        raise refusal(CorruptWeights, path, f"member {name} is not a NumPy array", DOWNLOAD_AGAIN)
    form = "<H" if start[-2] == 1 else "<I"
    length = int(struct.unpack(form, b"".join(pieces(path, stream, member, struct.calcsize(form))))[0])
    if length > HEADER_LIMIT:
        cause = f"array {name} declares a header of {length} bytes, over the limit of {HEADER_LIMIT}"
        raise refusal(UnsafeWeights, path, cause, RESAVE)
    text = b"".join(pieces(path, stream, member, length)).decode("latin-1")
    return _parse_layout(path, name, text), len(start) + struct.calcsize(form) + length


def _parse_layout(path: Path, name: str, text: str) -> _Layout:
    """The three fields of an array's header, taken by their form and never evaluated."""
    fields = dict(FIELD.findall(text))
    if "'descr': '|O'" in text or "'descr': [" in text:
        cause = f"array {name} holds Python objects or records, which only unpickling could restore"
        raise refusal(UnsafeWeights, path, cause, "re-save plain numeric arrays")
    if len(fields) != 3 or not FRAME.fullmatch(FIELD.sub("", text)):
        raise refusal(CorruptWeights, path, f"array {name} has the header {shown(text.strip())}", DOWNLOAD_AGAIN)
    kind, order, dimensions = fields["descr"].strip("'"), fields["fortran_order"], fields["shape"]
    dtype = KINDS.get(kind[1:])
    shape = tuple(int(digits) for digits in re.findall(r"\d+", dimensions))
    if dtype is None or kind[0] not in "<>=|":
        cause = f"array {name} has type {kind!r}, which vitrail does not read"
        raise refusal(MismatchedWeights, path, cause, f"convert it to one of {', '.join(KINDS)}")
    if order not in ("True", "False") or not dimensions.startswith("("):
        raise refusal(CorruptWeights, path, f"array {name} has the header {shown(text.strip())}", DOWNLOAD_AGAIN)
    if len(shape) > MOST_AXES or not all(is_count(axis) for axis in shape):
        raise refusal(UnsafeWeights, path, f"array {name} has the shape {shown(dimensions)}", RESAVE)
    return _Layout(dtype=dtype, swapped=kind[0] == ">", columns_first=order == "True", shape=shape)

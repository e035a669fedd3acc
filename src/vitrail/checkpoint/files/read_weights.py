"""Reads weight files of any kind into plain tensors, or refuses them with a one-line error.

The kind is recognised by the first bytes, never by the name. Nothing in a file is executed, no size in it is trusted
before it is compared with the file's actual bytes, and only vitrail's own errors leave this module.

.npz archives are read here without NumPy's reader, which can unpickle and allocates whatever a header declares. Headers
must have a strict form, their size is compared with the member's before anything is allocated, and Python objects are
never restored.
"""

import errno
import math
import re
import stat
import struct
import zipfile
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoint.files import torch_file
from vitrail.checkpoint.files.checks import DOWNLOAD_AGAIN, RESAVE, corrupt, quote, refuse, shorten
from vitrail.checkpoint.files.safetensors import MOST_AXES, first_unsound, is_count, read_safetensors
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError, WeightsNotFound

NPY_SUFFIX = ".npy"
NPY_MAGIC = b"\x93NUMPY"
HEADER_LIMIT = 1 << 16  # bytes
FIELD = re.compile(r"'(descr|fortran_order|shape)' ?: ?('[^']{1,16}'|True|False|\((?:\d{1,20}, ?)*(?:\d{1,20})?\))")
FRAME = re.compile(r"\{ ?, ?, ?,? ?\}\s*")  # the rest of a valid header without its three fields

KINDS = ("f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "V2")
OPAQUE = "V2"  # NumPy has no bfloat16: JAX saves two opaque bytes


def read_npz(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """The arrays of an archive that ``open_archive`` found sound, under their names in it."""
    tensors: dict[str, Tensor] = {}
    for member in archive.infolist():
        if not member.filename.endswith(NPY_SUFFIX):
            cause = f"member {quote(member.filename)} is not a {NPY_SUFFIX} array"
            raise refuse(CorruptWeights, path, cause, "re-save with numpy.savez, arrays only")
        with torch_file.open_member(path, archive, member) as stream:
            tensors[member.filename.removesuffix(NPY_SUFFIX)] = _read_array(path, stream, member)
    return tensors


def _read_array(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> Tensor:
    kind, columns_first, shape, header_size = _read_layout(path, stream, member)
    dtype = np.dtype(kind.replace(OPAQUE, "u2"))
    size = math.prod(shape) * dtype.itemsize
    if header_size + size != member.file_size:
        cause = f"array {quote(member.filename)} of shape {shape} needs {size} bytes"
        raise corrupt(path, f"{cause} but its member holds {member.file_size - header_size}")
    content, filled = np.empty(size, np.uint8), 0
    for piece in torch_file.read_pieces(path, stream, member, size):
        content[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    stream.read(1)  # an empty array has not reached its CRC yet
    array = content.view(dtype).reshape(shape, order="F" if columns_first else "C")
    tensor = torch.from_numpy(array.astype(dtype.newbyteorder("="), order="C", copy=False))
    return tensor.view(torch.bfloat16) if kind.endswith(OPAQUE) else tensor


def _read_layout(path: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> tuple[str, bool, tuple[int, ...], int]:
    """The array's type, whether columns come first (Fortran order), its shape and the bytes that its header takes."""
    name = quote(member.filename)
    start = stream.read(len(NPY_MAGIC) + 2)
    if len(start) != len(NPY_MAGIC) + 2 or not start.startswith(NPY_MAGIC) or start[-2] not in (1, 2, 3):
        raise corrupt(path, f"member {name} is not a NumPy array")
    form = "<H" if start[-2] == 1 else "<I"
    length = int(struct.unpack(form, b"".join(torch_file.read_pieces(path, stream, member, struct.calcsize(form))))[0])
    if length > HEADER_LIMIT:
        cause = f"array {name} declares a header of {length} bytes, over the limit of {HEADER_LIMIT}"
        raise refuse(UnsafeWeights, path, cause, RESAVE)
    text = b"".join(torch_file.read_pieces(path, stream, member, length)).decode("latin-1")
    # The three fields are taken by their form and never evaluated.
    fields = dict(FIELD.findall(text))
    if "'descr': '|O'" in text or "'descr': [" in text:
        cause = f"array {name} holds Python objects or records, which only unpickling could restore"
        raise refuse(UnsafeWeights, path, cause, "re-save plain numeric arrays")
    if len(fields) != 3 or not FRAME.fullmatch(FIELD.sub("", text)):
        raise corrupt(path, f"array {name} has the header {quote(text.strip())}")
    kind, order, dimensions = fields["descr"].strip("'"), fields["fortran_order"], fields["shape"]
    shape = tuple(int(digits) for digits in re.findall(r"\d+", dimensions))
    if kind[1:] not in KINDS or kind[0] not in "<>=|":
        cause = f"array {name} has type {kind!r}, which vitrail does not read"
        raise refuse(MismatchedWeights, path, cause, f"convert it to one of {', '.join(KINDS)}")
    if order not in ("True", "False") or not dimensions.startswith("("):
        raise corrupt(path, f"array {name} has the header {quote(text.strip())}")
    if len(shape) > MOST_AXES or not all(is_count(axis) for axis in shape):
        raise refuse(UnsafeWeights, path, f"array {name} has the shape {quote(dimensions)}", RESAVE)
    return kind, order == "True", shape, len(start) + struct.calcsize(form) + length


ZIP_START = b"PK\x03\x04"
PICKLE_START = b"\x80"
READS = "vitrail reads .safetensors, .npz and files of torch.save"
WRAPPERS = ("module.", "_orig_mod.")  # put before every name by DistributedDataParallel and torch.compile

# Files often mistaken for weight files, by their first bytes, and the remedy.
MISTAKEN = (
    (b"version https://git-lfs", "is a Git LFS pointer", "run 'git lfs pull'"),
    (b"<", "is a web page or other markup", DOWNLOAD_AGAIN),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first"),
    (b"\x89HDF", "is an HDF5 file", "convert it to .safetensors"),
    (b"GGUF", "is a GGUF file", "convert it to .safetensors"),
    (b"\x93NUMPY", "is a single NumPy array", "save named arrays with numpy.savez"),
)


@dataclass(frozen=True, slots=True)
class RawWeights:
    """The tensors of a file as stored: on the CPU, in the file's types and under its names, contiguous."""

    path: Path
    container: Literal["safetensors", "npz", "torch"]
    tensors: dict[str, Tensor]
    description: dict[str, Any] | None = None  # what vitrail wrote about its own file; None for a foreign one


def read_weights(path: str | Path) -> RawWeights:
    """Reads a .safetensors, .npz or torch file. Raises a WeightsError whatever is wrong with it."""
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "folder" if path.is_dir() else "device or pipe"
            raise refuse(WeightsError, path, f"is a {kind}, not a weight file", "name a file")
        with path.open("rb") as file:
            found = _read(path, file)
    except WeightsError:
        raise
    except FileNotFoundError:
        raise refuse(WeightsNotFound, path, "does not exist", "check the name and the folder") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a seek to where a damaged file points
            raise corrupt(path, f"is damaged ({shorten(error)})") from error
        remedy = "check its permissions and the disk"
        raise refuse(WeightsError, path, f"cannot be read ({error.strerror or shorten(error)})", remedy) from error
    except MemoryError as error:
        remedy = "use a machine with more memory, or a smaller file"
        raise refuse(UnsafeWeights, path, "needs more memory than is available", remedy) from error
    except Exception as error:
        raise corrupt(path, f"is damaged ({shorten(error)})") from error
    return _check_sound(found)


def _read(path: Path, file: BufferedReader) -> RawWeights:
    """Recognises the container by its first bytes and reads it."""
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(64)
    # A header's length may begin like a pickle or a zip, but neither torch's pickles nor zips have a brace here.
    if start[8:9] == b"{":
        tensors, description = read_safetensors(path, file, size)
        return RawWeights(path, "safetensors", tensors, description)
    if start.startswith(ZIP_START):
        with torch_file.open_archive(path, file, size) as archive:
            names = archive.namelist()
            if any(name.endswith(torch_file.PICKLE) for name in names):
                return RawWeights(path, "torch", torch_file.read_torch_zip(path, file, size, archive))
            if any(name.endswith(NPY_SUFFIX) for name in names):
                return RawWeights(path, "npz", read_npz(path, archive))
        raise refuse(CorruptWeights, path, f"is a zip without tensors ({quote(', '.join(names[:5]))})", READS)
    if start.startswith(PICKLE_START):
        return RawWeights(path, "torch", torch_file.read_torch_stream(path, file, size))
    if not start.strip(b"\0"):
        raise corrupt(path, "starts with zeros where its header should be" if size else "is empty")
    for magic, what, remedy in MISTAKEN:
        if start.lstrip().startswith(magic):
            raise refuse(CorruptWeights, path, f"{what}, not a weight file", remedy)
    if path.suffix.lower() == ".onnx" or b"\x12\x07vitrail" in start[:16]:  # our producer name in its header
        named = "" if path.suffix.lower() == ".onnx" else " once its name ends in .onnx"
        remedy = f"predict, evaluate and serve can run it{named}; other commands need the weights it was exported from"
        raise refuse(CorruptWeights, path, "is an ONNX file, not a weight file", remedy)
    raise refuse(CorruptWeights, path, f"is not a weight file: it starts with {start[:8]!r}", READS)


def _check_sound(found: RawWeights) -> RawWeights:
    """Removes wrappers from the names, and checks that there are tensors and that their values are finite."""
    if not found.tensors:
        raise corrupt(found.path, "holds no tensors")
    tensors = found.tensors
    for wrapper in () if found.description is not None else WRAPPERS * 2:
        # A prefix that only some names have belongs to the model.
        if all(name.startswith(wrapper) and name != wrapper for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    if unsound := first_unsound(tensors):
        remedy = "take an earlier checkpoint or fetch the file again"
        raise refuse(CorruptWeights, found.path, f"tensor {quote(unsound[0])} holds {unsound[1]}", remedy)
    if "" in tensors:
        raise refuse(MismatchedWeights, found.path, "holds a tensor without a name", "name it and save again")
    return replace(found, tensors=tensors)

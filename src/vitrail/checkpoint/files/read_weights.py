"""Read a weight file of any kind into plain tensors, or refuse it in one line.

The kind is told by the first bytes, never by the name. Nothing in a file is run, no size in it is believed before it
is compared with the bytes that are there, and only errors of vitrail's own leave this module.
"""

import errno
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitrail.checkpoint.files.npz import SUFFIX, read_npz
from vitrail.checkpoint.files.safetensors import read_safetensors
from vitrail.checkpoint.files.sealed_file import first_unsound
from vitrail.checkpoint.files.torch_file import PICKLE, open_archive, read_torch_stream, read_torch_zip
from vitrail.checkpoint.files.weight_errors import DOWNLOAD_AGAIN, refusal, shown, told
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError, WeightsNotFound

ZIP_START = b"PK\x03\x04"
PICKLE_START = b"\x80"
WRAPPERS = ("module.", "_orig_mod.")  # put before every name by DistributedDataParallel and torch.compile

# What often lies where a weight file should, by its first bytes, and what to do about it.
MISTAKEN = (
    (b"version https://git-lfs", "is a Git LFS pointer", "run 'git lfs pull'"),
    (b"<", "is a web page or other markup", DOWNLOAD_AGAIN),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first"),
    (b"\x89HDF", "is an HDF5 file", "convert it to .safetensors"),
    (b"GGUF", "is a GGUF file", "convert it to .safetensors"),
    (b"\x93NUMPY", "is a single NumPy array", "save named arrays with numpy.savez"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawWeights:
    """The tensors of a file as they stand there: on the CPU, in its types, contiguous and under its names."""

    path: Path
    container: Literal["safetensors", "npz", "torch"]
    tensors: dict[str, Tensor]
    description: dict[str, Any] | None  # what vitrail wrote about its own file; None for a foreign one
    metadata: dict[str, str]  # of a foreign .safetensors file


def read_weights(path: str | Path) -> RawWeights:
    """Read a .safetensors, .npz or torch file; whatever is wrong with it becomes one of the weights errors."""
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "folder" if path.is_dir() else "device or pipe"
            raise refusal(WeightsError, path, f"is a {kind}, not a weight file", "name a file")
        with path.open("rb") as file:
            found = _read(path, file)
    except WeightsError:
        raise
    except FileNotFoundError:
        raise refusal(WeightsNotFound, path, "does not exist", "check the name and the folder") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a seek to where a damaged file points
            raise refusal(CorruptWeights, path, f"is damaged ({told(error)})", DOWNLOAD_AGAIN) from error
        remedy = "check its permissions and the disk"
        raise refusal(WeightsError, path, f"cannot be read ({error.strerror or told(error)})", remedy) from error
    except MemoryError as error:
        remedy = "use a machine with more memory, or a smaller file"
        raise refusal(UnsafeWeights, path, "asks for more memory than there is", remedy) from error
    except Exception as error:
        raise refusal(CorruptWeights, path, f"is damaged ({told(error)})", DOWNLOAD_AGAIN) from error
    return _sound(found)


def _read(path: Path, file: BufferedReader) -> RawWeights:
    """Tell the container by its first bytes and have it read."""
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(64)
    # A header's length may begin like a pickle or a zip, but no pickle of torch and no zip has a brace in this place.
    if start[8:9] == b"{":
        tensors, description, metadata = read_safetensors(path, file, size)
        return RawWeights(
            path=path, container="safetensors", tensors=tensors, description=description, metadata=metadata
        )
    if start.startswith(ZIP_START):
        return _read_zip(path, file, size)
    if start.startswith(PICKLE_START):
        tensors = read_torch_stream(path, file, size)
        return RawWeights(path=path, container="torch", tensors=tensors, description=None, metadata={})
    if not start.strip(b"\0"):
        what = "is empty" if not size else "starts with zeros where its header should be"
        raise refusal(CorruptWeights, path, what, DOWNLOAD_AGAIN)
    for magic, what, remedy in MISTAKEN:
        if start.lstrip().startswith(magic):
            raise refusal(CorruptWeights, path, f"{what}, not a weight file", remedy)
    cause = f"is not a weight file: it starts with {start[:8]!r}"
    raise refusal(CorruptWeights, path, cause, "vitrail reads .safetensors, .npz and files of torch.save")


def _read_zip(path: Path, file: BufferedReader, size: int) -> RawWeights:
    with open_archive(path, file, size) as archive:
        names = archive.namelist()
        if any(name.endswith(PICKLE) for name in names):
            tensors = read_torch_zip(path, file, size, archive)
            return RawWeights(path=path, container="torch", tensors=tensors, description=None, metadata={})
        if any(name.endswith(SUFFIX) for name in names):
            tensors = read_npz(path, archive)
            return RawWeights(path=path, container="npz", tensors=tensors, description=None, metadata={})
    remedy = "vitrail reads .safetensors, .npz and files of torch.save"
    raise refusal(CorruptWeights, path, f"is a zip without tensors ({shown(', '.join(names[:5]))})", remedy)


def _sound(found: RawWeights) -> RawWeights:
    """Names without their wrapper, and the assurance that there are tensors and that they hold numbers."""
    if not found.tensors:
        raise refusal(CorruptWeights, found.path, "holds no tensors", DOWNLOAD_AGAIN)
    tensors = found.tensors if found.description is not None else _unwrapped(found.tensors)
    unsound = first_unsound(tensors)
    if unsound is not None:
        name, what = unsound
        remedy = "take an earlier checkpoint or fetch the file again"
        raise refusal(CorruptWeights, found.path, f"tensor {shown(name)} holds {what}", remedy)
    if "" in tensors:
        raise refusal(MismatchedWeights, found.path, "holds a tensor without a name", "name it and save again")
    return RawWeights(
        path=found.path,
        container=found.container,
        tensors=tensors,
        description=found.description,
        metadata=found.metadata,
    )


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off prefixes that all names share; a prefix that only some have belongs to the model."""
    for wrapper in WRAPPERS * 2:
        if all(name.startswith(wrapper) and name != wrapper for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors

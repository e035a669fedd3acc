"""Errors for weight files that are refused, in one line with the file, the cause and the remedy, and a memory budget.

Files are untrusted, so names and messages taken from them are shortened and kept on one line before they are shown. All
readers share the memory budget that is set here.
"""

from pathlib import Path
from typing import TypeVar

from vitrail.core.errors import CorruptWeights, UnsafeWeights, WeightsError, describe_error

DOWNLOAD_AGAIN = "fetch or copy the file again"
RESAVE = "re-save the tensors as .safetensors where they were made"

EXPANSION = 20  # times the size of the file
ALLOWANCE = 64 << 20  # bytes in addition, so that small files always pass

E = TypeVar("E", bound=WeightsError)


def check_budget(path: Path, file_size: int, wanted: int, *, what: str = "its tensors") -> None:
    """Refuses a file that would take memory out of proportion to its size, before anything is allocated: real weights
    hardly compress, whereas a bomb compresses by a factor of a thousand."""
    if wanted > EXPANSION * file_size + ALLOWANCE:
        cause = f"{what} take {wanted} bytes, over {EXPANSION} times the file's {file_size} plus {ALLOWANCE >> 20} MiB"
        raise refuse(UnsafeWeights, path, cause, "re-save uncompressed and without expanded views if it is trusted")


def quote(name: object, limit: int = 120) -> str:
    """A name from an untrusted file, quoted, on one line and of bounded length."""
    text = repr(name) if not isinstance(name, str) or len(name) <= limit else repr(name[:limit]) + "..."
    return text if len(text) <= 4 * limit else text[: 4 * limit] + "..."


def shorten(error: BaseException, limit: int = 200) -> str:
    """Another library's error as a short cause; some errors are pages long."""
    text = describe_error(error)
    return text if len(text) <= limit else text[:limit] + "..."


def refuse(kind: type[E], path: Path, cause: str, remedy: str) -> E:
    """The error to raise: ``file: cause; remedy``, printable on one line whatever the file is called."""
    line = " ".join(f"{path}: {cause}; {remedy}".split())
    return kind("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


def corrupt(path: Path, cause: str) -> CorruptWeights:
    """The error for a file that was damaged in transfer."""
    return refuse(CorruptWeights, path, cause, DOWNLOAD_AGAIN)

"""Writes files atomically, reads the text files that users name, and locates the cache."""

import contextlib
import difflib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, Final

from vitrail.core.errors import ConfigError, DataError

LONGEST_TEXT: Final = 1 << 26  # bytes of a text file


class WriteFailed(OSError):
    """The file has its final name, but its folder could not be synced to disk."""


def ignore_point(point: str) -> None:
    """Does nothing: only tests observe a file being written."""


@contextlib.contextmanager
def replace_on_success(
    path: Path, reached: Callable[[str], None] = ignore_point, *, folder_too: bool = True
) -> Generator[BinaryIO]:
    """Opens a temporary file that is renamed to its path only once it is complete and on disk. `reached` is called at
    each point where a crash would leave a different state behind. Without `folder_too`, the folder is not synced after
    the rename, so the new name itself may not survive a crash."""
    temporary = path.with_name(f".vitrail-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            reached("before sync")
            file.flush()
            os.fsync(file.fileno())
            reached("after sync")
        reached("before rename")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    reached("after rename")
    if folder_too:
        sync_folder(path.parent)
        reached("after folder sync")


def sync_folder(folder: Path) -> None:
    """Forces a rename to disk, if the file system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise WriteFailed(error.errno, error.strerror) from error
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically at a path that the user named, and creates its parent folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); name another place") from error


def read_text(path: Path) -> str:
    """Reads a text file that the user named. DataError for pipes and devices, without waiting for them, and for files
    too large to be a list."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, encoding="utf-8-sig", newline="") as file:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise DataError(f"{path} is a folder; name a file")
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path} is a pipe or a device; name a regular file")
            if status.st_size > LONGEST_TEXT:
                raise DataError(f"{path} has {status.st_size:,} bytes; a list has at most {LONGEST_TEXT:,}")
            return file.read()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # a NUL in the name
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or 'is not a valid file name'}") from None


def check_writable(path: Path) -> None:
    """Raises ConfigError if a file could not be written, before any work is done for it."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file in it")
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if not above.is_dir():
            raise ConfigError(f"{path} cannot be written: {above} is not a folder")
        probe = above / f".vitrail-{secrets.token_hex(8)}.tmp"  # permissions alone do not tell: /proc, a read-only disk
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        probe.unlink()
        for folder in (path, *path.absolute().parents):
            folder.exists()  # a name that is too long is an error
    except OSError as error:
        name = str(path) if len(path.name) < 100 else f"{path.name[:40]}..."
        raise ConfigError(f"{name} cannot be written ({error.strerror or error}); name another place") from None


def near_paths(text: str) -> list[str]:
    """The paths in the folder of the given one."""
    folder = Path(text).parent
    try:
        return [str(folder / path.name) for path in folder.iterdir()]
    except (OSError, ValueError):
        return []


def similar_paths(text: str, *names: str) -> str:
    """A question that suggests similar names for a path that does not exist, from its folder or from `names`; empty if
    there are none."""
    near = difflib.get_close_matches(text, [*names, *near_paths(text)], n=2, cutoff=0.7)
    return f"did you mean {' or '.join(near)}? " if near else ""


def cache_folder(kind: str) -> Path:
    """The cache folder for a kind of file: under $VITRAIL_CACHE, $XDG_CACHE_HOME/vitrail or ~/.cache/vitrail."""
    named, home = os.environ.get("VITRAIL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(named) if named else Path(home or "~/.cache") / "vitrail"
    try:
        return folder.expanduser().absolute() / kind
    except RuntimeError:
        raise ConfigError(f"there is no home folder for {folder}; set VITRAIL_CACHE to a folder") from None

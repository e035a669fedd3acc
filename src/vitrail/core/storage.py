"""Where files are kept, and how one is replaced: whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from vitrail.core.errors import ConfigError


class NotOnDisk(OSError):
    """The file stands under its name, but its folder could not be put on disk."""


def unobserved(point: str) -> None:
    """Nobody watches a file being written, outside of tests."""


@contextlib.contextmanager
def replacing(path: Path, reached: Callable[[str], None] = unobserved) -> Generator[BinaryIO]:
    """A file to write that takes its name only once it is whole and on disk. `reached` hears of each moment at which a
    crash would leave something else behind."""
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
    sync_folder(path.parent)
    reached("after folder sync")


def sync_folder(folder: Path) -> None:
    """Puts a rename itself on disk, where the filesystem can be asked to."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise NotOnDisk(error.errno, error.strerror) from error
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """A file that a person asked for by name, with the folders above it: whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); give another --out") from error


def check_writable(path: Path) -> None:
    """Refuses a file that could not be written, before the work that is to go into it."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be written: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: {above} may not be written to; name another place")


def cache_folder(kind: str) -> Path:
    """For one kind of cached thing: under $VITRAIL_CACHE, else $XDG_CACHE_HOME/vitrail, else ~/.cache/vitrail."""
    named, home = os.environ.get("VITRAIL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(named) if named else Path(home or "~/.cache") / "vitrail"
    try:
        return folder.expanduser().absolute() / kind
    except RuntimeError:
        raise ConfigError(f"there is no home folder for {folder}; set VITRAIL_CACHE to a folder") from None

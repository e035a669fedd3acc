"""Where files are kept, and how one is replaced: whole or not at all."""

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

LONGEST_TEXT: Final = 1 << 26  # bytes of a list in text


class WriteFailed(OSError):
    """The file stands under its name, but its folder could not be put on disk."""


def ignore_point(point: str) -> None:
    """Nobody watches a file being written, outside of tests."""


@contextlib.contextmanager
def replace_on_success(
    path: Path, reached: Callable[[str], None] = ignore_point, *, folder_too: bool = True
) -> Generator[BinaryIO]:
    """A file to write that takes its name only once it is whole and on disk. `reached` hears of each moment at which a
    crash would leave something else behind. Without `folder_too` the name itself is not forced to disk: the folder is
    left alone once the file has its name."""
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
    """Puts a rename itself on disk, where the filesystem can be asked to."""
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
    """A file that a person asked for by name, with the folders above it: whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_on_success(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); name another place") from error


def read_text(path: Path) -> str:
    """A text file that a person named. Pipes and devices are refused without waiting for them, and so is a file that is
    no list of anything by its size."""
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
        raise DataError(f"{path} is not text in UTF-8; save it as such") from None
    except (OSError, ValueError) as error:  # a NUL in the name
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or 'is not a valid file name'}") from None


def check_writable(path: Path) -> None:
    """Refuses a file that could not be written, before the work that is to go into it."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file in it")
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if not above.is_dir():
            raise ConfigError(f"{path} cannot be written: {above} is not a folder")
        probe = above / f".vitrail-{secrets.token_hex(8)}.tmp"  # rights alone do not say: /proc, a read-only disk
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        probe.unlink()
        for folder in (path, *path.absolute().parents):
            folder.exists()  # a name that is too long is an error
    except OSError as error:
        name = str(path) if len(path.name) < 100 else f"{path.name[:40]}..."
        raise ConfigError(f"{name} cannot be written ({error.strerror or error}); name another place") from None


def near_paths(text: str) -> list[str]:
    """What lies where a path was looked for."""
    folder = Path(text).parent
    try:
        return [str(folder / path.name) for path in folder.iterdir()]
    except (OSError, ValueError):
        return []


def similar_paths(text: str, *names: str) -> str:
    """A question that names what is written almost like a path that is not there, in its folder or among `names`; empty
    where nothing is."""
    near = difflib.get_close_matches(text, [*names, *near_paths(text)], n=2, cutoff=0.7)
    return f"did you mean {' or '.join(near)}? " if near else ""


def cache_folder(kind: str) -> Path:
    """For one kind of cached thing: under $VITRAIL_CACHE, else $XDG_CACHE_HOME/vitrail, else ~/.cache/vitrail."""
    named, home = os.environ.get("VITRAIL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(named) if named else Path(home or "~/.cache") / "vitrail"
    try:
        return folder.expanduser().absolute() / kind
    except RuntimeError:
        raise ConfigError(f"there is no home folder for {folder}; set VITRAIL_CACHE to a folder") from None

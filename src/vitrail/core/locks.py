"""File locks that the system releases when their holder dies, however it dies: flock, or msvcrt on Windows."""

import contextlib
import errno
import importlib
import os
import time
import weakref
from io import FileIO
from pathlib import Path
from typing import Any, Final

UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # a file system without locks
FAR: Final = 1 << 30  # Windows prevents reading locked bytes, so the locked byte lies beyond all content


class LockTaken(Exception):
    """Another process holds the lock."""


class FileLock:
    """A lock held from construction until `release` or the end of this process; forked processes do not share it.

    Raises LockTaken if another process holds it for longer than `patience_s`. On a file system without locks, the file
    is opened without one, and `obstacle` says why.
    """

    def __init__(self, path: Path, *, patience_s: float = 0.0) -> None:
        self.obstacle: str | None = None
        self.file: FileIO | None = open(path, "ab+", buffering=0)  # noqa: SIM115
        deadline = time.monotonic() + patience_s
        try:
            while not try_lock(self.file.fileno()):
                if time.monotonic() >= deadline:
                    raise LockTaken
                time.sleep(0.05)
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno not in UNSUPPORTED:
                self.release()
                raise
            self.obstacle = error.strerror or str(error)
        # A forked loader process would keep the lock when this one is killed. Closing its copy does not unlock.
        forgotten = weakref.WeakMethod(self.release)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: (found := forgotten()) and found())

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Locks an open file; returns False if another process has locked it. Errors of the file system raise OSError."""
    try:
        import fcntl
    except ImportError:
        return _locked_byte(handle, "LK_NBLCK")  # Windows has no shared locks
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:
        _locked_byte(handle, "LK_UNLCK")
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock on a file; always False on a file system without locks."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return not try_lock(file.fileno(), shared=True)
    return False


def _locked_byte(handle: int, way: str) -> bool:
    msvcrt: Any = importlib.import_module("msvcrt")
    os.lseek(handle, FAR, os.SEEK_SET)
    try:
        msvcrt.locking(handle, getattr(msvcrt, way), 1)
    except PermissionError:
        return False
    return True

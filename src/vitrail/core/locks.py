"""Locks on files that the system takes back when their holder dies, however it dies: flock, or on Windows msvcrt."""

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
FAR: Final = 1 << 30  # Windows lets nobody read what is locked, so the byte that is locked lies behind all content


class LockTaken(Exception):
    """Another process holds the lock."""


class FileLock:
    """Held from construction until `release`, or until this process is gone; forked processes do not share it.

    Raises LockTaken where another process holds it for longer than `patience_s`. `obstacle` says why there is no lock
    on a file system that has none; the file is open all the same.
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
    """Locks an open file, or returns False where another process has locked it. An OSError is the file system's."""
    try:
        import fcntl
    except ImportError:
        return _locked_byte(handle, "LK_NBLCK")  # Windows knows no shared ones
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
    """Whether a living process holds the lock on a file. A file system without locks knows of none."""
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

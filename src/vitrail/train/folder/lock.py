"""One job a run folder: a lock that the system takes back when its holder dies, however it dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final

from vitrail.core.errors import ConfigError

FILE: Final = "lock"
PATIENCE: Final = 1.0  # seconds, for somebody who only looks whether the lock is free
UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Lock:
    """Held from construction until `release`, or until this process is gone."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.path = folder / FILE
        self._file: FileIO | None = open(self.path, "ab+", buffering=0)  # noqa: SIM115
        try:
            self._take(folder, tell)
            content = {"pid": os.getpid(), "host": socket.gethostname(), "started": now()}
            os.ftruncate(self._file.fileno(), 0)
            self._file.write(json.dumps(content).encode() + b"\n")
        except BaseException:
            self.release()
            raise
        # A forked loader process shares the lock and would keep it when this one is killed.
        forgotten = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (found := forgotten()) and found())

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, folder: Path, tell: Callable[[str], None]) -> None:
        assert self._file is not None
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _taken(folder) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                tell(f"{folder} is on a file system without locks ({error.strerror}); see to it that one job uses it")
                return

    def _forget(self) -> None:
        """In a forked child: closing its copy does not unlock."""
        self.release()


def holder(folder: Path) -> dict[str, Any]:
    """What the last holder of the lock wrote of itself; empty where that cannot be read."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_held(folder: Path) -> bool:
    """Whether a living process holds the lock."""
    with contextlib.suppress(FileNotFoundError), open(folder / FILE, "rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _taken(folder: Path) -> ConfigError:
    found = holder(folder)
    who = f"process {found.get('pid', '?')} on {found.get('host', '?')} since {found.get('started', '?')}"
    return ConfigError(f"{folder} is in use by {who}; wait for it, stop it, or give another --out")

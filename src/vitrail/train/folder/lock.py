"""One job a run folder: a lock that the system takes back when its holder dies, however it dies."""

import json
import os
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from vitrail.core.errors import ConfigError
from vitrail.core.locks import FileLock, LockTaken, is_locked

FILE: Final = "lock"
PATIENCE: Final = 1.0  # seconds, for somebody who only looks whether the lock is free


class Lock:
    """Held from construction until `release`, or until this process is gone."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.path = folder / FILE
        try:
            self._lock = FileLock(self.path, patience_s=PATIENCE)
        except LockTaken:
            raise _taken(folder) from None
        if self._lock.obstacle is not None:
            tell(f"{folder} is on a file system without locks ({self._lock.obstacle}); see to it that one job uses it")
        try:
            content = {"pid": os.getpid(), "host": socket.gethostname(), "started": now()}
            assert self._lock.file is not None
            os.ftruncate(self._lock.file.fileno(), 0)
            self._lock.file.write(json.dumps(content).encode() + b"\n")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._lock.release()


def holder(folder: Path) -> dict[str, Any]:
    """What the last holder of the lock wrote of itself; empty where that cannot be read."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_held(folder: Path) -> bool:
    """Whether a living process holds the lock."""
    return is_locked(folder / FILE)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _taken(folder: Path) -> ConfigError:
    found = holder(folder)
    who = f"process {found.get('pid', '?')} on {found.get('host', '?')} since {found.get('started', '?')}"
    return ConfigError(f"{folder} is in use by {who}; wait for it, stop it, or give another --out")

"""The names in a run folder, and what they say to whoever only reads.

Files that grow at their end while a run goes on, and outlive a full disk: what found no room is kept and written as
soon as there is some.

One job a run folder: a lock that the system takes back when its holder dies, however it dies.
"""

import contextlib
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import ConfigError, describe_error
from vitrail.core.locks import FileLock, LockTaken, is_locked

CONFIG: Final = "config.json"
COMMAND: Final = "command.json"
ENVIRONMENT: Final = "environment.json"
STATUS: Final = "status.json"
METRICS: Final = "metrics.jsonl"
LOG: Final = "log.txt"
BEST: Final = "best.safetensors"
LAST: Final = "last.safetensors"
SWEEP: Final = "sweep.json"
POINTS: Final = "sweep"  # a folder for each point in it

State: TypeAlias = Literal["preparing", "running", "interrupted", "diverged", "failed", "done"]


def read_command(folder: Path) -> dict[str, Any]:
    """What was asked for when the run in a folder was started."""
    return read_json(_run(folder) / COMMAND)


def is_done(folder: Path) -> bool:
    """Whether a run was finished in the folder."""
    return (folder / STATUS).exists() and read_status(folder).get("state") == "done"


def read_status(folder: Path) -> dict[str, Any]:
    """How the run stood when it last said so; empty where that cannot be read, as after a power cut."""
    try:
        status = read_json(folder / STATUS)
    except ConfigError:
        return {}
    if status.get("state") == "exploded":  # what earlier versions wrote
        status["state"] = "diverged"
    return status


def read_json(path: Path) -> dict[str, Any]:
    """One of the folder's tables."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run folder?") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({describe_error(error)}); remove it, or give another --out") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged (no table); remove it, or give another --out")
    return cast(dict[str, Any], content)


def _run(folder: Path) -> Path:
    if not (folder / COMMAND).is_file():
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{folder} {what}: there is no {COMMAND}; give the folder of a run")
    return folder


WAITING: Final = 10_000  # entries that are kept while there is no room; the oldest are given up beyond
RESERVED: Final = 128 << 10  # bytes


class DiskReserve:
    """A little room on the disk, held back so that a run can still say that the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self) -> None:
        """Take the room, if it can be had."""
        with contextlib.suppress(OSError):
            if not self.path.exists():
                self.path.write_bytes(bytes(RESERVED))

    def give(self) -> None:
        """Make room for the message."""
        with contextlib.suppress(OSError):
            self.path.unlink()


class AppendLog:
    """A file at whose end entries are put, each whole or not at all. `tell` hears once that there is no room, and once
    that there is again; a `reserve` is used up first."""

    def __init__(self, path: Path, tell: Callable[[str], None], reserve: DiskReserve | None = None) -> None:
        self.path, self.tell, self.reserve = path, tell, reserve
        self.failing = False
        self._waiting: list[bytes] = []
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def append(self, entry: bytes) -> None:
        """Put an entry at the end; the system has it when this returns, or it waits for room."""
        with self._lock:
            self._waiting.append(entry)
            try:
                self._write(b"".join(self._waiting))
            except OSError as error:
                del self._waiting[:-WAITING]
                if not self.failing:
                    self.tell(f"{self.path} cannot be written ({error.strerror}); the run goes on, and tries again")
                self.failing = True
                return
            self._waiting.clear()
            if self.failing:
                self.failing = False
                self.tell(f"{self.path} is written again")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def mend(self) -> None:
        """Cut off a last line that a crash left without its end."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def _write(self, content: bytes) -> None:
        try:
            self._put(content)
        except OSError:
            if self.reserve is None:
                raise
            self.reserve.give()
            self._put(content)

    def _put(self, content: bytes) -> None:
        """All of it or nothing: half an entry would spoil the next one."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        size = os.fstat(self._file.fileno()).st_size
        left = memoryview(content)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            self.close()
            raise


def encode_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON that every reader takes: NaN and the infinities, which JSON lacks, in words."""
    return json.dumps(to_json_value(row), allow_nan=False, default=_scalar).encode() + b"\n"


def to_json_value(value: Any) -> Any:
    """A value as JSON will hold it: tuples as lists, numbers that are none as "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in cast(list[Any], value)]
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of such a file; lines that are none, as a crash may leave the last one, are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(cast(dict[str, Any], row))
    return rows


def rewind_rows(path: Path, step: int) -> None:
    """Drop the rows of later steps, the score of the end, which comes again, and lines that are no rows; at step 0 all
    but the baseline. The file is replaced whole, if it has to be."""
    if not path.exists():
        return
    kept = b"".join(encode_row(row) for row in read_rows(path) if not _later(row, step))
    if kept != path.read_bytes():
        with replace_on_success(path) as file:
            file.write(kept)


def _later(row: Mapping[str, Any], step: int) -> bool:
    found = row.get("step")
    again = row.get("kind") == "test" or (step == 0 and row.get("kind") != "baseline")
    return again or (isinstance(found, int | float) and found > step)


def _scalar(value: Any) -> Any:
    """A number of torch or numpy as Python's own; anything else in words."""
    item = getattr(value, "item", None)
    try:
        return to_json_value(item()) if callable(item) else str(value)
    except (RuntimeError, ValueError):
        return str(value)


LOCK: Final = "lock"
PATIENCE: Final = 1.0  # seconds, for somebody who only looks whether the lock is free


class RunLock:
    """Held from construction until `release`, or until this process is gone."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.path = folder / LOCK
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


def read_holder(folder: Path) -> dict[str, Any]:
    """What the last holder of the lock wrote of itself; empty where that cannot be read."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_held(folder: Path) -> bool:
    """Whether a living process holds the lock."""
    return is_locked(folder / LOCK)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _taken(folder: Path) -> ConfigError:
    found = read_holder(folder)
    who = f"process {found.get('pid', '?')} on {found.get('host', '?')} since {found.get('started', '?')}"
    return ConfigError(f"{folder} is in use by {who}; wait for it, stop it, or give another --out")

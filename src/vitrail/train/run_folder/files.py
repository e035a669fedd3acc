"""The files of a run folder: their names, how they are read, and how they are written while a run is in progress.

Files that grow survive a full disk: entries that do not fit are kept and written once there is space. A lock gives the
folder to one job at a time; the system releases it however its holder dies. Metrics also go to TensorBoard's own event
files: a few bytes of protobuf each, so its package is only needed to view them.
"""

import contextlib
import ctypes
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping
from datetime import datetime
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.errors import ConfigError, describe_error
from vitrail.core.locks import FileLock, LockTaken, is_locked
from vitrail.data.datasets.file_formats import masked_crc

CONFIG: Final = "config.json"
COMMAND: Final = "command.json"
ENVIRONMENT: Final = "environment.json"
STATUS: Final = "status.json"
METRICS: Final = "metrics.jsonl"
LOG: Final = "log.txt"
BEST: Final = "best.safetensors"
LAST: Final = "last.safetensors"
SWEEP: Final = "sweep.json"
POINTS: Final = "sweep"  # the folder of its points
TENSORBOARD: Final = "tensorboard"
TENSORBOARD_VERSION: Final = b"brain.Event:2"
LOCK: Final = "lock"

MAX_WAITING: Final = 10_000  # entries kept while the disk is full; the oldest are dropped beyond that
RESERVED_BYTES: Final = 128 << 10
LOCK_PATIENCE_S: Final = 1.0  # for a process that only checks whether the lock is free

Tell: TypeAlias = Callable[[str], None]
State: TypeAlias = Literal["preparing", "running", "interrupted", "diverged", "failed", "done"]


def read_command(folder: Path) -> dict[str, Any]:
    """The command that started the run in a folder. ConfigError if the folder holds no run."""
    if not (folder / COMMAND).is_file():
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{folder} {what}: there is no {COMMAND}; give the folder of a run")
    return read_json(folder / COMMAND)


def is_done(folder: Path) -> bool:
    """Whether the run in the folder is finished."""
    return (folder / STATUS).exists() and read_status(folder).get("state") == "done"


def read_status(folder: Path) -> dict[str, Any]:
    """The last status of the run; empty if it cannot be read, as after a power cut."""
    try:
        status = read_json(folder / STATUS)
    except ConfigError:
        return {}
    if status.get("state") == "exploded":  # as earlier versions wrote
        status["state"] = "diverged"
    return status


def read_json(path: Path) -> dict[str, Any]:
    """One of the folder's JSON files."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run folder?") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({describe_error(error)}); remove it, or give another --out") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged (not an object); remove it, or give another --out")
    return cast(dict[str, Any], content)


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically and durably."""
    with replace_on_success(path) as file:
        file.write(json.dumps(to_json_value(content), indent=1, allow_nan=False).encode() + b"\n")


class FailureNotes:
    """Reports a failure to write when it begins, and not again while it lasts."""

    def __init__(self, tell: Tell) -> None:
        self.tell, self.failing = tell, set[str]()

    @contextlib.contextmanager
    def note_once(self, problem: str, consequence: str) -> Generator[None]:
        """Reports an OSError inside, once, instead of letting it stop the run."""
        try:
            yield
            self.failing.discard(problem)
        except OSError as error:
            if problem not in self.failing:
                self.failing.add(problem)
                self.tell(f"{problem} ({error.strerror or error}); {consequence}")


class DiskReserve:
    """A little disk space, reserved so that a run can still report that the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self) -> None:
        """Reserves the space, if there is any."""
        with contextlib.suppress(OSError):
            if not self.path.exists():
                self.path.write_bytes(bytes(RESERVED_BYTES))

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def use_for(self, write: Callable[[], None]) -> None:
        """Writes a message, in the reserved space if the disk is full."""
        try:
            write()
        except OSError:
            self.release()
            write()


class AppendLog:
    """A file to which entries are appended, each completely or not at all. `tell` is called once when the disk is full,
    and once when there is space again; a `reserve` is used up first."""

    def __init__(self, path: Path, tell: Tell, reserve: DiskReserve | None = None) -> None:
        self.path, self.tell, self.reserve = path, tell, reserve
        self.failing = False
        self._waiting: list[bytes] = []
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def append(self, entry: bytes) -> None:
        """Appends an entry. On return it has been passed to the operating system, or it waits for disk space."""
        with self._lock:
            self._waiting.append(entry)
            write = partial(self._write, b"".join(self._waiting))
            try:
                write() if self.reserve is None else self.reserve.use_for(write)
            except OSError as error:
                del self._waiting[:-MAX_WAITING]
                if not self.failing:
                    self.tell(f"{self.path} cannot be written ({error.strerror}); the run continues and will retry")
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

    def cut_partial_line(self) -> None:
        """Removes a last line that a crash left incomplete."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def _write(self, content: bytes) -> None:
        """Writes all or nothing: half an entry would corrupt the next one."""
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
    """A row as one line of standard JSON, with NaN and infinities as strings."""
    return json.dumps(to_json_value(row), allow_nan=False, default=_scalar).encode() + b"\n"


def to_json_value(value: Any) -> Any:
    """A value as JSON can hold it: tuples as lists; "nan", "inf" and "-inf" for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in cast(list[Any], value)]
    return value


def parse_rows(path: Path) -> list[dict[str, Any] | None]:
    """Parses a file of rows, with None for a line that is not a row. A last line that a crash cut off is ignored."""
    content = path.read_bytes() if path.exists() else b""
    rows: list[dict[str, Any] | None] = []
    for line in filter(bytes.strip, content.splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        rows.append(cast(dict[str, Any], row) if isinstance(row, dict) else None)
    is_cut = bool(rows) and rows[-1] is None and not content.endswith(b"\n")
    return rows[:-1] if is_cut else rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in parse_rows(path) if row is not None]


def rewind_rows(path: Path, step: int) -> None:
    """Drops the rows of later steps, the final score and lines that are not rows; at step 0 everything but the
    baseline. The file is replaced atomically, and only if it changes."""

    def is_kept(row: Mapping[str, Any]) -> bool:
        if row.get("kind") == "test" or (step == 0 and row.get("kind") != "baseline"):
            return False
        at = row.get("step")
        return not isinstance(at, int | float) or at <= step

    kept = b"".join(encode_row(row) for row in read_rows(path) if is_kept(row))
    if path.exists() and kept != path.read_bytes():
        with replace_on_success(path) as file:
            file.write(kept)


def _scalar(value: Any) -> Any:
    """A number of torch or numpy as a Python number; anything else as text."""
    item = getattr(value, "item", None)
    try:
        return to_json_value(item()) if callable(item) else str(value)
    except (RuntimeError, ValueError):
        return str(value)


class RunLock(FileLock):
    """Held from construction until `release`, or until this process ends."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        try:
            super().__init__(folder / LOCK, patience_s=LOCK_PATIENCE_S)
        except LockTaken:
            found = read_holder(folder)
            who = f"process {found.get('pid', '?')} on {found.get('host', '?')} since {found.get('started', '?')}"
            raise ConfigError(f"{folder} is in use by {who}; wait for it, stop it, or give another --out") from None
        if self.obstacle is not None:
            tell(f"{folder} is on a file system without locks ({self.obstacle}); make sure that only one job uses it")
        try:
            content = {"pid": os.getpid(), "host": socket.gethostname(), "started": now()}
            assert self.file is not None
            os.ftruncate(self.file.fileno(), 0)
            self.file.write(json.dumps(content).encode() + b"\n")
        except BaseException:
            self.release()
            raise


def read_holder(folder: Path) -> dict[str, Any]:
    """What the last holder of the lock wrote about itself; empty if that cannot be read."""
    try:
        return read_json(folder / LOCK)
    except ConfigError:
        return {}


def is_held(folder: Path) -> bool:
    """Whether a live process holds the lock."""
    return is_locked(folder / LOCK)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class EventFile:
    """Metrics for TensorBoard, one file per start of a run. Rows with a `kind` are prefixed by it: train/loss."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        folder.mkdir(exist_ok=True)
        moment = time.time()
        name = f"{int(moment):010d}.{socket.gethostname()}.{os.getpid()}.{int(moment * 1e6) % 10**6}"
        self._file = AppendLog(folder / f"events.out.tfevents.{name}", tell)
        self._append(0, _field(3, TENSORBOARD_VERSION))

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the numbers of a row, at its step."""
        kind = row.get("kind")
        prefix = f"{kind}/" if isinstance(kind, str) else ""
        values = b"".join(
            _field(1, _field(1, f"{prefix}{name}".encode()) + struct.pack("<Bf", 0x15, ctypes.c_float(value).value))
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        )
        if values:
            self._append(int(row.get("step", 0)), _field(5, values))

    def restart(self, step: int) -> None:
        """Hides the events of later steps that were written before."""
        self._append(step + 1, _field(7, b"\x08\x01"))  # SessionLog: START

    def _append(self, step: int, content: bytes) -> None:
        """An Event: time, step and one content field, framed as in TFRecord files."""
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content
        length = struct.pack("<Q", len(event))
        sums = [struct.pack("<I", masked_crc(part)) for part in (length, event)]
        self._file.append(length + sums[0] + event + sums[1])

    def close(self) -> None:
        self._file.close()


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

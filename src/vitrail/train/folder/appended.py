"""Files that grow at their end while a run goes on, and outlive a full disk: what found no room is kept and written as
soon as there is some."""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final, cast

from vitrail.core.storage import replacing

WAITING: Final = 10_000  # entries that are kept while there is no room; the oldest are given up beyond
RESERVED: Final = 128 << 10  # bytes


class Reserve:
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


class Appended:
    """A file at whose end entries are put, each whole or not at all. `tell` hears once that there is no room, and once
    that there is again; a `reserve` is used up first."""

    def __init__(self, path: Path, tell: Callable[[str], None], reserve: Reserve | None = None) -> None:
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


def as_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON that every reader takes: NaN and the infinities, which JSON lacks, in words."""
    return json.dumps(plain(row), allow_nan=False, default=_scalar).encode() + b"\n"


def plain(value: Any) -> Any:
    """A value as JSON will hold it: tuples as lists, numbers that are none as "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
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
    kept = b"".join(as_line(row) for row in read_rows(path) if not _later(row, step))
    if kept != path.read_bytes():
        with replacing(path) as file:
            file.write(kept)


def _later(row: Mapping[str, Any], step: int) -> bool:
    found = row.get("step")
    again = row.get("kind") == "test" or (step == 0 and row.get("kind") != "baseline")
    return again or (isinstance(found, int | float) and found > step)


def _scalar(value: Any) -> Any:
    """A number of torch or numpy as Python's own; anything else in words."""
    item = getattr(value, "item", None)
    try:
        return plain(item()) if callable(item) else str(value)
    except (RuntimeError, ValueError):
        return str(value)

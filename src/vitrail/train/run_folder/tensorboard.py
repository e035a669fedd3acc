"""Metrics for TensorBoard, in its own event files. They take a few bytes of protobuf each, so its package is needed to
look at them but not to write them.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vitrail.data.datasets.file_formats import masked_crc
from vitrail.train.run_folder.files import AppendLog

FOLDER: Final = "tensorboard"
VERSION: Final = b"brain.Event:2"


class EventFile:
    """One file of events for each start of a run. Rows with a `kind` get its name before theirs: train/loss."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        folder.mkdir(exist_ok=True)
        moment = time.time()
        name = (
            f"events.out.tfevents.{int(moment):010d}.{socket.gethostname()}.{os.getpid()}.{int(moment * 1e6) % 10**6}"
        )
        self._file = AppendLog(folder / name, tell)
        self._file.append(_record(_event(moment, 0, _field(3, VERSION))))

    def add(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row, at its step."""
        kind = row.get("kind")
        prefix = f"{kind}/" if isinstance(kind, str) else ""
        values = b"".join(
            _field(1, _field(1, f"{prefix}{name}".encode()) + b"\x15" + struct.pack("<f", _single(value)))
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        )
        if values:
            self._file.append(_record(_event(time.time(), int(row.get("step", 0)), _field(5, values))))

    def restart(self, step: int) -> None:
        """Events of steps after this one, written before, are no longer shown."""
        self._file.append(_record(_event(time.time(), step + 1, _field(7, b"\x08\x01"))))  # SessionLog: START

    def close(self) -> None:
        self._file.close()


def _event(moment: float, step: int, content: bytes) -> bytes:
    """An Event: when, at which step, and one thing that it holds."""
    return b"\x09" + struct.pack("<d", moment) + b"\x10" + _varint(step) + content


def _record(content: bytes) -> bytes:
    """As record files frame it."""
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc(length)) + content + struct.pack("<I", masked_crc(content))


def _field(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _single(value: float) -> float:
    """Within what four bytes hold."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)

"""Work that may crash or hang, done in a child that reports line by line."""

import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NamedTuple


class Reports(NamedTuple):
    """The lines of a child, and how it ended: "crash" unless it was told to stop for being silent; its exit status."""

    lines: list[tuple[Any, ...]]
    ended: str
    status: int


def reports(work: Callable[[int], None], patience: float) -> Reports:
    """Runs `work` in a forked child with the end of a pipe, into which it writes a JSON list a line. A child that says
    nothing for `patience` seconds is killed."""
    out, into = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(out)
            work(into)
            status = 0
        finally:
            os._exit(status)
    os.close(into)
    pending, ended = b"", "crash"
    while True:
        ready, _, _ = select.select([out], [], [], patience)
        if not ready:
            ended = "hang"
            os.kill(process, signal.SIGKILL)
            break
        piece = os.read(out, 1 << 16)
        if not piece:
            break
        pending += piece
    os.close(out)
    _, status = os.waitpid(process, 0)
    lines = [tuple(json.loads(line)) for line in pending.split(b"\n")[:-1]]
    return Reports(lines, ended, os.waitstatus_to_exitcode(status))

"""Finds out which process is missing. Backends report that a collective timed out, but not for which rank it waited.

Every process counts its collectives, and a thread of its own writes a heartbeat with that count to the rendezvous store
once per second. Rank 0 reads them all. A process without a heartbeat was killed or stopped; one that is alive but falls
behind the others hangs in its own code. Either is named, and all processes end.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

SILENCE_S = 60.0  # live processes send a heartbeat every second
EXIT = 1  # exit status of a process ended by its watchdog


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of another process, and when its numbers last changed by the local clock."""

    beat: int = -1
    moves: int = -1
    beaten: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)

    def see(self, beat: int, moves: int) -> None:
        now = time.monotonic()
        if beat != self.beat:
            self.beat, self.beaten = beat, now
        if moves != self.moves:
            self.moves, self.moved = moves, now


class RankWatchdog(threading.Thread):
    """The watchdog thread. The main thread increments `moves`; everything else belongs to the watchdog."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float):
        super().__init__(name="vitrail watch", daemon=True)
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s
        self.interval = min(1.0, timeout_s / 8)
        self.moves = 0
        self.signs = {other: Heartbeat() for other in range(size) if other != rank}
        self._beats = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.store.set(_key("who", rank), f"{socket.gethostname()}, process {os.getpid()}")
        self._beat()

    def run(self) -> None:
        while not self._over.wait(self.interval):
            try:
                with self._lock:
                    self._beat()
                    lost = self._find_lost()
            except RuntimeError as error:
                lost = self._describe_lost_store(error)
            if lost and not self._over.is_set():
                self._end_process(lost)

    def stop(self) -> None:
        self._over.set()

    def leave_reason(self, error: BaseException) -> None:
        """Records why this process ends, for the others to report."""
        with contextlib.suppress(RuntimeError):  # the store may be gone before us
            self.store.set(_key("ended", self.rank), f"{type(error).__name__}: {_first_line(error)}")

    def find_missing(self) -> str:
        """The ranks without a heartbeat for three intervals, after a collective failed; empty if all are alive."""
        try:
            with self._lock:
                before = self._read_signs(self.signs)
            time.sleep(3 * self.interval)
            with self._lock:
                pairs = zip(self.signs, before, self._read_signs(self.signs), strict=True)
                gone = [rank for rank, (earlier, _), (later, _) in pairs if earlier == later]
                return self._describe(gone, "has ended") if gone else ""
        except RuntimeError as error:
            return self._describe_lost_store(error)

    def _describe_lost_store(self, error: RuntimeError) -> str:
        """The store lives in the launcher, or in the first process where there is none."""
        return f"rank 0 of {self.size} or its launcher has ended: the store is gone ({_first_line(error)})"

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(_key("sign", self.rank), f"{self._beats} {self.moves}")

    def _read_signs(self, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Beats and moves of some processes."""
        signs = self.store.multi_get([_key("sign", rank) for rank in ranks])
        return [(int(beat), int(moves)) for beat, moves in (sign.split() for sign in signs)]

    def _find_lost(self) -> str:
        """The verdict on lost ranks, or "". Rank 0 judges all; the others read its verdict and judge rank 0."""
        if self.store.check([_key("lost", 0)]):
            return self.store.get(_key("lost", 0)).decode()
        judged = [0] if self.rank else list(self.signs)
        for rank, sign in zip(judged, self._read_signs(judged), strict=True):
            self.signs[rank].see(*sign)
        return self._judge(judged)

    def _judge(self, ranks: list[int]) -> str:
        now = time.monotonic()
        silent = min(self.timeout_s, SILENCE_S)
        dead = [rank for rank in ranks if now - self.signs[rank].beaten > silent]
        if dead:
            return self._describe(dead, f"gave no sign of life for {silent:.0f} s: killed, stopped or cut off")
        front = max(self.moves, *(self.signs[rank].moves for rank in ranks))
        late = [rank for rank in ranks if now - self.signs[rank].moved > self.timeout_s]
        behind = [rank for rank in late if self.signs[rank].moves < front]
        return self._describe(behind, f"hangs: others waited {self.timeout_s:.0f} s for it") if behind else ""

    def _describe(self, ranks: list[int], what: str) -> str:
        parts: list[str] = []
        for rank in ranks[:8]:
            who, why = self._read("who", rank), self._read("ended", rank)
            name = f"rank {rank} of {self.size}{f' ({who})' if who else ''}"
            parts.append(f"{name} {what}{f' with {why}' if why else ''}")
        return "; ".join(parts) + (f"; and {len(ranks) - 8} more" if len(ranks) > 8 else "")

    def _read(self, what: str, rank: int) -> str:
        key = _key(what, rank)
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _end_process(self, lost: str) -> None:
        """Prints the verdict and ends this process. The main thread may be blocked in a kernel that no exception can
        interrupt, so the process exits directly."""
        with contextlib.suppress(RuntimeError):
            self.store.set(_key("lost", 0), lost)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"rank {self.rank} stops: {lost}\n")
            if lost.startswith(f"rank {self.rank} of"):
                faulthandler.dump_traceback(sys.stderr)  # shows where this process hangs
            sys.stderr.flush()
        if self.rank == 0:
            time.sleep(3 * self.interval)  # the store may live here; others still need to read it
        os._exit(EXIT)


def _key(what: str, rank: int) -> str:
    return f"vitrail/{what}/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]

"""Saves checkpoints while the run continues: a thread writes a snapshot, and the old checkpoint is kept until the new
one is complete.

Each process writes its own shard into one folder; the first waits for all of them, lists them in `checkpoint.json` and
gives the folder its name. They communicate through files only, because a collective from a thread would interfere with
those of training.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.store import layout
from vitrail.checkpoint.store.layout import ShardNote, Snapshot, TensorPiece, crash_point, list_checkpoints, part_name
from vitrail.checkpoint.store.reader import describe_fault, describe_shard, open_saved, verify
from vitrail.core.atomic_files import sync_folder
from vitrail.core.errors import ConfigError, WeightsError

FIRST_RETRY: Final = 30.0  # seconds after a save that failed; doubled each time
LAST_RETRY: Final = 600.0
GRACE: Final = 5.0  # seconds for the other processes once this one's run is over


class CheckpointWriter:
    """Writes the checkpoints of a run to `folder`, and keeps the newest `keep` of them.

    `token` is the same for all processes of a start, and different for the next. `tell` is called with failures, also
    from the writing thread; disk errors are never raised. `patience` is how long the first process waits for the
    others' shards.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world: int = 1,
        token: str,
        keep: int,
        tell: Callable[[str], None],
        patience: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not token.isalnum() or keep < 1:
            raise ConfigError(f"token={token!r} must be letters and digits, keep={keep} at least 1")
        self.folder, self.rank, self.world, self.token, self.keep = folder, rank, world, token, keep
        self.tell, self.patience, self.clock = tell, patience, clock
        self.last: int | None = None  # the newest step that was saved
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._attempt = 0  # the same in all processes, which save together
        self._failures, self._retry = 0, math.inf
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            try:
                layout.tidy(folder, token)
            except OSError as error:
                tell(f"what an earlier crash left in {folder} could not be removed ({describe_fault(error)})")
            self.last = next(iter(list_checkpoints(folder)), None)

    def newest(self) -> int | None:
        """The newest step that was saved and whose checkpoint has not been removed since."""
        standing = list_checkpoints(self.folder)
        return self.last if self.last in standing else next(iter(standing), None)

    @property
    def failing(self) -> bool:
        """Whether the last save that ended did not succeed."""
        return self._failures > 0

    def retry_due(self) -> bool:
        """Whether it is time to save again after a failure. The first process learns of every failure, so its answer
        decides; the other processes always return False."""
        writing = self._thread is not None and self._thread.is_alive()
        return self.rank == 0 and self.failing and not writing and self.clock() >= self._retry

    def save(self, step: int, pieces: Mapping[str, TensorPiece], facts: Mapping[str, Any]) -> None:
        """Copies the current state and starts writing it, after waiting for a save that is still in progress.

        All processes call this at the same step, each with the pieces it holds (a replicated tensor comes from one of
        them, and a process may have none). The facts of the first process count.
        """
        self.wait()
        self._attempt += 1
        work = (step, layout.take_snapshot(pieces), layout.encode_facts(facts))
        # Not a daemon: a run that ends without `close` still finishes its last checkpoint.
        self._thread = threading.Thread(target=self._save, args=work, name=f"checkpoint {step}", daemon=False)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for the save in progress, and returns whether the last one succeeded: for the whole checkpoint in the
        first process, for their shard in the others."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return not self.failing

    def close(self) -> bool:
        """As `wait`, but allows only a few seconds for the others' shards: at the end of a run they may be lost."""
        if self.world > 1:
            self._over.set()
        return self.wait()

    def _save(self, step: int, snapshot: Snapshot, facts: str) -> None:
        """The work of the thread. Failures are reported, and nothing is raised."""
        place = self.folder / f".saving-{layout.step_name(step)}-{self.token}"
        try:
            self._write(place, step, snapshot, facts)
        except Exception as error:
            self._report_failure(place, step, error)
        else:
            if self.failing and self.rank == 0:
                self.tell(f"checkpoint of step {step} is saved; saving works again")
            self.last, self._failures, self._retry = step, 0, math.inf
            if self.rank == 0:
                self._prune(step)

    def _write(self, place: Path, step: int, snapshot: Snapshot, facts: str) -> None:
        crash_point("saving", "before make")
        self.folder.mkdir(exist_ok=True)  # it may have been removed to free space
        place.mkdir(exist_ok=True)
        crash_point("saving", "after make")
        note = None
        if snapshot.tensors:
            snapshot.settle()
            path = place / f"shard-{self.rank:05d}-of-{self.world:05d}.safetensors"
            description = {"step": step, "rank": self.rank, "world": self.world, "pieces": snapshot.where}
            write_sealed(path, snapshot.tensors, description, partial(crash_point, "shard"))
            snapshot.tensors.clear()  # frees the memory while waiting for the others
            note = describe_shard(path)
        if self.rank:
            self._report(place, {"shard": None if note is None else asdict(note)})
            return
        shards = [shard for shard in (note, *self._gather(place)) if shard is not None]
        layout.write_manifest(place / layout.MANIFEST, step=step, world=self.world, shards=shards, facts=facts)
        for rank in range(1, self.world):
            crash_point("part", "before unlink")
            (place / part_name(rank)).unlink()
            crash_point("part", "after unlink")
        open_saved(place)  # only a checkpoint that can be opened again gets its name
        sync_folder(place)
        target = self.folder / layout.step_name(step)
        if target.exists() and _holds_same(target, place):
            layout.remove(place)
            sync_folder(self.folder)
        else:
            layout.commit(place, target, self.token)

    def _report(self, place: Path, what: dict[str, Any]) -> None:
        """Leaves a note for the first process, which may commit the folder under its final name as soon as it sees the
        note."""
        content = json.dumps({"attempt": self._attempt, **what}).encode()
        layout.write(place / part_name(self.rank), "part", content, folder_too=False)

    def _gather(self, place: Path) -> list[ShardNote | None]:
        """Waits for the notes of the other processes, in order."""
        found: dict[int, ShardNote | None] = {}
        begun, ended, pause = time.monotonic(), math.inf, 0.005
        while True:
            there = {entry.name for entry in place.iterdir()}
            for rank in range(1, self.world):
                if rank in found or part_name(rank) not in there:
                    continue
                said = json.loads((place / part_name(rank)).read_bytes())
                if said["attempt"] != self._attempt:
                    continue  # from a failed save of this step
                if "failed" in said:
                    raise WeightsError(f"process {rank}: {said['failed']}; see its log")
                found[rank] = None if said["shard"] is None else ShardNote(**said["shard"])
            if len(found) == self.world - 1:
                return [found[rank] for rank in range(1, self.world)]
            now = time.monotonic()
            if ended == math.inf and (self._over.is_set() or not threading.main_thread().is_alive()):
                ended = now
            if now > min(begun + self.patience, ended + GRACE):
                missing = ", ".join(str(rank) for rank in range(1, self.world) if rank not in found)
                waited = f"after {now - begun:.0f} s the shards of these processes are missing: {missing}"
                raise TimeoutError(0, waited, str(place))
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def _report_failure(self, place: Path, step: int, error: Exception) -> None:
        cause = describe_fault(error)
        if isinstance(error, OSError) and not error.filename:
            cause = f"{place}: {cause}"
        with contextlib.suppress(OSError):  # the first process then times out
            if self.rank:
                self._report(place, {"failed": cause})
            else:
                layout.remove(place)
        pause = min(FIRST_RETRY * 2**self._failures, LAST_RETRY)
        what = f"checkpoint of step {step} was not saved: {cause}"
        if self.rank:
            self.tell(f"{what} (process {self.rank})")
        else:
            newest = self.newest()
            kept = "there is none before it" if newest is None else f"the last good one, step {newest}, is intact"
            self.tell(f"{what}; {kept}; the next try is in {pause:.0f} s")
        self._failures, self._retry = self._failures + 1, self.clock() + pause

    def _prune(self, step: int) -> None:
        """Removes all but the newest. A checkpoint of a later step belongs to an abandoned course, because it was
        damaged or the run was rewound: resuming from it would mix the two."""
        try:
            layout.tidy(self.folder, self.token)
            standing = list_checkpoints(self.folder)
            for found in [found for found in standing if found > step]:
                self.tell(f"checkpoint of step {found} belongs to an abandoned course of this run; it is removed")
                layout.discard(standing.pop(found))
            for old in list(standing)[self.keep :]:
                layout.discard(standing[old])
        except OSError as error:
            self.tell(f"an old checkpoint could not be removed ({describe_fault(error)}); the next save tries again")


def _holds_same(standing: Path, fresh: Path) -> bool:
    """Whether an existing checkpoint of that name is intact and has the same contents."""
    try:
        old, new = open_saved(standing), open_saved(fresh)
        verify(old)
    except (WeightsError, OSError):
        return False
    return old.notes == new.notes and old.facts == new.facts

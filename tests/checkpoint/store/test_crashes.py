"""Killed at every point of a save, a run finds its old checkpoint or its new one, whole; on a full disk, too."""

import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint.store.crash_points import CRASH_POINTS
from tests.checkpoint.store.states import closed, collected, no_message, same, saved_once, shared, state, whole
from tests.forked import reports
from tests.lanes import rest_slow
from vitrail.checkpoint.store import layout as points
from vitrail.checkpoint.store.layout import list_checkpoints
from vitrail.checkpoint.store.reader import SavedCheckpoint, latest
from vitrail.checkpoint.store.writer import CheckpointWriter


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kill leaves the system's memory of a file as it is, so nothing here has to wait for a disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield
    points.reached = points.ignore_point


def die_at(number: int) -> Callable[[str], None]:
    """A hook that kills this process when it hears of its `number`-th point."""
    left = itertools.count()

    def reached(point: str) -> None:
        if next(left) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def save_one(folder: Path, step: int, *, keep: int = 1) -> None:
    store = CheckpointWriter(folder, token="b2", keep=keep, tell=lambda text: None)
    store.save(step, whole(state(step)), {"step": step})
    store.close()


def points_of(folder: Path, step: int, before: Callable[[Path], None]) -> list[str]:
    """Every point that a save comes to, in order."""
    before(folder)
    seen: list[str] = []
    points.reached = seen.append
    save_one(folder, step)
    points.reached = points.ignore_point
    return seen


def one_older(folder: Path) -> None:
    """What a run with one checkpoint and the rest of a cut-off save has."""
    saved_once(folder, 1)
    cut_off = folder / ".saving-00000009-old"
    cut_off.mkdir()
    (cut_off / "shard-00000-of-00001.safetensors").write_bytes(b"half")


def same_step(folder: Path) -> None:
    """What a run has that comes to a step again after its settings were changed."""
    saved_once(folder, 2, facts={"settings": "old"})


def the_newest(folder: Path) -> SavedCheckpoint:
    saved = latest(folder, no_message)
    assert saved is not None
    assert same(saved, state(saved.step))
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("before", rest_slow([one_older, same_step]))
def test_killed_at_every_point_of_a_save(before: Callable[[Path], None], tmp_path: Path) -> None:
    """The next start, too, is killed at its points; it then saves as if nothing had happened."""
    trail = points_of(tmp_path / "trail", 2, before)
    outcomes: list[str] = []
    for number, point in enumerate(trail):
        folder = tmp_path / str(number)
        before(folder)
        ended = reports(lambda _, n=number, f=folder: (setattr(points, "reached", die_at(n)), save_one(f, 2))[0], 30)
        assert ended.status == -signal.SIGKILL, (number, point)
        saved = the_newest(folder)
        new = saved.facts == {"step": 2}
        outcomes.append("new" if new else "old")
        assert new or saved.facts == ({"step": 1} if before is one_older else {"settings": "old"})
        save_one(folder, 2)  # the resumed run comes to the same step
        assert the_newest(folder).facts == {"step": 2}
        assert [entry.name for entry in folder.iterdir()] == ["00000002"], (number, point)
    turn = outcomes.index("new")
    assert outcomes == ["old"] * turn + ["new"] * (len(outcomes) - turn)  # the rename is the moment, and the only one
    assert trail[turn] == "checkpoint: after rename"
    assert len(trail) > 30


def two_processes(folder: Path, kill_rank: int, number: int) -> list[int]:
    """Two processes save step 2 together; one of them is killed at one of its points. How they ended. The first waits
    for the second until that has come to its end, whatever the machine is busy with."""
    out, into = os.pipe()
    ids: list[int] = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.close(into)
                if rank == kill_rank:
                    points.reached = die_at(number)
                store = CheckpointWriter(folder, rank=rank, world=2, token="b2", keep=1, tell=lambda text: None)
                store.save(2, shared(state(2), rank, 2), {"step": 2})
                if rank == 0:
                    os.read(out, 1)
                store.close()
            finally:
                os._exit(0)
        ids.append(child)
    second = os.waitpid(ids[1], 0)[1]
    os.close(into)
    first = os.waitpid(ids[0], 0)[1]
    os.close(out)
    return [os.waitstatus_to_exitcode(status) for status in (first, second)]


@pytest.mark.slow
@pytest.mark.parametrize("kill_rank", [0, 1])
def test_one_of_two_processes_killed_at_every_point(
    kill_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[str] = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        saved_once(folder, 1, world=2)
        with monkeypatch.context() as patch:  # the one that is left need not wait long for the one that is killed
            patch.setattr("vitrail.checkpoint.store.writer.GRACE", 0.25)
            ended = two_processes(folder, kill_rank, number)
        if ended == [0, 0]:  # past its last point
            break
        assert ended[kill_rank] == -signal.SIGKILL
        saved = the_newest(folder)
        assert saved.facts == {"step": saved.step}
        outcomes.append("new" if saved.step == 2 else "old")
        save_one(folder, 2)
        assert [entry.name for entry in folder.iterdir()] == ["00000002"], number
    assert len(outcomes) > 12
    assert outcomes == sorted(outcomes, reverse=True)
    assert {"old", "new"} == set(outcomes)


def test_the_first_process_commits_as_soon_as_it_has_seen_the_note_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = threading.Event()

    def wait_for_the_commit(point: str) -> None:
        if point == "checkpoint: after rename":
            committed.set()
        elif point == "part: after rename":
            assert committed.wait(60)

    monkeypatch.setattr(points, "reached", wait_for_the_commit)
    saved_once(tmp_path / "two", 1, world=2)
    assert committed.is_set()


def test_every_crash_point_is_listed_and_met(tmp_path: Path) -> None:
    """The list is what saves come to: no more, no less."""
    seen: set[str] = set()
    for number, before in enumerate((one_older, same_step)):
        seen |= set(points_of(tmp_path / str(number), 2, before))
    points.reached = seen.add
    saved_once(tmp_path / "two", 1, world=2)
    assert seen == set(CRASH_POINTS)
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS)


def test_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut, unlike a kill, loses what was not synced: each file, then its folder, before the rename; and the
    rename itself before anything older is removed."""
    saved_once(tmp_path, 1)
    events: list[str] = []
    real_sync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def name_of(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "folder" if path == tmp_path else "inner folder" if path.is_dir() else "file"

    def sync(descriptor: int) -> None:
        events.append(f"sync {name_of(descriptor)}")
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(f"name {target.name}" if target.parent == tmp_path else "inner name")
        real_rename(source, target)

    def replace(source: Path, target: Path) -> None:
        events.append("inner name")
        real_replace(source, target)

    store = CheckpointWriter(tmp_path, token="b2", keep=1, tell=no_message)
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("what a descriptor stands for cannot be asked here")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    store.save(2, whole(state(2)), {})
    assert store.close()
    written = ["sync file", "inner name", "sync inner folder"]
    head = [*written, *written, "sync inner folder", "name 00000002", "sync folder"]
    assert events[: len(head)] == head
    assert [event for event in events[len(head) :] if event.startswith("name")] == [
        next(event for event in events if event.startswith("name .removing-00000001"))
    ]


class TestFullDisk:
    def test_at_every_point(self, tmp_path: Path) -> None:
        """Whatever the disk refuses, the run hears no exception, the old checkpoint stays and the next save works."""
        trail = points_of(tmp_path / "trail", 2, one_older)
        for number, point in enumerate(trail):
            folder = tmp_path / str(number)
            one_older(folder)
            left = itertools.count()

            def full(_: str, left: Iterator[int] = left, number: int = number) -> None:
                if next(left) == number:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            said, tell = collected()
            points.reached = full
            store = CheckpointWriter(folder, token="b2", keep=1, tell=tell)
            store.save(2, whole(state(2)), {"step": 2})
            store.wait()
            points.reached = points.ignore_point
            assert len(said) == 1, (point, said)
            assert "No space left on device" in said[0]
            begun, named, safe = (
                trail.index(name)
                for name in ("saving: before make", "checkpoint: after rename", "checkpoint: after folder sync")
            )
            assert the_newest(folder).step == (1 if begun <= number < named else 2), point
            assert store.failing == (begun <= number <= safe), point  # a name that may not be on disk is not a success
            if store.failing:
                assert "checkpoint of step 2 was not saved" in said[0]
                assert "the last good one, step 1, is intact" in said[0]
                assert str(folder) in said[0]
            store.save(3, whole(state(3)), {"step": 3})
            assert store.close()
            assert [entry.name for entry in folder.iterdir()] == ["00000003"], (point, said)

    def test_the_system_cuts_a_write_off(self, tmp_path: Path) -> None:
        """The limit of the system on a file's size, which ends a write in the middle, as a full disk does."""
        saved_once(tmp_path, 1)

        def work(out: int) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            said, tell = collected()
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
            store = CheckpointWriter(tmp_path, token="b2", keep=2, tell=tell)
            store.save(2, whole(state(2)), {"step": 2})
            first = store.wait()
            left = sorted(entry.name for entry in tmp_path.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            store.save(3, whole(state(3)), {"step": 3})
            os.write(out, json.dumps([first, left, store.close(), said]).encode() + b"\n")

        ended = reports(work, 30)
        assert ended.status == 0
        first, left, second, said = ended.lines[0]
        assert not first
        assert left == ["00000001"]
        assert second
        assert "shard-00000-of-00001.safetensors: cannot be written (File too large)" in said[0]
        assert said[1] == "checkpoint of step 3 is saved; saving works again"
        assert list(list_checkpoints(tmp_path)) == [3, 1]

    def test_a_disk_that_is_really_full(self, tmp_path: Path) -> None:
        """A file system of its own with room for two checkpoints, of which rubbish takes one."""
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], capture_output=True)
        if mounted.returncode:
            pytest.skip("a file system cannot be mounted here")
        try:
            folder = tmp_path / "run"
            tensors = {"a": torch.arange(40_000.0)}
            said, tell = collected()
            now = 0.0
            store = CheckpointWriter(folder, token="b2", keep=1, tell=tell, clock=lambda: now)
            store.save(1, whole(tensors), {})
            assert store.wait()
            (tmp_path / "rubbish").write_bytes(bytes(250_000))
            for tries in range(3):
                store.save(2 + tries, whole(tensors), {})
                assert not store.wait()
                assert f"the last good one, step 1, is intact; the next try is in {30 * 2**tries} s" in said[-1]
            assert the_saved(folder, tensors) == 1
            (tmp_path / "rubbish").unlink()
            store.save(9, whole(tensors), {})
            assert store.close()
            assert the_saved(folder, tensors) == 9
        finally:
            subprocess.run(["umount", tmp_path], check=True)

    def test_when_to_try_again(self, tmp_path: Path) -> None:
        """After 30 s, then twice as long each time up to ten minutes; a success starts over."""
        now, said = 0.0, list[str]()
        store = CheckpointWriter(tmp_path, token="b2", keep=1, tell=said.append, clock=lambda: now)
        assert not store.retry_due()
        bad = {"a": torch.tensor([float("inf")])}
        for pause in (30, 60, 120, 240, 480, 600, 600):
            store.save(1, whole(bad), {})
            assert not store.wait()
            assert store.failing
            assert not store.retry_due()
            now += pause - 1
            assert not store.retry_due()
            now += 1
            assert store.retry_due()
        store.save(1, whole(state(1)), {})
        assert store.wait()
        assert not store.failing
        assert not store.retry_due()
        store.save(2, whole(bad), {})
        store.wait()
        assert said[-1].endswith("the last good one, step 1, is intact; the next try is in 30 s")
        assert "tensor 'a' holds NaN or infinity" in said[-1]

    def test_among_several_the_first_decides(self, tmp_path: Path) -> None:
        said, tell = collected()
        stores = [
            CheckpointWriter(tmp_path, rank=rank, world=2, token="b2", keep=1, tell=tell, clock=lambda: 99.0)
            for rank in (0, 1)
        ]
        for store in stores:
            store.save(1, whole({f"a{store.rank}": torch.tensor([float("nan")])}), {})
        assert not closed(stores)
        assert all(store.failing for store in stores)
        assert not any(store.retry_due() for store in stores)
        stores[0].clock = stores[1].clock = lambda: 1e9
        assert [store.retry_due() for store in stores] == [True, False]
        assert len(said) == 2


def the_saved(folder: Path, tensors: dict[str, torch.Tensor]) -> int:
    saved = latest(folder, no_message)
    assert saved is not None
    assert same(saved, tensors)
    return saved.step

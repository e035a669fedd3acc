"""Locks on files: one holder, given back at the end of a process, not shared by forks; and the way Windows has them."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitrail.core.errors import ConfigError, DataError
from vitrail.core.locks import FAR, FileLock, LockTaken, is_locked, try_lock, unlock
from vitrail.data.tools.pack import JOURNAL, open_journal
from vitrail.train.run_folder.files import RunLock, is_held, read_holder

HOLD = """
import os, sys, time
from pathlib import Path
from vitrail.core.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
if os.fork():
    print("both run", flush=True)
time.sleep(60)
"""


class Windows:
    """msvcrt, as far as locks go: a byte of a file belongs to one handle, and nobody else may touch it."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], int] = {}
        self.module = SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=self.locking)

    def locking(self, handle: int, way: int, count: int) -> None:
        place = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        assert (place[1], count) == (FAR, 1)
        if way == self.module.LK_UNLCK:
            del self.taken[place]
        elif self.is_open(self.taken.get(place), place[0]) and self.taken[place] != handle:
            raise PermissionError(errno.EACCES, "Permission denied")
        else:
            self.taken[place] = handle

    @staticmethod
    def is_open(handle: int | None, file: int) -> bool:
        """Windows takes a lock back when its handle is closed."""
        try:
            return handle is not None and os.fstat(handle).st_ino == file
        except OSError:
            return False


@pytest.fixture(params=["posix", "windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "windows":
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", Windows().module)
        monkeypatch.delattr(os, "register_at_fork")
    return request.param


@pytest.mark.usefixtures("system")
def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    lock = FileLock(path)
    assert lock.obstacle is None
    assert is_locked(path)
    with pytest.raises(LockTaken):
        FileLock(path)
    lock.release()
    lock.release()
    assert not is_locked(path)
    FileLock(path, patience_s=1.0).release()


@pytest.mark.usefixtures("system")
def test_open_files_are_locked_and_unlocked(tmp_path: Path) -> None:
    with open(tmp_path / JOURNAL, "ab") as one, open(tmp_path / JOURNAL, "ab") as other:
        assert try_lock(one.fileno())
        assert not try_lock(other.fileno())
        with pytest.raises(DataError, match="another process is packing"), open_journal(tmp_path, {}):
            pass
        unlock(one.fileno())
        assert try_lock(other.fileno())


@pytest.mark.usefixtures("system")
@pytest.mark.slow
def test_a_run_is_refused_while_another_holds_them(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, lambda text: None)
    assert read_holder(tmp_path)["pid"] == os.getpid()
    assert is_held(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunLock(tmp_path, lambda text: None)
    with pytest.raises(LockTaken):
        FileLock(tmp_path / "lock")
    lock.release()
    FileLock(tmp_path / "lock").release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_it_ends_with_its_process_and_not_with_a_fork_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            with pytest.raises(LockTaken):
                FileLock(path)
            process.kill()
            process.wait()
            FileLock(path, patience_s=30).release()  # the fork lives on
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = FileLock(tmp_path / "lock")
    assert lock.obstacle == "No locks available"
    lock.release()
    assert not is_locked(tmp_path / "lock")

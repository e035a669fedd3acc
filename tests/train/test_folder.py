"""What a run leaves behind: nobody else gets in, a full disk loses nothing, and a person can tell what happened."""

import errno
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import reports
from vitrail import __version__
from vitrail.core.errors import ConfigError
from vitrail.data.datasets.file_formats import masked_crc, read_records
from vitrail.evaluation.result import describe_working_tree
from vitrail.train.run_folder import files as lock
from vitrail.train.run_folder.describe_run import describe_run
from vitrail.train.run_folder.files import is_done, read_command, read_rows
from vitrail.train.run_folder.run import NullRunFolder, RunFolder

CONFIG: dict[str, Any] = {"name": "tiny", "optim": {"lr": 0.001, "betas": (0.9, 0.999)}, "data": {"workers": 2}}
COMMAND = {"verb": "pretrain", "go_on": "vitrail pretrain --resume runs/tiny"}


def ignored(text: str) -> None:
    del text


def opened(path: Path, **changed: Any) -> RunFolder:
    return RunFolder.open(path, **{"config": CONFIG, "command": COMMAND, "tell": ignored} | changed)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


class TestOpening:
    def test_a_new_run(self, tmp_path: Path) -> None:
        with opened(tmp_path / "runs" / "tiny") as folder:
            assert load(folder.path / "config.json") == {**CONFIG, "optim": {"lr": 0.001, "betas": [0.9, 0.999]}}
            assert read_command(folder.path) == COMMAND
            found = load(folder.path / "environment.json")
            assert found["torch"] == torch.__version__
            assert found["vitrail"] == __version__  # also where nothing is installed
            assert {"python", "platform", "devices", "vitrail", "git", "host"} <= found.keys()
            status = load(folder.path / "status.json")
            assert (status["state"], status["pid"], status["next"]) == ("preparing", os.getpid(), COMMAND["go_on"])
            assert folder.next == COMMAND["go_on"]

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"file/run cannot be written \(Not a directory\)"):
            opened(tmp_path / "file" / "run")
        with pytest.raises(ConfigError, match=r"file cannot be written \(File exists\)"):
            opened(tmp_path / "file")

    def test_a_folder_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        with monkeypatch.context() as patch:
            patch.setattr(lock, "replace_on_success", refuse)
            with pytest.raises(ConfigError, match=r"cannot be written \(Permission denied\); .* another --out"):
                opened(tmp_path)
        opened(tmp_path).close()  # the lock was given back

    def test_the_other_processes_write_nothing(self, tmp_path: Path) -> None:
        with NullRunFolder(tmp_path / "run") as folder:
            folder.note("hello")
            folder.record({"step": 1})
            folder.set_status("running", step=1)
            folder.rewind(0)
            folder.write_json("a.json", {})
            assert (folder.path, folder.warnings, folder.next) == (tmp_path / "run", [], "")
        assert not (tmp_path / "run").exists()

    def test_git_is_asked_and_may_be_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert describe_working_tree(tmp_path) is None
        git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
        try:
            subprocess.run([*git, "init", "-q"], check=True)
        except FileNotFoundError:
            pytest.skip("git is not installed here")
        (tmp_path / "a").write_text("1")
        subprocess.run([*git, "add", "a"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
        clean = describe_working_tree(tmp_path)
        assert clean is not None
        assert (len(clean["commit"]), clean["dirty"]) == (40, False)
        (tmp_path / "a").write_text("2")
        assert describe_working_tree(tmp_path) == {**clean, "dirty": True}
        monkeypatch.setenv("PATH", "")
        assert describe_working_tree(tmp_path) is None


class TestConfig:
    def test_the_same_again(self, tmp_path: Path) -> None:
        opened(tmp_path).close()
        opened(tmp_path).close()

    def test_differing_fields_are_named(self, tmp_path: Path) -> None:
        opened(tmp_path).close()
        other = {"name": "tiny", "optim": {"lr": 0.003, "betas": [0.9, 0.99]}, "data": {"workers": 2}, "mix": None}
        before = (tmp_path / "config.json").read_bytes()
        with pytest.raises(ConfigError) as caught:
            opened(tmp_path, config=other)
        assert str(caught.value) == (
            f"{tmp_path} holds a run with another config (optim.lr: 0.001 -> 0.003; optim.betas: 0.9,0.999 -> "
            "0.9,0.99; mix: (absent) -> (none)); add --force to continue with the new one, or give another --out"
        )
        assert (tmp_path / "config.json").read_bytes() == before
        with opened(tmp_path, config=other, force=True) as folder:
            assert folder.warnings[0] == "config changed by --force: optim.lr: 0.001 -> 0.003"
            assert (tmp_path / "config.json").read_bytes() == before  # until it is known that it can be resumed
            folder.write_tables()
        assert load(tmp_path / "config.json") == other

    @pytest.mark.parametrize("free", [{"data.workers"}, {"data"}])
    def test_a_field_that_may_change(self, free: set[str], tmp_path: Path) -> None:
        opened(tmp_path).close()
        other = {**CONFIG, "data": {"workers": 5}}
        with pytest.raises(ConfigError, match=r"data\.workers: 2 -> 5"):
            opened(tmp_path, config=other, free={"data.work", "datas"})
        opened(tmp_path, config=other, free=free).close()
        assert load(tmp_path / "config.json")["data"] == {"workers": 5}

    def test_true_is_not_one(self, tmp_path: Path) -> None:
        opened(tmp_path, config={"a": 1, "b": math.inf}).close()
        with pytest.raises(ConfigError, match="a: 1 -> on"):
            opened(tmp_path, config={"a": True, "b": math.inf})

    def test_a_damaged_config(self, tmp_path: Path) -> None:
        opened(tmp_path).close()
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"config\.json is damaged"):
            opened(tmp_path)
        with opened(tmp_path, force=True) as folder:
            folder.write_tables()
        assert load(tmp_path / "config.json")["name"] == "tiny"


class TestLock:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock, "LOCK_PATIENCE_S", 0.0)

    def test_a_second_process_is_refused(self, tmp_path: Path) -> None:
        def work(out: int) -> None:
            try:
                opened(tmp_path)
            except ConfigError as error:
                os.write(out, json.dumps([str(error)]).encode() + b"\n")

        with opened(tmp_path):
            said = reports(work, 20).lines
            assert len(said) == 1
            assert f"{tmp_path} is in use by process {os.getpid()} on " in said[0][0]
            assert lock.is_held(tmp_path)
        assert not lock.is_held(tmp_path)
        assert not reports(work, 20).lines

    def test_a_killed_holder_leaves_it_free_though_its_children_live(self, tmp_path: Path) -> None:
        """A loader process that is forked while the lock is held outlives its parent for a while."""
        out, into = os.pipe()
        holder = os.fork()
        if holder == 0:
            folder = opened(tmp_path)
            if os.fork() == 0:
                os.write(into, f"{os.getpid()}\n".encode())
                time.sleep(30)
                os._exit(0)
            time.sleep(30)
            folder.close()
            os._exit(0)
        orphan = int(os.read(out, 100))
        try:
            with pytest.raises(ConfigError, match=f"in use by process {holder} on"):
                opened(tmp_path)
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
            os.kill(orphan, 0)  # lives
            opened(tmp_path).close()
        finally:
            os.kill(orphan, signal.SIGKILL)
            os.close(out)
            os.close(into)

    def test_a_look_does_not_keep_a_job_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock, "LOCK_PATIENCE_S", 10.0)
        opened(tmp_path).close()
        code = (
            "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH);"
            "print(1, flush=True); time.sleep(0.3)"
        )
        looker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
        assert looker.stdout is not None
        looker.stdout.readline()
        opened(tmp_path).close()
        looker.communicate()

    def test_a_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr("fcntl.flock", refuse)
        said: list[str] = []
        opened(tmp_path, tell=said.append).close()
        assert len(said) == 1
        assert "file system without locks" in said[0]


class TestMetrics:
    def test_rows_are_there_at_once_and_valid_json(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.record({"step": 1, "loss": math.nan, "norm": -math.inf, "parts": {"a": [math.inf, 2]}})
            folder.record({"step": 2, "loss": np.float32(0.5), "norm": torch.tensor(2.0), "what": Path("x")})

            def refuse(text: str) -> None:
                raise AssertionError(text)

            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line, parse_constant=refuse) for line in lines] == [
                {"step": 1, "loss": "nan", "norm": "-inf", "parts": {"a": ["inf", 2]}},
                {"step": 2, "loss": 0.5, "norm": 2.0, "what": "x"},
            ]

    def test_rewinding(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            for step in range(1, 8):
                folder.record({"step": step, "loss": 1 / step})
            folder.record({"without": "a step"})
        with opened(tmp_path) as folder:
            folder.rewind(4)
            folder.record({"step": 5, "loss": 0.0})
        rows = read_rows(tmp_path / "metrics.jsonl")
        assert [row.get("step") for row in rows] == [1, 2, 3, 4, None, 5]
        assert [row["loss"] for row in rows[:4]] == [1 / step for step in range(1, 5)]

    def test_a_torn_last_line(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.record({"step": 1})
            folder.note("hello")
        for name in ("metrics.jsonl", "log.txt"):
            with open(tmp_path / name, "ab") as file:
                file.write(b'{"step": 2, "lo')
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
        with opened(tmp_path) as folder:
            folder.record({"step": 2})
            folder.note("again")
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
        assert [line.split(" ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["hello", "again"]

    def test_rewinding_writes_only_when_it_must(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.rewind(3)
            folder.record({"step": 1})
            inode = (tmp_path / "metrics.jsonl").stat().st_ino
            folder.rewind(1)
            assert (tmp_path / "metrics.jsonl").stat().st_ino == inode


def field(number: int, kind: int) -> int:
    return number << 3 | kind


class TestTensorBoard:
    def test_the_bytes(self, tmp_path: Path) -> None:
        """Frames, checksums and protobuf, taken apart by hand."""
        with opened(tmp_path) as folder:
            folder.record({"step": 300, "kind": "train", "loss": 0.25, "name": "x", "flag": True, "huge": 1e300})
        (path,) = (tmp_path / "tensorboard").iterdir()
        assert path.name.startswith("events.out.tfevents.")
        first, second = (data for _, data in read_records(path))
        assert first[9:] == bytes([field(2, 0), 0, field(3, 2), 13]) + b"brain.Event:2"
        assert abs(struct.unpack("<d", second[1:9])[0] - time.time()) < 100
        loss = bytes([field(1, 2), 10]) + b"train/loss" + bytes([field(2, 5)]) + struct.pack("<f", 0.25)
        huge = bytes([field(1, 2), 10]) + b"train/huge" + bytes([field(2, 5)]) + struct.pack("<f", math.inf)
        values = b"".join(bytes([field(1, 2), len(value)]) + value for value in (loss, huge))
        assert second[9:] == bytes([field(2, 0), 0xAC, 0x02, field(5, 2), len(values)]) + values
        raw = path.read_bytes()
        assert struct.unpack("<I", raw[-4:])[0] == masked_crc(second)

    def test_a_resume_hides_what_comes_after(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.rewind(3)
        (path,) = (tmp_path / "tensorboard").iterdir()
        _, second = (data for _, data in read_records(path))
        assert second[9:] == bytes([field(2, 0), 4, field(7, 2), 2, field(1, 0), 1])  # START: nothing from step 4 on

    @pytest.mark.slow
    def test_its_own_reader(self, tmp_path: Path) -> None:
        """Where TensorBoard is installed it shows what was recorded, and after a resume no step twice."""
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        with opened(tmp_path) as folder:
            for step in range(1, 6):
                folder.record({"step": step, "kind": "train", "loss": step / 2})
        time.sleep(1.1)  # the name of the file has the second in it, and the reader takes them in order
        with opened(tmp_path) as folder:
            folder.rewind(3)
            folder.record({"step": 4, "kind": "train", "loss": 40.0})
        reader = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        reader.Reload()
        assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0)]

    def test_a_folder_that_cannot_be_made_is_told_of_once(self, tmp_path: Path) -> None:
        (tmp_path / "tensorboard").touch()
        said: list[str] = []
        with opened(tmp_path, tell=said.append) as folder:
            folder.record({"step": 1})
            folder.record({"step": 2})
        assert len(said) == 1
        assert "tensorboard cannot be written" in said[0]
        assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


class TestNotes:
    def test_a_note_is_told_and_kept_with_its_time(self, tmp_path: Path) -> None:
        said: list[str] = []
        with opened(tmp_path, tell=said.append) as folder:
            folder.note("two\nlines")
            assert said == ["two\nlines"]
            assert folder.warnings == ["two\nlines"]
            (line,) = (tmp_path / "log.txt").read_text().splitlines()
        assert line.endswith(" two lines")
        assert line[:2] == "20"

    def test_status(self, tmp_path: Path) -> None:
        with opened(tmp_path) as folder:
            folder.set_status("running", step=3, total=10)
            folder.set_status("running", step=4)
            found = load(tmp_path / "status.json")
            assert [found[name] for name in ("state", "step", "steps", "next")] == ["running", 4, 10, COMMAND["go_on"]]
            assert not is_done(tmp_path)
            folder.set_status("done", step=10, message="all steps done")
            found = load(tmp_path / "status.json")
            assert [found[name] for name in ("state", "step", "message", "next")] == ["done", 10, "all steps done", ""]
            assert is_done(tmp_path)
            assert sorted(entry.name for entry in tmp_path.glob(".*")) == [".reserve"]
        assert not list(tmp_path.glob(".*"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few hundred kilobytes."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fill(folder: Path) -> Path:
    """Rubbish to the last byte."""
    rubbish = folder / "rubbish"
    with open(rubbish, "wb", buffering=0) as file:
        for size in (4096, 64, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return rubbish


class TestFullDisk:
    def test_it_is_said_and_nothing_is_lost(self, small: Path) -> None:
        """A real one: the log and the status still go into the room that was held back, the metrics wait."""
        said: list[str] = []
        with opened(small / "run", tell=said.append) as folder:
            folder.record({"step": 1})
            rubbish = fill(small)
            for step in range(2, 300):
                folder.record({"step": step, "text": "x" * 30})
            folder.note("checkpoint of step 200 was not saved: No space left on device")
            folder.set_status("failed", step=299, message="no room")
            assert "No space left" in (folder.path / "log.txt").read_text()
            assert load(folder.path / "status.json")["message"] == "no room"
            full = [text for text in said if "cannot be written (No space left on device)" in text]
            assert len(full) <= 2, said  # metrics and events, once each
            assert any("metrics.jsonl" in text for text in full)
            assert read_rows(folder.path / "metrics.jsonl")[-1]["step"] < 299
            assert (folder.path / "metrics.jsonl").read_bytes().endswith(b"\n")
            rubbish.unlink()
            folder.record({"step": 300})
            folder.note("goes on")
            folder.set_status("running", step=300)
            assert [row["step"] for row in read_rows(folder.path / "metrics.jsonl")] == list(range(1, 301))
            assert "metrics.jsonl is written again" in "".join(said)
            assert (folder.path / ".reserve").stat().st_size == 128 << 10

    def test_not_one_byte_of_room(self, tmp_path: Path) -> None:
        """The system refuses every write to the files of the run; the run hears no exception."""

        def work(out: int) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            said: list[str] = []
            folder = opened(tmp_path, tell=said.append)
            folder.note("before")
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            for step in range(3):
                folder.record({"step": step})
                folder.set_status("running", step=step)
                folder.note(f"note {step}")
                folder.write_json("more.json", {})
            folder.rewind(1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            folder.record({"step": 3})
            folder.note("after")
            folder.set_status("done", step=3)
            folder.close()
            os.write(out, json.dumps([said]).encode() + b"\n")

        ended = reports(work, 30)
        assert ended.status == 0
        (said,) = ended.lines[0]
        for name in ("metrics.jsonl", "status.json", "log.txt"):
            assert sum(f"{name} cannot be written (File too large)" in text for text in said) == 1, said
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
        log = (tmp_path / "log.txt").read_text()
        assert [f"note {step}" in log for step in range(3)] == [True] * 3
        assert log.splitlines()[-1].endswith("after")
        assert load(tmp_path / "status.json")["state"] == "done"

    def test_too_full_to_begin(self, small: Path) -> None:
        fill(small)
        with pytest.raises(ConfigError, match=r"run cannot be written \(No space left on device\)"):
            opened(small / "run")
        assert not lock.is_held(small / "run")


class TestStory:
    def begun(self, tmp_path: Path) -> RunFolder:
        folder = opened(tmp_path)
        folder.set_status("running", step=0, total=500)
        folder.record({"step": 120, "kind": "train", "loss": 2.345678, "accuracy": 0.5})
        for step in (50, 100):
            (tmp_path / "checkpoints" / f"{step:08}").mkdir(parents=True)
        return folder

    def test_running(self, tmp_path: Path) -> None:
        with self.begun(tmp_path):
            first, *rest = describe_run(tmp_path).splitlines()
        assert first.startswith(f"{tmp_path}: running, step 120 of 500, by process {os.getpid()} on ")
        assert "  last metrics: step 120: loss 2.346, accuracy 0.5" in rest
        assert "  checkpoints: the newest is of step 100 (2 in all)" in rest
        assert not any("with:" in line for line in rest)  # nothing to type while it runs

    def test_numbers_have_their_titles(self, tmp_path: Path) -> None:
        """As of instances: a number that is of no object is left out."""
        numbers = {"map": 0.25, "map50": 0.5, "map75": 0.125, "map_small": 0.25, "map_medium": None, "map_large": 0.1}
        with self.begun(tmp_path) as folder:
            folder.record({"step": 120, "kind": "watch", "split": "dev", "score": "map", **numbers, "count": 8})
            text = describe_run(tmp_path)
        known = "AP 0.25, AP50 0.5, AP75 0.125, AP of small objects 0.25, AP of large objects 0.1"
        assert f"  last metrics: step 120: split dev, {known}\n" in text
        assert "dev: AP 25.00% (8 images) with the weights of step 120" in text

    def test_killed(self, tmp_path: Path) -> None:
        def work(out: int) -> None:
            del out
            self.begun(tmp_path)
            (tmp_path / "checkpoints" / ".saving-00000150-a1").mkdir()
            (tmp_path / "unreadable.jsonl").write_text('{"sample": 1, "name": "a", "reason": "b"}\n')
            os.kill(os.getpid(), signal.SIGKILL)

        assert reports(work, 20).status == -signal.SIGKILL
        assert load(tmp_path / "status.json")["state"] == "running"
        first, *rest = describe_run(tmp_path).splitlines()
        assert (
            "was killed (by a signal that nothing can catch, or with its machine), step 120 of 500; process " in first
        )
        assert first.endswith(" is gone")
        assert (
            "  checkpoints: the newest is of step 100 (2 in all); the save of step 150 was cut off, which does no harm"
        ) in rest
        assert "  unreadable images: 1, listed in unreadable.jsonl" in rest
        assert rest[-1] == "  resume with: vitrail pretrain --resume runs/tiny"

    def test_killed_before_it_began(self, tmp_path: Path) -> None:
        opened(tmp_path).close()
        first, *rest = describe_run(tmp_path).splitlines()
        assert "was killed while it was being prepared, before its first step; process " in first
        assert rest == ["  checkpoints: none yet", "  start again with: vitrail pretrain --resume runs/tiny"]

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ("interrupted", "interrupted by a signal, step 130 of 500, at 20"),
            ("diverged", "diverged: loss, gradient or weights were no longer finite, step 130 of 500, at 20"),
            ("failed", "failed with an error, step 130 of 500, at 20"),
            ("done", "done, step 130 of 500, at 20"),
        ],
    )
    def test_ended(self, state: Any, words: str, tmp_path: Path) -> None:
        with self.begun(tmp_path) as folder:
            folder.note("a word before the end")
            folder.set_status(state, step=130, message="because")
            (tmp_path / "report.html").touch()
            (tmp_path / "last.safetensors").touch()
        first, *rest = describe_run(tmp_path).splitlines()
        assert first.startswith(f"{tmp_path}: {words}")
        assert "  message: because" in rest
        assert "  weights: last.safetensors" in rest
        assert f"  report: {tmp_path / 'report.html'}" in rest
        assert any("a word before the end" in line for line in rest) == (state != "done")
        assert ("  resume with: vitrail pretrain --resume runs/tiny" in rest) == (state not in ("done", "diverged"))

    def test_after_a_power_cut(self, tmp_path: Path) -> None:
        self.begun(tmp_path).close()
        (tmp_path / "status.json").write_bytes(b"")
        first, *rest = describe_run(tmp_path).splitlines()
        assert "no longer in use, step 120; status.json cannot be read, as after a power cut" in first
        assert rest[-1] == "  resume with: vitrail pretrain --resume runs/tiny"

    def test_no_run_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"holds no run: there is no command\.json"):
            describe_run(tmp_path)
        with pytest.raises(ConfigError, match="does not exist"):
            read_command(tmp_path / "other")
        assert not is_done(tmp_path)

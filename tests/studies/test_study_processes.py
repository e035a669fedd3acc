"""Cells in processes of their own, which die, are told to stop, or lose the one that started them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies.tiny_study import Recorder, board_of, cells, plan_of, quick
from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.studies import run_study as kept
from vitrail.studies.run_study import StudyPlan, run_study
from vitrail.train.grid.engine import run_in_pool
from vitrail.train.grid.plan import Cell
from vitrail.train.grid.workers import DeviceSlot
from vitrail.train.observer import Stop, listen_for_signals
from vitrail.train.run_folder.files import is_held, read_holder

LONG = 100_000  # steps: an hour
ONE = DeviceSlot(device="cpu")


def long_one(name: str = "long") -> Cell:
    return Cell(name=name, at={"long": name}, run=quick(steps=LONG, seed=3))


def then(folder: Path, act: Callable[[int], None]) -> threading.Thread:
    """Does something with the process that trains in a folder, once it has a checkpoint there."""

    def wait() -> None:
        end = time.monotonic() + 120
        while not list_checkpoints(folder / FOLDER):
            if time.monotonic() > end:
                return
            time.sleep(0.02)
        act(int(read_holder(folder)["pid"]))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_process_that_is_killed_fails_its_cell_and_another_takes_its_place(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), cells=(long_one(), cells("tiny", "")[0]), work={"long": 2.0})
    board = board_of(plan, recorder := Recorder())
    killed: list[int] = []

    def kill(process: int) -> None:
        killed.append(process)
        os.kill(process, signal.SIGKILL)

    thread = then(kept.cell_folder(tmp_path, "long"), kill)
    run_in_pool(board, [ONE], Stop())
    thread.join()
    assert killed != [os.getpid()]
    assert board.states == {"long": "failed", "first-0": "done"}
    assert "its process was ended by SIGKILL" in board.outcomes["long"].fault
    assert recorder.lines == ["start long", "fail long", "start first-0", "end first-0"]
    assert read_holder(kept.cell_folder(tmp_path, "first-0"))["pid"] not in (killed[0], os.getpid())


@pytest.mark.slow
def test_a_signal_stops_all_processes_behind_their_steps(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), cells=(long_one("one"), long_one("two"), cells("tiny", "")[0]))
    plan = replace(plan, work={"one": 2.0, "two": 2.0})
    folders = [kept.cell_folder(tmp_path, name) for name in ("one", "two")]
    after = then(folders[1], lambda process: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    report = run_study(plan, places=[replace(ONE, on_machine=2)] * 2, watcher=Recorder(), present=lambda outcomes: None)
    after.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert report.stopped
    assert report.states == {"one": "stopped", "two": "stopped", "first-0": "waiting"}
    for folder in folders:
        assert list_checkpoints(folder / FOLDER)
        assert not is_held(folder)
        assert "interrupted" in (folder / "status.json").read_text()


@pytest.mark.slow
def test_processes_whose_study_was_killed_save_and_end(tmp_path: Path) -> None:
    folder = kept.cell_folder(tmp_path, "long")
    plan: StudyPlan = replace(plan_of(tmp_path), cells=(long_one(),))
    child = os.fork()
    if not child:
        with listen_for_signals() as stop:
            run_in_pool(board_of(plan), [ONE], stop)
        os._exit(0)
    then(folder, lambda process: os.kill(child, signal.SIGKILL)).join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    end = time.monotonic() + 60
    while is_held(folder):
        assert time.monotonic() < end, "it trains on and on"
        time.sleep(0.1)
    assert "interrupted" in (folder / "status.json").read_text()

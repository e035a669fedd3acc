"""A study to its end, whatever happens to one of its cells or to the whole of it."""

import errno
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.studies.tiny_study import STEPS, TINY, board_of, cells, plan_of, play, quick
from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints
from vitrail.core.errors import ConfigError
from vitrail.studies import run_study as kept
from vitrail.studies.run_study import StudyPlan
from vitrail.train.grid import engine
from vitrail.train.grid import engine as board_module
from vitrail.train.grid import plan as results
from vitrail.train.grid import workers as worker
from vitrail.train.grid.engine import device_slots
from vitrail.train.grid.plan import Cell, CellJob
from vitrail.train.run_folder.files import read_json

pytestmark = pytest.mark.slow  # test_vtab.py runs a study in the fast lane


def trained(out: Path, name: str) -> int:
    """How often a cell was started, by its log."""
    log = kept.cell_folder(out, name) / "log.txt"
    return log.read_text().count("run folder") if log.exists() else 0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done") / "study"
    report, recorder = play(plan_of(out))
    assert set(report.states.values()) == {"done"}
    assert recorder.lines == [line for name in report.states for line in (f"start {name}", f"end {name}")]
    return out


def test_values_are_those_of_the_run(done: Path) -> None:
    found = kept.read_finished(done, TINY.grid("tiny"))
    assert list(found) == ["first-0", "second-0", "third-0"]
    for name, outcome in found.items():
        folder = kept.cell_folder(done, name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        test = next(row for row in rows if row["kind"] == "test")
        assert outcome.values["accuracy"] == test["accuracy"]
        assert outcome.values["watch"] == [row for row in rows if row["kind"] == "watch"][-1]["accuracy"]
        assert outcome.values["images"] == STEPS * 16
        assert outcome.values["exaflops"] > 0
        assert outcome.values["device_hours"] > 0
        assert not (folder / "checkpoints").exists()


def test_few_shot_accuracies_and_the_best_watched_one_are_values(tmp_path: Path) -> None:
    rows = [
        {"kind": "watch", "step": 1, "accuracy": 0.5},
        {"kind": "watch", "step": 2, "accuracy": 0.4},
        {"kind": "fewshot", "step": 1, "source": "digits", "shots": 5, "accuracy": 0.1},
        {"kind": "fewshot", "step": 2, "source": "digits", "shots": 5, "accuracy": 0.2},
        {"kind": "fewshot", "step": 2, "source": "digits", "shots": 10, "accuracy": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = kept.read_values(tmp_path)
    assert found == {"watch": 0.4, "accuracy": 0.4, "fewshot-5": 0.2, "fewshot-10": 0.3}
    (tmp_path / "best.safetensors").touch()  # of a run that chose its weights
    assert kept.read_values(tmp_path) == {"watch": 0.5, "accuracy": 0.5, "fewshot-5": 0.1}


def test_a_cell_after_another_starts_from_its_last_weights(done: Path) -> None:
    config = read_json(kept.cell_folder(done, "third-0") / "config.json")
    assert config["weights"] == str(kept.cell_folder(done, "first-0") / "last.safetensors")
    assert config["model"]["width"] == 16


def test_a_finished_study_trains_nothing_again(done: Path) -> None:
    before = {name: trained(done, name) for name in ("first-0", "second-0", "third-0")}
    report, recorder = play(plan_of(done))
    assert recorder.lines == ["told 3 of 3 cells are already finished"]
    cells_now = json.loads((done / "study.json").read_text())["cells"]
    assert all(cell["seconds"] > 0 for cell in cells_now.values())  # of the start that trained them
    assert set(report.states.values()) == {"done"}
    assert {name: trained(done, name) for name in before} == before == dict.fromkeys(before, 1)


def test_study_json_tells_how_every_cell_stands(done: Path) -> None:
    told = read_json(done / "study.json")
    assert (told["study"], told["scale"], told["state"]) == ("tiny", "tiny", "done")
    assert {name: cell["state"] for name, cell in told["cells"].items()} == dict.fromkeys(told["cells"], "done")
    assert told["cells"]["second-0"]["at"] == {"lr": 1e-3, "seed": 0}
    assert told["cells"]["second-0"]["values"]["images"] == STEPS * 16


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    """The finished study in a folder of its own."""
    return Path(shutil.copytree(done, tmp_path / "copy"))


def test_a_changed_cell_is_refused_by_its_fields(copy: Path) -> None:
    changed = replace(cells("tiny", "")[0], run=quick(lr=0.5))
    with pytest.raises(ConfigError, match=r"first-0 holds .* \(optim\.lr: 0\.003 -> 0\.5\); add --force .* --out"):
        play(plan_of(copy, [changed]))
    same = replace(changed, run=replace(quick(), name="other", log=3))
    play(plan_of(copy, [same]))  # what does not change the outcome is not a change
    assert trained(copy, "first-0") == 1


def test_a_changed_cell_is_trained_again_by_force(copy: Path) -> None:
    changed = replace(cells("tiny", "")[0], run=quick(lr=0.5))
    report, recorder = play(plan_of(copy, [changed], force=True))
    assert set(report.states.values()) == {"done"}
    assert recorder.lines[-4:] == ["start first-0", "end first-0", "start third-0", "end third-0"]
    assert read_json(kept.cell_folder(copy, "first-0") / "config.json")["optim"]["lr"] == 0.5


def test_another_study_or_run_in_the_folder_is_refused(done: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds the study tiny at scale tiny; give another --out"):
        play(replace(plan_of(done), scale="small"))
    with pytest.raises(ConfigError, match="holds a run, not a study"):
        play(plan_of(kept.cell_folder(done, "first-0")))


def break_first(copy: Path) -> StudyPlan:
    """The first cell has no data, and what started from its weights has gone."""
    for name in ("first-0", "third-0"):
        shutil.rmtree(kept.cell_folder(copy, name))
    run = quick()
    return plan_of(
        copy, [replace(cells("tiny", "")[0], run=replace(run, data=replace(run.data, source="no-such-set")))]
    )


def test_a_failed_cell_is_reported_and_the_others_finish(copy: Path) -> None:
    report, _ = play(break_first(copy))
    assert report.states == {"first-0": "failed", "second-0": "done", "third-0": "left out"}
    faults = {outcome.cell: outcome.fault for outcome in report.outcomes}
    assert "no-such-set" in faults["first-0"]
    assert "first-0" in faults["third-0"]
    assert not report.stopped
    assert read_json(copy / "study.json")["cells"]["first-0"]["fault"] == faults["first-0"]


def test_a_failed_cell_is_tried_again(copy: Path) -> None:
    play(break_first(copy))
    again, recorder = play(plan_of(copy))
    assert set(again.states.values()) == {"done"}
    assert "start second-0" not in recorder.lines
    assert trained(copy, "second-0") == 1


def test_an_explosion_and_an_unknown_error_are_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "study"
    wild = Cell(name="wild", at={}, run=replace(quick(lr=1e30), bad_steps=1))
    odd = Cell(name="odd", at={}, run=quick(seed=5))
    real = results.keep_outcome

    def keep(cell: Cell, folder: Path, job: CellJob) -> Mapping[str, float]:
        if cell.name == "odd":
            raise RuntimeError("a thing nobody\nthought of")
        return real(cell, folder, job)

    monkeypatch.setattr(worker, "keep_outcome", keep)
    report, _ = play(replace(plan_of(out), cells=(wild, odd)))
    faults = {outcome.cell: outcome.fault for outcome in report.outcomes}
    assert set(report.states.values()) == {"failed"}
    assert "finite" in faults["wild"]
    assert faults["odd"] == "RuntimeError: a thing nobody thought of"
    assert "in keep" in (kept.cell_folder(out, "odd") / "fault.txt").read_text()


def test_a_record_that_cannot_be_written_ends_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: Path, content: Mapping[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(board_module, "write_json", full)
    report, recorder = play(plan_of(copy))
    assert set(report.states.values()) == {"done"}
    assert sum("No space left" in line for line in recorder.lines) == 1


def test_long_cells_come_first_and_none_before_what_it_starts_from(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), work={"first-0": 1.0, "second-0": 2.0, "third-0": 9.0})
    board, order = board_of(plan), list[str]()
    while (cell := board.next()) is not None:
        order.append(cell.name)
        board.begin(cell)
        if cell.name == "first-0":
            board.states["first-0"] = "done"
    assert order == ["second-0", "first-0", "third-0"]


def test_a_seed_of_the_whole_grid_comes_before_the_next_seed(tmp_path: Path) -> None:
    made = tuple(
        replace(cell, name=f"{cell.name}{seed}", at={**cell.at, "seed": seed}, after="")
        for cell in cells("tiny", "")
        for seed in range(2)
    )
    work = {cell.name: float(len(made) - at) for at, cell in enumerate(made)}
    plan = replace(plan_of(tmp_path), cells=made, work=work)
    board, order = board_of(plan), list[str]()
    while (cell := board.next()) is not None:
        order.append(cell.name)
        board.begin(cell)
    assert order == ["first-00", "second-00", "third-00", "first-01", "second-01", "third-01"]


def test_one_study_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    from vitrail.train.run_folder.files import RunLock

    lock = RunLock(tmp_path, print)
    with pytest.raises(ConfigError, match="is in use by process"):
        play(plan_of(tmp_path))
    lock.release()


def started(out: Path, steps: int) -> int:
    """The study in a child with a process group of its own. It is forked: what it needs is imported already."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        torch.set_num_threads(1)
        longer = [replace(cell, run=replace(cell.run, steps=steps)) for cell in cells("tiny", "")]
        play(plan_of(out, longer))
        status = 0
    except BaseException:
        traceback.print_exc()  # the child ends here, and nobody else would say why
    finally:
        os._exit(status)


def wait_for_checkpoint(folder: Path) -> None:
    """The cell is in the midst of its training."""
    end = time.monotonic() + 60
    while not list_checkpoints(folder / FOLDER):
        assert time.monotonic() < end, "no checkpoint ever came"
        time.sleep(0.005)


def test_a_study_that_is_killed_repeats_no_finished_cell(tmp_path: Path) -> None:
    """SIGKILL to the whole process group while the second cell trains; that one resumes from its checkpoint."""
    out = tmp_path / "study"
    child = started(out, 80)
    wait_for_checkpoint(kept.cell_folder(out, "second-0"))
    os.killpg(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    outcomes = {name: kept.cell_folder(out, name) / results.OUTCOME for name in ("first-0", "second-0", "third-0")}
    assert [path.exists() for path in outcomes.values()] == [True, False, False]
    assert read_json(out / "study.json")["state"] == "running"
    written = outcomes["first-0"].stat().st_mtime_ns
    again = started(out, 80)
    assert os.waitstatus_to_exitcode(os.waitpid(again, 0)[1]) == 0
    assert all(path.exists() for path in outcomes.values())
    assert outcomes["first-0"].stat().st_mtime_ns == written
    assert [trained(out, name) for name in outcomes] == [1, 2, 1]
    assert "resumes from step" in (kept.cell_folder(out, "second-0") / "log.txt").read_text()


def test_where_the_processes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "available_cores", lambda: 2)
    assert [place.on_machine for place in device_slots("cpu")] == [1]
    monkeypatch.setattr(engine, "available_cores", lambda: 8)
    assert [place.on_machine for place in device_slots("cpu")] == [4, 4, 4, 4]
    assert len(device_slots("cpu", 3)) == 3
    with pytest.raises(ConfigError, match="--jobs -1"):
        device_slots("cpu", -1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = device_slots("auto")
    assert [place.device for place in found] == ["cuda:0", "cuda:1"] * 4
    assert {(place.on_device, place.on_machine) for place in found} == {(4, 8)}
    assert {place.device for place in device_slots("cuda:1", 3)} == {"cuda:1"}

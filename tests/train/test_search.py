"""A sweep whatever happens to it: killed anywhere and resumed, a point that fails, a folder of version 0.1.0."""

import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.killed import digest_of
from tests.train.tiny import tiny_run
from vitrail.core.errors import ConfigError, DataError, TrainingError
from vitrail.distributed.process_group import World
from vitrail.train import loop
from vitrail.train.config import Data, Run, Scoring
from vitrail.train.grid import sweep as search
from vitrail.train.grid import workers as worker
from vitrail.train.grid.engine import device_slots
from vitrail.train.grid.sweep import SweepJob, SweepResult
from vitrail.train.run_folder.files import RunLock

ALONE = World(device=torch.device("cpu"))
GRID = {"optim.lr": (1e-9, 0.01)}
POINTS = ("optim.lr=1e-09", "optim.lr=0.01")
RUN = tiny_run(steps=8, data=Data(source="digits", dev=0.1, workers=0), evaluation=Scoring(every=4))


def sweep(out: Path, run: Run = RUN, **how: Any) -> SweepResult:
    return search.run_sweep(run, GRID, out=out, world=ALONE, command={"go_on": "again"}, **how)


def facts(out: Path, found: SweepResult) -> tuple[Any, ...]:
    """What must not depend on how often the sweep was started: the scores, the choice, and all bits of the last run."""
    assert found.final is not None
    return found.points, found.final.test, digest_of(out)


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "sweep.json").read_text())


def starts(out: Path, name: str) -> int:
    return (out / "sweep" / name / "log.txt").read_text().count("run folder")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    out = tmp_path_factory.mktemp("whole") / "run"
    return facts(out, sweep(out))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(name: str, step: int) -> None:
    honest = loop.Training.read_metrics

    def draw(self: loop.Training) -> None:
        honest(self)
        if self.config.name.endswith(name) and self.step == step:
            self.store.wait()  # a checkpoint that is on its way is whole: the test is about what comes then
            kill()

    loop.Training.read_metrics = draw  # type: ignore[method-assign]


def before_outcome() -> None:
    worker.keep_outcome = lambda *args, **named: kill()  # type: ignore[assignment]


def behind_outcome() -> None:
    honest = worker.keep_outcome
    worker.keep_outcome = lambda *args, **named: (honest(*args, **named), kill())  # type: ignore[assignment]


def killed(out: Path, arm: Callable[[], None]) -> None:
    """The sweep in a child, which kills itself where it is armed to."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            arm()
            sweep(out)
        except BaseException:
            traceback.print_exc()  # the child ends here, and nobody else would say why
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "started"),
    [
        (lambda: in_step(POINTS[0], 1), (2, 1)),
        (lambda: in_step(POINTS[1], 6), (1, 2)),
        (before_outcome, (2, 1)),
        (behind_outcome, (1, 1)),
        (lambda: in_step("tiny", 6), (1, 1)),
    ],
    ids=["first point, before a checkpoint", "second point", "before an outcome", "behind an outcome", "last run"],
)
def test_a_sweep_that_is_killed_resumes_to_the_same_bits(
    tmp_path: Path, whole: tuple[Any, ...], arm: Callable[[], None], started: tuple[int, int]
) -> None:
    out = tmp_path / "run"
    killed(out, arm)
    assert facts(out, sweep(out)) == whole
    assert tuple(starts(out, name) for name in POINTS) == started  # what was finished is not touched again
    assert record(out)["state"] == "done"


@pytest.mark.slow
def test_a_point_that_fails_is_reported_behind_the_others_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, honest = tmp_path / "run", SweepJob.prepare

    def broken(self: SweepJob, cell: Any) -> Any:
        if cell.name == POINTS[0]:
            raise DataError("a disk is gone")
        return honest(self, cell)

    monkeypatch.setattr(SweepJob, "prepare", broken)
    with pytest.raises(TrainingError, match=r"1 of 2 points .* optim\.lr=1e-09: a disk is gone"):
        sweep(out)
    assert {name: cell["state"] for name, cell in record(out)["cells"].items()} == dict(
        zip(POINTS, ("failed", "done"), strict=True)
    )
    assert not (out / "config.json").exists()  # nothing is chosen without it
    monkeypatch.setattr(SweepJob, "prepare", honest)
    assert sweep(out).final is not None
    assert starts(out, POINTS[1]) == 1


@pytest.mark.slow
def test_a_folder_of_an_older_version_resumes(tmp_path: Path) -> None:
    """0.1.0 wrote no outcomes: what is done there is finished from its checkpoint, without a step."""
    out = tmp_path / "run"
    first = sweep(out)
    for name in POINTS:
        (out / "sweep" / name / "outcome.json").unlink()
    older = {key: value for key, value in record(out).items() if key in ("grid", "points", "tried")}
    (out / "sweep.json").write_text(json.dumps(older))
    assert facts(out, sweep(out)) == facts(out, first)
    rows = (out / "sweep" / POINTS[1] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if json.loads(row)["kind"] == "watch"] == [4, 8]


@pytest.mark.slow
def test_a_finished_point_of_other_settings_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    out, other = tmp_path / "run", replace(RUN, seed=3)
    sweep(out)
    with pytest.raises(ConfigError, match=r"seed: 7 -> 3\); add --force"):
        sweep(out, other)
    late = replace(RUN, schedule=replace(RUN.schedule, warmup=9))
    with pytest.raises(ConfigError, match="warmup"):
        sweep(tmp_path / "late", late)
    assert not (tmp_path / "late").exists()
    lock = RunLock(out, print)
    with pytest.raises(ConfigError, match="is in use by process"):
        sweep(out)
    lock.release()


@pytest.mark.slow
def test_a_signal_behind_the_last_point_stops_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Any, ...]
) -> None:
    out, honest = tmp_path / "run", worker.keep_outcome

    def keep(*args: Any, **named: Any) -> Any:
        if args[0].name == POINTS[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "keep_outcome", keep)
        final = sweep(out).final
    assert final is not None
    assert (final.state, final.step) == ("interrupted", 1)
    assert facts(out, sweep(out)) == whole


@pytest.mark.slow
def test_points_that_are_scored_otherwise_are_scored_again(tmp_path: Path) -> None:
    """At their end without patience, at their best with it: never one point by the one and another by the other."""
    patient = replace(RUN, average=0.0, evaluation=replace(RUN.evaluation, every=1, patience=99))
    last = sweep(tmp_path / "run", replace(patient, evaluation=replace(patient.evaluation, patience=0)))
    best = sweep(tmp_path / "run", patient)
    assert best.points == sweep(tmp_path / "best", patient).points != last.points


@pytest.mark.slow
def test_points_in_processes_of_their_own_give_the_same(tmp_path: Path, whole: tuple[Any, ...]) -> None:
    out = tmp_path / "run"
    assert facts(out, sweep(out, places=device_slots("cpu", 2))) == whole
    pids = {json.loads((out / "sweep" / name / "lock").read_text())["pid"] for name in POINTS}
    assert len(pids | {os.getpid()}) == 3
    world = World(size=2, local_size=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="torchrun"):
        search.run_sweep(RUN, GRID, out=tmp_path / "two", world=world, places=device_slots("cpu", 2))

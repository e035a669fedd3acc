"""VTAB from end to end on tiny sets: every task, a missing set, a stop and its sequel, another config."""

import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.datasets import writers
from tests.studies.conftest import QUICK
from vitrail.core.errors import ConfigError, Diverged
from vitrail.core.paper_tables import TABLE_9
from vitrail.data.datasets.catalogue import VTAB_TASKS
from vitrail.data.transforms.crop import ResizeCrop, Squash
from vitrail.distributed.process_group import World
from vitrail.evaluation.result import Result
from vitrail.studies.paper.vtab import (
    VtabOutcome,
    VtabScore,
    VtabStudy,
    average_groups,
    build_base_run,
    build_page,
    build_result,
    build_rows,
    build_task_run,
    is_deduplicated,
    locate_task,
    read_progress,
    run_vtab_tasks,
)
from vitrail.train import loop
from vitrail.train.grid import workers as worker
from vitrail.train.grid.engine import device_slots
from vitrail.train.scoring import TrainingResult

HERE = World(device=torch.device("cpu"))


def study_of(weights: str, out: Path, root: Path, *tasks: str, settings: tuple[str, ...] = ()) -> VtabStudy:
    every = (*QUICK, *settings)
    base = build_base_run(weights, image_size=8, settings=every)
    return VtabStudy(
        base=base, out=out, tasks=tasks or tuple(VTAB_TASKS), root=root, settings=every, go_on="vitrail vtab again"
    )


def test_the_recipe_is_the_papers(weights: str) -> None:
    """Table 4: one setting for all tasks."""
    run = build_base_run(weights)
    assert (run.steps, run.batch, run.optim.lr, run.augmentation.size) == (2500, 512, 0.01, (384, 384))
    assert run.data.train == "trainval1000"
    assert not VtabStudy(base=run, out=Path("x")).changes
    other = VtabStudy(base=build_base_run(weights, settings=("steps=7",)), out=Path("x"))
    assert other.changes == ["steps: 2500 -> 7"]


def test_a_set_that_is_not_in_its_usual_folder_keeps_its_answer(weights: str, tmp_path: Path) -> None:
    study = study_of(weights, tmp_path / "out", tmp_path)
    located = build_task_run(study, VTAB_TASKS["dsprites-location"])
    assert located.data.source == f"vtab/dsprites-location:{tmp_path / 'dsprites'}"
    assert isinstance(located.augmentation.crop, Squash)
    assert located.augmentation.flip == 0
    assert isinstance(build_task_run(study, VTAB_TASKS["pets"]).augmentation.crop, ResizeCrop)
    (tmp_path / "oxford-iiit-pet").mkdir()  # as torchvision keeps it
    assert locate_task(VTAB_TASKS["pets"], tmp_path) == f"vtab/pets:{tmp_path}"
    assert locate_task(VTAB_TASKS["pets"], None) == "vtab/pets"


@pytest.mark.slow
def test_all_nineteen(weights: str, few: Path, tmp_path: Path, ten: None) -> None:
    study = study_of(weights, tmp_path / "out", few, settings=("data.train=trainval10", "steps=2", "batch=4"))
    outcome = run_vtab_tasks(study, world=HERE)
    assert outcome.in_state("done") == list(VTAB_TASKS), outcome.reasons
    assert [mean.title for mean in average_groups(outcome.scores)] == [
        "Natural",
        "Specialized",
        "Structured",
        "VTAB (19)",
    ]
    assert average_groups(outcome.scores)[-1].value == pytest.approx(
        sum(score.accuracy for score in outcome.scores.values()) / 19
    )
    found = build_result(study, outcome, {"name": "tiny"})
    found.write(tmp_path / "result.json")
    again = Result.read(tmp_path / "result.json")
    assert len(again.measures) == 19 + 4
    assert again.measures[0].name == "Caltech101"
    assert again.measures[0].low is not None


@pytest.fixture(scope="module")
def trained(weights: str, sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with CIFAR-100 done."""
    out = tmp_path_factory.mktemp("trained") / "out"
    outcome = run_vtab_tasks(study_of(weights, out, sets, "cifar100"), world=HERE)
    assert outcome.in_state("done") == ["cifar100"], outcome.reasons
    assert not (out / "cifar100" / "checkpoints").exists()
    return out


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "out"))


@pytest.mark.slow
def test_a_missing_set_is_skipped_and_named(weights: str, sets: Path, out: Path, tmp_path: Path) -> None:
    study = study_of(weights, out, sets, "cifar100", "pets")
    seen: list[list[str]] = []
    outcome = run_vtab_tasks(study, world=HERE, present=lambda now: seen.append(now.in_state("done")))
    assert (outcome.in_state("done"), outcome.in_state("missing")) == (["cifar100"], ["pets"])
    assert str(sets / "pets" / "images.tar.gz") in outcome.reasons["pets"]
    assert seen[0] == ["cifar100"]
    assert outcome.scores["cifar100"].count == 24  # all of test
    rows = build_rows(outcome)
    assert [row[0] for row in rows] == ["CIFAR-100", "Pets", "Natural, 1 of 7", "VTAB (19), 1 of 19"]
    assert rows[1][3] == "missing"
    assert rows[-1][5] == f"{TABLE_9['ViT-H/14, JFT']['cifar100']:.1f}"  # over the same tasks
    assert "images.tar.gz" in build_page(study, outcome, "tiny")
    writers.pets(tmp_path / "more" / "pets")  # a copy with fewer than a thousand images is skipped too
    other = study_of(weights, tmp_path / "other", tmp_path / "more", "pets")
    assert "VTAB-1k takes 800" in run_vtab_tasks(other, world=HERE).reasons["pets"]


@pytest.mark.slow
def test_a_repeated_call_trains_nothing(
    weights: str, sets: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(weights, out, sets, "cifar100")
    first = read_progress(study)
    monkeypatch.setattr(loop.Training, "update", lambda *_: pytest.fail("trained again"))
    gone = study_of(weights, out, tmp_path / "nowhere", "cifar100")  # nor are images needed
    for again in (study, gone):
        assert run_vtab_tasks(again, world=HERE).scores == first.scores
    more = run_vtab_tasks(study_of(weights, out, tmp_path / "nowhere", "pets"), world=HERE)
    assert (more.in_state("done"), more.in_state("missing")) == (["cifar100"], ["pets"])  # whichever were requested


@pytest.mark.slow
def test_a_stop_in_a_task_and_its_sequel(
    weights: str, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = ("cifar100", "dsprites-location", "dsprites-orientation")
    whole = run_vtab_tasks(study_of(weights, tmp_path / "whole", sets, *tasks), world=HERE)
    study, honest = study_of(weights, tmp_path / "out", sets, *tasks), loop.Training.read_metrics

    def stop(self: loop.Training) -> None:
        honest(self)
        if self.config.name == "vtab-dsprites-location" and self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "read_metrics", stop)
        outcome = run_vtab_tasks(study, world=HERE)
    assert outcome.stopped
    assert [outcome.states[task] for task in tasks] == ["done", "stopped", "waiting"]
    status = json.loads((tmp_path / "out/dsprites-location/status.json").read_text())
    assert (status["state"], status["next"]) == ("interrupted", "vitrail vtab again")
    assert not (tmp_path / "out/dsprites-orientation").exists()
    steps: list[tuple[str, int]] = []
    monkeypatch.setattr(
        loop.Training, "read_metrics", lambda self: (honest(self), steps.append((self.config.name, self.step)))
    )
    assert run_vtab_tasks(study, world=HERE).scores == whole.scores  # on a CPU to the very same numbers
    assert steps[0] == ("vtab-dsprites-location", status["step"] + 1)
    assert {name for name, _ in steps} == {"vtab-dsprites-location", "vtab-dsprites-orientation"}


def kill_in_step(patch: pytest.MonkeyPatch) -> None:
    honest = loop.Training.read_metrics

    def draw(self: loop.Training) -> None:
        honest(self)
        if self.config.name == "vtab-dsprites-location" and self.step == 5:
            self.store.wait()  # a checkpoint that is on its way is whole: the test is about what comes then
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(loop.Training, "read_metrics", draw)


def kill_before_outcome(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "keep_outcome", lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL))


def kill_before_checkpoints_are_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shutil.rmtree", lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize("arm", [kill_in_step, kill_before_outcome, kill_before_checkpoints_are_removed])
def test_a_study_that_is_killed_resumes_to_the_same_scores(
    weights: str, sets: Path, tmp_path: Path, arm: Callable[[pytest.MonkeyPatch], None]
) -> None:
    tasks, often = ("cifar100", "dsprites-location"), ("keep.steps=2",)
    whole = run_vtab_tasks(study_of(weights, tmp_path / "whole", sets, *tasks, settings=often), world=HERE)
    study = study_of(weights, tmp_path / "out", sets, *tasks, settings=often)
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            with pytest.MonkeyPatch.context() as patch:
                arm(patch)
                run_vtab_tasks(study, world=HERE)
        except BaseException:
            traceback.print_exc()  # the child ends here, and nobody else would say why
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert json.loads((tmp_path / "out/study.json").read_text())["state"] == "running"
    again = run_vtab_tasks(study, world=HERE)
    assert (again.states, again.scores) == (whole.states, whole.scores)
    logs = [(tmp_path / "out" / task / "log.txt").read_text() for task in tasks]
    if arm is kill_in_step:
        assert [log.count("run folder") for log in logs] == [1, 2]
        assert "resumes from step 4" in logs[1]


@pytest.mark.slow
def test_tasks_in_processes_of_their_own_give_the_same(weights: str, sets: Path, tmp_path: Path) -> None:
    tasks = ("cifar100", "pets", "dsprites-location")
    whole = run_vtab_tasks(study_of(weights, tmp_path / "whole", sets, *tasks), world=HERE)
    spread = run_vtab_tasks(
        study_of(weights, tmp_path / "out", sets, *tasks), world=HERE, places=device_slots("cpu", 2)
    )
    assert (spread.states, spread.scores) == (whole.states, whole.scores)
    assert spread.in_state("missing") == ["pets"]
    pids = {json.loads((tmp_path / "out" / task / "lock").read_text())["pid"] for task in ("cifar100", tasks[2])}
    assert os.getpid() not in pids


@pytest.mark.slow
def test_a_folder_of_an_older_version_keeps_its_tasks(weights: str, out: Path, tmp_path: Path) -> None:
    """0.1.0 wrote no outcomes, and only what must not change into study.json."""
    study = study_of(weights, out, tmp_path / "nowhere", "cifar100")  # it is done: nothing is opened
    first, record = read_progress(study), json.loads((out / "study.json").read_text())
    (out / "cifar100/outcome.json").unlink()
    (out / "study.json").write_text(json.dumps({name: record[name] for name in ("weights", "run")}))
    assert run_vtab_tasks(study, world=HERE).scores == first.scores


@pytest.mark.slow
def test_a_stop_while_a_task_is_scored_ends_the_study_behind_it(
    weights: str, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = loop.Training.finish

    def late(self: loop.Training, ending: str) -> TrainingResult:
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(self, ending)

    monkeypatch.setattr(loop.Training, "finish", late)
    outcome = run_vtab_tasks(study_of(weights, tmp_path / "out", sets, "cifar100", "dsprites-location"), world=HERE)
    assert outcome.states == {"cifar100": "done", "dsprites-location": "stopped"}


def test_another_config_is_refused(weights: str, sets: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.optim\.lr: 0\.01 -> 0\.5\); give another --out"):
        run_vtab_tasks(study_of(weights, out, sets, "cifar100", settings=("optim.lr=0.5",)), world=HERE)
    other = VtabStudy(base=build_base_run(weights, image_size=8, settings=QUICK), out=out, weights_hash="another")
    with pytest.raises(ConfigError, match="weights"):
        run_vtab_tasks(other, world=HERE)
    run_vtab_tasks(study_of(weights, out, sets, "cifar100", settings=("log=1",)), world=HERE)  # changes no outcome
    with pytest.raises(ConfigError, match="holds a run, not a study"):
        run_vtab_tasks(study_of(weights, out / "cifar100", sets, "cifar100"), world=HERE)


def test_a_recipe_that_cannot_work_is_refused_before_anything_is_written(
    weights: str, sets: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="warmup=50"):
        run_vtab_tasks(
            study_of(weights, tmp_path / "out", sets, "pets", "cifar100", settings=("schedule.warmup=50",)), world=HERE
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_task_that_diverges_leaves_the_others(
    weights: str, sets: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = loop.Training.run

    def blow(self: loop.Training) -> TrainingResult:
        if self.config.name == "vtab-dsprites-location":
            raise Diverged("no longer finite")
        return honest(self)

    monkeypatch.setattr(loop.Training, "run", blow)
    study = study_of(weights, out, sets, "cifar100", "dsprites-location")
    outcome = run_vtab_tasks(study, world=HERE)
    assert outcome.states == {"cifar100": "done", "dsprites-location": "failed"}
    assert read_progress(study).in_state("done") == ["cifar100"]


def test_a_mean_is_plain_over_tasks_not_over_pictures() -> None:
    one = VtabScore(task=VTAB_TASKS["cifar100"], accuracy=0.9, count=1000, loss=0.0, step=1, fingerprint="")
    two = VtabScore(task=VTAB_TASKS["dtd"], accuracy=0.5, count=10, loss=0.0, step=1, fingerprint="")
    outcome = VtabOutcome(states={"cifar100": "done", "dtd": "done"}, scores={"cifar100": one, "dtd": two})
    natural, every = average_groups(outcome.scores)
    assert natural.value == every.value == 0.7
    assert natural.title == "Natural, 2 of 7"
    assert natural.interval.low < 0.7 < natural.interval.high


def test_copies_are_left_out_where_the_weights_say_so_of_every_task() -> None:
    both = {"deduplicated": {"against": {"one": "1", "two": "2"}}}
    assert is_deduplicated(both, ["1", "2"]) is True
    assert is_deduplicated(both, ["1", "2", "3"]) is None
    assert is_deduplicated({"deduplicated": False}, ["1", "2"]) is False
    assert is_deduplicated({}, ["1"]) is None
    assert is_deduplicated(both, []) is None

"""`vitrail pretrain`, `finetune`, `report` and `replay` as a person types them."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.cli import main
from vitrail.cli.train import training
from vitrail.data.collection import open_collection
from vitrail.train import loop

QUICK = ["--set", "steps=6", "--set", "schedule.warmup=1", "--set", "batch=16", "--set", "log=2", "--device", "cpu"]


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    said = capsys.readouterr()
    return said.out, said.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one subfolder per class: 40 digits of three classes, drawn larger."""
    path, source = tmp_path_factory.mktemp("pictures"), open_collection("digits").split("train")
    for index in range(150):
        label = int(source.labels.values[index])
        if label < 3:
            (path / f"digit {label}").mkdir(exist_ok=True)
            picture = source.open_image(index).rgb().resize((40, 36), Image.Resampling.BICUBIC)
            picture.save(path / f"digit {label}" / f"{index}.png")
    return path


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pretrained") / "run"
    assert main(["pretrain", "digits", "--out", str(out), *QUICK]) == 0
    return out


def test_pretrain_says_what_came_out(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(pretrained)]) == 0
    out, _ = lines(capsys)
    assert "done" in out
    assert "6 of 6" in out
    assert (pretrained / "report.html").exists()


def test_the_same_command_again_has_nothing_left_to_do(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pretrained / "metrics.jsonl").read_bytes()
    assert main(["pretrain", "digits", "--out", str(pretrained), *QUICK]) == 0
    assert main(["pretrain", "--resume", str(pretrained), "--device", "cpu"]) == 0
    assert (pretrained / "metrics.jsonl").read_bytes() == before
    assert "done" in lines(capsys)[0]


@pytest.mark.slow
def test_finetune_needs_weights_and_pictures_alone(
    pretrained: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = str(pretrained / "last.safetensors")
    assert main(["finetune", "--from", weights, "--data", str(folder), "--image-size", "24", *QUICK]) == 0
    out, _ = lines(capsys)
    for said in ("image size 24x24", "positions resized", "held out", "batch", "steps", "sgd at"):
        assert said in out
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1
    network = vitrail.load(runs[0] / "last.safetensors")
    assert network.config.image == (24, 24)
    assert network.card.labels == ("digit 0", "digit 1", "digit 2")  # type: ignore[union-attr]
    assert main(["finetune", "--from", weights, "--data", str(folder), "--image-size", "24", *QUICK]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2  # without --out every call starts again


def test_a_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "digits", "--dry-run", *QUICK]) == 0
    out, _ = lines(capsys)
    for said in ("memory", "speed", "time: about", "parameters"):
        assert said in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sweep_tries_the_grid_and_trains_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "optim.lr=1e-9,3e-3"]
    assert main(["pretrain", "digits", "--out", str(tmp_path / "run"), *QUICK, *sweep]) == 0
    out, _ = lines(capsys)
    assert "best on dev: optim.lr=3e-3" in out
    assert json.loads((tmp_path / "run/config.json").read_text())["optim"]["lr"] == 3e-3


def test_jobs_are_for_the_points_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "digits", "--out", str(tmp_path / "run"), *QUICK, "--jobs", "2"]) == 2
    assert "--sweep" in lines(capsys)[1]
    assert main(["pretrain", "digits", "--out", str(tmp_path / "run"), *QUICK, "--jobs", "-1", "--sweep"]) == 2
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_sweep_gives_the_time_of_one_run_and_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "digits", "--dry-run", *QUICK, "--sweep", "optim.lr=1e-3,3e-3", "optim.clip=1,2"]) == 0
    one, whole = [line for line in lines(capsys)[0].splitlines() if line.startswith("time: about")]
    assert "for all steps" in one
    assert "the sweep, 4 points and the last run, 5.0 times as long" in whole
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_counts_the_steps_of_each_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "digits", "--dry-run", *QUICK, "--sweep", "steps=6,12"]) == 0
    assert "2 points and the last run, 5.0 times as long" in lines(capsys)[0]  # 6 + 12 steps, and 12 where those win
    epochs = [*QUICK[2:], "--set", "epochs=0.5", "--set", "evaluation.patience=2"]  # 45 steps, 40 with a tenth held out
    assert main(["pretrain", "digits", "--dry-run", *epochs, "--sweep", "optim.lr=1e-3,3e-3"]) == 0
    assert "2 points and the last run, 2.8 times as long" in lines(capsys)[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_finished_sweep_does_not_hide_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pretrain", "digits", "--out", str(tmp_path / "run"), *QUICK]
    assert main([*command, "--sweep", "optim.lr=1e-9,3e-3"]) == 0
    before = (tmp_path / "run/last.safetensors").stat().st_mtime_ns
    lines(capsys)
    for same in (["--sweep", "optim.lr=1e-9,3e-3"], ["--sweep", "optim.lr=3e-3,1e-9"]):
        assert main([*command, *same]) == 0
        assert "done" in lines(capsys)[0]
    assert main(["pretrain", "--resume", str(tmp_path / "run"), "--device", "cpu"]) == 0
    lines(capsys)
    for other, said in (
        (["--sweep", "optim.lr=1e-9,3e-2"], "sweep of another grid (optim.lr: 1e-9,3e-3 -> 1e-9,3e-2); add --force"),
        (["--sweep", "optim.clip=1"], "(optim.lr: 1e-9,3e-3 -> (absent); optim.clip: (absent) -> 1)"),
        (["--set", "optim.clip=9", "--sweep", "optim.lr=1e-9,3e-3"], "another config (optim.clip: 1.0 -> 9.0); add"),
    ):
        assert main([*command, *other]) == 2
        _, err = lines(capsys)
        assert said in err
        assert "another --out" in err
        assert err.count("\n") == 1
    assert (tmp_path / "run/last.safetensors").stat().st_mtime_ns == before
    assert main([*command, "--sweep", "optim.lr=1e-9,2e-9", "--force"]) == 0
    assert "best on dev: optim.lr=" in lines(capsys)[0]


def test_a_run_is_no_sweep(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "digits", "--out", str(pretrained), *QUICK, "--sweep", "optim.lr=1e-9,3e-3"]) == 2
    assert "holds a run that is not a sweep; add --force" in lines(capsys)[1]
    assert not (pretrained / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_that_was_stopped_goes_on_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, honest = tmp_path / "run", loop.Training.evaluate

    def stop(self: loop.Training) -> None:
        honest(self)
        if self.config.optim.lr == 3e-3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "evaluate", stop)
        early = ["--set", "evaluation.every=3"]  # a signal at the last step of the last point is for the run behind it
        assert main(["pretrain", "digits", "--out", str(out), *QUICK, *early, "--sweep", "optim.lr=1e-3,3e-3"]) == 0
    assert f"stopped; resume with: vitrail pretrain --resume {out}" in lines(capsys)[0]
    assert main(["report", str(out)]) == 0
    said = lines(capsys)[0].splitlines()
    assert said[0] == f"{out}: a sweep, 1 of 2 points tried"
    assert "optim.lr=1e-3: " in said[1]
    assert said[-1] == f"  resume with: vitrail pretrain --resume {out}"
    assert main(["pretrain", "--resume", str(out), "--device", "cpu"]) == 0
    assert "best on dev: optim.lr=" in lines(capsys)[0]
    assert json.loads((out / "status.json").read_text())["state"] == "done"


def test_replay_names_the_pictures(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(pretrained), "--step", "3", "--device", "cpu"]) == 0
    out, _ = lines(capsys)
    assert "16 images, 0 of them" in out
    assert "digits/train[" in out
    assert np.asarray(Image.open(pretrained / "replay-3.png")).std() > 0


def test_a_finished_folder_does_not_hide_a_changed_command(
    pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "digits", "--out", str(pretrained), *QUICK, "--set", "optim.lr=1"]) == 2
    _, err = lines(capsys)
    assert "optim.lr: 0.003 -> 1.0" in err
    assert err.count("\n") == 1


def test_resume_alone_takes_no_other_settings(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--resume", str(pretrained), "--set", "optim.lr=1"]) == 2
    assert "give the whole command" in lines(capsys)[1]
    assert main(["pretrain", "--out", str(pretrained), "--resume", "--device", "cpu"]) == 0


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vitrail", "pretrain", "digits", "--out", str(out), *QUICK]
    process = subprocess.Popen(
        [*command, "--set", "evaluation.every=1", "--set", "steps=12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read().decode()
    assert process.wait(60) in (0, 141), said
    assert json.loads((out / "status.json").read_text())["state"] == "done", said


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["pretrain"], "which recipe?"),
        (["pretrain", "digit"], "did you mean digits"),
        (["pretrain", "finetune-digits"], "vitrail finetune WEIGHTS"),
        (["pretrain", "digits", "--set", "optim.lrr=1"], "optim.lr"),
        (["pretrain", "digits", "--set", "optim.lr=fast"], "optim.lr"),
        (["pretrain", "digits", "--data", "nowhere"], "neither a path nor a known set"),
        (["pretrain", "digits", "--image-size", "15"], "use 12 or 16"),
        (["pretrain", "digits", "--device", "tpu"], "tpu"),
        (["pretrain", "--resume", "nowhere"], "give the folder of a run"),
        (["pretrain", "digits", "--resume"], "--resume RUN"),
        (["finetune"], "which weights?"),
        (["finetune", "--from", "nowhere.safetensors"], "which images?"),
        (["finetune", "--from", "nowhere.safetensors", "--data", "digits"], "no such weight file"),
        (["replay", "nowhere", "--step", "1"], "give the folder of a run"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(
    command: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    _, err = lines(capsys)
    assert cause in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.slow
def test_a_signal_ends_it_with_status_0_and_the_command_to_go_on(
    tmp_path: Path, loaders: int, number: signal.Signals
) -> None:
    """To the process, or to the whole group, as a terminal and `timeout` send it: loader processes do not mind."""
    source = [] if not loaders else ["--set", "data.resident=off", "--set", f"data.workers={loaders}"]
    command = [sys.executable, "-m", "vitrail", "pretrain", "digits", "--out", str(tmp_path / "run"), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--set", "evaluation.every=1", "--set", "batch=16", *source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 2:"):
            os.killpg(process.pid, number) if loaders else process.send_signal(number)
    process.stdout.close()
    assert process.wait(60) == 0, "".join(said)
    assert f"resume with: vitrail pretrain --resume {tmp_path / 'run'}" in said[-1]
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


def test_one_of_several_processes_leaves_without_taking_its_threads_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch's groups of a mesh abort an interpreter that shuts down now and then, when all is done."""

    class Left(BaseException):
        pass

    def left(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(training, "start_run", lambda *_: 0)
    assert main(["pretrain", "digits", "--out", str(tmp_path)]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", left)
    with pytest.raises(Left, match="0"):
        main(["pretrain", "digits", "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_sweep_takes_networks_by_name_and_steps_for_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--sweep", "model=ViT-Nano/4", "steps=3"]
    assert main(["pretrain", "digits", "--out", str(tmp_path / "run"), *QUICK, *grid]) == 0
    assert "model=ViT-Nano/4,steps=3" in lines(capsys)[0]


def test_a_fine_tuning_ends_with_what_to_type_next(
    pretrained: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    words = [
        "finetune",
        str(pretrained),
        str(folder),
        "--out",
        str(out),
        "--steps",
        "4",
        "--batch",
        "8",
        "--lr",
        "0.02",
    ]
    assert main([*words, "--set", "schedule.warmup=1", "--set", "data.workers=0", "--device", "cpu"]) == 0
    said, _ = lines(capsys)
    assert "MFU" not in said
    commands = [line.strip() for line in said.partition("next:\n")[2].splitlines()]
    assert [command.split()[:2] for command in commands] == [
        ["vitrail", name] for name in ("predict", "evaluate", "serve")
    ]
    assert main([*shlex.split(commands[0])[1:], "--device", "cpu"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["steps"], config["batch"], config["optim"]["lr"]) == (4, 8, 0.02)
    log = (out / "log.txt").read_text()
    scores = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    watched = [row["accuracy"] for row in scores if row["kind"] == "watch"]
    assert watched
    assert all(f"accuracy {accuracy:.2%}" in log for accuracy in watched)
    page = (out / "report.html").read_text()
    assert "core-days" not in page
    assert "FLOP" not in page

"""A segmentation from the command line: trained, resumed, scored, predicted with, exported; and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.tasks.segmentation.drawn import CLASSES, COUNTS, SIZE, draw_folder
from vitrail.cli.app import main
from vitrail.evaluation.result import Result
from vitrail.objectives.objective import Objective

NETWORK = ["model.depth=1", "model.width=16", "model.mlp_width=16"]
SETTINGS = [*NETWORK, "schedule.warmup=1", "evaluation.every=6", "optim.lr=0.02", "log=4", "keep.steps=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and masks, and a run on it."""
    folder = tmp_path_factory.mktemp("place")
    draw_folder(folder / "drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(command("whole")) == 0
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def command(out: str | Path, *more: str, steps: int = 12) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ["pretrain", "digits", "drawn", "--task", "segmentation", "--steps", str(steps), "--batch", "8"]
    return [*words, "--out", str(out), *settings, *more]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_weights(one: Path, other: Path) -> bool:
    mine, yours = (vitrail.load(run / "last.safetensors").state_dict() for run in (one, other))
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def interrupt_at(step: int) -> Callable[[Objective, int], None]:
    def after_step(self: Objective, at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    return after_step


def test_it_learns_and_says_what(here: Path) -> None:
    card = vitrail.load(here / "whole").card
    assert (card.task, card.labels) == ("segmentation", CLASSES)
    rows = rows_of(here / "whole")
    last = rows[-1]
    assert {"miou", "pixel_accuracy", "loss", "count"} <= last.keys()
    assert (last["score"], last["count"]) == ("miou", COUNTS["test"])
    assert last["loss"] < next(row["loss"] for row in rows if row["kind"] == "watch")
    text = (here / "whole" / "report.html").read_text("utf-8")
    assert all(name in text for name in CLASSES)
    assert "Classes on test" in text
    assert text.count('class="strip"') == COUNTS["test"]


def test_interrupted_it_resumes_to_the_bit(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "after_step", interrupt_at(6))
        assert main(command(tmp_path / "parted")) == 0
    assert rows_of(tmp_path / "parted")[-1]["step"] < 12
    assert main(["pretrain", "--resume", str(tmp_path / "parted")]) == 0
    assert same_weights(here / "whole", tmp_path / "parted")
    assert rows_of(here / "whole")[-1] == rows_of(tmp_path / "parted")[-1]


@pytest.mark.slow
def test_killed_it_resumes_to_the_bit(here: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "vitrail", *command(tmp_path / "killed", "--set", "log=1", steps=60)]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "killed" / "checkpoints"
    while child.poll() is None and len(list(checkpoints.glob("*"))) < 2:
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert main(["pretrain", "--resume", str(tmp_path / "killed")]) == 0
    assert main(command(tmp_path / "undisturbed", "--set", "log=1", steps=60)) == 0
    assert same_weights(tmp_path / "killed", tmp_path / "undisturbed")


def test_evaluate_says_what_the_run_said(here: Path, tmp_path: Path) -> None:
    assert main(["evaluate", "whole", "drawn", "--out", str(tmp_path / "r.json"), "--device", "cpu"]) == 0
    last = rows_of(here / "whole")[-1]
    found = {measure.name: measure.value for measure in Result.read(tmp_path / "r.json").measures}
    assert found["mIoU"] == pytest.approx(last["miou"], rel=1e-12)
    assert found["pixel accuracy"] == pytest.approx(last["pixel_accuracy"], rel=1e-12)
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_predict_writes_masks_in_the_size_of_the_images(here: Path, tmp_path: Path) -> None:
    assert main(["predict", "whole", "drawn/test/images", "--out", str(tmp_path), "--device", "cpu"]) == 0
    written = [path for path in sorted(tmp_path.rglob("*.png")) if ".overlay" not in path.name]
    assert len(written) == COUNTS["test"]
    for path in written:
        with Image.open(path) as mask:
            assert mask.size == SIZE[::-1]
            assert set(np.unique(np.asarray(mask))) <= set(range(len(CLASSES)))


@pytest.mark.slow
def test_an_export_gives_the_same_logits(here: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    assert main(["export", "whole", "--to", "onnx", "--out", str(tmp_path / "w.onnx")]) == 0
    model = vitrail.load(here / "whole").eval()
    image = model.card.preprocessing(Image.open("drawn/test/images/00.png"))[None]
    session = runtime.InferenceSession(str(tmp_path / "w.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    with torch.no_grad():
        wanted = model(image).numpy()
    assert found.shape == wanted.shape == (1, len(CLASSES), 16, 16)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_weights_of_a_classifier_are_fine_tuned_without_a_word_on_the_task(here: Path, tmp_path: Path) -> None:
    config = vitrail.ViTConfig(width=16, depth=1, mlp_width=16, heads=2, image=(16, 16), patch=(4, 4), classes=7)
    vitrail.save(vitrail.create_model(config), tmp_path / "classifier.safetensors")
    words = ["finetune", str(tmp_path / "classifier.safetensors"), "drawn", "--steps", "2"]
    assert main([*words, "--dry-run"]) == 0
    assert main([*words, "--out", str(tmp_path / "tuned")]) == 0
    made = vitrail.load(tmp_path / "tuned")
    assert (made.card.task, made.card.labels) == ("segmentation", CLASSES)
    assert made(torch.zeros(2, 3, 16, 16)).shape == (2, len(CLASSES), 16, 16)
    assert rows_of(tmp_path / "tuned")[-1]["score"] == "miou"


@pytest.mark.slow
def test_masks_that_cannot_be_used_are_named_and_do_not_stop_the_run(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("drawn", tmp_path / "drawn")
    monkeypatch.chdir(tmp_path)
    masks = tmp_path / "drawn" / "train" / "masks"
    (masks / "04.png").write_bytes((masks / "03.png").read_bytes()[:60])
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(masks / "05.png")
    Image.fromarray(np.full(SIZE, 9, np.uint8)).save(tmp_path / "drawn" / "test" / "masks" / "02.png")
    assert main(["data", "drawn"]) == 0
    said = capsys.readouterr().out
    assert "24 in train" in said
    assert ", ".join(CLASSES) in said
    assert main(command("run", steps=3)) == 0
    assert rows_of(tmp_path / "run")[-1]["count"] == COUNTS["test"] - 1
    entries = (tmp_path / "run" / "unreadable.jsonl").read_text()
    assert len(entries.splitlines()) == 3
    assert all(name in entries for name in ("04.png", "05.png", "02.png"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pretrain", "digits", "drawn", "--task", "segment"], ("'segment'", "segmentation")),
        (["pretrain", "digits", "--task", "segmentation"], ("digits", "images/a.jpg", "masks/a.png")),
        (["pretrain", "digits", "drawn", "--task", "classification"], ("drawn", "segmentation")),
        (command("refused", "--set", "augmentation.policy=RandAugment"), ("RandAugment", "rotate")),
        (command("refused", "--set", "mix.mixup=0.2"), ("mix.mixup",)),
        (["evaluate", "vitrail-cifar10", "drawn"], ("drawn", "labels")),
        (["evaluate", "whole", "digits"], ("digits", "masks")),
        (["fit", "whole", "drawn", "--task", "classification", "--out", "f.safetensors"], ("drawn", "labels")),
        (["knn", "whole", "drawn"], ("drawn", "labels")),
        (["probe", "whole", "drawn"], ("drawn", "labels")),
        (["fewshot", "whole", "drawn"], ("drawn", "labels")),
        (["convert", "whole", "other.safetensors", "--to", "timm"], ("timm", "patches")),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    here: Path, words: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert all(word in error for word in said)


@pytest.mark.slow
def test_frozen_features_come_from_such_weights_too(here: Path, tmp_path: Path) -> None:
    """A classifier on the features of a network whose head reads patches is one for whole images."""
    assert main(["fit", "whole", "digits", "--out", str(tmp_path / "fitted.safetensors"), "--device", "cpu"]) == 0
    made = vitrail.load(tmp_path / "fitted.safetensors")
    assert made.card.task == "classification"
    assert made(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


def test_a_report_and_its_rows_are_read_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "whole"]) == 0
    said = capsys.readouterr().out
    assert "mIoU" in said
    assert f"{COUNTS['test']} images" in said


@pytest.mark.slow
def test_a_step_is_replayed_without_labels_of_whole_images(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "whole", "--step", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("train/images/") == 8
    assert not any(name in said for name in CLASSES)


@pytest.mark.slow
def test_a_pack_of_masks_without_labels_says_so(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "pack", "drawn", "--out", str(tmp_path / "packed")]) == 0
    capsys.readouterr()
    words = ["fit", "whole", str(tmp_path / "packed"), "--task", "classification"]
    assert main([*words, "--out", str(tmp_path / "w.safetensors")]) == 2
    assert "--task segmentation" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_shorter_than_an_epoch_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "drawn")
    for mask in (tmp_path / "drawn/train/masks").iterdir():
        Image.fromarray(np.full(SIZE, 255, np.uint8)).save(mask)
    assert main(command("run", "--set", "schedule.warmup=0", steps=1)) == 2
    assert "training images could be used" in capsys.readouterr().err


@pytest.mark.parametrize("value", [200, pytest.param(255, marks=pytest.mark.slow)])
def test_a_run_without_an_image_to_learn_from_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: int
) -> None:
    """All masks hold an index that is not a class, or nothing but ignored pixels."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "drawn")
    for mask in (tmp_path / "drawn/train/masks").iterdir():
        Image.fromarray(np.full(SIZE, value, np.uint8)).save(mask)
    assert main(command("run")) == 2
    told = capsys.readouterr().err
    assert "training images could be used" in told
    assert ("unreadable.jsonl" in told) == (value == 200)

"""A new task is one file with one line of registration (regression.py): it trains, resumes, is scored, inspected, asked
and exported like those of the package."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.extending import regression  # registers the task
from tests.extending.test_objective import interrupt_at
from vitrail.checkpoint.bundle import get_card
from vitrail.cli.app import main
from vitrail.data.collection import open_collection
from vitrail.inspection import rollout
from vitrail.objectives.objective import Objective

SETTINGS = ["schedule.warmup=1", "evaluation.every=12", "log=4", "model.depth=2", "data.dev=0.1", "data.watch=dev"]


def command(folder: Path) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ["pretrain", "digits", "--task", "regression", "--steps", "24", "--batch", "32"]
    return [*words, "--out", str(folder), *settings]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in the middle by Ctrl-C, then resumed."""
    folder = tmp_path_factory.mktemp("task") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "after_step", interrupt_at(6))
        assert main(command(folder)) == 0
    assert main(["pretrain", "--resume", str(folder)]) == 0
    return folder


def rows_of(folder: Path, kind: str) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def error_by_hand(folder: Path, split: str = "test") -> float:
    """The mean error over a split, image by image."""
    model, source = vitrail.load(folder), open_collection("digits").split(split)
    prepare = get_card(model).preprocessing
    images = torch.stack([prepare(source.open_image(at).rgb()) for at in range(len(source))])
    with torch.no_grad():
        found = model(images)[:, 0]
    return float((found - torch.from_numpy(source.labels.values.astype(np.float32))).abs().mean())


@pytest.mark.slow
def test_it_is_trained_and_resumed_to_the_bit(run: Path, tmp_path: Path) -> None:
    assert main(command(tmp_path / "whole")) == 0
    for name in ("last.safetensors", "best.safetensors"):
        whole, parted = (vitrail.load(folder / name).state_dict() for folder in (tmp_path / "whole", run))
        assert all(torch.equal(whole[key], parted[key]) for key in whole)
    first, last = rows_of(run, "train")[0], rows_of(run, "train")[-1]
    assert last["loss"] < first["loss"]


def test_smaller_errors_choose_the_best_weights(run: Path) -> None:
    rows = rows_of(run, "watch")
    best = min(rows, key=lambda row: row["error"])
    assert len(rows) == 2
    assert get_card(vitrail.load(run / "best.safetensors")).provenance["step"] == best["step"]


def test_weights_say_what_they_are_for(run: Path) -> None:
    card = get_card(vitrail.load(run))
    assert (card.task, card.labels) == ("regression", ("value",))


def test_it_is_evaluated(run: Path, tmp_path: Path) -> None:
    assert main(["evaluate", str(run), "digits@test", "--out", str(tmp_path / "result.json")]) == 0
    (measure,) = json.loads((tmp_path / "result.json").read_text())["measures"]
    assert measure["value"] == pytest.approx(error_by_hand(run), rel=1e-5)
    assert rows_of(run, "test")[-1]["error"] == pytest.approx(error_by_hand(run), rel=1e-5)


def test_it_predicts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "digit.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(picture)
    model = vitrail.load(run)
    with torch.no_grad():
        value = float(model(get_card(model).preprocessing(Image.open(picture))[None])[0, 0])
    assert vitrail.Predictor(run)(picture) == regression.Number(pytest.approx(value, rel=1e-5))
    assert main(["predict", "--weights", str(run), str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_it_is_finetuned(run: Path, tmp_path: Path) -> None:
    """One output is enough for it, where classes have to be two, and its objective's own fields can be set."""
    settings = {"objective.weight": 2.0}
    tuned = vitrail.finetune(run, "digits", task="regression", steps=2, out=tmp_path / "tuned", settings=settings)
    assert get_card(tuned.model).task == "regression"
    assert tuned.score == pytest.approx(error_by_hand(tuned.folder), rel=1e-5)


def test_its_rollout_is_the_one_by_hand(run: Path) -> None:
    model, x = vitrail.load(run).eval(), torch.randn(2, 3, 16, 16)
    _, found = model.forward_intermediates(x, attention=True)
    through = torch.eye(17)
    for weights in found.attention:
        kept = weights.mean(1) + torch.eye(17)
        through = kept / kept.sum(-1, keepdim=True) @ through
    torch.testing.assert_close(rollout(model, x), through[:, 0, 1:].unflatten(1, (4, 4)).detach())


@pytest.mark.slow
def test_it_is_inspected(run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "digit.png"
    Image.new("RGB", (16, 16), (90, 40, 20)).save(picture)
    assert main(["inspect", str(run), str(picture), "--out", str(tmp_path / "look")]) == 0
    assert (tmp_path / "look" / "report.html").exists()


@pytest.mark.slow
def test_it_is_exported(run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 0
    session, x = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")), torch.randn(3, 3, 16, 16)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(outputs, vitrail.load(run)(x).numpy(), atol=1e-5)


def test_data_without_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["pretrain", "digits", "shapes", "--task", "regression", *out]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1

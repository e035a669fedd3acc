"""`vitrail cost`: the paper's figures, one's own, and what is measured."""

import json
from pathlib import Path

import pytest
import torch

from tests.studies.conftest import TINY
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.cli.app import main
from vitrail.evaluation.result import Result


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["cost", *argv]) == 0
    return capsys.readouterr().out


def cells(text: str, *starts: str) -> list[str]:
    """The cells of the first line that holds these words in this order."""
    for line in text.splitlines():
        found = line.split()
        if [word for word in found if word in starts][: len(starts)] == list(starts):
            return found
    raise AssertionError(f"no line with {starts} in\n{text}")


def test_the_papers_own_trainings(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "vit_l_16")
    assert cells(text, "ViT-L/16", "224x224")[2:] == ["1,000", "197", "304.33M", "61.55"]
    assert cells(text, "ViT-L/16", "384x384")[2:] == ["1,000", "577", "304.72M", "191.07"]
    assert cells(text, "jft", "14") == [
        *("ViT-L/16", "224x224", "jft", "303,000,000", "14", "18,291", "1,567.1", "1,567", "680.1"),
    ]
    assert cells(text, "imagenet21k", "90")[-2:] == ["472.1", "204.9"]  # no row of Table 6
    assert "padding" not in text


def test_several_networks_and_their_convolutions(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "BiT-R50x1", "R50+ViT-B/16", "--data", "jft")
    assert cells(text, "BiT-R50x1", "jft")[-3:-1] == ["50.7", "50"]
    assert cells(text, "R50+ViT-B/16", "jft")[-3:-1] == ["272.7", "274"]
    assert "multiplies with its padding" in text
    assert "recomputed" in text


def test_ones_own_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ViT-B/16", "--images", "1000", "--epochs", "10", "--classes", "7", "--image-size", "32")
    row = cells(text, "ViT-B/16", "yours")
    assert row[1:6] == ["32x32", "yours", "1,000", "10", "7"]
    patches, tokens, d = 4, 5, 768
    macs = patches * 768 * d + 12 * (12 * tokens * d * d + 2 * tokens * tokens * d) + 7 * d
    assert float(row[6]) == pytest.approx(6 * macs * 10_000 / 1e18, rel=0.01)
    text = said(capsys, "ViT-Nano/4", "--data", "digits", "--epochs", "2")
    assert cells(text, "digits")[:2] == ["ViT-Nano/4", "32x32"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["ViT-B/61"], "unknown model 'ViT-B/61'"),
        (["nowhere.safetensors"], "there is no weight file nowhere.safetensors"),
        (["ViT-B/16", "--image-size", "100"], "100"),
        (["ViT-B/16", "--images", "5"], "give --epochs E"),
        (["ViT-B/16", "--epochs", "5"], "give --data NAME or --images N"),
        (["ViT-B/16", "--data", "pets"], "--data pets needs a number of epochs"),
        (["ViT-B/16", "--data", "pets", "--images", "5"], "one of them"),
        (["ViT-B/16", "--data", "jft", "--epochs", "-1"], "above 0"),
    ],
)
def test_mistakes_are_told_in_a_line(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *argv]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_weights_are_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(build_fresh(TINY), "tiny.safetensors")
    argv = ["./tiny.safetensors", "--measure", "--batch", "1", "2", "--image-size", "8", "16", "--device", "cpu"]
    text = said(capsys, *argv, "--seconds", "60", "--out", "here", "--data", "digits", "--epochs", "1")
    assert "Inference on CPU" in text
    assert "float32" in text
    for size in ("8x8", "16x16"):
        assert "all requested" in " ".join(cells(text, "tiny", size, "about"))
    found = Result.read(tmp_path / "here" / "tiny.json")
    assert found.kind == "cost"
    assert found.weights["hash"]
    by_name = {measure.name: measure for measure in found.measures}
    assert by_name["img/s 8x8"].value > 0
    assert by_name["img/s 8x8"].unit == "img/s"
    assert by_name["memory 16x16"].value > by_name["memory 8x8"].value
    assert [point["batch"] for point in found.details["16x16"]["points"]] == [1, 2]
    assert json.loads((tmp_path / "here" / "tiny.json").read_text())["config"]["network"]
    assert (tmp_path / "here" / "speed.png").exists()
    assert (tmp_path / "here" / "speed.svg").exists()


def test_without_measuring_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said(capsys, "ViT-B/16")
    assert not list(tmp_path.iterdir())
    said(capsys, "ViT-B/16", "--out", "x")
    assert Result.read(tmp_path / "x" / "vit_b_16.json").weights["hash"] is None


def test_two_files_of_one_network_have_a_result_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        save(build_fresh(TINY), f"{name}/tiny.safetensors")
    text = said(capsys, "a/tiny.safetensors", "b/tiny.safetensors", "--data", "digits", "--epochs", "1", "--out", "x")
    found = [Result.read(path) for path in sorted(Path("x").glob("*.json"))]
    assert [one.weights["name"] for one in found] == ["a/tiny.safetensors", "b/tiny.safetensors"]
    assert all(path.name in text for path in Path("x").glob("*.json"))


@pytest.mark.slow
def test_a_result_says_in_what_and_on_what_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(build_fresh(TINY), "tiny.safetensors")
    argv = ["./tiny.safetensors", "--batch", "1", "--data", "digits", "--epochs", "1", "--device", "cpu"]
    said(capsys, *argv, "--measure", "--seconds", "0.5", "--out", "x")
    config = Result.read(Path("x/tiny.json")).config
    assert (config["precision"], config["seconds"]) == ("float32", 0.5)
    assert config["device"].startswith("CPU")
    said(capsys, *argv, "--out", "y")
    assert "precision" not in Result.read(Path("y/tiny.json")).config  # nothing was run


@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
def test_numbers_that_are_none_are_refused_before_the_work(capsys: pytest.CaptureFixture[str], number: str) -> None:
    assert main(["cost", "ViT-Nano/4", "--images", "5", "--epochs", number]) == 2
    assert f"--epochs {number}" in capsys.readouterr().err
    assert main(["cost", "ViT-Nano/4", "--measure", "--seconds", number]) == 2
    said = capsys.readouterr()
    assert f"--seconds {number}" in said.err
    assert main(["cost", "ViT-Nano/4", "--measure", "--batch", "1", "0"]) == 2
    said = capsys.readouterr()
    assert "--batch 0 must be at least 1" in said.err
    assert not said.out

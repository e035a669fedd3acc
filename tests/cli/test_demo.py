"""The last lines of the demo, and how little it says on the way. tests/test_quickstart_path.py runs all of it."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from vitrail.cli.train import demo
from vitrail.cli.train.display import PlainDisplay


def test_ends_with_lines_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "vitrail_command", lambda: "vitrail")
    demo.show_next_steps(Path("runs/my demo"), Path("runs/a-7.png"))
    report, serve, predict, fit = capsys.readouterr().out.splitlines()
    assert report.split()[-1] == (tmp_path / "runs" / "my demo" / "report.html").as_uri()
    assert serve.endswith("vitrail serve 'runs/my demo'")
    assert predict.endswith("vitrail predict 'runs/my demo' runs/a-7.png")
    assert "vitrail fit vitrail-cifar10 FOLDER" in fit
    demo.show_next_steps(Path("runs/my demo"), Path("runs/a-scene.png"), "segmentation")
    assert "vitrail finetune WEIGHTS FOLDER" in capsys.readouterr().out.splitlines()[-1]


def test_the_command_is_one_that_can_be_typed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    assert demo.vitrail_command() == f"{tools / 'python'} -m vitrail"
    (tools / "vitrail").write_text("#!/bin/sh\n")
    (tools / "vitrail").chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert demo.vitrail_command() == ".venv/bin/vitrail"
    monkeypatch.setenv("PATH", str(tools))
    assert demo.vitrail_command() == "vitrail"
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert demo.vitrail_command() == str(tools / "vitrail")


def test_a_held_out_digit_is_there_to_ask_with(tmp_path: Path) -> None:
    path = demo.write_digit(tmp_path / "runs")
    assert path.name == "a-7.png"
    with Image.open(path) as image:
        assert image.size == (128, 128)


def test_a_held_out_scene_is_there_to_ask_with(tmp_path: Path) -> None:
    with Image.open(demo.write_scene(tmp_path / "runs")) as image:
        assert image.size == (demo.PANE, demo.PANE)


def test_of_many_scores_a_few_are_shown() -> None:
    said: list[str] = []
    brief = demo.DemoObserver(PlainDisplay(said.append))
    train = {"kind": "train", "steps": 100, "epoch": 1.0, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0, "mfu": 0.1}
    test = {"kind": "test", "split": "test", "accuracy": 0.5, "loss": 1.0, "count": 10}
    for step in range(1, 101):
        brief.progress({**train, "step": step, "left_s": 1.0})
        brief.progress({**test, "step": step})
    assert [line.split(":")[0] for line in said] == ["step 1", "step 21", "step 41", "step 61", "step 81", "step 100"]


def test_the_number_to_beat_is_shown() -> None:
    said: list[str] = []
    row = {"kind": "baseline", "accuracy": 0.9, "count": 10, "split": "test", "penalty": 4.0}
    demo.DemoObserver(PlainDisplay(said.append)).progress(row)
    assert "without training: 90.00%" in said[0]

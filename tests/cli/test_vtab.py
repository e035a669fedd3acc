"""`vitrail vtab`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest
import torch

from tests.data.datasets import writers
from tests.studies.conftest import TINY
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.cli.app import main
from vitrail.cli.evaluate.evaluate import select_tasks
from vitrail.data.datasets.catalogue import VTAB_TASKS
from vitrail.evaluation.result import Result

SETTINGS = ("steps=2", "batch=8", "schedule.warmup=1", "data.workers=0")
QUICK = ["--image-size", "8", "--device", "cpu", *(word for text in SETTINGS for word in ("--set", text))]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "sets"))
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(build_fresh(TINY), "tiny.safetensors")
    return "tiny.safetensors"


@pytest.fixture
def cifar(tmp_path: Path) -> None:
    members = writers.cifar100_members(2000, 24)
    writers.tar(tmp_path / "sets" / "cifar100" / "cifar-100-python.tar.gz", members)


@pytest.mark.slow
def test_a_table_beside_the_papers(weights: str, cifar: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["vtab", weights, "--tasks", "cifar100", "vtab/pets", *QUICK]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "skipped: Pets. Oxford-IIIT Pets: images.tar.gz" in out
    assert "not the paper's recipe: " in out
    assert "steps: 2500 -> 2" in out
    row = next(line for line in out.splitlines() if line.strip().startswith("CIFAR-100 "))
    assert row.split()[-3:] == ["85.5", "81.9", "84.1"]
    found = Result.read(Path("runs/vtab-tiny/result.json"))
    assert found.kind == "vtab"
    assert [measure.name for measure in found.measures] == ["CIFAR-100", "Natural, 1 of 7", "VTAB (19), 1 of 19"]
    assert found.measures[0].count == 24
    assert found.weights["hash"]
    assert "pets" in found.details["missing"]
    assert "CIFAR-100" in Path("runs/vtab-tiny/report.html").read_text()
    go_on = json.loads(Path("runs/vtab-tiny/cifar100/status.json").read_text())
    assert go_on["state"] == "done"
    assert main(command) == 0  # the same again, and nothing is trained
    assert "step 2/2" not in capsys.readouterr().out
    assert main(["vtab", weights, "--tasks", "cifar100", *QUICK, "--set", "optim.lr=0.5"]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_a_dry_run_says_what_goes_where(weights: str, cifar: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vtab", weights, "--dry-run", *QUICK]) == 0
    out = capsys.readouterr().out
    there = [line.split()[0] for line in out.splitlines() if " there " in line and "Put" not in line]
    assert there == ["CIFAR-100"]
    assert "skipped: Clevr-Count, Clevr-Dist" in out  # two tasks, one set
    assert str(Path("sets/pets/images.tar.gz")) in out
    assert "1 tasks to train" not in out
    assert "1 task to train for 2 steps of 8 images of 8x8" in out
    assert not Path("runs").exists()


@pytest.mark.slow
def test_no_set_at_all_is_an_error(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vtab", weights, "--root", str(tmp_path / "empty"), "--tasks", "specialized", *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("skipped: ") == 8  # as each task comes, and at the end
    assert f"none of the data sets is in {tmp_path / 'empty'}" in captured.err


def test_an_unknown_task_is_named_with_its_neighbours(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vtab", weights, "--tasks", "pest"]) == 2
    assert "unknown VTAB task 'pest'; did you mean vtab/pets" in capsys.readouterr().err


def test_tasks_come_in_the_papers_order() -> None:
    assert select_tasks([]) == tuple(VTAB_TASKS)
    assert select_tasks(["kitti-distance", "Specialized", "pets"]) == (
        *("pets", "pcam", "eurosat", "resisc45", "retinopathy", "kitti-distance"),
    )

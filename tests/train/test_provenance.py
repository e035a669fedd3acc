"""What a run's weights say of the images they were trained on, and what a resume notices of changed ones."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.distributed.pair import together
from tests.train.tiny import tiny_run
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.core.errors import ConfigError
from vitrail.data.collection import open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.training_record import KEY, find_exposure
from vitrail.distributed.process_group import World
from vitrail.optim.config import Schedule
from vitrail.train.config import Data, Keep, Run
from vitrail.train.loop import train
from vitrail.train.scoring import TrainingResult

ALONE = World(device=torch.device("cpu"))
COUNT = 40


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw(tmp_path / "photos")
    return tmp_path / "photos"


def draw(folder: Path, seed: int = 0) -> None:
    """40 images of two classes, all of the same size in bytes."""
    rng = np.random.default_rng(seed)
    for at in range(COUNT):
        (folder / "ab"[at % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / "ab"[at % 2] / f"{at}.bmp")


def a_run(photos: Path, **changes: Any) -> Run:
    data = Data(source=str(photos), dev=0.25, watch="dev", test="none", workers=0)
    model = replace(tiny_run().model, classes=2)  # type: ignore[type-var]
    run = tiny_run(model=model, data=data, steps=2, schedule=Schedule(), keep=Keep(steps=1))
    return replace(run, **changes)


def go(run: Run, out: Path, *, force: bool = False) -> TrainingResult:
    return train(run, out=out, world=ALONE, force=force)


def provenance_of(weights: Path) -> dict[str, Any]:
    return read_bundle(weights).card.provenance


def source(photos: Path) -> ImageDataset:
    return open_collection(str(photos)).split("train")


@pytest.mark.slow
def test_the_weights_of_a_run_know_which_images_they_were_trained_on(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "run")
    for name in ("best.safetensors", "last.safetensors"):
        provenance = provenance_of(tmp_path / "run" / name)
        (record,) = provenance[KEY]
        assert (record["images"], record["held_out"]) == (30, 10)
        assert record["selection"]["dev"] == 0.25
        assert find_exposure(provenance, source(photos)).count == 30
    tuned = a_run(photos, weights=str(tmp_path / "run" / "last.safetensors"), data=Data(source="digits", workers=0))
    tuned = replace(tuned, model=tiny_run().model)
    go(tuned, tmp_path / "tuned")
    provenance = provenance_of(tmp_path / "tuned" / "last.safetensors")
    assert find_exposure(provenance, source(photos)).count == 30  # of the run before
    digits = open_collection("digits")
    assert find_exposure(provenance, digits.split("train")).seen.all()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_record_and_a_forced_one_adds_to_it(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "run")
    before = provenance_of(tmp_path / "run" / "last.safetensors")[KEY]
    go(a_run(photos, steps=3), tmp_path / "run", force=True)
    assert provenance_of(tmp_path / "run" / "last.safetensors")[KEY] == before
    shutil.copytree(photos, tmp_path / "first")
    draw(photos, seed=1)
    go(a_run(photos, steps=4), tmp_path / "run", force=True)
    provenance = provenance_of(tmp_path / "run" / "last.safetensors")
    assert len(provenance[KEY]) == 2
    for folder in (photos, tmp_path / "first"):
        assert find_exposure(provenance, source(folder)).count == 30


def test_images_that_were_replaced_by_others_of_the_same_size_are_noticed(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "run")
    fingerprint = source(photos).fingerprint
    times = {path: path.stat().st_mtime_ns for path in photos.rglob("*.bmp")}
    draw(photos, seed=1)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    assert source(photos).fingerprint == fingerprint
    with pytest.raises(ConfigError, match=r"data\.content\.train"):
        go(a_run(photos), tmp_path / "run")


@pytest.mark.slow
def test_images_that_were_touched_or_moved_are_the_same(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "run")
    moved = shutil.move(photos, tmp_path / "elsewhere")
    for path in Path(moved).rglob("*.bmp"):
        os.utime(path)
    assert go(a_run(Path(moved)), tmp_path / "run").state == "done"


def test_a_run_of_a_version_that_did_not_look_at_contents_resumes(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["data"]["content"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert go(a_run(photos), tmp_path / "run").state == "done"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["content"]  # it does now


def work(world: World, run: Run, out: str) -> str:
    torch.set_num_threads(1)
    return train(run, out=Path(out), world=world).state


@pytest.mark.slow
def test_images_to_score_that_are_trained_on_are_told_of(photos: Path, tmp_path: Path) -> None:
    def notes(out: Path) -> list[str]:
        return [line for line in (out / "log.txt").read_text().splitlines() if "are also trained on" in line]

    go(a_run(photos), tmp_path / "run")
    assert not notes(tmp_path / "run")
    everything = Data(source=str(photos), dev=0.0, watch="none", test="none", workers=0)
    go(a_run(photos, data=everything), tmp_path / "all")
    tuned = a_run(photos, weights=str(tmp_path / "all" / "last.safetensors"))
    go(tuned, tmp_path / "tuned")
    (note,) = notes(tmp_path / "tuned")
    assert "10 of the 10 images of dev" in note


@pytest.mark.slow
def test_two_processes_record_what_one_does(photos: Path, tmp_path: Path) -> None:
    go(a_run(photos), tmp_path / "one")
    assert together(work, a_run(photos), str(tmp_path / "two")) == ["done", "done"]
    one, two = (provenance_of(tmp_path / name / "last.safetensors")[KEY] for name in ("one", "two"))
    assert one == two

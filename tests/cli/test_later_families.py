"""Every command on weights of later families, from a folder of images to a fine-tuned run at another resolution."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.test_frozen import COLOURS, folder
from tests.models.tiny import FAMILIES, VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import load, save
from vitrail.cli.app import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit_config import ViTConfig

BASE = replace(VIT, image=(24, 24), patch=(4, 4), classes=3)
NO_MAE = ("beit", "beit, shared table", "bias table without class token", "sam", "vitdet")


def write_weights(name: str, path: Path) -> ViTConfig:
    config = replace(BASE, **FAMILIES[name])
    config = replace(config, head="linear") if config.has_patch_head else config
    torch.manual_seed(0)
    model = awake(config, torch.float32)
    labels = tuple(COLOURS) if config.classes else None
    model.card = Card(preprocessing=Preprocessing(image=config.image), labels=labels)
    save(model, path)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    folder(tmp_path / "photos", {"train": 8, "test": 4})
    config = write_weights(name, tmp_path / "start.safetensors")

    def run(*words: str, status: int = 0) -> None:
        assert main([*words, "--device", "cpu"]) == status

    alone = ("--workers", "0")
    run("fit", "start.safetensors", "photos", "--out", "fitted.safetensors", *alone)
    run("predict", "fitted.safetensors", "photos/test/red/0.png", "--attention", "maps")
    run("evaluate", "fitted.safetensors", "photos@test", *alone)
    run("embed", "start.safetensors", "photos", "--out", "features.npz", *alone)
    for command in ("fewshot", "probe", "knn"):
        run(command, "start.safetensors", "photos", *alone)
    run("inspect", "fitted.safetensors", "photos/test/red/0.png", "--only", "rollout,heads,norms", "--out", "look")
    short = ("--steps", "2", "--batch", "6", "--set", "data.workers=0")
    run("finetune", "start.safetensors", "photos", "--image-size", "32", "--out", "tuned", *short)
    tuned = load("tuned").config
    assert isinstance(tuned, ViTConfig)
    assert (tuned.image, tuned.classes, tuned.shape) == ((32, 32), 3, config.shape)
    for recipe in ("dino", "mae", "masked"):
        words = ("--recipe", f"selfsup/{recipe}-digits", "--image-size", "24", "--set", "schedule.warmup=0", *short)
        refused = recipe == "mae" and name in NO_MAE
        run("finetune", "start.safetensors", "photos", *words, "--out", recipe, status=2 if refused else 0)

"""--patch and --channels as a person types them, wherever weights are given."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoint.weights import build_fresh, load, save
from vitrail.cli.app import main
from vitrail.models.vit_config import ViTConfig

SHAPE = ViTConfig(width=32, depth=1, mlp_width=32, heads=1, image=(16, 16), patch=(4, 4), classes=3)
NAMES = ("ant", "bee", "cat")
CPU = ["--device", "cpu"]
LOADING = [*CPU, "--workers", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with names, and 24 images of noise in two splits, a tint for each class."""
    path, rng = tmp_path_factory.mktemp("patch"), np.random.default_rng(0)
    torch.manual_seed(0)
    network: Any = build_fresh(SHAPE)
    torch.nn.init.normal_(network.head.classifier.weight, std=0.5)
    save(network, path / "net.safetensors", labels=list(NAMES))
    for at in range(24):
        folder = path / "photos" / ("train" if at < 15 else "test") / NAMES[at % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 128, (20, 24, 3), dtype=np.uint8)
        pixels[:, :, at % 3] += 100
        Image.fromarray(pixels).save(folder / f"{at}.png")
    return path


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_each_of_several_patches_is_a_row_and_a_file(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "net.safetensors", "photos", *LOADING]
    text = said(capsys, *command, "--patch", "2", "4", "8", "--out", str(tmp_path / "r.json"))
    assert re.findall(r"^ *16x16 +(\d)\b", text, re.MULTILINE) == ["2", "4", "8"]
    found = {patch: json.loads((tmp_path / f"r-p{patch}.json").read_text()) for patch in (2, 4, 8)}
    said(capsys, *command, "--out", str(tmp_path / "own.json"))
    own = json.loads((tmp_path / "own.json").read_text())
    values = {patch: [measure["value"] for measure in one["measures"]] for patch, one in found.items()}
    assert values[4] == [measure["value"] for measure in own["measures"]]
    assert values[2] != values[4] != values[8]
    assert {one["weights"]["hash"] for one in found.values()} == {own["weights"]["hash"]}
    assert [one["config"].get("patch") for one in (*found.values(), own)] == [2, 4, 8, None]
    measured = vitrail.evaluate("net.safetensors", "photos", patch=8, device="cpu")
    assert [measure.value for measure in measured.measures.values()] == values[8]
    both = said(capsys, *command, "--patch", "3", "6", "--image-size", "12", "24")
    assert re.findall(r"^ *(\d\d)x\d\d +(\d)\b", both, re.MULTILINE) == [
        ("12", "3"), ("12", "6"), ("24", "3"), ("24", "6"),
    ]  # fmt: skip
    assert "names a size twice" in refused(capsys, *command, "--patch", "4", "4")


def test_a_patch_that_does_not_divide_the_image_is_answered_with_sizes_that_do(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "evaluate", "net.safetensors", "photos", "--patch", "5", *LOADING)
    assert "image 16x16 leaves 1 pixel over at patch 5x5; use 15 or 20" in told
    assert "--patch" in refused(capsys, "predict", "net.safetensors", "photos/test", "--patch-size", "8")


def test_predict_embed_and_frozen_features(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        said(capsys, "predict", "net.safetensors", "photos/test", "--json", *CPU, *more)
        for more in ([], ["--patch", "4"], ["--patch", "8"])
    ]
    assert answers[0] == answers[1] != answers[2]
    rows = [
        vitrail.extract_features("net.safetensors", "photos@test", patch=patch, cache=False, device="cpu").features
        for patch in (4, 8)
    ]
    assert not torch.equal(*rows)
    out = tmp_path / "found.npz"
    said(capsys, "embed", "net.safetensors", "photos@test", str(out), "--patch", "8", *LOADING)
    with np.load(out) as file:
        np.testing.assert_allclose(file["features"], rows[1].numpy(), rtol=1e-5, atol=1e-5)
    said(
        capsys,
        "knn",
        "net.safetensors",
        "photos",
        "-k",
        "1",
        "--patch",
        "8",
        "--out",
        str(tmp_path / "k.json"),
        *LOADING,
    )
    assert json.loads((tmp_path / "k.json").read_text())["config"]["patch"] == 8


def test_fit_keeps_patch_and_channels(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "new.safetensors")
    sizes = ["--patch", "8", "--channels", "1"]
    text = said(capsys, "fit", "net.safetensors", "photos", "--out", out, *sizes, "--no-cache", *LOADING)
    network = load(out)
    assert (network.config.patch, network.config.channels) == ((8, 8), 1)  # type: ignore[union-attr]
    assert network.card.preprocessing.mean == (0.5,)
    accuracy = re.search(r"accuracy ([\d.]+)%", text)
    assert accuracy is not None
    found = vitrail.evaluate(out, "photos@test", device="cpu").top1
    assert found is not None
    assert f"{100 * found:.2f}" == accuracy[1]
    words = ["fit", "net.safetensors", "photos", "--out", str(tmp_path / "no.safetensors"), "--no-cache", *LOADING]
    assert "images of 3 channels for a network of 5" in refused(capsys, *words, "--channels", "5")
    assert "channels=0 must be above 0" in refused(capsys, *words, "--channels", "0")
    made = vitrail.fit("net.safetensors", "photos", patch=8, channels=1, cache=False, device="cpu").model
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name], rtol=1e-4, atol=1e-4)


def test_export_at_another_patch_and_for_grey_images(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "m.safetensors")
    said(capsys, "export", "net.safetensors", "--to", "timm", "--out", out, "--patch", "8", "--channels", "1")
    network = load(out, heads=1)
    assert (network.config.patch, network.config.channels) == ((8, 8), 1)  # type: ignore[union-attr]
    wanted = load("net.safetensors", patch=8, channels=1).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in network.state_dict().items())


@pytest.mark.slow
def test_inspect_has_its_own_word_for_it(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There --patch is one of the patches."""
    out = tmp_path / "look"
    words = ["inspect", "net.safetensors", "--only", "positions", "--patch-size", "8", "--out", str(out), *LOADING]
    said(capsys, *words)
    assert "2x2" in (out / "report.html").read_text()


QUICK = ["--set", "steps=4", "--set", "schedule.warmup=1", "--set", "batch=4", "--set", "log=2", *CPU]


@pytest.mark.parametrize(
    "patch", [["--patch", "8"], pytest.param(["--set", "model.patch=8,8"], marks=pytest.mark.slow)]
)
def test_finetune_at_another_patch(
    here: Path, tmp_path: Path, patch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    said(capsys, "finetune", "net.safetensors", "photos", "--out", out, *patch, *QUICK)
    assert load(out).config.patch == (8, 8)  # type: ignore[union-attr]
    said(capsys, "finetune", "--resume", out, *CPU)


@pytest.mark.slow
def test_finetune_with_one_channel(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    said(capsys, "finetune", "net.safetensors", "photos", "--out", out, "--set", "model.channels=1", *QUICK)
    assert load(out).config.channels == 1
    assert vitrail.evaluate(out, "photos@test", device="cpu").count == 9


@pytest.mark.slow
def test_pretrain_at_patches_that_are_drawn_and_another_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    words = ["pretrain", "digits", "--out", out, "--patch", "8", "--set", "patches=2,4,8", *QUICK]
    assert "patches of 2, 4 and 8 px" in said(capsys, *words)
    assert load(out).config.patch == (8, 8)  # type: ignore[union-attr]
    assert json.loads((Path(out) / "config.json").read_text())["patches"] == [2, 4, 8]
    said(capsys, *words)  # has nothing left to do
    text = said(capsys, "evaluate", out, "digits@test", "--patch", "2", "4", "8", *LOADING)
    assert re.findall(r"^ *16x16 +(\d)\b", text, re.MULTILINE) == ["2", "4", "8"]
    assert "leaves 1 pixel over" in refused(capsys, *words[:3], str(tmp_path / "x"), "--set", "patches=5", *QUICK)

"""`vitrail export` as a person types it: what is said, written and refused; and the program of the docs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.export.digits import VIT, trained
from vitrail.checkpoint.weights import build_fresh, load, save
from vitrail.cli.app import main
from vitrail.cli.options.use import FORMS
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.export import OnnxOptions, to_onnx
from vitrail.models.vit_config import ViTConfig

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
WEIGHTS = DATA / "deit_tiny_patch16_224.safetensors"
PICTURES = DATA / "imagenet_val_1000.tar"
NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
SHAPE = ViTConfig(width=32, depth=1, mlp_width=48, heads=2, image=(16, 16), patch=(4, 4), classes=7)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights in it, to stand in."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = build_fresh(SHAPE)
    torch.nn.init.normal_(network.get_classifier().weight, std=1.0)
    save(network, "net.safetensors", labels=list(NAMES))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["export", *words]) == status
    seen = capsys.readouterr()
    assert ("error" in seen.err) == bool(status), seen.err
    return seen.err if status else seen.out


@pytest.mark.slow
def test_onnx_is_named_after_the_weights_and_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "net.safetensors", "--to", "onnx", "--data", "digits@test", "--by-number", status=2)
    assert "10 classes" in text
    (here / "net.onnx").write_text("of yesterday")
    text = said(capsys, "net.safetensors", "--to", "onnx")
    assert "net.safetensors: ViT of 1 layers, width 32, patch 4" in text
    assert "net.onnx: 4" in text
    assert "overwrote" in text
    assert re.search(r"24x20 +16 +\d\.\d\de-0[67] +\d\.\d\de-0[678] +16 of 16", text)
    assert 'load it: onnxruntime.InferenceSession("net.onnx")' in text
    assert sorted(path.name for path in here.iterdir()) == ["net.onnx", "net.safetensors"]


@pytest.mark.slow
def test_int8_is_scored_on_pictures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitrail.save(trained(VIT), "digits.safetensors")
    words = ("digits.safetensors", "--to", "onnx", "--int8", "--data", "digits", "--workers", "0")
    text = said(capsys, *words)
    assert "digits@test: 360 images" in text
    assert (here / "digits.int8.onnx").is_file()
    assert not (here / "digits.onnx").exists()
    found = re.search(r"same answer on (\d+) of 360 images", text)
    assert found is not None
    assert int(found[1]) >= 0.98 * 360
    assert re.search(r"accuracy: network \d\d\.\d\d%, export \d\d\.\d\d%, difference [+-]\d\.\d\d points", text)
    assert re.search(r"images per second at batch 16, run in turn: float32 [\d,.]+, int8 [\d,.]+", text)
    assert re.search(r"kB, \d\d% of the \d+\.\d kB in float32", text)
    assert "note: 7 matrix products in int8" in text


def test_a_library_is_told_how_to_load_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    text = said(capsys, "net.safetensors", "--to", "timm", "--out", "out/m.safetensors", "--image-size", "24")
    assert 'load it: timm.create_model("vit_base_patch16_224", checkpoint_path="out/m.safetensors", img_size=24' in text
    assert "num_classes=7" in text
    assert "in timm " in text
    assert "note: timm cannot hold" in text
    assert load("out/m.safetensors").config.image == (24, 24)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["net.safetensors", "--to", "tflite"], "invalid choice: 'tflite'"),
        (["net.safetensors"], "--to"),
        (["nothing.safetensors", "--to", "onnx"], "nothing.safetensors"),
        (["net.safetensors", "--to", "npz", "--int8"], "--int8 goes with --to onnx, not with --to npz"),
        (["net.safetensors", "--to", "hf", "--data", "x"], "DATA goes with --to onnx"),
        (["net.safetensors", "--to", "hf", "--fixed-size"], "--fixed-size goes with --to onnx or torch-export"),
        (["net.safetensors", "--to", "onnx", "--opset", "7"], "opset=7 must lie between 18 and 23"),
        (["net.safetensors", "--to", "onnx", "--out", "net.safetensors"], "holds the weights themselves"),
        (["net.safetensors", "--to", "onnx", "--out", "net.safetensors/m.onnx"], "net.safetensors is not a folder"),
        (["net.safetensors", "--to", "onnx", "--out", "."], "must end in .onnx"),
        (["net.safetensors", "--to", "torch-export", "--out", "m.pt"], "must end in .pt2"),
        (["net.safetensors", "--to", "onnx", "--image-size", "17"], "use 16 or 20"),
        (["net.safetensors", "--to", "onnx", "--data", "no/such/folder"], "no/such/folder"),
        (["net.safetensors", "--to", "torchvision"], "torchvision cannot hold"),
        (["net.safetensors", "--to", "onnx", "--int8", "--agreement", "2"], "must lie between 0 and 1"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *words]) == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["net.safetensors"]


def test_help_names_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(form in text for form in FORMS)


@pytest.mark.slow
def test_nothing_but_the_result_reaches_the_terminal(here: Path) -> None:
    """torch's exporter and the quantiser are talkative, in logs and in warnings; a fresh process shows it."""
    weights, out = str(here / "net.safetensors"), str(here / "m.onnx")
    command = [
        sys.executable,
        "-m",
        "vitrail",
        "export",
        weights,
        "--to",
        "onnx",
        "--int8",
        "--out",
        out,
        "--fixed-size",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"{weights}: ")
    assert "these images are synthetic; give DATA to measure what int8 costs on real ones" in done.stdout


# The program in the docs, which has onnxruntime, Pillow and numpy alone.


def program() -> dict[str, Any]:
    text = (ROOT / "docs" / "export.md").read_text("utf-8")
    (code,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if "def answer" in block
    ]
    code = code[: code.index("\n\n\nanswers = {}")]
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imported == {"json", "numpy", "onnxruntime", "PIL"}
    space: dict[str, Any] = {}
    exec(code, space)
    return space


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.slow
def test_the_program_of_the_docs_says_what_the_network_says(pixels: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = build_fresh(SHAPE)
    torch.nn.init.normal_(network.get_classifier().weight, std=1.0)
    crop = Preprocessing(image=(16, 16), resize=21, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    preprocessing = Preprocessing(image=(16, 16)) if pixels else crop
    save(network, tmp_path / "m.safetensors", preprocessing=preprocessing, labels=list(NAMES))
    to_onnx(tmp_path / "m.safetensors", tmp_path / "m.onnx", OnnxOptions(fixed_size=True, preprocessing=pixels))
    rng = np.random.default_rng(0)
    answer = program()["answer"]
    for size in ((37, 50), (41, 29), (16, 16)):
        picture = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).resize(size[::-1])
        picture.save(tmp_path / "p.png")
        with torch.inference_mode():
            expected = load(tmp_path / "m.safetensors")(preprocessing(picture)[None])[0].softmax(0)
        found = answer(tmp_path / "m.onnx", tmp_path / "p.png")
        assert [name for name, _ in found] == [NAMES[place] for place in expected.argsort(descending=True)]
        assert np.allclose([share for _, share in found], expected.sort(descending=True).values, atol=1e-5)


# Real weights, and the demo's.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_int8_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 98 % of its test set are answered as before."""
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    capsys.readouterr()
    out = str(tmp_path / "m.onnx")
    text = said(capsys, str(tmp_path / "demo" / "finetune"), "--to", "onnx", "--int8", "--data", "digits", "--out", out)
    found = re.search(r"same answer on (\d+) of 360 images", text)
    assert found is not None
    assert int(found[1]) >= 0.98 * 360


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.is_file(), reason=f"no trained weights: {WEIGHTS.name} is not next to the checkout")
@pytest.mark.timeout(900)
def test_trained_weights_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in FORMS:
        out = tmp_path / {"onnx": "m.onnx", "torch-export": "m.pt2", "hf": "hf", "npz": "m.npz"}.get(
            form, f"{form}.pth"
        )
        text = said(capsys, str(WEIGHTS), "--to", form, "--out", str(out))
        found = [float(value) for value in re.findall(r"^ ?\d+x\d+ +\d+ +\S+ +(\S+)", text, re.MULTILINE)]
        assert len(found) == (6 if form in ("onnx", "torch-export") else 3)
        assert max(found) < 1e-5
    about = json.loads(vitrail.export.onnx_file.OnnxSession(tmp_path / "m.onnx").metadata["preprocessing"])
    assert (about["image"], about["resize"]) == ([224, 224], 256)


@pytest.mark.slow
@pytest.mark.skipif(not PICTURES.is_file(), reason=f"no images: {PICTURES.name} is not next to the checkout")
@pytest.mark.timeout(1800)
def test_int8_of_trained_weights_keeps_their_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m.onnx")
    text = said(capsys, str(WEIGHTS), "--to", "onnx", "--int8", "--data", str(PICTURES), "--out", out)
    found = re.search(r"network (\S+)%, export (\S+)%", text)
    assert found is not None
    assert float(found[1]) == 70.1
    assert abs(float(found[2]) - 70.1) < 1.5

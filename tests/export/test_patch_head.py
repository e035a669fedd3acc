"""Exports of a network whose head reads every patch: one output of logits per pixel, equal to torch at every size."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.tiny import VIT, awake
from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.weights import save, to_bundle
from vitrail.cli.app import main
from vitrail.core.errors import ExportRefused
from vitrail.data.preprocessing import Preprocessing
from vitrail.export import ExportImages, OnnxOptions, to_library, to_onnx, to_torch_export
from vitrail.export.onnx_file import OnnxSession
from vitrail.export.verify import BATCHES, compare_outputs
from vitrail.models.build import Model

PATCHES = replace(VIT, head="patches")
NAMES = ("sky", "sea", "sand", "ship", "sun")


def network() -> Model:
    torch.manual_seed(0)
    model = awake(PATCHES, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=(6, 12)), labels=NAMES, task="segmentation")
    return model


@pytest.fixture
def bundle() -> Bundle:
    return to_bundle(network())


def test_answers_are_counted_along_the_classes() -> None:
    mine = torch.zeros(2, 3, 4, 5)
    mine[:, 1] = 1
    theirs = mine.clone()
    theirs[0, 2, :2, 0] = 2
    found = compare_outputs((4, 5), mine, theirs, 3)
    assert (found.agree, found.answers, found.batch) == (38, 40, 2)
    found = compare_outputs((4, 5), mine[..., 0, 0], theirs[..., 0, 0], 3)
    assert (found.agree, found.answers, found.batch) == (1, 2, 2)


@pytest.mark.slow
def test_onnx_gives_logits_per_pixel_at_every_size(bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    done = to_onnx(bundle, tmp_path / "m.onnx")
    sizes = {case.image for case in done.report.cases}
    assert {(case.image, case.batch) for case in done.report.cases} == {(s, b) for s in sizes for b in BATCHES}
    assert len(sizes) == 2
    assert done.report.worst < 1e-5
    assert done.report.agreement is not None
    assert done.report.agreement > 0.999
    session = OnnxSession(done.target)
    assert [(o.name, o.shape) for o in session.inner.get_outputs()] == [("logits", ["batch", 5, "2*rows", "3*columns"])]
    assert json.loads(session.metadata["task"]) == "segmentation"
    assert json.loads(session.metadata["labels"]) == list(NAMES)
    model = network().eval()
    for batch, size in ((1, (6, 12)), (2, (4, 9)), (3, (14, 6))):
        x = torch.randn(batch, 3, *size)
        with torch.no_grad():
            np.testing.assert_allclose(session(x).numpy(), model(x).numpy(), atol=1e-5)


@pytest.mark.slow
def test_torch_export_gives_them_too(bundle: Bundle, tmp_path: Path) -> None:
    done = to_torch_export(bundle, tmp_path / "m.pt2")
    assert done.report.worst < 1e-5
    x = torch.randn(3, 3, 8, 6)
    with torch.no_grad():
        found = torch.export.load(done.target).module()(x)
        torch.testing.assert_close(found, network().eval()(x), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_int8_with_preprocessing_at_one_size(bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from vitrail.data.dataset import ArrayDataset

    source = ArrayDataset(np.random.default_rng(0).integers(0, 256, (6, 6, 12, 3), dtype=np.uint8))
    options = OnnxOptions(int8=True, preprocessing=True, fixed_size=True, least_agreement=0.5)
    done = to_onnx(bundle, tmp_path / "m.onnx", options, scoring_images=ExportImages(source=source))
    assert done.scores is not None
    assert done.scores.count == 6
    assert done.scores.agreement is not None
    assert 0.5 <= done.scores.agreement <= 1
    assert OnnxSession(done.target).inner.get_outputs()[0].shape == ["batch", 5, 6, 12]


def test_other_libraries_refuse_it(bundle: Bundle, tmp_path: Path) -> None:
    for to, name in (("timm", "m.safetensors"), ("hf", "m"), ("torchvision", "m.pth"), ("npz", "m.npz")):
        with pytest.raises(ExportRefused, match="patches"):
            to_library(bundle, tmp_path / name, to)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_exports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(network(), tmp_path / "seg.safetensors")
    out = tmp_path / "seg.pt2"
    command = ["export", str(tmp_path / "seg.safetensors"), "--to", "torch-export", "--out", str(out)]
    assert main(command) == 0
    assert out.is_file()
    assert "216 of 216" in capsys.readouterr().out  # 3 images of 6x12 pixels
    assert main([*command[:2], "--to", "timm", "--out", str(tmp_path / "t.safetensors")]) == 2

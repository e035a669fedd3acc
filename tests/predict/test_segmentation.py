"""Weights of segmentation, from Python, the command line and over HTTP: a mask in the size of the image."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vitrail
from tests.models.tiny import VIT
from tests.predict.pictures import CLASSES, drawn, network
from tests.serve.in_process_server import inside
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import Model
from vitrail.predict.predictor import Predictor
from vitrail.tasks.segmentation.prediction import PredictedMask
from vitrail.tasks.segmentation.windows import SlidingWindows


def segmenter(resize: int | None = None) -> Model:
    model = network(replace(VIT, head="patches"), resize=resize)
    model.card = replace(model.card, task="segmentation")
    with torch.no_grad():  # no class is everywhere
        classifier = model.get_classifier()
        classifier.bias -= model(model.card.preprocessing(drawn(1)[0])[None]).mean((0, 2, 3))
    return model


@pytest.fixture
def path(tmp_path: Path) -> str:
    save(segmenter(), tmp_path / "w.safetensors")
    return str(tmp_path / "w.safetensors")


@pytest.fixture
def image(tmp_path: Path) -> str:
    drawn(1)[0].resize((31, 19)).save(tmp_path / "image.png")
    return str(tmp_path / "image.png")


def expected_mask(path: str, image: str) -> np.ndarray:
    """The largest logit of each pixel, of the network alone."""
    model, picture = vitrail.load(path), Image.open(image)
    with torch.no_grad():
        logits = model(model.card.preprocessing(picture)[None])
    assert logits.shape == (1, 5, 6, 12)
    return F.interpolate(logits, (19, 31), mode="bilinear", align_corners=False)[0].argmax(0).numpy()


def test_a_mask_has_the_size_of_the_image(path: str, image: str) -> None:
    asker: Predictor[PredictedMask] = vitrail.Predictor(path, device="cpu")
    found = asker(image)
    assert np.array_equal(found.mask, expected_mask(path, image))
    assert len(np.unique(found.mask)) > 1
    pixels = asker.prepare(image)[None]
    assert asker.logits(pixels).shape == (1, 5, 6, 12)
    assert {region.label for region in found.regions} <= set(CLASSES)


def test_predict_writes_it(path: str, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", path, image, "--out", str(tmp_path / "masks"), "--json", "--device", "cpu"]) == 0
    row = json.loads(capsys.readouterr().out)
    with Image.open(row["file"]) as mask, Image.open(row["overlay"]) as overlay:
        assert (row["file"], mask.mode) == (str(tmp_path / "masks" / "image.png"), "P")
        assert np.array_equal(np.asarray(mask), expected_mask(path, image))
        assert overlay.size == mask.size == (31, 19)
    assert main(["predict", path, image, "--csv", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "path,label,index,share,error"
    assert "5 classes of pixels" in said.err


def test_a_server_gives_it(path: str, image: str) -> None:
    with inside(given=Predictor(path, device="cpu")) as here:
        (told,) = here.post(data=Path(image).read_bytes(), params={"show": 1}).json()["predictions"]
        assert here.client.get("/model").json()["task"] == "segmentation"
        schema = here.client.get("/openapi.json").json()["components"]["schemas"]["Predictions"]
    assert told["size"] == [19, 31]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(told["png"])))), expected_mask(path, image))
    assert sum(region["share"] for region in told["regions"]) == pytest.approx(1)
    assert [bar["label"] for bar in told["shown"]["bars"]] == [region["label"] for region in told["regions"]]
    assert Image.open(io.BytesIO(base64.b64decode(told["shown"]["png"]))).size == (31, 19)
    assert set(schema["properties"]["predictions"]["items"]["required"]) == {"name", "size", "regions", "png"}


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 700), (40, 21)])
def test_any_size_has_a_mask(size: tuple[int, int]) -> None:
    asker: Predictor[PredictedMask] = Predictor(segmenter(resize=21), device="cpu")
    found = asker(Image.new("RGB", size))
    assert found.mask.shape == size[::-1]
    assert (found.mask < 5).any()


def test_what_was_not_seen_has_no_class() -> None:
    model = segmenter()
    model.card = replace(model.card, preprocessing=Preprocessing(image=(6, 12), resize=12))
    asker: Predictor[PredictedMask] = Predictor(model, device="cpu")
    found = asker(Image.new("RGB", (12, 12)))
    assert (found.mask[:3] == 255).all()
    assert (found.mask[9:] == 255).all()
    assert (found.mask[3:9] < 5).all()


def test_windows_slide_over_large_images(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = drawn(1)[0].resize((60, 24))
    large.save(tmp_path / "large.png")
    asker: Predictor[PredictedMask] = vitrail.Predictor(
        path, device="cpu", windows=SlidingWindows("full", 1.0), batch=3
    )
    plain: Predictor[PredictedMask] = vitrail.Predictor(path, device="cpu")
    whole = asker(large).mask
    assert whole.shape == (24, 60)
    for top in range(0, 24, 6):  # windows without overlap are images by themselves
        for left in range(0, 60, 12):
            tile = plain(large.crop((left, top, left + 12, top + 6))).mask
            assert np.array_equal(whole[top : top + 6, left : left + 12], tile)
    fitting = drawn(1)[0].resize((36, 18))  # the network's own aspect: one window
    for scale in ("fit", "full"):
        one: Predictor[PredictedMask] = vitrail.Predictor(path, device="cpu", windows=scale)
        assert one(large).mask.shape == (24, 60)
        assert [found.mask.shape for found in one.stream([large, fitting])] == [(24, 60), (18, 36)]
        if scale == "fit":
            assert np.array_equal(one(fitting).mask, plain(fitting).mask)
    words = ["predict", path, str(tmp_path / "large.png"), "--windows", "full", "--out", str(tmp_path / "out")]
    assert main([*words, "--device", "cpu"]) == 0
    capsys.readouterr()
    overlapping: Predictor[PredictedMask] = vitrail.Predictor(path, device="cpu", windows="full")
    written = np.asarray(Image.open(tmp_path / "out" / "large.png"))
    assert np.array_equal(written, overlapping(large).mask)
    assert main([*words[:3], "--windows", "fit", "--attention", str(tmp_path / "maps"), "--device", "cpu"]) == 2
    assert "--windows" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="windows are for classes of pixels"):
        vitrail.Predictor(network(VIT), device="cpu", windows="full")

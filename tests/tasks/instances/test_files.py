"""`vitrail predict --out` and a server, for objects and for panoptic maps."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.predict.pictures import folder_of
from tests.serve.in_process_server import inside
from tests.tasks.mask_queries.tiny_queries import make_network
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.predict.predictor import Predictor


@pytest.fixture(params=["instances", "panoptic"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.safetensors"
    save(make_network(request.param), path)
    return path


def test_a_folder_gets_files_overlays_and_one_file_about_all(weights: Path, tmp_path: Path) -> None:
    images, out = folder_of(tmp_path / "images", 3), tmp_path / "out"
    given = ["predict", str(weights), str(tmp_path / "images"), "--out", str(out), "--device", "cpu", "--json"]
    assert main([*given, "--threshold", "0.3"]) == 0
    suffix = ".json" if weights.stem == "instances" else ".png"
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    stems = [Path(name).stem for name in images]
    assert {name.rpartition("/")[2] for name in names} == {
        "predictions.json",
        *(f"{stem}{suffix}" for stem in stems),
        *(f"{stem}.overlay.png" for stem in stems),
    }
    found = json.loads((out / "predictions.json").read_text())
    expected = [Predictor(weights, device="cpu", threshold=0.3)(name) for name in images]
    if weights.stem == "instances":
        counts = [sum(row["image_id"] == at for row in found) for at in range(3)]  # named 00, 01, 02
    else:
        counts = [len(one["segments_info"]) for one in found["annotations"]]
        assert all((out / one["file_name"]).is_file() for one in found["annotations"])
    assert counts == [len(one) for one in expected]  # pyright: ignore[reportArgumentType]
    assert sum(counts) > 0
    with Image.open(next(out.rglob("00.overlay.png"))) as overlay, Image.open(images[0]) as image:
        assert overlay.size == image.size


def test_a_server_answers_with_masks(weights: Path, tmp_path: Path) -> None:
    (image,) = folder_of(tmp_path / "images", 1)
    with inside(given=Predictor(weights, device="cpu")) as running:
        data = Path(image).read_bytes()
        found = running.client.post("/predict?threshold=0.3&show=1", files={"image": ("a.png", data)}).json()
        (answer,) = found["predictions"]
        expected = Predictor(weights, device="cpu", threshold=0.3)(image)
        assert answer["segments"] == json.loads(json.dumps(expected.to_dict()))["segments"]
        assert answer["shown"]["text"] == str(expected)
        schema = running.client.get("/openapi.json").json()["components"]["schemas"]["Predictions"]
        assert "segments" in schema["properties"]["predictions"]["items"]["properties"]
        about = running.client.get("/model").json()
        assert about["options"] == ["threshold"]
        assert about["threshold"] == (0.5 if weights.stem == "instances" else 0.8)
        assert np.prod(answer["size"]) > 0

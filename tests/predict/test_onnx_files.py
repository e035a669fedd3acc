"""ONNX files in the place of weights: predictors, scores and servers make of them what they make of the network."""

import contextlib
import copy
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import RESNET, VIT
from tests.predict.pictures import drawn, network, weights
from tests.tasks.mask_queries.tiny_queries import make_network
from vitrail.api import evaluate, fit
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.onnx_network import OnnxNetwork
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError, DataError, VitrailError
from vitrail.export import OnnxOptions, to_onnx
from vitrail.models.build import Model
from vitrail.predict.predictor import Predictor
from vitrail.serve.served_model import ServedModel
from vitrail.serve.settings import ServeSettings

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow  # writing a file takes ten seconds
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a network, once for every set of options."""
    folder, done = tmp_path_factory.mktemp("onnx"), dict[str, Path]()

    def write(name: str, model: Model, **options: object) -> Path:
        key = f"{name}{options}"
        if key not in done:
            done[key] = folder / f"{len(done)}.onnx"
            to_onnx(model, done[key], OnnxOptions(**options))  # pyright: ignore[reportArgumentType]
        return done[key]

    return write


@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "bit"])
def test_answers_are_those_of_the_network(write: Write, config: object, bytes_: bool) -> None:
    model, images = network(config).float(), drawn(5)  # pyright: ignore[reportArgumentType]
    found, wanted = Predictor(write(type(config).__name__, model, preprocessing=bytes_), batch=2), Predictor(model)
    batch = torch.stack([wanted.prepare(image) for image in images])
    assert torch.allclose(found.probabilities(batch), wanted.probabilities(batch), atol=1e-5)
    assert [str(one) for one in found(images)] == [str(one) for one in wanted(images)]
    assert found.network.config == model.config
    with pytest.raises(ConfigError):
        found.features(images)


def test_segments_are_those_of_the_network(write: Write) -> None:
    model = make_network("panoptic").float()
    one, two = (Predictor(weights, threshold=0.0) for weights in (model, write("queries", model)))
    batch = torch.stack([one.prepare(image) for image in drawn(3)])
    for mine, wanted in zip(two.outputs(batch), one.outputs(batch), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-4)
    assert type(two(drawn(1)[0])) is type(one(drawn(1)[0]))


def test_a_file_without_a_head_has_features(write: Write) -> None:
    model = network(replace(VIT, classes=0, head="none"), labels=None).float()
    wanted, path = Predictor(model).features(drawn(2)), write("headless", model)
    assert torch.allclose(Predictor(path).features(drawn(2)), wanted, atol=1e-5)
    assert not ServedModel(Predictor(path), "headless", ServeSettings()).features_obstacle


def test_what_is_settled_in_the_file_is_refused(write: Write) -> None:
    path = write(type(VIT).__name__, network(VIT).float(), preprocessing=False)
    for options in ({"image_size": 32}, {"patch": 4}, *({"precision": one} for one in ("bfloat16", "autocast", "fp8"))):
        with pytest.raises(ConfigError, match="ONNX"):
            Predictor(path, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(VitrailError, match="float99"):
        Predictor(path, precision="float99")  # pyright: ignore[reportArgumentType]
    assert Predictor(path, precision="float32").precision == "float32"
    with pytest.raises(VitrailError, match="evaluate"):
        find_weights(path)


def test_other_files_are_refused(tmp_path: Path, write: Write) -> None:
    strange = tmp_path / "strange.onnx"
    strange.write_bytes(b"no graph")
    with pytest.raises(VitrailError):
        OnnxNetwork(strange)
    model = onnx.load(str(write(type(VIT).__name__, network(VIT).float(), preprocessing=False)))
    for broken in ("{", "[]", '{"width": -1}'):
        onnx.helper.set_model_props(model, {"config": broken, "labels": "null", "provenance": "{}"})
        onnx.save(model, str(strange))
        with pytest.raises(VitrailError):
            OnnxNetwork(strange)
    del model.metadata_props[:]
    onnx.save(model, str(strange))
    with pytest.raises(VitrailError, match="metadata"):
        OnnxNetwork(strange)


def edit(path: Path, out: Path, change: Callable[[Any], object]) -> Path:
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(out))
    return out


def set_entry(model: Any, name: str, value: str) -> None:
    model.metadata_props.add(key=name, value=value)


def test_entries_of_other_tools_are_ignored(tmp_path: Path, write: Write) -> None:
    path = write(type(VIT).__name__, network(VIT).float(), preprocessing=False)
    other = edit(path, tmp_path / "other.onnx", lambda model: set_entry(model, "author", "me, with love"))
    assert OnnxNetwork(other).config == OnnxNetwork(path).config


def describe_otherwise(model: Any, **changes: object) -> None:
    (entry,) = (one for one in model.metadata_props if one.key == "config")
    entry.value = json.dumps(json.loads(entry.value) | changes)


def test_a_graph_that_does_not_fit_its_description_is_refused(tmp_path: Path, write: Write) -> None:
    path = write(type(VIT).__name__, network(VIT).float(), preprocessing=False)
    sizes = edit(path, tmp_path / "size.onnx", lambda model: describe_otherwise(model, channels=1))
    headless = edit(path, tmp_path / "classes.onnx", lambda model: model.graph.output.pop())
    for file in (sizes, headless):
        with pytest.raises(VitrailError):
            Predictor(file)(drawn(2))
    with pytest.raises(VitrailError):
        OnnxNetwork(path)(torch.zeros(1, VIT.channels + 1, *VIT.image))


def test_no_image_is_no_answer(write: Write) -> None:
    path = write(type(VIT).__name__, network(VIT).float(), preprocessing=False)
    found = OnnxNetwork(path)(torch.zeros(0, VIT.channels, *VIT.image))
    assert isinstance(found, torch.Tensor)
    assert found.shape == (0, VIT.classes)


def test_damaged_files_are_refused_or_read(tmp_path: Path, write: Write) -> None:
    content = write(type(VIT).__name__, network(VIT).float(), preprocessing=False).read_bytes()
    names = content.index(b"labels")
    for seed in range(60):
        draw = random.Random(seed)
        damaged, at = bytearray(content), names + seed if seed < 30 else draw.randrange(len(content))
        damaged[at] ^= 1 << draw.randrange(8)
        (tmp_path / "w.onnx").write_bytes(damaged)
        with contextlib.suppress(VitrailError):
            Predictor(tmp_path / "w.onnx")(drawn(1))


def test_the_hash_covers_weights_in_another_file(tmp_path: Path, write: Write) -> None:
    model = onnx.load(str(write(type(VIT).__name__, network(VIT).float(), preprocessing=False)))
    place = {"save_as_external_data": True, "size_threshold": 512, "location": "weights.bin"}
    onnx.save(model, str(tmp_path / "w.onnx"), **place)
    before = OnnxNetwork(tmp_path / "w.onnx")
    other = bytearray((tmp_path / "weights.bin").read_bytes())
    other[-1] ^= 1
    (tmp_path / "weights.bin").write_bytes(other)
    after = OnnxNetwork(tmp_path / "w.onnx")
    assert before.hash != after.hash


def test_copies_open_the_file_again(write: Write) -> None:
    predictor = Predictor(write(type(VIT).__name__, network(VIT).float(), preprocessing=False))
    for other in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        assert str(other(drawn(1)[0])) == str(predictor(drawn(1)[0]))


def test_images_that_the_weights_have_seen_are_not_scored(tmp_path: Path) -> None:
    """As with the weights themselves: the file keeps the record of what they were trained on."""
    fitted = fit(weights(tmp_path, VIT), "digits@train").model
    save(fitted, tmp_path / "fitted.safetensors")
    to_onnx(tmp_path / "fitted.safetensors", tmp_path / "fitted.onnx", OnnxOptions())
    for name in ("fitted.safetensors", "fitted.onnx"):
        with pytest.raises(DataError, match="train"):
            evaluate(tmp_path / name, "digits@train")


def test_a_server_answers_but_has_no_features(write: Write) -> None:
    path = write(type(VIT).__name__, network(VIT).float(), preprocessing=False)
    served = ServedModel(Predictor(path), "vit", ServeSettings())
    served.warm()
    assert served.features_obstacle
    assert not served.describe()["attention"]


def test_scores_are_those_of_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tuple(map(str, range(10)))
    path = weights(tmp_path, replace(VIT, classes=10), labels=names)
    plain, eight = str(tmp_path / "w.onnx"), str(tmp_path / "w8.onnx")
    assert main(["export", path, "--to", "onnx", "--out", plain]) == 0
    to_onnx(path, eight, OnnxOptions(int8=True))
    first, second = (evaluate(one, "digits").measures["top-1"].value for one in (path, plain))
    assert first == second
    capsys.readouterr()
    assert main(["evaluate", eight, "digits"]) == 0
    assert "int8" in capsys.readouterr().out
    assert main(["evaluate", eight, "digits", "--precision", "bfloat16"]) == 2

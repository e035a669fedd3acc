"""ONNX: what the file says of itself, that it computes what the network does, and that a wrong one is never left."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.export.digits import BIT, VIT, held_out, trained
from tests.export.digits import HYBRID as MIXED
from tests.models.tiny import BACKBONE, HYBRID, RESNET, VARIANTS, awake
from tests.models.tiny import VIT as TINY
from vitrail import __version__
from vitrail.checkpoint.bundle import Bundle, Card, parse_description
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import ConfigError, ExportFailed, ExportRefused
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.export import ExportResult, OnnxOptions, onnx_file, to_onnx
from vitrail.export import exportable as form
from vitrail.export import onnx_file as runtime
from vitrail.export.exportable import make_reference
from vitrail.export.onnx_file import OnnxSession
from vitrail.models.family import ModelConfig
from vitrail.models.layers import RootPool
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import adapt_config

onnx = pytest.importorskip("onnx")
LABELS = ("blue", "gold", "green", "red", "white")


def bundle(config: ModelConfig) -> Bundle:
    torch.manual_seed(0)
    model = awake(config, torch.float32)
    preprocessing = Preprocessing(image=config.image, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    model.card = Card(preprocessing=preprocessing, labels=LABELS[: config.classes] or None, provenance={"seed": 0})
    return to_bundle(model)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return to_onnx(bundle(TINY), tmp_path_factory.mktemp("vit") / "vit.onnx")


@pytest.fixture(scope="module")
def bit(tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return to_onnx(bundle(RESNET), tmp_path_factory.mktemp("bit") / "bit.onnx", OnnxOptions(preprocessing=True))


def assert_checked(done: ExportResult) -> None:
    assert done.report.worst < 1e-4
    assert {case.batch for case in done.report.cases} == {1, 3, 16}
    assert done.report.against.startswith("onnxruntime ")
    assert done.target.is_file()
    assert [path.name for path in done.target.parent.iterdir()] == [done.target.name]


@pytest.mark.slow
def test_a_vit_takes_any_batch_and_other_sizes(vit: ExportResult) -> None:
    assert_checked(vit)
    assert [case.image for case in vit.report.cases] == [(6, 12)] * 3 + [(10, 15)] * 3
    (shown,) = OnnxSession(vit.target).inner.get_inputs()
    assert (shown.name, shown.type, shown.shape) == ("image", "tensor(float)", ["batch", 3, "2*rows", "3*columns"])
    (out,) = OnnxSession(vit.target).inner.get_outputs()
    assert (out.name, out.shape) == ("logits", ["batch", 5])
    images = torch.randn(5, 3, 4, 27)
    expected = make_reference(bundle(TINY), (4, 27))(images)
    assert torch.allclose(OnnxSession(vit.target)(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_metadata_say_what_a_program_needs(vit: ExportResult) -> None:
    found = OnnxSession(vit.target).metadata
    assert found["vitrail"] == __version__
    about = {name: json.loads(found[name]) for name in ("config", "preprocessing", "labels", "provenance")}
    config, card = parse_description(about)
    assert config == TINY
    assert card == bundle(TINY).card


@pytest.mark.slow
def test_nothing_of_this_machine_is_in_the_file(vit: ExportResult) -> None:
    content = vit.target.read_bytes()
    for word in (b"site-packages", b".py", str(Path(form.__file__).parents[2]).encode(), b"stack_trace"):
        assert word not in content, word
    model = onnx.load(str(vit.target))
    assert model.producer_name == "vitrail"
    assert "blocks.1.mlp.contract/MatMul" in {node.name for node in model.graph.node}


@pytest.mark.slow
def test_bit_takes_any_size_and_bytes(bit: ExportResult) -> None:
    assert_checked(bit)
    (shown,) = OnnxSession(bit.target).inner.get_inputs()
    assert (shown.name, shown.type, shown.shape) == ("pixels", "tensor(uint8)", ["batch", 3, "height", "width"])
    assert {case.image for case in bit.report.cases} == {(20, 28), (36, 36), (21, 31)}
    pixels = torch.randint(256, (3, 3, 33, 47), dtype=torch.uint8)
    expected = make_reference(bundle(RESNET), (33, 47), pixels=True)(pixels)
    assert torch.allclose(OnnxSession(bit.target)(pixels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_hybrid_takes_multiples_of_its_stride(tmp_path: Path) -> None:
    config = replace(HYBRID, image=(16, 24), backbone=replace(BACKBONE, image=(16, 24)))
    done = to_onnx(bundle(config), tmp_path / "hybrid.onnx")
    assert_checked(done)
    assert OnnxSession(done.target).inner.get_inputs()[0].shape == ["batch", 3, "8*rows", "8*columns"]
    assert {case.image for case in done.report.cases} == {(16, 24), (32, 32)}


@pytest.mark.slow
def test_a_zero_pad_that_the_runtime_merges_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime takes zeros before a max-pool for its padding, which is minus infinity. Should this begin to pass,
    the runtime has learned better."""
    monkeypatch.delitem(form.REPLACED, RootPool)  # the network's own pads
    with pytest.raises(ExportFailed, match="off the network"):
        to_onnx(bundle(replace(RESNET, blocks=(1,))), tmp_path / "bit.onnx", OnnxOptions(fixed_size=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_says_what_the_network_says(tmp_path: Path) -> None:
    model = trained(VIT)
    done = to_onnx(model, tmp_path / "digits.onnx", OnnxOptions(int8=True), scoring_images=held_out())
    assert done.scores is not None
    assert (done.scores.count, done.scores.labelled) == (360, 360)
    assert done.scores.network > 250 / 360
    assert done.scores.agreement is not None
    assert done.scores.agreement >= 0.98
    assert abs(done.scores.difference) <= 0.02
    assert done.plain is not None
    assert done.plain.worst < 1e-4
    assert done.bytes < 0.75 * done.plain_bytes  # a network so small is mostly graph
    assert done.pace is not None
    assert set(done.pace.images_per_s) == {"float32", "int8"}
    held = onnx.load(str(done.target))
    kinds = [node.op_type for node in held.graph.node]
    assert kinds.count("MatMulInteger") == 2 * 3 + 1
    assert kinds.count("DequantizeLinear") == 2
    weights = {tensor.name: tensor for tensor in held.graph.initializer}
    assert OnnxSession(done.target).metadata["quantisation"] == "int8"
    assert sum(tensor.data_type == onnx.TensorProto.INT8 for tensor in weights.values()) >= 9
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]


@pytest.mark.slow
def test_int8_that_says_other_things_is_not_left(tmp_path: Path) -> None:
    options = OnnxOptions(int8=True, least_agreement=1.0)
    with pytest.raises(ExportFailed, match=r"nothing was written.*--agreement 0\."):
        to_onnx(trained(VIT, steps=1), tmp_path / "m.onnx", options, scoring_images=held_out())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("config", "lr"), [(BIT, 1e-2), (MIXED, 3e-3)], ids=["bit", "hybrid"])
def test_int8_of_convolutions_has_its_ranges_from_pictures(config: ModelConfig, lr: float, tmp_path: Path) -> None:
    model = trained(config, lr=lr)
    with pytest.raises(ConfigError, match="give images"):
        to_onnx(model, tmp_path / "bit.onnx", OnnxOptions(int8=True))
    done = to_onnx(model, tmp_path / "bit.onnx", OnnxOptions(int8=True, preprocessing=True), scoring_images=held_out())
    assert done.scores is not None
    assert done.scores.network > 300 / 360
    assert done.scores.agreement is not None
    assert done.scores.agreement >= 0.98
    kinds = [node.op_type for node in onnx.load(str(done.target)).graph.node]
    assert kinds.count("QuantizeLinear") > 8
    assert any("convolutions in int8" in note for note in done.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_network(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    done = to_onnx(bundle(config), tmp_path / "m.onnx")
    assert_checked(done)
    assert OnnxSession(done.target).inner.get_outputs()[0].name == ("logits" if config.classes else "features")
    assert bool(done.notes) == (config.open_sizes.step is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relative, every", "axial", "hybrid", "learned, stem", "bit, same padding"])
def test_two_image_sizes_by_one_file_each(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    other = adapt_config(config, image_size=(config.image[0] * 2, config.image[1]))
    for at, size in enumerate((config, other)):
        done = to_onnx(bundle(size), tmp_path / str(at) / "m.onnx", OnnxOptions(fixed_size=True))
        assert_checked(done)
        assert OnnxSession(done.target).inner.get_inputs()[0].shape[2:] == list(size.image)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21, 23])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    done = to_onnx(bundle(TINY), tmp_path / "m.onnx", OnnxOptions(opset=opset))
    assert_checked(done)
    assert onnx.load(str(done.target)).opset_import[0].version == opset


@pytest.mark.slow
def test_weights_too_large_for_one_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 1000)
    done = to_onnx(bundle(TINY), tmp_path / "m.onnx")
    assert [path.name for path in done.files] == ["m.onnx", "m.onnx.data"]
    assert sorted(tmp_path.iterdir()) == sorted(done.files)
    images = torch.randn(2, 3, *TINY.image)
    assert torch.allclose(OnnxSession(done.target)(images), make_reference(bundle(TINY), TINY.image)(images), atol=1e-4)
    with pytest.raises(ConfigError, match="beyond 2 GB"):
        to_onnx(bundle(TINY), tmp_path / "n.onnx", OnnxOptions(int8=True))


def test_what_cannot_be_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = bundle(replace(TINY, channels=1))
    with pytest.raises(ConfigError, match="has 3 channels, this network 1"):
        to_onnx(grey, tmp_path / "m.onnx", OnnxOptions(preprocessing=True))
    with pytest.raises(ConfigError, match="images have 3 channels, this network 1"):
        to_onnx(grey, tmp_path / "m.onnx", scoring_images=held_out())
    with pytest.raises(ConfigError, match="give images"):
        to_onnx(bundle(RESNET), tmp_path / "m.onnx", OnnxOptions(int8=True))
    with pytest.raises(ConfigError, match="opset=11 must lie between 18 and 23"):
        OnnxOptions(opset=11)
    with pytest.raises(ConfigError, match=r"least_agreement=98 must lie"):
        OnnxOptions(least_agreement=98)
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        to_onnx(grey, tmp_path / "m.pt")
    found = runtime.importlib.util.find_spec
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with pytest.raises(ExportRefused, match=r"needs onnxscript: pip install 'vitrail\[export\]'"):
        to_onnx(grey, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_network_on_half_precision_is_exported_in_float32(tmp_path: Path) -> None:
    whole = bundle(RESNET)
    assert isinstance(whole.config, ResNetConfig)
    half = replace(whole, tensors={name: tensor.half() for name, tensor in whole.tensors.items()})
    taken = onnx_file.load_bundle(half, exact=True)
    assert {tensor.dtype for tensor in taken.tensors.values()} == {torch.float32}

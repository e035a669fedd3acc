"""What a weight file says of preprocessing is held against the network before memory is taken for it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.checkpoint.bundle import describe
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.formats.huggingface import folder as huggingface
from vitrail.checkpoint.formats.timm import vit as timm
from vitrail.checkpoint.weights import to_bundle
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError, ExportRefused, MismatchedWeights
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

TINY: dict[str, Any] = {"width": 16, "depth": 1, "mlp_width": 16, "heads": 2, "patch": (8, 8), "classes": 2}


@pytest.fixture(scope="module")
def network() -> Any:
    return vitrail.create_model("ViT-Nano/4", **TINY)


def written(network: Any, path: Path, **changed: Any) -> Path:
    """A sealed file whose preprocessing says something else."""
    bundle = to_bundle(network)
    about = describe(bundle.config, bundle.card)
    about["preprocessing"] = {**about["preprocessing"], **changed}
    write_sealed(path, bundle.tensors, about)
    return path


WRONG: list[dict[str, Any]] = [
    {"image": [20000, 20000]},
    {"image": [32, 20000]},
    {"image": [2000, 2000]},  # of a network for 32 pixels
    {"image": 20000},
    {"image": [0, 32]},
    {"image": [-32, -32]},
    {"image": [32.5, 32]},
    {"image": [True, True]},
    {"image": "32"},
    {"image": [32]},
    {"image": [32, 32, 32]},
    {"image": None},
    {"image": [math.nan, 32]},
    {"image": [10**400, 32]},
    {"resize": 20000},
    {"resize": 0},
    {"resize": -1},
    {"resize": 40.5},
    {"resize": True},
    {"resize": "9" * 1000},
    {"resize": math.inf},
    {"mean": [0.5, 0.5]},
    {"mean": [math.nan, 0, 0]},
    {"mean": [1e300, 0, 0]},
    {"mean": ["0.5", 0, 0]},
    {"mean": 0.5},
    {"std": [0.0, 1, 1]},
    {"std": [-1, 1, 1]},
    {"std": [1e-300, 1, 1]},
    {"std": [math.inf, 1, 1]},
    {"std": [1, 1, 1, 1]},
    {"std": [True, 1, 1]},
    {"std": "abc"},
    {"interpolation": "x" * 100_000},
    {"interpolation": ["bilinear"]},
    {"antialias": "yes"},
    {"antialias": 1},
]


@pytest.mark.parametrize("changed", WRONG, ids=lambda changed: repr(changed)[:40])
def test_absurd_values_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Preprocessing.from_dict({**Preprocessing(image=(32, 32)).to_dict(), **changed}).check_fit((32, 32))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("changed", [{"image": [20000, 20000]}, {"image": [2000, 2000]}, {"resize": 20000}])
def test_at_load(changed: dict[str, Any], network: Any, tmp_path: Path) -> None:
    path = written(network, tmp_path / "w.safetensors", **changed)
    with pytest.raises(MismatchedWeights, match=r"w\.safetensors"):
        vitrail.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"image": [64, 64]},
        {"image": [512, 512]},
        {"image": [1024, 1024]},
        {"image": [32.0, 32], "resize": 36.0},
        {"resize": 36},
        {"resize": 256},
        {"mean": [0, 0, 0], "std": [1, 1, 1]},
        {"mean": [123.675, 116.28, 103.53], "std": [58.4, 57.1, 57.4]},
    ],
)
def test_what_people_do_stays(changed: dict[str, Any], network: Any, tmp_path: Path) -> None:
    card: Any = vitrail.load(written(network, tmp_path / "w.safetensors", **changed)).card
    assert list(card.preprocessing.image) == [int(side) for side in changed.get("image", [32, 32])]


def test_a_larger_network_may_have_larger_pictures() -> None:
    Preprocessing(image=(1792, 1792)).check_fit((224, 224))
    with pytest.raises(ConfigError):
        Preprocessing(image=(1793, 1793)).check_fit((224, 224))
    with pytest.raises(ConfigError):
        Preprocessing(image=(224, 224), resize=5000)


@pytest.mark.parametrize("command", ["predict", "serve", "export", "convert"])
def test_commands_refuse_it_in_one_line(
    command: str, network: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(network, tmp_path / "w.safetensors", image=[20000, 20000]))
    more = {"predict": ["x.png"], "serve": ["--port", "0"], "export": [], "convert": [str(tmp_path / "out")]}
    assert main([command, path, *more[command]]) == 2
    assert capsys.readouterr().err.count("\n") == 1


HUGE = {"height": 20000, "width": 20000}


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({"size": HUGE}, False),
        ({"size": {"shortest_edge": 20000}, "do_center_crop": True, "crop_size": HUGE}, False),
        ({"size": {"shortest_edge": 20000}}, False),
        ({"size": 20000}, False),
        ({"size": {"height": -1, "width": 32}}, False),
        ({"image_std": [0, 0, 0]}, False),
        ({"image_mean": [math.nan, 0, 0]}, False),
        ({"size": {"shortest_edge": 36}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, True),
        ({"size": {"height": 64, "width": 64}}, True),
    ],
)
def test_a_hugging_face_folder(changed: dict[str, Any], good: bool) -> None:
    said = {**huggingface.build_preprocessor(Preprocessing(image=(32, 32))), **changed}

    def read() -> None:
        made = huggingface.read_preprocessor(said, (32, 32))
        assert made is not None
        made.check_fit((32, 32))

    if good:
        read()
    else:
        with pytest.raises(ConfigError):
            read()


WHOLE = Preprocessing(image=(32, 32), fit="pad")


@pytest.mark.parametrize("kind", ["eomt", "eomt_dinov3"])
def test_whole_images_with_borders_are_what_eomt_s_processor_makes(kind: str) -> None:
    said = huggingface.build_preprocessor(WHOLE, {"model_type": kind})
    assert huggingface.read_preprocessor(said, (32, 32)) == WHOLE
    assert huggingface.read_preprocessor({**said, "do_split_image": True}, (32, 32)) is None
    assert huggingface.read_preprocessor({**said, "size": {"shortest_edge": 32, "longest_edge": 64}}, (32, 32)) is None


@pytest.mark.parametrize(
    ("network", "preprocessing"),
    [({"model_type": "vit"}, WHOLE), (None, WHOLE), ({"model_type": "eomt"}, replace(WHOLE, image=(32, 64)))],
)
def test_borders_that_a_hugging_face_folder_cannot_ask_for(network: Any, preprocessing: Preprocessing) -> None:
    with pytest.raises(ExportRefused):
        huggingface.build_preprocessor(preprocessing, network)


def test_borders_that_a_timm_folder_cannot_ask_for(network: Any) -> None:
    with pytest.raises(ExportRefused):
        timm.build_settings(timm.network_settings(network.config), network.config, WHOLE, None)


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({"crop_mode": "center", "crop_pct": 1e-9}, False),
        ({"crop_mode": "center", "crop_pct": -1.0}, False),
        ({"std": [0, 0, 0]}, False),
        ({"crop_mode": "center", "crop_pct": 0.875}, True),
    ],
)
def test_a_timm_folder(changed: dict[str, Any], good: bool, network: Any) -> None:
    settings, images = timm.network_settings(network.config), Preprocessing(image=(32, 32))
    said = timm.build_settings(settings, network.config, images, None)
    said["pretrained_cfg"].update(changed)
    if good:
        made = timm.read_preprocessing(said, (32, 32))
        assert made is not None
        assert made.resize == 37
    else:
        with pytest.raises(ConfigError):
            timm.read_preprocessing(said, (32, 32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"image": (20000, 20000), "position": "sincos2d"},
        {"image": (4096, 4096), "patch": (4, 4)},
        {"depth": 1_000_000},
        {"width": 10**9},
        {"classes": 10**12},
        {"registers": 10**9},
    ],
)
def test_networks_that_nothing_could_compute(wrong: dict[str, Any]) -> None:
    """Their tensors may be small, or not be named at all: an image size without positions costs a file nothing."""
    with pytest.raises(ConfigError):
        ViTConfig(**{**TINY, "image": (32, 32), **wrong})
    with pytest.raises(ConfigError):
        ResNetConfig(blocks=(1, 10**9))
    with pytest.raises(ConfigError):
        ResNetConfig(blocks=(1,), image=(20000, 20000))

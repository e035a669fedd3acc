"""Other libraries load what was written, by the very call that is told, and compute the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.test_onnx_file import LABELS, bundle
from tests.models.tiny import VARIANTS
from tests.models.tiny import VIT as TINY
from vitrail.checkpoint import parity_check as peers
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import ConfigError, ExportFailed, ExportRefused, UnknownName
from vitrail.export import to_library
from vitrail.export.other_libraries import timm_call
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone, model_config

SQUARE = replace(TINY, image=(12, 12), patch=(3, 3), gelu="erf")
BIT = ResNetConfig(blocks=(1, 1), factor=1.0, image=(64, 64), classes=5)
R50 = ResNetConfig(blocks=(3, 4, 6, 3), image=(64, 64), classes=5)
R50_VIT = ViTConfig(
    width=32,
    depth=1,
    mlp_width=64,
    heads=2,
    image=(64, 64),
    patch=(1, 1),
    classes=5,
    backbone=hybrid_backbone((3, 4, 9), (64, 64)),
)


def loaded(use: str) -> Any:
    """What the told call gives."""
    libraries = {name: pytest.importorskip(name) for name in ("timm", "transformers", "torchvision")}
    space: dict[str, Any] = {"torch": torch, **libraries}
    if use.startswith("model = "):
        exec(use, space)
        return space["model"].eval()
    return eval(use, space).eval()


@torch.no_grad()
def assert_same(theirs: Any, whole: Bundle) -> None:
    images = torch.randn(4, 3, *whole.config.image, generator=torch.Generator().manual_seed(3))
    mine, out = build_network(whole)(images), theirs(images)
    out = out.last_hidden_state[:, 0] if hasattr(out, "last_hidden_state") else getattr(out, "logits", out)
    assert (mine - out).abs().max() < 1e-4 * mine.abs().max()


@pytest.mark.parametrize(
    ("to", "name", "config"),
    [
        ("hf", "m-hf", SQUARE),
        ("hf", "m-hf", BIT),
        ("timm", "m.safetensors", TINY),
        pytest.param("timm", "m.pth", R50, marks=pytest.mark.slow),
        pytest.param("timm", "m.safetensors", R50_VIT, marks=pytest.mark.slow),
        ("timm", "m-timm", SQUARE),
        ("torchvision", "m.pth", SQUARE),
        ("torchvision", "m.pth", replace(SQUARE, head="none", classes=0)),
        ("hf", "m-hf", replace(SQUARE, head="none", classes=0)),
    ],
    ids=[
        "hf vit",
        "hf bit",
        "timm vit",
        "timm bit",
        "timm hybrid",
        "timm folder",
        "torchvision",
        "torchvision without head",
        "hf without head",
    ],
)
def test_the_library_loads_it_and_agrees(to, name: str, config, tmp_path: Path) -> None:
    whole = bundle(config)
    done = to_library(whole, tmp_path / name, to)
    assert done.report.worst < 1e-4
    assert [case.batch for case in done.report.cases] == [1, 3, 16]
    assert done.report.against.split()[0] in ("transformers", "timm", "torchvision")
    theirs = loaded(done.use)
    assert_same(theirs, whole)
    assert {path.name for path in tmp_path.iterdir()} <= {name, f"{name}.vitrail.json"}
    if to == "hf" and config.classes:
        assert theirs.config.id2label == dict(enumerate(LABELS))
        import transformers

        prepare = transformers.AutoImageProcessor.from_pretrained(str(done.target))
        assert tuple(prepare.image_mean) == whole.card.preprocessing.mean


def test_npz_has_no_library_and_is_read_back(tmp_path: Path) -> None:
    done = to_library(bundle(SQUARE), tmp_path / "m.npz", "npz")
    assert done.report.worst == 0
    assert done.report.against == "vitrail itself, which read it back (there is no other library to compare with)"


def test_where_the_library_is_missing_it_is_read_back_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    done = to_library(bundle(SQUARE), tmp_path / "m-hf", "hf")
    assert done.report.against == "vitrail itself, which read it back (transformers is not installed)"


def test_what_the_format_cannot_compute_is_refused_with_the_reason(tmp_path: Path) -> None:
    """torchvision has the exact GELU only."""
    torch.manual_seed(0)
    with pytest.raises(ExportFailed, match=r"off the network.*torchvision cannot hold .*gelu.*`vitrail convert`"):
        to_library(bundle(replace(SQUARE, gelu="tanh")), tmp_path / "m.pth", "torchvision")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "name", "config", "told"),
    [
        ("hf", "m", VARIANTS["hybrid"], "no place for field backbone"),
        ("hf", "m", VARIANTS["registers"], "no place for field registers=3"),
        ("hf", "m", VARIANTS["relative, every"], "position='relative'"),
        ("hf", "m", VARIANTS["axial resnet"], "mixing='axial'"),
        ("timm", "m.safetensors", BIT, r"timm has no name for a BiT of field blocks=\(1, 1\)"),
        ("timm", "m.safetensors", VARIANTS["hybrid"], "timm has no name for a hybrid"),
        ("timm", "m.pth", VARIANTS["axial resnet"], "timm has no axial ResNet"),
        ("timm", "m.pth", VARIANTS["tanh"], "no hidden tanh layer"),
        ("torchvision", "m.pth", VARIANTS["bit"], "holds ViTs"),
        ("torchvision", "m.pth", replace(TINY, gelu="erf"), "torchvision cannot build this network"),
        ("npz", "m.npz", VARIANTS["mean, registers, norm last"], "field registers"),
    ],
)
def test_what_a_library_has_not_is_refused_and_nothing_left(to, name: str, config, told: str, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=told):
        to_library(bundle(config), tmp_path / name, to)
    assert not list(tmp_path.iterdir())


def test_calls_say_only_what_differs() -> None:
    assert timm_call(model_config("ViT-B/16")) == ("vit_base_patch16_224", {"act_layer": "gelu_tanh"})
    name, args = timm_call(model_config("ViT-Ti/16", classes=10, image_size=96, gelu="erf"))
    assert (name, args) == ("vit_tiny_patch16_224", {"num_classes": 10, "img_size": 96})
    name, args = timm_call(model_config("ViT-S/32", image_size=(64, 96), gelu="erf", pool="mean"))
    assert (name, args) == ("vit_small_patch32_224", {"img_size": (64, 96), "global_pool": "avg", "fc_norm": False})
    assert timm_call(model_config("BiT-R50x1", classes=0)) == ("resnetv2_50x1_bit", {"num_classes": 0})
    assert timm_call(TINY)[1]["patch_size"] == (2, 3)


def test_slips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown library 'keras'"):
        to_library(bundle(SQUARE), tmp_path / "m", "keras")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must end in \.npz"):
        to_library(bundle(SQUARE), tmp_path / "m.safetensors", "npz")
    (tmp_path / "taken").write_text("")
    with pytest.raises(ExportRefused, match="is a file, but this format is a folder"):
        to_library(bundle(SQUARE), tmp_path / "taken", "hf")

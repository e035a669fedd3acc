"""A new family of networks is one file with one line of registration (scaled_vit.py): everything works with it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from tests.extending.scaled_vit import ScaledConfig, ScaledViT
from vitrail.cli.app import main
from vitrail.core.errors import ExportRefused
from vitrail.inspection import gradient_rollout, rollout
from vitrail.models.build import NETWORKS, build
from vitrail.models.family import FAMILIES, from_dict, to_dict
from vitrail.objectives.objective import Objective

TINY = ScaledConfig(width=16, depth=2, mlp_width=32, heads=2, image=(8, 8), patch=(2, 2), classes=10, scale=0.3)
SETTINGS = [
    "schedule.warmup=1",
    "model=ScaledConfig",
    "model.scale=0.3",
    "model.width=16",
    "model.depth=2",
    "model.mlp_width=32",
    "model.heads=2",
]


def awake() -> ScaledViT:
    """With all parameters random, so that every part counts."""
    torch.manual_seed(0)
    model = build(TINY).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert isinstance(model, ScaledViT)
    return model


def written_out(model: ScaledViT, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention weights, from the parameters alone."""
    w = dict(model.named_parameters())
    norm = lambda z, name: torch.nn.functional.layer_norm(z, (16,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)  # noqa: E731
    patches = x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    z = patches @ w["embedding.projection.weight"].flatten(1).T + w["embedding.projection.bias"]
    z = torch.cat([w["class_token"].expand(len(x), -1, -1), z], 1) + w["position.tables.0.table"]
    seen = []
    for block in ("blocks.0", "blocks.1"):
        qkv = (
            norm(z, f"{block}.norm_attention") @ w[f"{block}.attention.qkv.weight"].T + w[f"{block}.attention.qkv.bias"]
        )
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in qkv.chunk(3, -1))
        seen.append((q @ k.mT / 8**0.5).softmax(-1))
        mixed = (seen[-1] @ v).transpose(1, 2).flatten(2)
        scale = w[f"{block}.scales"]
        z = z + scale[0] * (mixed @ w[f"{block}.attention.out.weight"].T + w[f"{block}.attention.out.bias"])
        inner = norm(z, f"{block}.norm_mlp") @ w[f"{block}.mlp.expand.weight"].T + w[f"{block}.mlp.expand.bias"]
        inner = torch.nn.functional.gelu(inner, approximate="tanh")
        z = z + scale[1] * (inner @ w[f"{block}.mlp.contract.weight"].T + w[f"{block}.mlp.contract.bias"])
    return norm(z[:, 0], "norm") @ w["head.classifier.weight"].T + w["head.classifier.bias"], seen


def test_the_network_and_its_intermediates_are_what_they_are_by_hand() -> None:
    model, x = awake(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    logits, seen = written_out(model, x)
    torch.testing.assert_close(model(x), logits)
    _, found = model.forward_intermediates(x, attention=True)
    for mine, theirs in zip(found.attention, seen, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rollout_is_the_one_by_hand() -> None:
    model, x = awake(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    through = torch.eye(17, dtype=torch.float64)
    for weights in written_out(model, x)[1]:
        kept = weights.mean(1) + torch.eye(17, dtype=torch.float64)
        through = kept / kept.sum(-1, keepdim=True) @ through
    torch.testing.assert_close(rollout(model, x), through[:, 0, 1:].unflatten(1, (4, 4)).detach())


def test_gradient_rollout_is_the_one_by_hand() -> None:
    """Its gradients come from autograd through the network written out, so a part left out of the block would show."""
    model, x = awake(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    logits, seen = written_out(model, x)
    slopes = torch.autograd.grad(logits.amax(-1).sum(), seen)
    through = torch.eye(17, dtype=torch.float64).expand(3, 17, 17)
    for weights, slope in zip(seen, slopes, strict=True):
        through = through + (weights * slope).clamp(min=0).mean(1) @ through
    torch.testing.assert_close(gradient_rollout(model, x), through[:, 0, 1:].unflatten(1, (4, 4)).detach())


def test_its_config_is_a_file_header_and_its_cost_is_counted() -> None:
    assert from_dict(json.loads(json.dumps(to_dict(TINY)))) == TINY
    assert TINY.parameters == sum(parameter.numel() for parameter in build(TINY).parameters())
    assert FAMILIES["scaled-vit"] is ScaledConfig
    assert NETWORKS[ScaledConfig] is ScaledViT


def test_another_image_size_resizes_its_positions(tmp_path: Path) -> None:
    vitrail.save(awake().float(), tmp_path / "w.safetensors")
    larger = vitrail.load(tmp_path / "w.safetensors", image_size=12, classes=3)
    assert larger(torch.zeros(2, 3, 12, 12)).shape == (2, 3)
    assert isinstance(larger, ScaledViT)


def test_a_format_without_room_for_its_parts_refuses_it(tmp_path: Path) -> None:
    vitrail.save(awake().float(), tmp_path / "w.safetensors")
    with pytest.raises(ExportRefused):
        vitrail.convert(tmp_path / "w.safetensors", tmp_path / "theirs.safetensors", to="timm")


def command(folder: Path) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["pretrain", "digits", "--steps", "12", "--batch", "32", "--out", str(folder), *settings]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in the middle by Ctrl-C, then resumed."""
    folder = tmp_path_factory.mktemp("family") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "after_step", interrupt_at(6))
        assert main(command(folder)) == 0
    assert main(["pretrain", "--resume", str(folder)]) == 0
    return folder


def interrupt_at(step: int) -> Callable[[Objective, int], None]:
    def after_step(self: Objective, at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    return after_step


@pytest.mark.slow
def test_it_is_trained_and_resumed(run: Path, tmp_path: Path) -> None:
    """To the bit what a training is that nobody stops."""
    assert main(command(tmp_path / "whole")) == 0
    whole = vitrail.load(tmp_path / "whole" / "last.safetensors").state_dict()
    for name, tensor in vitrail.load(run / "last.safetensors").state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    model = vitrail.load(run)
    assert isinstance(model, ScaledViT)
    assert isinstance(model.config, ScaledConfig)
    assert model.config.scale == 0.3
    scales = torch.cat([parameter.flatten() for name, parameter in model.named_parameters() if "scales" in name])
    assert (scales != 0.3).all()


@pytest.mark.slow
def test_it_is_evaluated(run: Path, tmp_path: Path) -> None:
    assert main(["evaluate", str(run), "digits", "--out", str(tmp_path / "result.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["weights"]["network"] == "Scaled"


@pytest.mark.slow
def test_it_predicts_and_is_inspected(run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "digit.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(picture)
    model = vitrail.load(run)
    with torch.no_grad():
        sure = model(model.card.preprocessing(Image.open(picture))[None]).softmax(-1)[0]
    found = vitrail.predictor(run)(picture)
    assert (found.top[0].index, found.top[0].probability) == (int(sure.argmax()), pytest.approx(float(sure.max())))
    assert main(["inspect", str(run), str(picture), "--out", str(tmp_path / "look")]) == 0
    assert (tmp_path / "look" / "report.html").exists()


@pytest.mark.slow
def test_it_is_exported_to_onnx(run: Path, tmp_path: Path) -> None:
    """At its own image size and at another, for positions are resampled in the graph."""
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 0
    session, model = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")), vitrail.load(run)
    for size in (8, 12):
        x = torch.randn(2, 3, size, size)
        (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(logits, model(x).numpy(), atol=1e-5)

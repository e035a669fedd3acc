"""Google's `.npz` files that say less than others, or say it the old way: read as Google's own code reads them.

The numbers to agree with come from the second implementation in test_formats.py, fed with arrays that were changed here
by hand in the way that big_vision and vit_jax document.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.checkpoint.test_formats import (
    CLASSES,
    GRID,
    IMAGE,
    PATCH,
    STEM,
    WIDTH,
    Array,
    Arrays,
    Draw,
    assert_same_arrays,
    assert_same_network,
    classified,
    grouped,
    kernel_of,
    picture,
    vit_arrays,
    vit_logits,
    written,
)
from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.checkpoint.convert import convert, export
from vitrail.checkpoint.weights import load, to_bundle
from vitrail.cli.app import main
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import build
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone

NARROW = ViTConfig(width=24, depth=1, mlp_width=32, heads=3, image=(8, 8), patch=(4, 4), classes=3)


def sines(rows: int, columns: int, width: int) -> Array:
    """Sine-cosine positions one number at a time: sin x, cos x, sin y, cos y, a quarter of the width each."""
    quarter = width // 4
    out = np.zeros((1, rows * columns, width))
    for y in range(rows):
        for x in range(columns):
            for i in range(quarter):
                rate = 1 / 10_000 ** (i / (quarter - 1))
                place = out[0, y * columns + x]
                place[i], place[quarter + i] = np.sin(x * rate), np.cos(x * rate)
                place[2 * quarter + i], place[3 * quarter + i] = np.sin(y * rate), np.cos(y * rate)
    return out


def sincos_arrays(*, token: bool = False, hidden: bool = True) -> Arrays:
    """A file as big_vision stores it with posemb="sincos2d": nothing stands for the positions."""
    arrays = vit_arrays("npz-big-vision", token=token, hidden=hidden)
    del arrays["pos_embedding"]
    return arrays


def logits(model: torch.nn.Module, image: Tensor) -> Array:
    with torch.no_grad():
        return model(image)[0].numpy()


# big_vision's positions that are not in the file.


@pytest.mark.parametrize("token", [False, True], ids=["mean", "token"])
@pytest.mark.parametrize("facts", [{}, {"position": "sincos2d"}], ids=["inferred", "given"])
def test_sine_cosine_positions_are_big_visions(token: bool, facts: dict[str, Any], tmp_path: Path) -> None:
    arrays = sincos_arrays(token=token)
    model = load(written(arrays, tmp_path / "s.npz"), image=IMAGE, dtype=torch.float64, **facts)
    assert (model.config.position, model.config.image) == ("sincos2d", (IMAGE, IMAGE))
    image = picture(IMAGE)
    wanted = vit_logits(
        image[0].permute(1, 2, 0).numpy(),
        arrays | {"pos_embedding": sines(GRID, GRID, WIDTH)},
        "npz-big-vision",
    )
    np.testing.assert_allclose(logits(model, image), wanted, rtol=0, atol=5.6e-7 * np.abs(wanted).max())


def test_sine_cosine_positions_of_a_grid_that_is_not_square(tmp_path: Path) -> None:
    model = load(written(sincos_arrays(), tmp_path / "s.npz"), image=(2 * PATCH, 5 * PATCH))
    table = cast(Tensor, model.position.tables[0].table)
    np.testing.assert_allclose(table.numpy(), sines(2, 5, WIDTH), rtol=0, atol=1e-6)


def test_no_positions_only_where_asked_for(tmp_path: Path) -> None:
    """ "none" is never assumed, and taken at its word where it is said."""
    file = written(sincos_arrays(), tmp_path / "s.npz")
    assert load(file, image=IMAGE, position="none").config.position == "none"
    original = vit_arrays(token=False)
    del original[STEM]
    file = written(original, tmp_path / "original.npz")
    with pytest.raises(MismatchedWeights, match="pass position="):
        load(file, image=IMAGE)
    assert load(file, image=IMAGE, position="sincos2d").config.position == "sincos2d"


def s16_arrays() -> Arrays:
    """The released vit_s16_i1k by its shapes, one layer deep."""
    draw = Draw(4)
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    out = {"embedding/kernel": draw(16, 16, 3, 384), "embedding/bias": draw(384)}
    for name in ("query", "key", "value"):
        out |= {f"{attention}/{name}/kernel": draw(384, 6, 64), f"{attention}/{name}/bias": draw(6, 64)}
    out |= {f"{attention}/out/kernel": draw(6, 64, 384), f"{attention}/out/bias": draw(384)}
    for name in (f"{block}/LayerNorm_0", f"{block}/LayerNorm_1", "Transformer/encoder_norm"):
        out |= {f"{name}/scale": draw(384, shift=1), f"{name}/bias": draw(384)}
    for name, shape in (("Dense_0", (384, 1536)), ("Dense_1", (1536, 384))):
        out |= {f"{block}/MlpBlock_0/{name}/kernel": draw(*shape), f"{block}/MlpBlock_0/{name}/bias": draw(shape[1])}
    out |= {"pre_logits/kernel": draw(384, 384), "pre_logits/bias": draw(384)}
    return out | {"head/kernel": draw(384, CLASSES), "head/bias": draw(CLASSES)}


def test_the_released_network_needs_no_word(tmp_path: Path) -> None:
    """A published shape without positions was trained at 224 px; any other must say its size."""
    file = written(s16_arrays(), tmp_path / "vit_s16_i1k.npz")
    model = load(file)
    assert (model.config.position, model.config.image, model.config.pool) == ("sincos2d", (224, 224), "mean")
    assert "sincos2d" in model.card.provenance["inferred"]
    assert "224x224" in model.card.provenance["inferred"]
    assert load(file, image_size=384).config.grid == (24, 24)
    done = convert(convert(file, tmp_path / "ours.safetensors").target, tmp_path / "back.npz", "npz-big-vision")
    assert (done.sidecar, done.format) == (None, "npz-big-vision")
    assert_same_arrays(done.target, s16_arrays())
    with pytest.raises(MismatchedWeights, match="pass image="):
        load(written(sincos_arrays(), tmp_path / "small.npz"))


def test_the_command_takes_position_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = str(written(sincos_arrays(), tmp_path / "s.npz")), tmp_path / "out.safetensors"
    assert main(["convert", file, str(out)]) == 2
    assert not out.exists()
    capsys.readouterr()
    assert main(["convert", file, str(out), "--image-size", f"{IMAGE}x{2 * IMAGE}"]) == 0
    assert "sincos2d" in capsys.readouterr().out
    config = load(out).config
    assert (config.position, config.image) == ("sincos2d", (IMAGE, 2 * IMAGE))
    assert main(["convert", file, str(out), "--image-size", str(IMAGE), "--position", "none"]) == 0
    assert load(out).config.position == "none"


# Other trees.


def test_a_root_without_stages(tmp_path: Path) -> None:
    """R+ViT-Ti/16: the root convolution and its max-pool, then patches of their map."""
    draw, arrays = Draw(5), vit_arrays("npz-linen")
    side, patch = 16, 2
    arrays |= {"conv_root/kernel": draw(7, 7, 3, 64, shift=0.1)}
    arrays |= {"gn_root/scale": draw(64, shift=1), "gn_root/bias": draw(64)}
    arrays["embedding/kernel"] = draw(patch, patch, 64, WIDTH, scale=0.05)
    arrays[STEM] = draw(1, (side // 4 // patch) ** 2 + 1, WIDTH)
    file = written(arrays, tmp_path / "r.npz")
    model = load(file, dtype=torch.float64)
    assert model.config.backbone == hybrid_backbone((), (side, side))
    assert (model.config.image, model.config.patch) == ((side, side), (patch, patch))
    image = picture(side)
    x = F.conv2d(F.pad(image, (2, 3, 2, 3)), kernel_of(arrays["conv_root/kernel"], "std+1e-5"), stride=2)
    x = F.relu(grouped(x, arrays["gn_root/scale"], arrays["gn_root/bias"], 1e-6))
    x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-np.inf), 3, stride=2)
    kernel = torch.from_numpy(arrays["embedding/kernel"].astype(np.float64).transpose(3, 2, 0, 1).copy())
    patches = F.conv2d(x, kernel, stride=patch)[0].flatten(1).T.numpy() + arrays["embedding/bias"]
    wanted = classified(patches, arrays, "npz-linen")
    np.testing.assert_allclose(logits(model, image), wanted, rtol=1e-9, atol=1e-9)
    ours = convert(file, tmp_path / "ours.safetensors").target
    assert_same_arrays(convert(ours, tmp_path / "back.npz", "npz-linen").target, arrays)
    with pytest.raises(ExportRefused, match=r"blocks=\(\)"):
        convert(ours, tmp_path / "timm.pth", "timm")


@pytest.mark.parametrize("head", [True, False], ids=["projection", "no projection"])
def test_the_image_tower_of_lit(head: bool, tmp_path: Path) -> None:
    arrays = vit_arrays("npz-linen", head=head)
    towers = {f"img/{name}": array for name, array in arrays.items()}
    towers |= {"t": np.ones(1, np.float32), "txt/pos_embedding": np.ones((1, 16, 8), np.float32)}
    towers |= {
        "txt/Encoder_0/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel": np.ones((8, 2, 4), np.float32)
    }
    file = written(towers, tmp_path / "lit.npz")
    assert_same_network(file, written(arrays, tmp_path / "plain.npz"))
    assert load(file).config.classes == (CLASSES if head else 0)


@pytest.mark.parametrize("name", ["Transformer/pos_embedding", "pos_embedding"])
def test_old_positions_with_a_row_for_the_class_token(name: str, tmp_path: Path) -> None:
    """big_vision adds that row to the class token and drops it, which computes the same."""
    arrays = vit_arrays("npz-big-vision")
    row = Draw(6)(1, 1, WIDTH)
    old = {n: a for n, a in arrays.items() if n != "pos_embedding"}
    old[name] = np.concatenate([row, arrays["pos_embedding"]], axis=1)
    file = written(old, tmp_path / "old.npz")
    image = picture(IMAGE)
    merged = arrays | {"cls": arrays["cls"].astype(np.float64) + row}
    wanted = vit_logits(image[0].permute(1, 2, 0).numpy(), merged, "npz-big-vision")
    np.testing.assert_allclose(logits(load(file, dtype=torch.float64), image), wanted, rtol=1e-9, atol=1e-9)
    done = convert(file, tmp_path / "out.npz", "npz-linen")
    assert (done.lost_fields, done.parity.identical) == (["preprocessing"], done.parity.tensors)
    assert_same_network(done.target, file)


# What Google's code would read otherwise.


def made(config: ModelConfig) -> Bundle:
    torch.manual_seed(0)
    return replace(to_bundle(build(config)), card=Card(preprocessing=Preprocessing(image=config.image)))


UNREADABLE = {
    "mean of tokens and a class token": (replace(NARROW, pool="mean"), "npz", "pool"),
    "the same in big_vision": (replace(NARROW, pool="mean", position_prefix=False), "npz-big-vision", "pool"),
    "no positions": (replace(NARROW, position="none"), "npz", "position"),
    "no positions in big_vision": (replace(NARROW, position="none"), "npz-big-vision", "position"),
    "sine-cosine in vit_jax": (replace(NARROW, position="sincos2d"), "npz-linen", "position"),
    "a hybrid in big_vision": (
        replace(NARROW, patch=(1, 1), image=(8, 8), position_prefix=False, backbone=hybrid_backbone((1,), (8, 8))),
        "npz-big-vision",
        "backbone",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_googles_code_would_misread_is_refused_unless_asked_for(case: str, tmp_path: Path) -> None:
    config, form, field = UNREADABLE[case]
    bundle, target = made(config), tmp_path / "out.npz"
    with pytest.raises(ExportRefused, match=f"field {field}="):
        export(bundle, target, form)
    assert not list(tmp_path.iterdir())
    done = export(bundle, target, form, unofficial=True)
    assert done.parity.identical == done.parity.tensors
    assert load(target).config == config


def test_the_command_refuses_and_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.npz"
    export(made(replace(NARROW, pool="mean")), source)
    assert main(["convert", str(source), str(target)]) == 2
    assert "field pool='mean'" in capsys.readouterr().err
    assert not target.exists()
    assert main(["export", str(source), "--to", "npz", "--out", str(target)]) == 2
    assert not target.exists()
    assert main(["convert", str(source), str(target), "--unofficial"]) == 0
    assert load(target).config.pool == "mean"

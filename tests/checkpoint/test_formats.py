"""Google's `.npz` files, made by hand from the key tables: read, computed with, and written as they came.

The networks that compute with the bare arrays here are a second implementation, in float64 and in the arrays' own
layout; nothing of vitrail's tables is used to make a file or to judge one.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tests.lanes import rest_slow
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import load
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone

Array = NDArray[Any]
Arrays = dict[str, Array]

STEM = "Transformer/posembed_input/pos_embedding"
LAYOUTS = {  # attention, second norm, MLP, positions
    "npz": ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3", STEM),
    "npz-linen": ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0", STEM),
    "npz-big-vision": ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0", "pos_embedding"),
}
# No two of these are equal, and a head has not the 64 dimensions that a guess would give it.
WIDTH, HEADS, MLP, DEPTH, PATCH, GRID, CLASSES = 20, 5, 28, 3, 4, 3, 7
IMAGE = PATCH * GRID


class Draw:
    """Seeded float32 arrays, none of them trivial."""

    def __init__(self, seed: int = 0):
        self.random = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 0.3, shift: float = 0.0) -> Array:
        return (shift + scale * self.random.standard_normal(shape)).astype(np.float32)


def vit_arrays(
    layout: str = "npz", *, token: bool = True, hidden: bool = False, head: bool = True, seed: int = 0
) -> Arrays:
    """A small ViT as the reference code of that time would store it."""
    draw = Draw(seed)
    attention, second, mlp, position = LAYOUTS[layout]
    side = WIDTH // HEADS
    rows = GRID * GRID + (token and layout != "npz-big-vision")
    out = {"cls": draw(1, 1, WIDTH, scale=1)} if token else {}
    out |= {position: draw(1, rows, WIDTH, scale=1)}
    out |= {"embedding/kernel": draw(PATCH, PATCH, 3, WIDTH), "embedding/bias": draw(WIDTH)}
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        for norm in ("LayerNorm_0", second):
            out |= {f"{block}/{norm}/scale": draw(WIDTH, shift=1), f"{block}/{norm}/bias": draw(WIDTH)}
        for part in ("query", "key", "value"):
            out[f"{block}/{attention}/{part}/kernel"] = draw(WIDTH, HEADS, side)
            out[f"{block}/{attention}/{part}/bias"] = draw(HEADS, side)
        out |= {
            f"{block}/{attention}/out/kernel": draw(HEADS, side, WIDTH),
            f"{block}/{attention}/out/bias": draw(WIDTH),
        }
        out |= {f"{block}/{mlp}/Dense_0/kernel": draw(WIDTH, MLP), f"{block}/{mlp}/Dense_0/bias": draw(MLP)}
        out |= {f"{block}/{mlp}/Dense_1/kernel": draw(MLP, WIDTH), f"{block}/{mlp}/Dense_1/bias": draw(WIDTH)}
    out |= {"Transformer/encoder_norm/scale": draw(WIDTH, shift=1), "Transformer/encoder_norm/bias": draw(WIDTH)}
    if hidden:
        out |= {"pre_logits/kernel": draw(WIDTH, WIDTH), "pre_logits/bias": draw(WIDTH)}
    if head:
        out |= {"head/kernel": draw(WIDTH, CLASSES), "head/bias": draw(CLASSES)}
    return out


BLOCKS = (1, 2)
FEATURES = 256 * 2 ** (len(BLOCKS) - 1)
HYBRID_IMAGE = 2 * 4 * 2 ** (len(BLOCKS) - 1) + 16


def hybrid_arrays(layout: str = "npz", *, rank: int = 1) -> Arrays:
    """A small hybrid; `rank` is the number of dimensions of a GroupNorm vector."""
    draw, out = Draw(1), vit_arrays(layout)
    out["embedding/kernel"] = draw(1, 1, FEATURES, WIDTH, scale=0.05)
    side = HYBRID_IMAGE // 8
    position = LAYOUTS[layout][3]
    out[position] = draw(1, side * side + (layout != "npz-big-vision"), WIDTH, scale=1)

    def norm(name: str, width: int) -> None:
        shape = (*[1] * (rank - 1), width)
        out.update({f"{name}/scale": draw(*shape, shift=1), f"{name}/bias": draw(*shape)})

    out["conv_root/kernel"] = draw(7, 7, 3, 64, shift=0.1)
    norm("gn_root", 64)
    width = 64
    for stage, count in enumerate(BLOCKS, start=1):
        inner = 64 * 2 ** (stage - 1)
        for unit in range(1, count + 1):
            at = f"block{stage}/unit{unit}"
            for part, shape in enumerate(((1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)), 1):
                out[f"{at}/conv{part}/kernel"] = draw(*shape, shift=0.1)
                norm(f"{at}/gn{part}", shape[-1])
            if unit == 1:
                out[f"{at}/conv_proj/kernel"] = draw(1, 1, width, 4 * inner)
                norm(f"{at}/gn_proj", 4 * inner)
            width = 4 * inner
    return out


def bit_arrays(conv: Callable[[], str] = lambda: "standardized_conv2d") -> Arrays:
    """A small BiT; `conv` names the next convolution."""
    draw = Draw(2)
    out = {f"resnet/root_block/{conv()}/kernel": draw(7, 7, 3, 64, shift=0.1)}
    width = 64
    for stage, count in enumerate(BLOCKS, start=1):
        inner = 64 * 2 ** (stage - 1)
        for unit in range(1, count + 1):
            at = f"resnet/block{stage}/unit{unit:02d}"
            shapes = {"a": (1, 1, width, inner), "b": (3, 3, inner, inner), "c": (1, 1, inner, 4 * inner)}
            for letter, shape in shapes.items():
                out[f"{at}/{letter}/{conv()}/kernel"] = draw(*shape, shift=0.1)
                out[f"{at}/{letter}/group_norm/gamma"] = draw(shape[2], shift=1)
                out[f"{at}/{letter}/group_norm/beta"] = draw(shape[2])
            if unit == 1:
                out[f"{at}/a/proj/{conv()}/kernel"] = draw(1, 1, width, 4 * inner)
            width = 4 * inner
    out |= {"resnet/group_norm/gamma": draw(width, shift=1), "resnet/group_norm/beta": draw(width)}
    return out | {"resnet/head/conv2d/kernel": draw(1, 1, width, CLASSES), "resnet/head/conv2d/bias": draw(CLASSES)}


def written(arrays: Arrays, path: Path) -> Path:
    np.savez(path, **arrays)
    return path


def assert_same_arrays(path: Path, wanted: Arrays) -> None:
    """The file holds these arrays and no others, bit for bit."""
    with np.load(path, allow_pickle=False) as found:
        assert sorted(found.files) == sorted(wanted)
        for name, array in wanted.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
            assert found[name].tobytes() == array.tobytes(), name


def assert_same_network(path: Path, other: Path) -> None:
    one, two = read_bundle(path), read_bundle(other)
    assert one.config == two.config
    assert list(one.tensors) == list(two.tensors)
    assert all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())


# The second implementation.


def normed(x: Array, scale: Array, bias: Array) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * scale + bias


def encoded(tokens: Array, arrays: Arrays, layout: str) -> Array:
    """Tokens with positions through blocks and last norm: [T, D] -> [T, D]."""
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    attention, second, mlp, _ = LAYOUTS[layout]
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        y = normed(tokens, a[f"{block}/LayerNorm_0/scale"], a[f"{block}/LayerNorm_0/bias"])
        q, k, v = (
            np.einsum("td,dhe->hte", y, a[f"{block}/{attention}/{part}/kernel"])
            + a[f"{block}/{attention}/{part}/bias"][:, None]
            for part in ("query", "key", "value")
        )
        logits = np.einsum("hqe,hke->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,hke->hqe", weights, v)
        tokens = tokens + np.einsum("hqe,hed->qd", mixed, a[f"{block}/{attention}/out/kernel"])
        tokens = tokens + a[f"{block}/{attention}/out/bias"]
        y = normed(tokens, a[f"{block}/{second}/scale"], a[f"{block}/{second}/bias"])
        y = y @ a[f"{block}/{mlp}/Dense_0/kernel"] + a[f"{block}/{mlp}/Dense_0/bias"]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        tokens = tokens + y @ a[f"{block}/{mlp}/Dense_1/kernel"] + a[f"{block}/{mlp}/Dense_1/bias"]
    return normed(tokens, a["Transformer/encoder_norm/scale"], a["Transformer/encoder_norm/bias"])


def classified(patches: Array, arrays: Arrays, layout: str) -> Array:
    """Embedded patches [N, D] to logits, or to y where there is no head."""
    position = arrays[LAYOUTS[layout][3]][0].astype(np.float64)
    if "cls" not in arrays:
        y = encoded(patches + position, arrays, layout).mean(0)
    elif layout == "npz-big-vision":
        y = encoded(np.concatenate([arrays["cls"][0], patches + position]), arrays, layout)[0]
    else:
        y = encoded(np.concatenate([arrays["cls"][0], patches]) + position, arrays, layout)[0]
    if "pre_logits/kernel" in arrays:
        y = np.tanh(y @ arrays["pre_logits/kernel"].astype(np.float64) + arrays["pre_logits/bias"])
    return y @ arrays["head/kernel"].astype(np.float64) + arrays["head/bias"] if "head/kernel" in arrays else y


def vit_logits(image: Array, arrays: Arrays, layout: str) -> Array:
    """An image [H, W, C] to logits: patches cut by hand, in raster order."""
    kernel = arrays["embedding/kernel"].astype(np.float64)
    patches = [
        np.einsum("ijc,ijcd->d", image[r : r + PATCH, s : s + PATCH], kernel) + arrays["embedding/bias"]
        for r in range(0, IMAGE, PATCH)
        for s in range(0, IMAGE, PATCH)
    ]
    return classified(np.stack(patches), arrays, layout)


def kernel_of(array: Array, form: str) -> Tensor:
    """HWIO to OIHW in float64, standardised over (kh, kw, cin) for each output channel."""
    w = array.astype(np.float64)
    mean, variance = w.mean((0, 1, 2)), w.var((0, 1, 2))
    scale = np.sqrt(variance) + 1e-5 if form == "std+1e-5" else np.sqrt(variance + 1e-10)
    return torch.from_numpy(((w - mean) / scale).transpose(3, 2, 0, 1).copy())


def grouped(x: Tensor, scale: Array, bias: Array, eps: float) -> Tensor:
    one, two = (torch.from_numpy(array.astype(np.float64).reshape(-1)) for array in (scale, bias))
    return F.group_norm(x, 32, one, two, eps)


def hybrid_logits(image: Tensor, arrays: Arrays, layout: str) -> Array:
    """[1, C, H, W] to logits. SAME padding on even maps: (2, 3) for 7x7/2, (0, 1) for 3x3/2, (1, 1) for 3x3."""

    def norm(x: Tensor, name: str) -> Tensor:
        return grouped(x, arrays[f"{name}/scale"], arrays[f"{name}/bias"], 1e-6)

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = kernel_of(arrays[f"{name}/kernel"], "std+1e-5")
        before, after = {(7, 2): (2, 3), (3, 2): (0, 1), (3, 1): (1, 1)}.get((kernel.shape[2], stride), (0, 0))
        return F.conv2d(F.pad(x, (before, after, before, after)), kernel, stride=stride)

    x = F.relu(norm(conv(image, "conv_root", 2), "gn_root"))
    x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-math.inf), 3, stride=2)
    for stage, count in enumerate(BLOCKS, start=1):
        for unit in range(1, count + 1):
            at, stride = f"block{stage}/unit{unit}", 2 if stage > 1 and unit == 1 else 1
            shortcut = norm(conv(x, f"{at}/conv_proj", stride), f"{at}/gn_proj") if unit == 1 else x
            y = F.relu(norm(conv(x, f"{at}/conv1"), f"{at}/gn1"))
            y = F.relu(norm(conv(y, f"{at}/conv2", stride), f"{at}/gn2"))
            x = F.relu(norm(conv(y, f"{at}/conv3"), f"{at}/gn3") + shortcut)
    features = x[0].permute(1, 2, 0).reshape(-1, FEATURES).numpy()
    patches = features @ arrays["embedding/kernel"][0, 0].astype(np.float64) + arrays["embedding/bias"]
    return classified(patches, arrays, layout)


def bit_logits(image: Tensor, arrays: Arrays) -> Tensor:
    """[1, C, H, W] to logits: fixed padding, no norm in the root, zeros around the max-pool."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.relu(grouped(x, arrays[f"{name}/gamma"], arrays[f"{name}/beta"], 1e-5))

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = kernel_of(arrays[f"{name}/standardized_conv2d/kernel"], "var+1e-10")
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2)

    x = F.max_pool2d(F.pad(conv(image, "resnet/root_block", 2), (1, 1, 1, 1)), 3, stride=2)
    for stage, count in enumerate(BLOCKS, start=1):
        for unit in range(1, count + 1):
            at, stride = f"resnet/block{stage}/unit{unit:02d}", 2 if stage > 1 and unit == 1 else 1
            y = norm(x, f"{at}/a/group_norm")
            shortcut = conv(y, f"{at}/a/proj", stride) if unit == 1 else x
            y = norm(conv(y, f"{at}/a"), f"{at}/b/group_norm")
            y = norm(conv(y, f"{at}/b", stride), f"{at}/c/group_norm")
            x = conv(y, f"{at}/c") + shortcut
    y = norm(x, "resnet/group_norm").mean((2, 3))
    kernel = torch.from_numpy(arrays["resnet/head/conv2d/kernel"][0, 0].astype(np.float64))
    return y @ kernel + torch.from_numpy(arrays["resnet/head/conv2d/bias"].astype(np.float64))


def picture(size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(9).standard_normal((1, 3, size, size)))


# Computing with what was read.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["token", "mean", "hidden", "no head"])
def test_a_vit_computes_what_its_arrays_say(layout: str, kind: str, tmp_path: Path) -> None:
    arrays = vit_arrays(layout, token=kind != "mean", hidden=kind == "hidden", head=kind != "no head")
    model = load(written(arrays, tmp_path / "vit.npz"), dtype=torch.float64)
    image = picture(IMAGE)
    wanted = vit_logits(image[0].permute(1, 2, 0).numpy(), arrays, layout)
    with torch.no_grad():
        np.testing.assert_allclose(model(image)[0].numpy(), wanted, rtol=1e-9, atol=1e-9)
    c = model.config
    assert (c.width, c.heads, c.mlp_width, c.depth) == (WIDTH, HEADS, MLP, DEPTH)
    assert (c.image, c.patch, c.gelu, c.norm_eps) == ((IMAGE, IMAGE), (PATCH, PATCH), "tanh", 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hybrid_computes_what_its_arrays_say(layout: str, tmp_path: Path) -> None:
    arrays = hybrid_arrays(layout)
    model = load(written(arrays, tmp_path / "hybrid.npz"), dtype=torch.float64)
    assert model.config.backbone == hybrid_backbone(BLOCKS, (HYBRID_IMAGE, HYBRID_IMAGE))
    image = picture(HYBRID_IMAGE)
    with torch.no_grad():
        np.testing.assert_allclose(model(image)[0].numpy(), hybrid_logits(image, arrays, layout), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [32, 45], ids=["even", "odd"])
def test_a_bit_computes_what_its_arrays_say(size: int, tmp_path: Path) -> None:
    arrays = bit_arrays()
    model = load(written(arrays, tmp_path / "bit.npz"), dtype=torch.float64)
    assert model.config == ResNetConfig(blocks=BLOCKS, classes=CLASSES)
    with torch.no_grad():
        torch.testing.assert_close(model(picture(size)), bit_logits(picture(size), arrays), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [24, 40])
def test_google_weights_expect_pixels_from_minus_one_to_one(size: int, tmp_path: Path) -> None:
    card = load(written(bit_arrays(), tmp_path / "bit.npz"), image=(size, size)).card
    assert (card.preprocessing.mean, card.preprocessing.std) == ((0.5,) * 3, (0.5,) * 3)
    assert card.preprocessing.image == (size, size)
    assert card.provenance == {"imported_from": "npz-bit", "file": "bit.npz"}


def test_the_preprocessing_of_googles_own_pipelines(tmp_path: Path) -> None:
    """vit_jax and BiT squash with tf.image.resize; big_vision takes the centre of a larger one, averaged by area."""
    for layout in LAYOUTS:
        found = load(written(vit_arrays(layout), tmp_path / f"{layout}.npz")).card.preprocessing
        assert not found.antialias
        if layout == "npz-big-vision":
            assert (found.resize, found.interpolation) == (round(IMAGE * 8 / 7), "area")
        else:
            assert (found.resize, found.interpolation) == (None, "bilinear")
    bit = written(bit_arrays(), tmp_path / "bit.npz")
    found = load(bit).card.preprocessing
    assert (found.resize, found.interpolation, found.antialias) == (None, "bilinear", False)
    ours = convert(bit, tmp_path / "ours.safetensors").target
    assert load(ours).card.preprocessing == found
    theirs = convert(bit, tmp_path / "theirs.pth", to="timm")
    assert "preprocessing" in theirs.lost_fields
    assert load(theirs.target).card.preprocessing == found


# Writing what was read.


FILES: dict[str, tuple[str, Callable[[], Arrays]]] = {
    **{layout: (layout, lambda layout=layout: vit_arrays(layout)) for layout in LAYOUTS},
    **{f"{layout}, hidden": (layout, lambda layout=layout: vit_arrays(layout, hidden=True)) for layout in LAYOUTS},
    **{f"{layout}, mean": (layout, lambda layout=layout: vit_arrays(layout, token=False)) for layout in LAYOUTS},
    "npz, no head": ("npz", lambda: vit_arrays(head=False)),
    "npz, hidden without head": ("npz", lambda: vit_arrays(head=False, hidden=True)),
    "npz, hybrid of 4-D norms": ("npz", lambda: hybrid_arrays(rank=4)),
    "npz-linen, hybrid of 1-D norms": ("npz-linen", lambda: hybrid_arrays("npz-linen")),
    "npz-big-vision, hybrid of 1-D norms": ("npz-big-vision", lambda: hybrid_arrays("npz-big-vision")),
    "npz-bit": ("npz-bit", bit_arrays),
}


@pytest.mark.parametrize("name", rest_slow(FILES, "npz-bit", 0))
def test_a_file_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    layout, make = FILES[name]
    arrays = make()
    source = written(arrays, tmp_path / "in.npz")
    ours = convert(source, tmp_path / "ours.safetensors").target
    done = convert(ours, tmp_path / "out.npz", to=layout, unofficial="big-vision, hybrid" in name)
    assert (done.format, done.sidecar, done.lost_fields) == (layout, None, [])
    assert (done.parity.identical, done.parity.reference) == (done.parity.tensors, None)
    assert_same_arrays(done.target, arrays)
    assert_same_network(source, done.target)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_come_back_as_they_were(dtype: Any, tmp_path: Path) -> None:
    arrays = {name: array.astype(dtype) for name, array in vit_arrays().items()}
    source = written(arrays, tmp_path / "in.npz")
    assert_same_arrays(convert(source, tmp_path / "out.npz").target, arrays)


def test_the_original_layout_is_what_npz_means(tmp_path: Path) -> None:
    source = written(vit_arrays("npz-linen"), tmp_path / "in.npz")
    assert_same_arrays(convert(source, tmp_path / "out.npz").target, vit_arrays("npz"))
    assert_same_arrays(convert(source, tmp_path / "linen.npz", to="npz-linen").target, vit_arrays("npz-linen"))


def test_npz_means_bit_for_a_bit(tmp_path: Path) -> None:
    source = written(bit_arrays(), tmp_path / "in.npz")
    assert convert(source, tmp_path / "out.npz").format == "npz-bit"


@pytest.mark.parametrize("layout", rest_slow(["npz", "npz-linen"]))
def test_norm_vectors_of_one_and_of_four_dimensions_are_the_same(layout: str, tmp_path: Path) -> None:
    """The original hybrids store [1, 1, 1, C], later ones [C]; each layout is written its own way."""
    flat = written(hybrid_arrays(layout, rank=1), tmp_path / "flat.npz")
    deep = written(hybrid_arrays(layout, rank=4), tmp_path / "deep.npz")
    assert_same_network(flat, deep)
    own = hybrid_arrays(layout, rank=4 if layout == "npz" else 1)
    for source in (flat, deep):
        assert_same_arrays(convert(source, tmp_path / "out.npz", to=layout).target, own)


def test_numbered_convolutions_of_bit(tmp_path: Path) -> None:
    count = iter(range(100))

    def numbered() -> str:
        i = next(count)
        return f"standardized_conv2d_{i}" if i else "standardized_conv2d"

    arrays = bit_arrays(numbered)
    assert any("/standardized_conv2d_7/" in name for name in arrays)
    source = written(arrays, tmp_path / "numbered.npz")
    assert_same_network(source, written(bit_arrays(), tmp_path / "plain.npz"))
    assert_same_arrays(convert(source, tmp_path / "out.npz").target, bit_arrays())


def test_norm_vectors_of_bit_may_have_four_dimensions(tmp_path: Path) -> None:
    deep = {name: array.reshape(1, 1, 1, -1) if "group_norm" in name else array for name, array in bit_arrays().items()}
    assert_same_network(written(deep, tmp_path / "deep.npz"), written(bit_arrays(), tmp_path / "flat.npz"))


# What stands around the tensors.


def stacked(arrays: Arrays) -> Arrays:
    """One array for all blocks, the layer in front, as a scanned model stores it."""
    out = {name: array for name, array in arrays.items() if "/encoderblock_" not in name}
    for name in arrays:
        if "/encoderblock_0/" in name:
            layers = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(DEPTH)]
            out[name.replace("/encoderblock_0/", "/encoderblock/", 1)] = np.stack(layers)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scanned", rest_slow([False, True], 1), ids=["blocks apart", "scanned"])
@pytest.mark.parametrize("prefix", rest_slow(["", "params/", "params/img/", "opt/target/", "opt/target/params/"], 0, 4))
def test_prefixes_and_scans_change_nothing(layout: str, scanned: bool, prefix: str, tmp_path: Path) -> None:
    plain = vit_arrays(layout)
    arrays = {prefix + name: array for name, array in (stacked(plain) if scanned else plain).items()}
    if prefix == "params/img/":
        arrays |= {"params/t": np.ones(1, np.float32), "params/txt/head/kernel": np.ones((3, 2), np.float32)}
    if prefix.startswith("opt/"):
        arrays |= {"opt/state/step": np.array(7), "opt/state/param_states/cls/grad_ema": np.ones((1, 1, WIDTH))}
    if prefix:
        arrays |= {"extra/rng": np.arange(2, dtype=np.uint32)}
    source = written(arrays, tmp_path / "in.npz")
    assert_same_network(source, written(plain, tmp_path / "plain.npz"))
    assert_same_arrays(convert(source, tmp_path / "out.npz", to=layout).target, plain)


def test_positions_of_the_era_between(tmp_path: Path) -> None:
    plain = vit_arrays("npz-big-vision")
    between = {("Transformer/pos_embedding" if n == "pos_embedding" else n): a for n, a in plain.items()}
    source = written(between, tmp_path / "between.npz")
    assert_same_network(source, written(plain, tmp_path / "plain.npz"))


def test_bfloat16_as_jax_stores_it(tmp_path: Path) -> None:
    """numpy has no name for it: two opaque bytes, the upper half of a float32."""
    exact = {name: (array.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, array in vit_arrays().items()}
    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16).view("V2") for name, array in exact.items()}
    source = written(halves, tmp_path / "half.npz")
    tensors = read_bundle(source).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    wide = read_bundle(written(exact, tmp_path / "wide.npz")).tensors
    assert all(torch.equal(tensor.float(), wide[name]) for name, tensor in tensors.items())
    assert_same_arrays(convert(source, tmp_path / "out.npz").target, exact)


def test_zero_heads_of_the_original_release_are_read_as_they_are(tmp_path: Path) -> None:
    arrays = vit_arrays(hidden=True)
    arrays |= {name: np.zeros_like(arrays[name]) for name in ("head/kernel", "head/bias")}
    source = written(arrays, tmp_path / "in.npz")
    model = load(source)
    assert model.config.head == "tanh"
    with torch.no_grad():
        features = model.forward_head(model.forward_features(picture(IMAGE).float()), pre_logits=True)
        assert model(picture(IMAGE).float()).count_nonzero() == 0
    assert features.std() > 0.1
    assert_same_arrays(convert(source, tmp_path / "out.npz").target, arrays)


def test_pictures_that_are_not_square_must_be_told(tmp_path: Path) -> None:
    arrays = vit_arrays()
    arrays[STEM] = Draw(3)(1, 1 + 2 * 5, WIDTH)
    source = written(arrays, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match=r"in\.npz: 11 positions make no square grid; pass image="):
        load(source)
    assert load(source, image=(8, 20)).config.grid == (2, 5)


def test_a_file_without_positions_must_be_told_its_size(tmp_path: Path) -> None:
    arrays = vit_arrays()
    del arrays[STEM]
    source = written(arrays, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match=r"in\.npz: no positions in the file.*pass image="):
        load(source, position="none")
    config = load(source, position="none", image=(8, 12)).config
    assert isinstance(config, ViTConfig)
    assert (config.position, config.grid) == ("none", (2, 3))


def test_class_rows_are_made_and_dropped(tmp_path: Path) -> None:
    """big_vision has no position for the class token: a zero row stands for it elsewhere, and a sidecar says so."""
    source = written(vit_arrays("npz-big-vision"), tmp_path / "in.npz")
    done = convert(source, tmp_path / "out.npz", to="npz")
    with np.load(done.target) as found:
        assert not found[STEM][0, 0].any()
        assert found[STEM].shape == (1, 10, WIDTH)
    assert done.lost_fields == ["position_prefix", "preprocessing"]
    assert done.parity.identical == done.parity.tensors
    assert_same_network(done.target, source)
    back = convert(done.target, tmp_path / "back.npz", to="npz-big-vision")
    assert_same_arrays(back.target, vit_arrays("npz-big-vision"))


def test_a_class_row_has_no_place_in_big_vision(tmp_path: Path) -> None:
    source = written(vit_arrays(), tmp_path / "in.npz")
    with pytest.raises(ExportRefused, match="so not field position_prefix=True"):
        convert(source, tmp_path / "out.npz", to="npz-big-vision")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]


# Files that are not whole.


@pytest.mark.parametrize("layout", rest_slow(LAYOUTS))
def test_every_tensor_is_missed_by_name(layout: str, tmp_path: Path) -> None:
    arrays = vit_arrays(layout, hidden=True)
    optional = {"cls", LAYOUTS[layout][3], "head/kernel", "pre_logits/kernel"}  # a network without them is another
    for name in sorted(set(arrays) - optional):
        if "/encoderblock_" in name and "/encoderblock_1/" not in name and "LayerNorm_0/scale" not in name:
            continue  # one block stands for all
        path = written({n: a for n, a in arrays.items() if n != name}, tmp_path / "in.npz")
        with pytest.raises(MismatchedWeights) as caught:
            load(path)
        # Blocks are counted by their first norm: without it the block itself is what is out of place.
        offending = name.removesuffix("LayerNorm_0/scale")
        assert str(caught.value).startswith(f"{path}: tensor '{offending}"), name


def test_what_is_left_over_is_named(tmp_path: Path) -> None:
    path = written({**vit_arrays(), "MAPHead_0/probe": np.ones((1, 1, WIDTH), np.float32)}, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match=r"in\.npz: tensor 'MAPHead_0/probe' has no place in this network"):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("head/bias", (CLASSES + 1,), r"\[8\], expected \[7\]"),
        ("embedding/kernel", (PATCH, PATCH, WIDTH), "expected 4 dimensions"),
        ("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel", (WIDTH, WIDTH), "expected 3 dim"),
        (
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel",
            (WIDTH, 4, 5),
            r"expected \[20, 5, 4\]",
        ),
        ("Transformer/encoderblock_2/MlpBlock_3/Dense_1/kernel", (WIDTH, MLP), r"\[20, 28\], expected \[28, 20\]"),
        ("cls", (1, WIDTH), r"expected \[1, 1, 20\]"),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], complaint: str, tmp_path: Path) -> None:
    path = written({**vit_arrays(), name: np.ones(shape, np.float32)}, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match=complaint) as caught:
        load(path)
    assert f"{path}: tensor '{name}' has shape" in str(caught.value)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = written({**vit_arrays(), "head/bias": np.ones(CLASSES, np.int64)}, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match=r"'head/bias' has type torch\.int64, expected floating point"):
        load(path)


def test_names_of_nobody_are_refused(tmp_path: Path) -> None:
    path = written({"a/b": np.ones(2), "c": np.ones(3)}, tmp_path / "in.npz")
    with pytest.raises(MismatchedWeights, match="tensors like a/b, c match no format that vitrail knows"):
        load(path)

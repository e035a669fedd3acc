"""Google's `.npz` files: ViTs and hybrids in three layouts, and BiT ResNets (`BiT-M-R50x1.npz` and its kin).

    layout       attention, second norm, MLP                                positions
    original     MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3    Transformer/posembed_input/pos_embedding
    linen        MultiHeadDotProductAttention_0, LayerNorm_1, MlpBlock_0    Transformer/posembed_input/pos_embedding
    big_vision   as linen                                                   pos_embedding, without a class row, or none

big_vision's positions are learned or, where the file has none, sine-cosine (`posemb="sincos2d"`, the released
vit_s16_i1k): its code has no third kind, so a file with Linen's numbering and without positions is read as one of
these. Its blocks may be stacked by a scan. Kernels are stored input first (HWIO, [in, out]), q, k and v separately with
a dimension for heads. JAX computed with the tanh GELU, eps 1e-6, and the hybrid's backbone with (std + 1e-5) and SAME
padding. BiT files have the numerics of the original code.
"""

import re
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from vitrail.checkpoint.formats.key_table import (
    HEADS,
    KeyEntry,
    Tensors,
    TensorShapes,
    copy,
    infer_image,
    position_entry,
    require_plain,
)
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, format_size
from vitrail.models.family import ModelConfig, Position
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import hybrid_backbone

PREFIXES = ("opt/target/", "params/", "img/")  # the last is the image tower of a two-tower model (LiT)
RELEASED_IMAGE: Pair = (224, 224)  # of big_vision's released networks with sine-cosine positions (configs/vit_s16_i1k)
BLOCK = "Transformer/encoderblock_{}/"


@dataclass(frozen=True, slots=True)
class NpzLayout:
    """How one generation of the code numbers the parts of a block and where it keeps positions."""

    name: str
    attention: str
    norm_mlp: str
    mlp: str
    position: str
    norms: tuple[int, ...]  # dimensions in front of a GroupNorm vector: the original hybrids store [1, 1, 1, C]


STEM = "Transformer/posembed_input/pos_embedding"
ORIGINAL = NpzLayout("npz", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3", STEM, (1, 1, 1))
LINEN = NpzLayout("npz-linen", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0", STEM, ())
BIG_VISION = NpzLayout(
    "npz-big-vision", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0", "pos_embedding", ()
)
LAYOUTS = (ORIGINAL, LINEN, BIG_VISION)


def recognises(names: set[str]) -> bool:
    return any("MultiHeadDotProductAttention_" in name for name in names)


def modernise(tensors: Tensors) -> Tensors:
    """Without prefixes and scan stacks, so that the three layouts remain."""
    out = dict(tensors)
    for prefix in PREFIXES:
        inside = {name.removeprefix(prefix): t for name, t in out.items() if name.startswith(prefix)}
        out = inside or out  # what stands next to the prefix is optimiser state
    out = _unstack_scan(out)
    if "Transformer/pos_embedding" in out:
        out["pos_embedding"] = out.pop("Transformer/pos_embedding")
    dims = find_layout(set(out)).norms
    return {name: _reshape_norm(name, tensor, dims) for name, tensor in out.items()}


def _unstack_scan(tensors: Tensors) -> Tensors:
    """A scanned model stores every block in one tensor with the layer in front."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith("Transformer/encoderblock/") or not tensor.ndim or tensor.shape[0] > 1000:
            out[name] = tensor
            continue
        for layer, part in enumerate(tensor.unbind(0)):
            out[name.replace("encoderblock/", f"encoderblock_{layer}/", 1)] = part
    return out


def _reshape_norm(name: str, tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """GroupNorm vectors as the layout has them, whichever way the file does."""
    norm = re.search(r"(^|/)gn(_root|_proj|\d)/(scale|bias)$", name)
    return tensor.reshape(*dims, -1) if norm and tensor.numel() else tensor


def find_layout(names: set[str]) -> NpzLayout:
    if "pos_embedding" in names:
        return BIG_VISION
    if any("MultiHeadDotProductAttention_1/" in name for name in names):
        return ORIGINAL
    return LINEN if STEM in names else BIG_VISION


def infer(shapes: TensorShapes) -> ModelConfig:
    layout = find_layout(set(shapes.tensors))
    attention = f"{BLOCK.format(0)}{layout.attention}/"
    width, heads, _ = shapes.get(f"{attention}query/kernel", 3)
    *patch, channels, _ = shapes.get("embedding/kernel", 4)
    token = "cls" in shapes
    trunk = _infer_backbone(shapes) if "conv_root/kernel" in shapes else None
    ground = (patch[0], patch[1])
    if trunk is not None:
        channels = shapes.get("conv_root/kernel", 4)[2]
        ground = (patch[0] * trunk.stride, patch[1] * trunk.stride)
    mlp_width = shapes.get(f"{BLOCK.format(0)}{layout.mlp}/Dense_0/kernel", 2)[1]
    position: Position = "learned" if layout.position in shapes else _infer_position(shapes, layout)
    prefix = 1
    if layout.position in shapes:
        rows = shapes.get(layout.position, 3)[1]
        size, prefix = infer_image(shapes, rows, ground, token)
    else:
        size = shapes.image or _infer_released_image(shapes, position, (width, mlp_width), ground)
    classes = shapes.get("head/kernel", 2)[1] if "head/kernel" in shapes else 0
    tanh = "pre_logits/kernel" in shapes
    return ViTConfig(
        width=width,
        depth=shapes.count(BLOCK + "LayerNorm_0/scale"),
        mlp_width=mlp_width,
        heads=heads,
        image=size,
        patch=(patch[0], patch[1]),
        channels=channels,
        classes=classes,
        head="tanh" if tanh else "linear" if classes else "none",
        pool="token" if token else "mean",
        class_token=token,
        position=position,
        position_prefix=bool(prefix) or not token,
        backbone=None if trunk is None else replace(trunk, image=size, channels=channels),
    )


def _infer_position(shapes: TensorShapes, layout: NpzLayout) -> Position:
    """The kind of positions of a file that stores none: as given, or big_vision's."""
    if "position" in shapes.facts:
        return shapes.facts["position"]
    if layout is BIG_VISION:
        return "sincos2d"
    raise MismatchedWeights(
        f"{shapes.path}: no positions in the file, and its layout does not say which it was trained with; pass "
        'position="sincos2d" or position="none" (vitrail convert FILE --out OUT.safetensors --position sincos2d)'
    )


def _infer_released_image(shapes: TensorShapes, position: Position, size: tuple[int, int], patch: Pair) -> Pair:
    """The image size of a published network with sine-cosine positions, which no tensor tells; others must say it."""
    if position == "sincos2d" and size in HEADS and not any(RELEASED_IMAGE[i] % patch[i] for i in (0, 1)):
        return RELEASED_IMAGE
    raise MismatchedWeights(
        f"{shapes.path}: no positions in the file, so it does not say its image size; pass image= "
        "(vitrail convert FILE --out OUT.safetensors --image-size 224)"
    )


def describe_inferred(config: ModelConfig) -> str | None:
    """What was inferred beyond the file's tensors, as a sentence."""
    position = getattr(config, "position", "learned")
    if position == "learned":
        return None
    return f"no positions in the file: read as position={position!r} at {format_size(config.image)} px"


def _infer_backbone(shapes: TensorShapes) -> ResNetConfig:
    """The root, and as many stages as there are: R+ViT-Ti/16 has none."""
    stages = shapes.count("block{}/unit1/conv1/kernel", 1) if "block1/unit1/conv1/kernel" in shapes else 0
    return hybrid_backbone(
        tuple(shapes.count(f"block{stage}/unit{{}}/conv1/kernel", 1) for stage in range(1, stages + 1))
    )


def refuse_unreadable(config: ModelConfig, layout: NpzLayout) -> None:
    """Refuse to write what Google's own code would read as another network, naming the field."""
    build_table(config, layout)  # what has no place at all is refused first
    config = vit_config(config, layout.name)
    if layout is BIG_VISION and config.position == "learned" and config.class_token and config.position_prefix:
        raise ExportRefused(
            "npz-big-vision keeps no position for the class token: field position_prefix=True cannot be held; use npz"
        )
    rules = {
        "pool": (config.pool == "mean" and config.class_token, "it averages without a class token"),
        "position": (config.position not in _positions_of(layout), f"it adds {_positions_of(layout)[0]} positions"),
        "backbone": (config.backbone is not None and layout is BIG_VISION, "it has no hybrids; use npz"),
    }
    for field, (wrong, why) in rules.items():
        if wrong:
            value = "a ResNet" if field == "backbone" else repr(getattr(config, field))
            raise ExportRefused(
                f"{layout.name}: Google's code would read field {field}={value} as another network ({why}); "
                "vitrail convert --unofficial writes it all the same"
            )


def _positions_of(layout: NpzLayout) -> tuple[Position, ...]:
    """The kinds that the code of that time computes with."""
    return ("sincos2d", "learned") if layout is BIG_VISION else ("learned",)


def build_table(config: ModelConfig, layout: NpzLayout = ORIGINAL) -> list[KeyEntry]:
    free = ("backbone", "class_token", "pool")
    c = require_plain(layout.name, config, heads=("none", "linear", "tanh"), free=(*free, "position"))
    if c.position not in ("learned", "none", "sincos2d"):
        raise ExportRefused(
            f"{layout.name} has no place for field position={c.position!r}; it holds 'learned', 'sincos2d' and 'none'"
        )
    rows = [copy("class_token", "cls")] if c.class_token else []
    if c.position == "learned":
        rows += [_positions(c, layout)]
    rows += _trunk_table(c.backbone, layout) if c.backbone is not None else []
    rows += [
        conv("embedding.projection.weight", "embedding/kernel"),
        copy("embedding.projection.bias", "embedding/bias"),
    ]
    for i in range(c.depth):
        rows += _block_table(f"blocks.{i}.", BLOCK.format(i), layout, c.heads)
    rows += norm("norm", "Transformer/encoder_norm")
    rows += dense("head.hidden", "pre_logits") if c.head == "tanh" else []
    return rows + (dense("head.classifier", "head") if c.classes else [])


def _positions(c: ViTConfig, layout: NpzLayout) -> KeyEntry:
    if layout is not BIG_VISION:
        return position_entry(c, layout.position)
    return copy("position.tables.0.table", layout.position)


def _block_table(ours: str, theirs: str, layout: NpzLayout, heads: int) -> list[KeyEntry]:
    attention = f"{theirs}{layout.attention}/"
    parts = ("query", "key", "value")
    return [
        *norm(f"{ours}norm_attention", f"{theirs}LayerNorm_0"),
        qkv_kernel(f"{ours}attention.qkv.weight", tuple(f"{attention}{part}/kernel" for part in parts), heads),
        qkv_bias(f"{ours}attention.qkv.bias", tuple(f"{attention}{part}/bias" for part in parts), heads),
        out_kernel(f"{ours}attention.out.weight", f"{attention}out/kernel", heads),
        copy(f"{ours}attention.out.bias", f"{attention}out/bias"),
        *norm(f"{ours}norm_mlp", f"{theirs}{layout.norm_mlp}"),
        *dense(f"{ours}mlp.expand", f"{theirs}{layout.mlp}/Dense_0"),
        *dense(f"{ours}mlp.contract", f"{theirs}{layout.mlp}/Dense_1"),
    ]


def _trunk_table(c: ResNetConfig, layout: NpzLayout) -> list[KeyEntry]:
    if (c.unit, c.root, c.mixing, c.factor) != ("postactivation", "7x7", "convolution", 1):
        raise ExportRefused(
            f"{layout.name} holds hybrids of R50: field root={c.root!r} or factor={c.factor} cannot be held"
        )
    ours = "embedding.backbone."
    rows = [conv(f"{ours}root.weight", "conv_root/kernel"), *group_norm(f"{ours}norm_root", "gn_root", layout)]
    for stage, count in enumerate(c.blocks):
        for unit in range(count):
            here, there = f"{ours}stages.{stage}.{unit}.", f"block{stage + 1}/unit{unit + 1}/"
            for part in (1, 2, 3):
                rows += [conv(f"{here}conv{part}.weight", f"{there}conv{part}/kernel")]
                rows += group_norm(f"{here}norm{part}", f"{there}gn{part}", layout)
            if unit == 0:
                rows += [conv(f"{here}project.weight", f"{there}conv_proj/kernel")]
                rows += group_norm(f"{here}norm_project", f"{there}gn_proj", layout)
    return rows


def conv(ours: str, theirs: str) -> KeyEntry:
    """OIHW here, HWIO there."""
    return KeyEntry(ours, (theirs,), lambda t: (t.permute(2, 3, 1, 0),), lambda ts: ts[0].permute(3, 2, 0, 1))


def dense(ours: str, theirs: str) -> list[KeyEntry]:
    """[out, in] here, [in, out] there."""
    kernel = KeyEntry(f"{ours}.weight", (f"{theirs}/kernel",), lambda t: (t.T,), lambda ts: ts[0].T)
    return [kernel, copy(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[KeyEntry]:
    return [copy(f"{ours}.weight", f"{theirs}/scale"), copy(f"{ours}.bias", f"{theirs}/bias")]


def group_norm(ours: str, theirs: str, layout: NpzLayout) -> list[KeyEntry]:
    def entry(mine: str, yours: str) -> KeyEntry:
        return KeyEntry(mine, (yours,), lambda t: (t.reshape(*layout.norms, -1),), lambda ts: ts[0].flatten())

    return [entry(f"{ours}.weight", f"{theirs}/scale"), entry(f"{ours}.bias", f"{theirs}/bias")]


def qkv_kernel(ours: str, names: tuple[str, ...], heads: int) -> KeyEntry:
    """[3D, D] here; three times [D, heads, D_h] there."""

    def out(t: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.T.unflatten(1, (heads, -1)) for part in t.chunk(3))

    return KeyEntry(ours, names, out, lambda ts: torch.cat([t.flatten(1).T for t in ts]))


def qkv_bias(ours: str, names: tuple[str, ...], heads: int) -> KeyEntry:
    def out(t: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(0, (heads, -1)) for part in t.chunk(3))

    return KeyEntry(ours, names, out, lambda ts: torch.cat([t.flatten() for t in ts]))


def out_kernel(ours: str, theirs: str, heads: int) -> KeyEntry:
    """[D, D] here, [heads, D_h, D] there."""
    return KeyEntry(ours, (theirs,), lambda t: (t.T.unflatten(0, (heads, -1)),), lambda ts: ts[0].flatten(0, 1).T)


NAME = "npz-bit"
ROOT = "resnet/root_block/standardized_conv2d/kernel"


def recognises_bit(names: set[str]) -> bool:
    return any("standardized_conv2d" in name for name in names)


def modernise_bit(tensors: Tensors) -> Tensors:
    """Some files number the convolutions (`standardized_conv2d_7`) or store norm vectors as [1, 1, 1, C]."""
    out = {re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+/", r"\1/", name): t for name, t in tensors.items()}
    return {name: t.flatten() if name.endswith(("/gamma", "/beta")) else t for name, t in out.items()}


def infer_bit(shapes: TensorShapes) -> ModelConfig:
    unit = "resnet/block{}/unit{:02d}/a/standardized_conv2d/kernel"
    blocks: list[int] = []
    while unit.format(len(blocks) + 1, 1) in shapes:
        count = 0
        while unit.format(len(blocks) + 1, count + 1) in shapes:
            count += 1
        blocks.append(count)
    channels, width = shapes.get(ROOT, 4)[2:]
    classes = shapes.get("resnet/head/conv2d/kernel", 4)[3] if "resnet/head/conv2d/kernel" in shapes else 0
    return ResNetConfig(
        blocks=tuple(blocks), factor=width / 64, channels=channels, classes=classes, image=shapes.image or (224, 224)
    )


@singledispatch
def bit_table(config: ModelConfig) -> list[KeyEntry]:
    raise ExportRefused(f"{NAME} holds BiT ResNets; this network is a {config.title}")


@bit_table.register
def _(c: ResNetConfig) -> list[KeyEntry]:
    if (c.unit, c.root, c.mixing) != ("preactivation", "7x7", "convolution"):
        raise ExportRefused(f"{NAME} has no place for field unit={c.unit!r}, root={c.root!r} or mixing={c.mixing!r}")
    rows = [conv("trunk.root.weight", ROOT)]
    for stage, count in enumerate(c.blocks):
        for unit in range(count):
            here, there = f"trunk.stages.{stage}.{unit}.", f"resnet/block{stage + 1}/unit{unit + 1:02d}/"
            for part, letter in enumerate("abc", start=1):
                rows += [conv(f"{here}conv{part}.weight", f"{there}{letter}/standardized_conv2d/kernel")]
                rows += bit_norm(f"{here}norm{part}", f"{there}{letter}/group_norm")
            if unit == 0:
                rows += [conv(f"{here}project.weight", f"{there}a/proj/standardized_conv2d/kernel")]
    rows += bit_norm("norm", "resnet/group_norm")
    return rows + (_head() if c.classes else [])


def bit_norm(ours: str, theirs: str) -> list[KeyEntry]:
    return [copy(f"{ours}.weight", f"{theirs}/gamma"), copy(f"{ours}.bias", f"{theirs}/beta")]


def _head() -> list[KeyEntry]:
    """A matrix [K, F] here, a 1x1 convolution [1, 1, F, K] there."""
    kernel = KeyEntry(
        "head.weight", ("resnet/head/conv2d/kernel",), lambda t: (t.T[None, None],), lambda ts: ts[0].flatten(0, 2).T
    )
    return [kernel, copy("head.bias", "resnet/head/conv2d/bias")]

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vitrail.checkpoint.formats import key_table as keys
from vitrail.checkpoint.formats.format import Format, Settings, big_vision_crop, google_squash
from vitrail.checkpoint.formats.key_table import KeyEntry, Tensors, TensorShapes, copy
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, format_size
from vitrail.models.family import ModelConfig, Position
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import hybrid_backbone

PREFIXES = ("opt/target/", "params/", "img/")  # the last is the image tower of a two-tower model (LiT)
RELEASED_IMAGE: Pair = (224, 224)  # of big_vision's released networks with sine-cosine positions (configs/vit_s16_i1k)
Change: TypeAlias = Callable[[Tensor], Tensor]
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
BIG_VISION = replace(LINEN, name="npz-big-vision", position="pos_embedding")
LAYOUTS = (ORIGINAL, LINEN, BIG_VISION)


def recognises(names: set[str], layout: NpzLayout) -> bool:
    return any("MultiHeadDotProductAttention_" in name for name in names) and find_layout(names) is layout


def modernise(tensors: Tensors, settings: Settings) -> Tensors:
    """Without prefixes and scan stacks, so that the three layouts remain."""
    out = dict(tensors)
    for prefix in PREFIXES:
        inside = {name.removeprefix(prefix): t for name, t in out.items() if name.startswith(prefix)}
        out = inside or out  # tensors without the prefix are optimiser state
    for name in [name for name in out if name.startswith("Transformer/encoderblock/")]:
        if out[name].ndim and out[name].shape[0] <= 1000:  # a scan stacks blocks on the first axis
            parts = enumerate(out.pop(name).unbind(0))
            out |= {name.replace("encoderblock/", f"encoderblock_{layer}/", 1): part for layer, part in parts}
    if "Transformer/pos_embedding" in out:
        out["pos_embedding"] = out.pop("Transformer/pos_embedding")
    dims = find_layout(set(out)).norms
    norms = {name for name, t in out.items() if t.numel() and re.search(r"(^|/)gn(_root|_proj|\d)/(scale|bias)$", name)}
    return {name: t.reshape(*dims, -1) if name in norms else t for name, t in out.items()}


def find_layout(names: set[str]) -> NpzLayout:
    if "pos_embedding" in names:
        return BIG_VISION
    if any("MultiHeadDotProductAttention_1/" in name for name in names):
        return ORIGINAL
    return LINEN if STEM in names else BIG_VISION


def infer(shapes: TensorShapes) -> ModelConfig:
    layout = find_layout(set(shapes.tensors))
    width, heads, _ = shapes.get(f"{BLOCK.format(0)}{layout.attention}/query/kernel", 3)
    high, wide, channels, _ = shapes.get("embedding/kernel", 4)
    trunk, token = None, "cls" in shapes
    if "conv_root/kernel" in shapes:  # and as many stages as there are: R+ViT-Ti/16 has none
        trunk = hybrid_backbone(shapes.count_units("block{}/unit{}/conv1/kernel", 1))
        channels = shapes.get("conv_root/kernel", 4)[2]
    stride = trunk.stride if trunk else 1
    ground = (high * stride, wide * stride)
    mlp_width = shapes.get(f"{BLOCK.format(0)}{layout.mlp}/Dense_0/kernel", 2)[1]
    position: Position = "learned"
    if layout.position in shapes:
        size, prefix = keys.infer_image(shapes, shapes.get(layout.position, 3)[1], ground, token)
    else:
        position, size, prefix = *_infer_position(shapes, layout, (width, mlp_width), ground), 1
    classes = shapes.get("head/kernel", 2)[1] if "head/kernel" in shapes else 0
    sizes: Any = {"width": width, "mlp_width": mlp_width, "heads": heads, "patch": (high, wide), "image": size}
    sizes |= {"depth": shapes.count(BLOCK + "LayerNorm_0/scale"), "channels": channels, "classes": classes}
    return ViTConfig(
        **sizes,
        class_token=token,
        position=position,
        position_prefix=bool(prefix) or not token,
        head="tanh" if "pre_logits/kernel" in shapes else "linear" if classes else "none",
        pool="token" if token else "mean",
        backbone=None if trunk is None else replace(trunk, image=size, channels=channels),
    )


def _infer_position(
    shapes: TensorShapes, layout: NpzLayout, sizes: tuple[int, int], patch: Pair
) -> tuple[Position, Pair]:
    """Infers the kind of positions of a file that stores none, and the image size, neither of which the tensors show:
    as given, or those of big_vision's published networks with sine-cosine positions."""
    position = shapes.facts.get("position", "sincos2d" if layout is BIG_VISION else None)
    if position is None:
        fault = f"{shapes.path}: no positions in the file, and its layout does not say which it was trained with"
        remedy = "vitrail convert FILE --out OUT.safetensors --position sincos2d"
        raise MismatchedWeights(f'{fault}; pass position="sincos2d" or position="none" ({remedy})')
    released = position == "sincos2d" and sizes in keys.HEADS and not any(RELEASED_IMAGE[i] % patch[i] for i in (0, 1))
    if not (shapes.image or released):
        remedy = "pass image= (vitrail convert FILE --out OUT.safetensors --image-size 224)"
        raise MismatchedWeights(f"{shapes.path}: no positions in the file, so it does not say its image size; {remedy}")
    return position, shapes.image or RELEASED_IMAGE


def describe_inferred(config: ModelConfig) -> str | None:
    """What was inferred beyond the file's tensors, as a sentence."""
    position = getattr(config, "position", "learned")
    if position == "learned":
        return None
    return f"no positions in the file: read as position={position!r} at {format_size(config.image)} px"


def refuse_unreadable(config: ModelConfig, layout: NpzLayout) -> None:
    """Raises ExportRefused, with the field, for a network that Google's own code would read as another one."""
    build_table(config, layout)  # fields that cannot be stored at all are refused first
    config = vit_config(config, layout.name)
    if layout is BIG_VISION and config.position == "learned" and config.class_token and config.position_prefix:
        fault = "npz-big-vision stores no position for the class token, so not field position_prefix=True"
        raise ExportRefused(f"{fault}; use npz")
    # What the code of that time computes with.
    known = ("sincos2d", "learned") if layout is BIG_VISION else ("learned",)
    rules = {
        "pool": (config.pool == "mean" and config.class_token, "it averages without a class token"),
        "position": (config.position not in known, f"it adds {known[0]} positions"),
        "backbone": (config.backbone is not None and layout is BIG_VISION, "it has no hybrids; use npz"),
    }
    for field, (wrong, why) in rules.items():
        if wrong:
            value = "a ResNet" if field == "backbone" else repr(getattr(config, field))
            fault = f"{layout.name}: Google's code would read field {field}={value} as another network ({why})"
            raise ExportRefused(f"{fault}; vitrail convert --unofficial writes it anyway")


def build_table(config: ModelConfig, layout: NpzLayout = ORIGINAL) -> list[KeyEntry]:
    c = keys.require_plain(layout.name, config, free=("backbone", "class_token", "pool", "position"))
    if c.position not in ("learned", "none", "sincos2d"):
        kinds = "'learned', 'sincos2d' and 'none'"
        raise ExportRefused(f"{layout.name} has no place for field position={c.position!r}; it holds {kinds}")
    rows = [copy("class_token", "cls")] if c.class_token else []
    if c.position == "learned":
        big = layout is BIG_VISION
        rows += [copy("position.tables.0.table", layout.position) if big else keys.position_entry(c, layout.position)]
    rows += _trunk_table(c.backbone, layout) if c.backbone is not None else []
    rows += [*conv("embedding.projection", "embedding"), copy("embedding.projection.bias", "embedding/bias")]
    for i in range(c.depth):
        rows += _block_table(f"blocks.{i}.", BLOCK.format(i), layout, c.heads)
    rows += norm("norm", "Transformer/encoder_norm")
    rows += dense("head.hidden", "pre_logits") if c.head == "tanh" else []
    return rows + (dense("head.classifier", "head") if c.classes else [])


def _block_table(ours: str, theirs: str, layout: NpzLayout, heads: int) -> list[KeyEntry]:
    """q, k and v are one matrix [3D, D] here and three of [D, heads, D_h] there, with biases [3D] and [heads, D_h]; the
    output projection is [D, D] here and [heads, D_h, D] there."""
    attention, out = f"{theirs}{layout.attention}/", f"{theirs}{layout.attention}/out/kernel"
    split = (heads, -1)

    def qkv(part: str, kind: str, out: Change, back: Change) -> KeyEntry:
        name, names = f"{ours}attention.qkv.{part}", tuple(f"{attention}{n}/{kind}" for n in ("query", "key", "value"))
        return KeyEntry(name, names, lambda t: tuple(map(out, t.chunk(3))), lambda ts: torch.cat([*map(back, ts)]))

    return [
        *norm(f"{ours}norm_attention", f"{theirs}LayerNorm_0"),
        qkv("weight", "kernel", lambda t: t.T.unflatten(1, split), lambda t: t.flatten(1).T),
        qkv("bias", "bias", lambda t: t.unflatten(0, split), lambda t: t.flatten()),
        reshape(f"{ours}attention.out.weight", out, lambda t: t.T.unflatten(0, split), lambda t: t.flatten(0, 1).T),
        copy(f"{ours}attention.out.bias", f"{attention}out/bias"),
        *norm(f"{ours}norm_mlp", f"{theirs}{layout.norm_mlp}"),
        *dense(f"{ours}mlp.expand", f"{theirs}{layout.mlp}/Dense_0"),
        *dense(f"{ours}mlp.contract", f"{theirs}{layout.mlp}/Dense_1"),
    ]


def _trunk_table(c: ResNetConfig, layout: NpzLayout) -> list[KeyEntry]:
    if (c.unit, c.root, c.mixing, c.factor) != ("postactivation", "7x7", "convolution", 1):
        raise ExportRefused(f"{layout.name} holds R50 hybrids, not field root={c.root!r} or factor={c.factor}")

    def group_norm(ours: str, theirs: str) -> list[KeyEntry]:
        names = {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}
        return [reshape(a, b, lambda t: t.reshape(*layout.norms, -1), lambda t: t.flatten()) for a, b in names.items()]

    ours, names = "embedding.backbone.", {f"norm{i}": f"gn{i}" for i in (1, 2, 3)}
    names |= {"project": "conv_proj", "norm_project": "gn_proj"}
    rows = conv(f"{ours}root", "conv_root") + group_norm(f"{ours}norm_root", "gn_root")
    return rows + keys.unit_entries(c, ours, "block{2}/unit{3}/", names, conv, group_norm)


def reshape(ours: str, theirs: str, out: Change, back: Change) -> KeyEntry:
    """One tensor for one, in another shape."""
    return KeyEntry(ours, (theirs,), lambda t: (out(t),), lambda ts: back(ts[0]))


def conv(ours: str, theirs: str) -> list[KeyEntry]:
    """OIHW here, HWIO there."""
    name, kernel = f"{ours}.weight", f"{theirs}/kernel"
    return [reshape(name, kernel, lambda t: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))]


def dense(ours: str, theirs: str) -> list[KeyEntry]:
    """[out, in] here, [in, out] there."""
    kernel = reshape(f"{ours}.weight", f"{theirs}/kernel", lambda t: t.T, lambda t: t.T)
    return [kernel, copy(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[KeyEntry]:
    return [copy(f"{ours}.weight", f"{theirs}/scale"), copy(f"{ours}.bias", f"{theirs}/bias")]


BIT = "npz-bit"
ROOT = "resnet/root_block/standardized_conv2d"


def recognises_bit(names: set[str], settings: Settings) -> bool:
    return any("standardized_conv2d" in name for name in names)


def modernise_bit(tensors: Tensors, settings: Settings) -> Tensors:
    """Some files number the convolutions (`standardized_conv2d_7`) or store norm vectors as [1, 1, 1, C]."""
    out = {re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+/", r"\1/", name): t for name, t in tensors.items()}
    return {name: t.flatten() if name.endswith(("/gamma", "/beta")) else t for name, t in out.items()}


def infer_bit(shapes: TensorShapes) -> ModelConfig:
    blocks = shapes.count_units("resnet/block{}/unit{:02d}/a/standardized_conv2d/kernel", 1)
    channels, width = shapes.get(f"{ROOT}/kernel", 4)[2:]
    classes = shapes.get("resnet/head/conv2d/kernel", 4)[3] if "resnet/head/conv2d/kernel" in shapes else 0
    image = shapes.image or (224, 224)
    return ResNetConfig(blocks=blocks, factor=width / 64, channels=channels, classes=classes, image=image)


def bit_table(config: ModelConfig) -> list[KeyEntry]:
    c = keys.require_bit(BIT, config)
    names = {f"conv{i}": f"{letter}/standardized_conv2d" for i, letter in enumerate("abc", start=1)}
    names |= {f"norm{i}": f"{letter}/group_norm" for i, letter in enumerate("abc", start=1)}
    names |= {"project": "a/proj/standardized_conv2d"}
    rows = conv("trunk.root", ROOT)
    rows += keys.unit_entries(c, "trunk.", "resnet/block{2}/unit{3:02d}/", names, conv, bit_norm)
    rows += bit_norm("norm", "resnet/group_norm")
    if c.classes:  # a matrix [K, F] here, a 1x1 convolution [1, 1, F, K] there
        head = "resnet/head/conv2d"
        rows += [reshape("head.weight", f"{head}/kernel", lambda t: t.T[None, None], lambda t: t.flatten(0, 2).T)]
        rows += [copy("head.bias", f"{head}/bias")]
    return rows


def bit_norm(ours: str, theirs: str) -> list[KeyEntry]:
    return [copy(f"{ours}.weight", f"{theirs}/gamma"), copy(f"{ours}.bias", f"{theirs}/beta")]


def _declare(order: int, layout: NpzLayout) -> Format:
    return Format(
        name=layout.name,
        library=layout.name,
        order=order,
        recognises=lambda names, settings: recognises(names, layout),
        table=partial(build_table, layout=layout),
        infer=infer,
        modern=modernise,
        preprocessing=big_vision_crop if layout is BIG_VISION else google_squash,
        claims=lambda config: bool(config.tokens),
        refuse_unreadable=partial(refuse_unreadable, layout=layout),
        describe_inferred=describe_inferred,
    )


FORMATS = (
    *(_declare(80 + at, layout) for at, layout in enumerate(LAYOUTS)),
    Format(
        name=BIT,
        library=ORIGINAL.name,
        order=89,
        recognises=recognises_bit,
        table=bit_table,
        infer=infer_bit,
        modern=modernise_bit,
        preprocessing=google_squash,
    ),
)

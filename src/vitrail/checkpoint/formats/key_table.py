"""Key tables that work in both directions: an entry maps one of our tensors to another library's tensors with its
values.

Import goes from right to left, export from left to right, so that a round trip is the identity by construction. An
entry rearranges values and never computes with them.

`TensorShapes` infers what a config needs and a state dict does not state: heads, the grid. `require_plain` is for
formats that hold one kind of ViT: class token, learned positions at the stem, full attention, no backbone.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoint.files.checks import check_budget, shorten
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, format_size, pair
from vitrail.models.build import tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import SHAPES, SMALL_SHAPES

Tensors: TypeAlias = dict[str, Tensor]
Layer: TypeAlias = Callable[[str, str], "list[KeyEntry]"]  # the tensors of a layer by its name here and there

LAYERS = ("norm_attention", "attention.out", "norm_mlp", "mlp.expand", "mlp.contract")  # of a Transformer's block
UNIT = ("conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "project", "norm_project")  # of a ResNet


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """`ours` is `names` of theirs; `to_theirs` splits ours into theirs, `to_ours` joins theirs into ours."""

    ours: str
    names: tuple[str, ...]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]
    to_ours: Callable[[tuple[Tensor, ...]], Tensor]


def copy(ours: str, theirs: str) -> KeyEntry:
    return KeyEntry(ours, (theirs,), lambda t: (t,), lambda ts: ts[0])


def weight_and_bias(ours: str, theirs: str) -> list[KeyEntry]:
    """Weight and bias under one stem each."""
    return [copy(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def block_entries(depth: int, theirs: str, names: dict[str, str]) -> list[KeyEntry]:
    """Weights and biases of all encoder layers; `theirs` holds the number of the layer as {}."""
    layers = [(f"blocks.{i}.", theirs.format(i)) for i in range(depth)]
    pairs = [(ours + our, prefix + their) for ours, prefix in layers for our, their in names.items()]
    return [entry for our, their in pairs for entry in weight_and_bias(our, their)]


def name_layers(*theirs: str) -> dict[str, str]:
    """Another library's names for the layers of a block: first norm, out, second norm, expand, contract."""
    return dict(zip(LAYERS, theirs, strict=True))


def kernel(ours: str, theirs: str) -> list[KeyEntry]:
    """The weight of a layer without a bias."""
    return weight_and_bias(ours, theirs)[:1]


def unit_entries(
    c: ResNetConfig, ours: str, theirs: str, names: dict[str, str], conv: Layer = kernel, norm: Layer = weight_and_bias
) -> list[KeyEntry]:
    """The layers of all units of a ResNet. `theirs` contains the numbers of stage and unit as {0} and {1}, or counted
    from one as {2} and {3}; `names` are the layers with other names there."""
    rows: list[KeyEntry] = []
    for stage, unit in ((stage, unit) for stage, count in enumerate(c.blocks) for unit in range(count)):
        here, there = f"{ours}stages.{stage}.{unit}.", theirs.format(stage, unit, stage + 1, unit + 1)
        for layer in UNIT if c.unit == "postactivation" else UNIT[:-1]:
            if unit == 0 or "project" not in layer:
                rows += (norm if "norm" in layer else conv)(here + layer, there + names.get(layer, layer))
    return rows


def position_entry(config: ViTConfig, theirs: str) -> KeyEntry:
    """Learned positions for a format that always has a row for the class token. If our network has none, the row is
    zero and adds nothing."""
    ours = "position.tables.0.table"
    if config.position_prefix or not config.class_token:
        return copy(ours, theirs)
    return KeyEntry(ours, (theirs,), lambda t: (F.pad(t, (0, 0, 1, 0)),), lambda ts: ts[0][:, 1:])


def export_tensors(table: list[KeyEntry], tensors: Tensors) -> Tensors:
    """Converts our tensors to theirs. A network with tensors that the table does not know is refused, since it would be
    read as a different one."""
    out: Tensors = {}
    if left := set(tensors) - {entry.ours for entry in table}:
        raise ExportRefused(f"this format has no place for tensor {min(left)!r}; write a vitrail file instead")
    for entry in table:
        parts = entry.to_theirs(tensors[entry.ours])
        out |= {name: part.contiguous() for name, part in zip(entry.names, parts, strict=True)}
    return out


def import_tensors(path: Path, config: ModelConfig, table: Iterable[KeyEntry], theirs: Tensors) -> Tensors:
    """Converts their tensors to ours. The error names the first tensor that is missing, left over, or of the wrong
    shape or type."""
    shapes = expected_shapes(path, config, theirs)
    left = dict(theirs)
    out: Tensors = {}
    for entry in table:
        with torch.device("meta"):
            wanted = entry.to_theirs(torch.empty(shapes[entry.ours]))
        pairs = zip(entry.names, wanted, strict=True)
        parts = tuple(_check_tensor(path, name, left.pop(name, None), tuple(want.shape)) for name, want in pairs)
        out[entry.ours] = entry.to_ours(parts).contiguous()
    if left:
        name, more = next(iter(left)), f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise MismatchedWeights(f"{path}: tensor {name!r}{more} has no place in this network; give another file")
    return {name: out[name] for name in shapes}


def expected_shapes(path: Path, config: ModelConfig, theirs: Tensors) -> dict[str, tuple[int, ...]]:
    """The shapes that the network needs. A file that claims more layers than it has tensors is refused."""
    if config.units > len(theirs):
        raise MismatchedWeights(f"{path}: {len(theirs)} tensors cannot hold the {config.units} layers that it claims")
    if config.fixed_bytes:
        held = sum(tensor.nbytes for tensor in theirs.values())
        check_budget(path, held, config.fixed_bytes, what="its fixed positions")
    try:
        return tensor_shapes(config)
    except RuntimeError as error:  # torch counts bytes in 64 bits
        raise MismatchedWeights(f"{path}: claims tensors beyond any memory ({shorten(error)})") from None


def _check_tensor(path: Path, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if tensor is None:
        raise MismatchedWeights(f"{path}: tensor {name!r} of shape {list(shape)} is missing; the file is not whole")
    if tuple(tensor.shape) != shape:
        raise MismatchedWeights(f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point():
        raise MismatchedWeights(f"{path}: tensor {name!r} has type {tensor.dtype}, expected floating point")
    return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShapes:
    """Queries a file's tensors, with clear errors for missing ones.

    `settings` is the config.json next to them; `facts` are what the caller knows and the file may not state.
    """

    path: Path
    tensors: Tensors
    settings: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def image(self) -> Pair | None:
        return pair(self.facts["image"]) if "image" in self.facts else None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self.tensors:
            raise MismatchedWeights(f"{self.path}: tensor {name!r} is missing; the file is not whole")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != rank or min(shape, default=0) < 1:
            raise MismatchedWeights(f"{self.path}: tensor {name!r} has shape {list(shape)}, expected {rank} dimensions")
        return shape

    def count(self, template: str) -> int:
        """How many of `template.format(i)` exist consecutively, from the first on."""
        found = next(i for i in itertools.count() if template.format(i) not in self)
        if not found:
            raise MismatchedWeights(f"{self.path}: tensor {template.format(0)!r} is missing; the file is not whole")
        return found

    def count_units(self, template: str, start: int = 0) -> tuple[int, ...]:
        """The units of each stage of a ResNet, by `template.format(stage, unit)`."""
        units: list[int] = []
        while template.format(len(units) + start, start) in self:
            stage = len(units) + start
            units.append(next(i for i in itertools.count() if template.format(stage, i + start) not in self))
        return tuple(units)


PLAIN = ("attention", "position", "entry", "backbone", "registers", "class_token", "pool", "norm_after_pool")
PAPER = ViTConfig(width=64, depth=1, mlp_width=64, heads=1)  # plain: what formats of one kind of ViT have room for
HEADS = {(width, mlp): heads for width, _, mlp, heads in (SHAPES | SMALL_SHAPES).values()}


# Later families whose heads are not 64 wide: so400m, SigLIP's giant-opt, EVA-02-E, PE's G.
LATER_HEADS = {(1152, 4304): 16, (1536, 6144): 16, (1792, 15360): 16, (1536, 8960): 16}


def infer_heads(shapes: TensorShapes, width: int, mlp_width: int) -> int:
    """The number of heads as given, by the published shape, or else 64 dimensions per head; a fused matrix does not
    show it."""
    if "heads" in shapes.facts:
        return int(shapes.facts["heads"])
    if found := (HEADS | LATER_HEADS).get((width, mlp_width)):
        return found
    if width % 64:
        raise MismatchedWeights(f"{shapes.path}: width {width} is not a published shape; pass heads=")
    return width // 64


def infer_sizes(
    shapes: TensorShapes, embedding: str, block: str, names: dict[str, str], head: str, heads: int | None = None
) -> dict[str, Any]:
    """The fields that the tensors of a ViT in torch's layout show, by the names of its patch embedding, its blocks
    (with the number of the layer as {}), their layers, and its classifier."""
    width, channels, *patch = shapes.get(f"{embedding}.weight", 4)
    mlp_width = shapes.get(f"{block.format(0)}{names['mlp.expand']}.weight", 2)[0]
    classes = shapes.get(f"{head}.weight", 2)[0] if f"{head}.weight" in shapes else 0
    sizes = {"width": width, "channels": channels, "patch": (patch[0], patch[1]), "mlp_width": mlp_width}
    sizes |= {"depth": shapes.count(f"{block}{names['norm_attention']}.weight")}
    sizes |= {"heads": infer_heads(shapes, width, mlp_width) if heads is None else heads}
    return sizes | {"classes": classes, "head": "linear" if classes else "none", "gelu": "erf"}


def infer_image(shapes: TensorShapes, rows: int, patch: Pair, prefix: int) -> tuple[Pair, int]:
    """The image size of a position table, and how many of its rows belong to the `prefix` (class token and the like):
    all or none."""
    for count in (int(prefix), 0) if prefix else (0,):
        side = max(1, math.isqrt(max(rows - count, 0)))
        image = shapes.image or (side * patch[0], side * patch[1])
        if (image[0] // patch[0]) * (image[1] // patch[1]) == rows - count:
            return image, count
    fault = "make no square grid; pass image=(height, width) of the training images"
    if shapes.image is not None:
        fault = f"do not fit {format_size(shapes.image)} pixels at patch {format_size(patch)}"
    raise MismatchedWeights(f"{shapes.path}: {rows} positions {fault}")


def require_plain(format_name: str, config: ModelConfig, *, free: tuple[str, ...] = ()) -> ViTConfig:
    """The config as a plain ViT; ExportRefused with the first field that the format has no place for."""
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"{format_name} holds ViTs; this network is a {config.title}")
    plain = (*PLAIN, "qkv_bias", *(name for name in PAPER.parts if name != "position_resample"))
    rules = {name: [getattr(PAPER, name)] for name in plain if name not in free}
    rules |= {"head": ["none", "linear", "tanh"]} | ({"pool": ["token", "mean"]} if "pool" in free else {})
    for rule, allowed in rules.items():
        if (value := getattr(config, rule)) not in allowed:
            name = "placement" if rule == "entry" else rule
            raise ExportRefused(f"{format_name} has no place for field {name}={value!r}; it holds {name} in {allowed}")
    return config


def require_bit(format_name: str, config: ModelConfig) -> ResNetConfig:
    """The config as a BiT ResNet, or ExportRefused."""
    if not isinstance(config, ResNetConfig):
        raise ExportRefused(f"{format_name} holds BiT ResNets; this network is a {config.title}")
    fields = {name: getattr(config, name) for name in ("unit", "root", "mixing")}
    if list(fields.values()) != ["preactivation", "7x7", "convolution"]:
        listed = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        raise ExportRefused(f"{format_name} has no place for field {listed}")
    return config

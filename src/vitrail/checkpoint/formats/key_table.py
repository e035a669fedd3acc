"""Key tables that read both ways: one entry ties one of our tensors to the tensors of another library with its numbers.

Import walks the table from right to left, export from left to right, so that a round trip is the identity by
construction. An entry moves numbers and never computes with them.

`TensorShapes` infers what a state dict does not state and a config needs: heads, the grid. `require_plain` is for
formats that hold one kind of ViT: class token, learned positions at the stem, full attention, no backbone.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vitrail.checkpoint.files.checks import check_budget, shorten
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, format_size, pair
from vitrail.models.build import tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import SHAPES, SMALL_SHAPES

Tensors: TypeAlias = dict[str, Tensor]


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


def split_qkv(ours: str, names: tuple[str, str, str]) -> KeyEntry:
    """q, k and v stacked in one matrix here, three of their own there."""
    return KeyEntry(ours, names, lambda t: t.chunk(3), torch.cat)


def block_entries(depth: int, theirs: str, names: dict[str, str]) -> list[KeyEntry]:
    """Weights and biases of all encoder layers; `theirs` holds the number of the layer as {}."""
    return [
        entry
        for layer in range(depth)
        for our, their in names.items()
        for entry in weight_and_bias(f"blocks.{layer}.{our}", f"{theirs.format(layer)}{their}")
    ]


def as_pointwise(ours: str, theirs: str) -> KeyEntry:
    """A matrix here, a 1x1 convolution there."""
    return KeyEntry(ours, (theirs,), lambda t: (t[:, :, None, None],), lambda ts: ts[0].flatten(1))


def add_class_row(ours: str, theirs: str) -> KeyEntry:
    """Positions of patches alone here; there the class token has a row too, which stays zero and adds nothing."""

    def out(t: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([t.new_zeros(1, 1, t.shape[2]), t], dim=1),)

    return KeyEntry(ours, (theirs,), out, lambda ts: ts[0][:, 1:])


def export_tensors(table: Iterable[KeyEntry], tensors: Tensors) -> Tensors:
    """Ours to theirs. A network with tensors that the table does not know is refused: it would be read as another."""
    out: Tensors = {}
    entries = list(table)
    if left := set(tensors) - {entry.ours for entry in entries}:
        raise ExportRefused(f"this format has no place for tensor {min(left)!r}; write a vitrail file instead")
    for entry in entries:
        parts = entry.to_theirs(tensors[entry.ours])
        out |= {name: part.contiguous() for name, part in zip(entry.names, parts, strict=True)}
    return out


def import_tensors(path: Path, config: ModelConfig, table: Iterable[KeyEntry], theirs: Tensors) -> Tensors:
    """Theirs to ours; the first tensor that is missing, left over or of the wrong shape or type is named."""
    shapes = expected_shapes(path, config, theirs)
    left = dict(theirs)
    out: Tensors = {}
    for entry in table:
        with torch.device("meta"):
            wanted = entry.to_theirs(torch.empty(shapes[entry.ours]))
        parts = tuple(
            _check_tensor(path, name, left.pop(name, None), tuple(want.shape))
            for name, want in zip(entry.names, wanted, strict=True)
        )
        out[entry.ours] = entry.to_ours(parts).contiguous()
    if left:
        name = next(iter(left))
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise MismatchedWeights(
            f"{path}: tensor {name!r}{more} has no place in this network; it is another architecture, or another file"
        )
    return {name: out[name] for name in shapes}


def identity_table(path: Path, config: ModelConfig, theirs: Tensors) -> list[KeyEntry]:
    """The table of our own files."""
    return [copy(name, name) for name in expected_shapes(path, config, theirs)]


def expected_shapes(path: Path, config: ModelConfig, theirs: Tensors) -> dict[str, tuple[int, ...]]:
    """What the network holds; a file that speaks of more layers than it has tensors is not taken at its word."""
    layers = config.units
    if layers > len(theirs):
        raise MismatchedWeights(
            f"{path}: {len(theirs)} tensors cannot hold the {layers} layers that the file speaks of"
        )
    if config.fixed_bytes:
        held = sum(tensor.nbytes for tensor in theirs.values())
        check_budget(path, held, config.fixed_bytes, what="its fixed positions")
    try:
        return tensor_shapes(config)
    except RuntimeError as error:  # torch counts bytes in 64 bits
        raise MismatchedWeights(f"{path}: speaks of tensors beyond any memory ({shorten(error)})") from None


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
    """Questions to a file's tensors that answer with a clear error when a tensor is not there.

    `settings` is the config.json next to them; `facts` is what the caller knows and the file may not say.
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

    def count(self, template: str, start: int = 0) -> int:
        """How many of `template.format(i)` there are, without a hole."""
        i = start
        while template.format(i) in self.tensors:
            i += 1
        if i == start:
            raise MismatchedWeights(f"{self.path}: tensor {template.format(i)!r} is missing; the file is not whole")
        return i - start


HEADS = {(width, mlp): heads for width, _, mlp, heads in (SHAPES | SMALL_SHAPES).values()}


def infer_heads(shapes: TensorShapes, width: int, mlp_width: int) -> int:
    """Heads as given, by the published shape, else 64 dimensions a head; a fused matrix does not tell."""
    if "heads" in shapes.facts:
        return int(shapes.facts["heads"])
    if (width, mlp_width) in HEADS:
        return HEADS[width, mlp_width]
    if width % 64:
        raise MismatchedWeights(
            f"{shapes.path}: width {width} is not a published shape and the file gives no number of heads; pass heads="
        )
    return width // 64


def infer_image(shapes: TensorShapes, rows: int, patch: Pair, class_token: bool) -> tuple[Pair, int]:
    """The image that a position table is for, and how many of its rows belong to the class token."""
    path, image = shapes.path, shapes.image
    for prefix in (1, 0) if class_token else (0,):
        if image is not None:
            if (image[0] // patch[0]) * (image[1] // patch[1]) == rows - prefix:
                return image, prefix
            continue
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return (side * patch[0], side * patch[1]), prefix
    if image is None:
        raise MismatchedWeights(
            f"{path}: {rows} positions make no square grid; pass image=(height, width) of the training images"
        )
    raise MismatchedWeights(
        f"{path}: {rows} positions do not fit {format_size(image)} pixels at patch {format_size(patch)}"
    )


def require_plain(
    format_name: str, config: ModelConfig, heads: tuple[str, ...], *, free: tuple[str, ...] = ()
) -> ViTConfig:
    """The config as a plain ViT, or a refusal that names the first field the format has no place for."""
    if not isinstance(config, ViTConfig):
        raise ExportRefused(f"{format_name} holds ViTs; this network is a {config.title}")
    rules: dict[str, tuple[object, ...]] = {
        "attention": ("full",),
        "position": ("learned",),
        "placed": ("stem",),
        "backbone": (None,),
        "registers": (0,),
        "class_token": (True,),
        "pool": ("token",),
        "norm_after_pool": (False,),
        "head": heads,
        "qkv_bias": (True,),
    }
    for rule, allowed in rules.items():
        value = getattr(config, rule)
        if value not in allowed and rule not in free:
            name = "placement" if rule == "placed" else rule
            raise ExportRefused(
                f"{format_name} has no place for field {name}={value!r}; it holds {name} in {list(allowed)}"
            )
    return config


def position_entry(config: ViTConfig, theirs: str) -> KeyEntry:
    """Learned positions where the format always has a row for the class token."""
    own = config.position_prefix or not config.class_token
    return (copy if own else add_class_row)("position.tables.0.table", theirs)

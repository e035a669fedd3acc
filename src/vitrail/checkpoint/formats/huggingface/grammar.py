"""Describes how a Hugging Face `model_type` is read and written, as a frozen row, and the functions that work on any
row.

A row maps our tensors to theirs by name, and our fields to the keys of config.json, and says which class of
transformers reads which head. Files are written with the names of transformers 4, which transformers 5 also reads;
files with the names of 5 go through `renames` first.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoint.formats.format import Format, Settings, half_squash
from vitrail.checkpoint.formats.huggingface.config_json import NAME, ConfigReader, Keys, write_fields
from vitrail.checkpoint.formats.key_table import PAPER, PLAIN, KeyEntry, Tensors, TensorShapes, copy
from vitrail.core.errors import ExportRefused
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import tensor_shapes
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import Numerics, ViTConfig, vit_config


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor of ours that has another shape in their files."""

    name: str
    to_theirs: Callable[[Tensor], Tensor]
    to_ours: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of ours that is several tensors in their files, or one next to others that hold no weights."""

    names: tuple[str, ...]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]
    to_ours: Callable[[tuple[Tensor, ...]], Tensor]


# Where our tensor or layer is stored: under one name, in equal parts under several, or in another shape. {} is the
# number of a block on both sides.
Place: TypeAlias = str | tuple[str, ...] | Reshaped | Joined
Names: TypeAlias = Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class Head:
    """The class of transformers with such a head, and the pools that it supports. Without a head, pooling is up to the
    caller, and reading assumes the first pool."""

    architecture: str
    pools: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model_type.

    `names` are the tensors of the base model, whose names begin with `prefix`, and `outer` those after it. `keys` are
    the fields that config.json states, `constants` those that all networks of the family share, and `free` those that
    `read` and `write` handle. All other fields must have the paper's values, or the family cannot hold the network.
    """

    model_type: str
    config: type[ViTConfig] = ViTConfig  # of its networks
    whole: str = ""  # the model_type of image and text towers together, whose config.json has a vision_config
    prefix: str = ""
    bare: bool = False  # whether the base model alone is stored without the prefix
    prefixes: tuple[str, ...] = ()  # alternatives that files may have
    layer: str = "encoder.layer.{}.layernorm_before"  # a layer that each block has
    names: Callable[[ViTConfig], Names]
    outer: Names
    heads: Mapping[str, Head]
    keys: Keys
    constants: Mapping[str, Any]
    free: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()  # from names of other versions, as regular expressions
    drop: tuple[str, ...] = ()  # tensors outside the image network, as regular expressions
    read: Callable[[ConfigReader, dict[str, Any]], dict[str, Any]]
    write: Callable[[ViTConfig], dict[str, Any]] = lambda c: {}
    check: Callable[[ViTConfig], Iterable[str]] = lambda c: ()  # fields whose values are incompatible in the family
    unpack: Callable[[Tensors, dict[str, Any]], Tensors] = lambda tensors, values: tensors  # theirs, before reading
    pack: Callable[[Tensors, ViTConfig], Tensors] = lambda tensors, c: tensors  # theirs, before writing
    square: bool = True  # whether images, and patches, must be
    written: bool = True  # whether networks are exported as this family
    pooled: Callable[[ViTConfig], bool] = lambda c: False  # whether its `pooler_output` is our network's output
    preprocessing: Callable[[ModelConfig], Preprocessing] = half_squash


RESAMPLE: Final = "position_resample"  # our own key in config.json, for networks that differ from the family
# Fields that only matter in training or at other sizes; the sidecar keeps them.
LOOSE: Final = ("dropout", "attention_dropout", "stochastic_depth", RESAMPLE, "head", "classes", "pool")


def build_format(family: Family, order: int) -> Format:
    return Format(
        name=f"{NAME}-{family.model_type}",
        library=NAME,
        order=order,
        recognises=lambda names, settings: is_of(family, settings),
        table=partial(build_table, family),
        infer=partial(infer, family),
        modern=partial(modernise, family),
        preprocessing=family.preprocessing,
        claims=lambda config: family.written and not find_misfits(family, config),
        settings=partial(build_settings, family),
        finish=lambda tensors, config: family.pack(tensors, vit_config(config, NAME)),
    )


def is_of(family: Family, settings: Settings) -> bool:
    return settings is not None and settings.get("model_type") in {family.model_type, family.whole} - {""}


def tower_values(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the image network: all of it, or its vision_config."""
    inner: Any = settings.get("vision_config")
    values: dict[str, Any] = dict(inner) if isinstance(inner, dict) else {} if "text_config" in settings else settings
    older: Any = settings.get("vision_config_dict")
    return {**values, **older} if isinstance(older, dict) else values


def modernise(family: Family, tensors: Tensors, settings: Settings) -> Tensors:
    """Renames their tensors to the names that are written, and drops those outside the image network."""
    if settings is None or not is_of(family, settings):
        return tensors
    drop, renames = [re.compile(rule) for rule in family.drop], [(re.compile(old), new) for old, new in family.renames]
    outer = {name.split(".")[0] for place in family.outer.values() for name in place_names(place)}
    prefix = find_prefix(family, headless=outer.isdisjoint(name.split(".")[0] for name in tensors))
    out: Tensors = {}
    for name, tensor in tensors.items():
        if any(rule.search(name) for rule in drop):
            continue
        if name.split(".")[0] not in outer:
            found = next((p for p in (family.prefix, *family.prefixes) if p and name.startswith(p)), "")
            name = name.removeprefix(found)
            for old, new in renames:
                name = old.sub(new, name)
            name = prefix + name
        out[name] = tensor
    return family.unpack(out, tower_values(settings))


def find_prefix(family: Family, *, headless: bool) -> str:
    """The prefix of the names of the base model's tensors."""
    return "" if family.bare and headless else family.prefix


def place_names(place: Place) -> tuple[str, ...]:
    if isinstance(place, Joined):
        return place.names
    return (place,) if isinstance(place, str) else place if isinstance(place, tuple) else (place.name,)


def infer(family: Family, shapes: TensorShapes) -> ViTConfig:
    """The config that a folder's `config.json` states; tensors are held against it afterwards."""
    assert shapes.settings is not None
    outer = [name for place in family.outer.values() for name in place_names(place)]
    prefix = find_prefix(family, headless=not any(f"{name}.weight" in shapes for name in outer))
    get = ConfigReader(shapes, tower_values(shapes.settings), prefix)
    found = {**family.constants, **get.fields(family.keys)}
    found |= family.read(get, found)
    if (own := get.values.get(RESAMPLE)) in get_args(Numerics):
        found[RESAMPLE] = own
    if found["depth"] != (layers := shapes.count(f"{prefix}{family.layer}.weight")):
        raise get.refuse(f"config.json says num_hidden_layers={found['depth']}, the tensors make {layers}")
    return family.config(**found)


def read_head(family_heads: Mapping[str, Head], get: ConfigReader, layer: str = "classifier") -> dict[str, Any]:
    """The head that a file has: a linear layer of this name, or none."""
    classes = get.shapes.get(f"{layer}.weight", 2)[0] if f"{layer}.weight" in get.shapes else 0
    head = "linear" if classes else "none"
    return {"classes": classes, "head": head, "pool": family_heads[head].pools[0]}


def build_table(family: Family, config: ModelConfig) -> list[KeyEntry]:
    c = vit_config(config, NAME)
    inner, outer = family.names(c), family.outer
    base = find_prefix(family, headless=not c.classes)
    rows: list[KeyEntry] = []
    for ours in tensor_shapes(c):
        for names, prefix in ((inner, base), (outer, "")):
            if (found := _find_place(names, ours)) is not None:
                rows.append(_entry(c, ours, prefix, *found))
                break
        else:
            raise ExportRefused(f"{NAME} has no place for tensor {ours!r} under model_type {family.model_type}")
    return rows


def _find_place(names: Names, ours: str) -> tuple[Place, str, str] | None:
    """Where a tensor is stored, the suffix of its name after that of its layer, and the number of its block."""
    number = found[1] if (found := re.match(r"blocks\.(\d+)\.", ours)) else ""
    general = f"blocks.{{}}.{ours.removeprefix(f'blocks.{number}.')}" if number else ours
    matches = [layer for layer in names if general == layer or general.startswith(f"{layer}.")]
    layer = max(matches, key=len, default="")
    return (names[layer], general.removeprefix(layer), number) if layer else None


def _entry(c: ViTConfig, ours: str, prefix: str, place: Place, suffix: str, number: str) -> KeyEntry:
    if isinstance(place, str):
        return copy(ours, f"{prefix}{place}{suffix}".format(number))
    if isinstance(place, tuple):
        without_key = ours.endswith("attention.qkv.bias") and not c.key_bias  # then it is that of q and v
        parts = [f"{prefix}{part}{suffix}".format(number) for part in (place[::2] if without_key else place)]
        return KeyEntry(ours, tuple(parts), lambda t: t.chunk(len(parts)), torch.cat)
    if isinstance(place, Joined):
        return KeyEntry(ours, tuple(prefix + name for name in place.names), place.to_theirs, place.to_ours)
    return KeyEntry(ours, (f"{prefix}{place.name}",), lambda t: (place.to_theirs(t),), lambda ts: place.to_ours(ts[0]))


def build_settings(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that describe the network."""
    c = vit_config(config, NAME)
    kind = "projected" if c.projection else c.head
    values = {**write_fields(c, family.keys), **family.write(c)}
    if c.position_resample != family.constants.get(RESAMPLE, _plain(RESAMPLE)):
        values[RESAMPLE] = c.position_resample
    if c.classes and family.whole:  # classifiers belong to the class for both towers
        inner = {"model_type": family.model_type, **values}
        return {"model_type": family.whole, "architectures": [family.heads[kind].architecture], "vision_config": inner}
    return {"model_type": family.model_type, "architectures": [family.heads[kind].architecture], **values}


def normalise(c: ViTConfig) -> ViTConfig:
    """The same network, with the paper's value in each field that it does not use."""
    unused: dict[str, Any] = {}
    if not c.qkv_bias:
        unused["key_bias"] = True
    if not c.class_token:
        unused |= {"class_tokens": 1, "position_prefix": True}
    if c.position == "none":
        unused["position_prefix"] = True
    if not c.registers:
        unused["register_positions"] = False
    if c.pool != "map":
        unused |= {"map_style": "siglip", "map_heads": 0, "map_mlp_width": 0}
    if c.pool != "map" or not c.prefix:
        unused["map_prefix"] = True
    if c.map_heads == c.heads:
        unused["map_heads"] = 0
    if c.map_mlp_width == c.mlp_width:
        unused["map_mlp_width"] = 0
    if c.head_size * c.heads == c.width:
        unused["head_width"] = 0
    return replace(c, **unused)


def find_misfits(family: Family, config: ModelConfig) -> list[str]:
    """Fields of a network that the family cannot hold."""
    if not isinstance(config, family.config) or (config.has_queries and family.config is ViTConfig):
        return ["family"]
    c = normalise(config)
    held = {*family.keys, *family.free, *LOOSE, "placement"}
    wrong = [
        field.name
        for field in fields(c)
        if field.name not in held and getattr(c, field.name) != family.constants.get(field.name, _plain(field.name))
    ]
    wrong += ["placement"] if c.entry != "stem" and c.position != "none" else []
    kind = "projected" if c.projection and c.head == "none" else c.head
    if kind not in family.heads or (c.head == "tanh" and c.classes):
        wrong.append("projection" if kind == "projected" else "head")
    elif c.pool not in family.heads[kind].pools:
        wrong.append("pool")
    if family.square:
        wrong += [name for name in ("image", "patch") if len(set(getattr(c, name))) > 1]
    wrong += family.check(c)
    order = {name: place for place, name in enumerate(PLAIN)}
    return sorted(dict.fromkeys(wrong), key=lambda name: order.get(name, len(order)))


def _plain(field: str) -> Any:
    return getattr(PAPER, field)


def refuse_nearest(families: Iterable[Family], config: ViTConfig) -> ExportRefused:
    """The error for a network that no family holds, with the first field in which it differs from the nearest
    family."""
    found = [(find_misfits(family, config), family.model_type) for family in families if family.written]
    outside = {"image", "patch", "mlp_width", "head", "pool"}  # not of the blocks, which decide the family
    wrong, model_type = min(found, key=lambda row: (row[0] == ["family"], len({*row[0]} - outside), len(row[0])))
    value = getattr(config, wrong[0])
    if wrong[0] == "head" and value == "tanh":
        return ExportRefused(f"{NAME} has no classifier after a tanh layer: field head='tanh' goes with classes=0")
    more = f", nor for {', '.join(wrong[1:])}" if len(wrong) > 1 else ""
    fault = f"has no place for field {wrong[0]}={value!r} under model_type {model_type}{more}"
    return ExportRefused(f"{NAME} {fault}; write a vitrail file instead")


def in_blocks(layer: str, names: Names) -> dict[str, Place]:
    """Extends the names of one block's layers to all blocks; `layer` is the prefix of theirs, with {} for the
    number."""
    return {
        f"blocks.{{}}.{ours}": tuple(layer + part for part in place) if isinstance(place, tuple) else f"{layer}{place}"
        for ours, place in names.items()
        if not isinstance(place, Reshaped | Joined)
    }


def add_axes(name: str, count: int) -> Reshaped:
    """A tensor without our leading axes of length one."""
    return Reshaped(name, lambda t: t.flatten(0, count), lambda t: t[(None,) * count])


def pad_positions(name: str, rows: int) -> Reshaped:
    """A position table with additional rows in front, which are written as zeros and add nothing."""
    return Reshaped(name, lambda t: F.pad(t, (0, 0, rows, 0)), lambda t: t[:, rows:])

"""Hugging Face folders: `config.json` with `model.safetensors` (or `pytorch_model.bin`), ViT and BiT.

Files are written with the tensor names of transformers 4, which 5 reads too; both names are read. `ViTModel` folders,
whose tensors stand without the `vit.` in front, may carry a pooler: a hidden tanh layer without a classifier.
"""

import re
from functools import singledispatch
from typing import Any, cast

from vitrail.checkpoint.formats.key_table import (
    KeyEntry,
    Tensors,
    TensorShapes,
    block_entries,
    copy,
    position_entry,
    require_plain,
    split_qkv,
    weight_and_bias,
)
from vitrail.core.errors import ExportRefused, MismatchedWeights
from vitrail.core.text import Pair, pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

NAME = "huggingface"
MULTI_LABEL = "multi_label_classification"  # what its config.json calls a problem of several labels
GELU = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
BLOCK = {
    "norm_attention": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm_mlp": "layernorm_after",
    "mlp.expand": "intermediate.dense",
    "mlp.contract": "output.dense",
}
FIVE = {
    r"attention\.q_proj\.": "attention.attention.query.",
    r"attention\.k_proj\.": "attention.attention.key.",
    r"attention\.v_proj\.": "attention.attention.value.",
    r"attention\.o_proj\.": "attention.output.dense.",
    r"mlp\.fc1\.": "intermediate.dense.",
    r"mlp\.fc2\.": "output.dense.",
}


def recognises(names: set[str]) -> bool:
    return bool(names & {"vit.embeddings.cls_token", "embeddings.cls_token", "bit.embedder.convolution.weight"})


def modernise(tensors: Tensors) -> Tensors:
    """Names of transformers 5, and of bare `ViTModel` and `BitModel` folders, to those of transformers 4."""
    if "embedder.convolution.weight" in tensors:
        return {f"bit.{name}": tensor for name, tensor in tensors.items()}
    return {_four(name): tensor for name, tensor in tensors.items()}


def _four(name: str) -> str:
    if name.startswith(("embeddings.", "encoder.", "layers.", "layernorm.", "pooler.")):
        name = f"vit.{name}"
    if name.startswith("vit.layers."):
        name = "vit.encoder.layer." + name.removeprefix("vit.layers.")
        for five, four in FIVE.items():
            name = re.sub(five, four, name)
    return name


def infer(shapes: TensorShapes) -> ModelConfig:
    """The config that the folder's `config.json` states; tensors are held against it afterwards."""
    if shapes.settings is None:
        raise MismatchedWeights(f"{shapes.path}: Hugging Face tensors without their config.json; give the folder")
    get = ConfigReader(shapes, shapes.settings)
    return _infer_bit(get) if get.values.get("model_type") == "bit" else _infer_vit(get)


class ConfigReader:
    """A config.json, read with the types it must have."""

    def __init__(self, shapes: TensorShapes, values: dict[str, Any]):
        self.shapes, self.values = shapes, values

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not 0 < value < 2**20:
            raise MismatchedWeights(
                f"{self.shapes.path}: config.json says {name}={value!r}, expected a whole number above 0"
            )
        return value

    def size(self, name: str, default: int) -> Pair:
        value = self.values.get(name, default)
        numbers = [value, value] if type(value) is int else value
        if not isinstance(numbers, list) or [type(n) for n in cast(list[object], numbers)] != [int, int]:
            raise MismatchedWeights(
                f"{self.shapes.path}: config.json says {name}={value!r}, expected one or two whole numbers"
            )
        return pair(cast(list[int], numbers))

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MismatchedWeights(f"{self.shapes.path}: config.json says {name}={value!r}, expected a number")
        return float(value)


def _infer_vit(get: ConfigReader) -> ViTConfig:
    shapes, settings = get.shapes, get.values
    if settings.get("model_type", "vit") not in ("vit", "deit"):
        raise MismatchedWeights(
            f"{shapes.path}: model_type {settings.get('model_type')!r} is not a ViT or BiT of the paper"
        )
    act = settings.get("hidden_act", "gelu")
    if act not in GELU:
        raise MismatchedWeights(f"{shapes.path}: hidden_act {act!r} is not a GELU; known: {', '.join(GELU)}")
    depth, found = get.whole("num_hidden_layers", 12), shapes.count("vit.encoder.layer.{}.layernorm_before.weight")
    if depth != found:
        raise MismatchedWeights(f"{shapes.path}: config.json says num_hidden_layers={depth}, the tensors make {found}")
    classes = shapes.get("classifier.weight", 2)[0] if "classifier.weight" in shapes else 0
    pooler = "vit.pooler.dense.weight" in shapes
    if pooler and settings.get("pooler_act", "tanh") != "tanh":
        raise MismatchedWeights(f"{shapes.path}: pooler_act {settings['pooler_act']!r} is not the paper's tanh")
    return ViTConfig(
        width=get.whole("hidden_size", 768),
        depth=depth,
        mlp_width=get.whole("intermediate_size", 3072),
        heads=get.whole("num_attention_heads", 12),
        image=shapes.image or get.size("image_size", 224),
        patch=get.size("patch_size", 16),
        channels=get.whole("num_channels", 3),
        classes=classes,
        head="tanh" if pooler else "linear" if classes else "none",
        qkv_bias=bool(settings.get("qkv_bias", True)),
        dropout=get.number("hidden_dropout_prob", 0.0),
        attention_dropout=get.number("attention_probs_dropout_prob", 0.0),
        gelu="erf" if GELU[act] == "erf" else "tanh",
        norm_eps=get.number("layer_norm_eps", 1e-12),
    )


def _infer_bit(get: ConfigReader) -> ResNetConfig:
    shapes, settings = get.shapes, get.values
    layers = "bit.encoder.stages.{}.layers.{}.conv1.weight"
    stages = shapes.count("bit.encoder.stages.{}.layers.0.conv1.weight")
    blocks = tuple(shapes.count(layers.replace("{}", str(stage), 1)) for stage in range(stages))
    if settings.get("layer_type", "preactivation") != "preactivation" or any(
        settings.get(name) for name in ("global_padding", "embedding_dynamic_padding")
    ):
        raise MismatchedWeights(
            f"{shapes.path}: only the pre-activation BiT with its own padding is a network of the paper"
        )
    if tuple(settings.get("depths", (3, 4, 6, 3))) != blocks:
        raise MismatchedWeights(
            f"{shapes.path}: config.json says depths={settings.get('depths')}, the tensors make {blocks}"
        )
    width, channels, *_ = shapes.get("bit.embedder.convolution.weight", 4)
    classes = shapes.get("classifier.1.weight", 2)[0] if "classifier.1.weight" in shapes else 0
    groups = get.whole("num_groups", 32)
    return ResNetConfig(
        blocks=blocks, factor=width / 64, channels=channels, classes=classes, groups=groups, standardisation_eps=1e-8
    )


@singledispatch
def build_table(config: ModelConfig) -> list[KeyEntry]:
    c = require_plain(NAME, config, heads=("none", "linear", "tanh"), free=("qkv_bias",))
    if c.head == "tanh" and c.classes:
        raise ExportRefused(
            "huggingface has no classifier behind a hidden tanh layer: field head='tanh' goes with classes=0"
        )
    rows = [copy("class_token", "vit.embeddings.cls_token"), position_entry(c, "vit.embeddings.position_embeddings")]
    rows += weight_and_bias("embedding.projection", "vit.embeddings.patch_embeddings.projection")
    rows += block_entries(c.depth, "vit.encoder.layer.{}.", BLOCK)
    for i in range(c.depth):
        ours, inner = f"blocks.{i}.", f"vit.encoder.layer.{i}.attention.attention."
        for p in ("weight", "bias")[: 2 if c.qkv_bias else 1]:
            rows += [
                split_qkv(f"{ours}attention.qkv.{p}", (f"{inner}query.{p}", f"{inner}key.{p}", f"{inner}value.{p}"))
            ]
    rows += weight_and_bias("norm", "vit.layernorm")
    rows += weight_and_bias("head.hidden", "vit.pooler.dense") if c.head == "tanh" else []
    return rows + (weight_and_bias("head.classifier", "classifier") if c.classes else [])


@build_table.register
def _bit_table(c: ResNetConfig) -> list[KeyEntry]:
    if (c.unit, c.root, c.mixing) != ("preactivation", "7x7", "convolution"):
        raise ExportRefused(
            f"huggingface's BiT has no place for field unit={c.unit!r}, root={c.root!r} or mixing={c.mixing!r}"
        )
    rows = [copy("trunk.root.weight", "bit.embedder.convolution.weight")]
    for stage, count in enumerate(c.blocks):
        for block in range(count):
            here, there = f"trunk.stages.{stage}.{block}.", f"bit.encoder.stages.{stage}.layers.{block}."
            for part in (1, 2, 3):
                rows += [copy(f"{here}conv{part}.weight", f"{there}conv{part}.weight")]
                rows += weight_and_bias(f"{here}norm{part}", f"{there}norm{part}")
            if block == 0:
                rows += [copy(f"{here}project.weight", f"{there}downsample.conv.weight")]
    rows += weight_and_bias("norm", "bit.norm")
    return rows + (weight_and_bias("head", "classifier.1") if c.classes else [])


def build_settings(
    c: ModelConfig, class_names: tuple[str, ...] | None, dtype: str, multi_label: bool = False
) -> dict[str, Any]:
    """The folder's `config.json`."""
    names = class_names or [f"LABEL_{i}" for i in range(c.classes)]
    common: dict[str, Any] = {
        "num_channels": c.channels,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "torch_dtype": dtype,
        **({"problem_type": MULTI_LABEL} if multi_label else {}),
    }
    return _network_settings(c) | common


@singledispatch
def _network_settings(c: ModelConfig) -> dict[str, Any]:
    raise ExportRefused(f"huggingface has no such network: {c.title}")


@_network_settings.register
def _(c: ResNetConfig) -> dict[str, Any]:
    return {
        "model_type": "bit",
        "architectures": ["BitForImageClassification"],
        "layer_type": "preactivation",
        "depths": list(c.blocks),
        "embedding_size": c.root_width,
        "hidden_sizes": [4 * c.bottleneck(stage) for stage in range(len(c.blocks))],
        "num_groups": c.groups,
        "global_padding": None,
        "width_factor": 1,
    }


@_network_settings.register
def _(c: ViTConfig) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if c.classes else "ViTModel"],
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "intermediate_size": c.mlp_width,
        "hidden_act": "gelu" if c.gelu == "erf" else "gelu_pytorch_tanh",
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "layer_norm_eps": c.norm_eps,
        "image_size": c.image[0] if c.image[0] == c.image[1] else list(c.image),
        "patch_size": c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch),
        "qkv_bias": c.qkv_bias,
    }


def read_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """Class names, unless they are the LABEL_0, LABEL_1, ... that stand for none."""
    names: Any = settings.get("id2label")
    if not isinstance(names, dict) or not classes:
        return None
    found = tuple(str(cast(dict[str, Any], names).get(str(i))) for i in range(classes))
    return None if len(cast(dict[str, Any], names)) != classes or found[0] == "LABEL_0" else found


RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
BOX = 4  # the nearest of them to "area", which it is not


def build_preprocessor(p: Preprocessing) -> dict[str, Any]:
    """The folder's `preprocessor_config.json`; a centre crop needs BiT's image processor."""
    common: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": RESAMPLE.get(p.interpolation, BOX),
        "image_mean": list(p.mean),
        "image_std": list(p.std),
    }
    box = {"height": p.image[0], "width": p.image[1]}
    if p.resize is None:
        return {"image_processor_type": "ViTImageProcessor", "size": box, **common}
    size = {"shortest_edge": p.resize}
    return {
        "image_processor_type": "BitImageProcessor",
        "size": size,
        "crop_size": box,
        "do_center_crop": True,
        **common,
    }


def read_preprocessor(values: dict[str, Any], image: Pair) -> Preprocessing | None:
    """What a `preprocessor_config.json` says, where it says what we can do; None otherwise. ConfigError where it asks
    for something absurd."""
    names = {number: name for name, number in RESAMPLE.items()}
    try:
        size, crop = values["size"], values.get("crop_size")
        size = {"height": size, "width": size} if isinstance(size, int | float) else size
        box = crop if values.get("do_center_crop") and crop else size
        said: dict[str, Any] = {
            "image": (box["height"], box["width"]) if isinstance(box, dict) and "height" in box else image,
            "resize": size.get("shortest_edge"),
            "interpolation": names[values.get("resample", 2)],
            "mean": values["image_mean"],
            "std": values["image_std"],
        }
        if said["resize"] is not None and said["resize"] < min(said["image"]):
            return None  # the rest would be filled with black
    except (KeyError, TypeError, AttributeError):
        return None
    return Preprocessing.from_dict(said)
